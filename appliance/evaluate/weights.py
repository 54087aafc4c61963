"""The weights of a model by name, as float32 rows: of a source as it is, of a stored model dequantized.

Reads with plain file reads and only what is asked for. Runs in the worker's environment (torch inside functions).
Rules: a stored weight is exactly what the kernels compute with, (code - 8) * scale + zero, with 8 bits - 128; names are
those of the Hugging Face model in either case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import ModelError
from appliance.importing.reader import open_source
from appliance.importing.safetensors import read_header
from appliance.importing.source import inspect, merge_headers, quantization_config, read_config, weight_files
from appliance.importing.tensors import NormalForm, StoredTensor, float_rows, raw_rows
from appliance.quantize.format import PACKED, SCALE, ZERO, parse_config

if TYPE_CHECKING:
    import torch

Read = Callable[[int, int], "torch.Tensor"]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One tensor: `read(start, stop)` gives rows (all dimensions but the last) in float32 [stop - start, columns]."""

    shape: tuple[int, ...]
    rows: int
    read: Read

    def whole(self) -> torch.Tensor:
        return self.read(0, self.rows).reshape(self.shape)


Weights = Mapping[str, Weight]


def of_source(path: Path) -> Weights:
    """The weights of a source that can be added: a GGUF file or a folder. Raises ModelError as adding it would."""
    source = inspect(path)
    if source.kind == "cpu_int4":
        return of_stored(path)
    return of_form(open_source(source))


def of_form(form: NormalForm) -> Weights:
    return {name: _plain(tensor) for name, tensor in form.tensors.items()}


def of_stored(folder: Path) -> Weights:
    """The weights of a `cpu_int4` folder, dequantized as they are read."""
    int4 = parse_config(quantization_config(read_config(folder)))
    tensors = {name: StoredTensor(name=name, file=file, offset=e.offset, bytes=e.bytes, shape=e.shape, kind=e.dtype)
               for name, (file, e) in merge_headers(folder, {f: read_header(f) for f in weight_files(folder)}).items()}
    found: dict[str, Weight] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part == PACKED:
            found[f"{module}.weight"] = _packed(module, tensor, tensors, int4.bits_of(module))
        elif part not in (SCALE, ZERO):
            found[name] = _plain(tensor)
    return found


def _plain(tensor: StoredTensor) -> Weight:
    return Weight(shape=tensor.shape, rows=tensor.rows, read=lambda start, stop: float_rows(tensor, start, stop))


def _packed(module: str, packed: StoredTensor, tensors: Mapping[str, StoredTensor], bits: int) -> Weight:
    missing = [part for part in (SCALE, ZERO) if f"{module}.{part}" not in tensors]
    if missing:
        raise ModelError(f"{module} is not whole", why=f"{module}.{missing[0]} is missing", do="verify the model")
    scale, zero = tensors[f"{module}.{SCALE}"], tensors[f"{module}.{ZERO}"]

    def read(start: int, stop: int) -> torch.Tensor:
        from appliance.quantize.grid import dequantize, unpack

        stored = raw_rows(packed, start, stop)
        codes = unpack(stored) if bits == 4 else stored
        return dequantize(codes, float_rows(scale, start, stop), float_rows(zero, start, stop), bits)

    return Weight(shape=(packed.shape[0], packed.shape[1] * 8 // bits), rows=packed.shape[0], read=read)
