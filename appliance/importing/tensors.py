"""Tensors where they are stored: read by blocks of rows, decoded to float32 or taken as 4-bit codes.

Reads with plain file reads, never through a memory map: mapped pages count as resident memory and would break the
bound. Knows element types, not models. Runs in the worker's environment (torch, gguf imported inside functions).
Rules: rows x columns, where rows is the product of all dimensions but the last (a vector is a column of rows); the
rotary permutation of llama GGUF files is undone on the stored bytes of the rows, so it holds for codes as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.errors import ModelError

if TYPE_CHECKING:
    import torch

LATTICE = {"Q4_0": 18, "Q4_1": 20}
"""GGUF types that are a 4-bit lattice of 32 columns already -> bytes of one block."""
TABLE_LATTICE = {"Q8_0": 34}
"""The same with 8 bits; kept for tables, where the format has 8 bits too."""
LATTICE_GROUP = 32
FLOATS = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of the normal form: its Hugging Face name and where its bytes are.

    `kind` is a safetensors dtype (`BF16`) or a GGUF type name (`Q4_1`). `rotary_heads`: number of heads whose rows
    stand in llama.cpp's rotary order and must be put back; None = rows as they are.
    """

    name: str
    file: Path
    offset: int
    bytes: int
    shape: tuple[int, ...]
    kind: str
    rotary_heads: int | None = None

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else self.parameters

    @property
    def columns(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def row_bytes(self) -> int:
        return self.bytes // max(self.rows, 1)

    @property
    def is_float(self) -> bool:
        """False for integers and booleans, which are copied as they are."""
        return self.kind not in ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")


@dataclass(frozen=True, kw_only=True)
class NormalForm:
    """A model as every importer hands it on: Hugging Face config and names, tensors, and a writer of the other files.

    `write_extras(out)` puts the tokenizer, the templates and generation_config.json into a directory and returns
    whether there is a chat template.
    """

    kind: str
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    write_extras: Callable[[Path], bool]


def raw_rows(tensor: StoredTensor, start: int, stop: int) -> torch.Tensor:
    """Stored bytes of rows [start, stop): uint8 [stop - start, row_bytes]. Raises ModelError when the file is short."""
    import torch

    if tensor.rotary_heads is not None:
        # Rows move within their head only: whole heads are read, put in order, and cut.
        size = tensor.rows // tensor.rotary_heads
        first, last = start // size, -(-stop // size)
        pairs = _read(tensor, first * size, last * size).view(last - first, size // 2, 2, tensor.row_bytes)
        ordered = pairs.transpose(1, 2).reshape(-1, tensor.row_bytes)
        return ordered[start - first * size : stop - first * size]
    if stop <= start:
        return torch.empty((0, tensor.row_bytes), dtype=torch.uint8)
    return _read(tensor, start, stop)


def _read(tensor: StoredTensor, start: int, stop: int) -> torch.Tensor:
    import torch

    buffer = bytearray((stop - start) * tensor.row_bytes)
    with open(tensor.file, "rb", buffering=0) as file:
        file.seek(tensor.offset + start * tensor.row_bytes)
        view, done = memoryview(buffer), 0
        while done < len(buffer):
            count = file.readinto(view[done:])
            if not count:
                raise ModelError(f"{tensor.file} is cut short", why=f"tensor {tensor.name} ends early",
                                 do="download the file again")
            done += count
    return torch.frombuffer(buffer, dtype=torch.uint8).view(stop - start, tensor.row_bytes)


def float_rows(tensor: StoredTensor, start: int, stop: int) -> torch.Tensor:
    """Values of rows [start, stop): float32 [stop - start, columns].

    Raises ModelError when a value is NaN, infinite or does not fit into bfloat16, naming the tensor.
    """
    import torch

    raw = raw_rows(tensor, start, stop)
    if tensor.kind in FLOATS:
        types = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
        values = raw.reshape(-1).view(types[tensor.kind]).view(stop - start, tensor.columns).float()
    else:
        import gguf
        import numpy

        blocks = gguf.quants.dequantize(raw.contiguous().numpy(), gguf.GGMLQuantizationType[tensor.kind])
        values = torch.from_numpy(numpy.ascontiguousarray(blocks, dtype=numpy.float32))
        values = values.view(stop - start, tensor.columns)
    if not bool(torch.isfinite(values.to(torch.bfloat16)).all()):
        where = "NaN" if bool(torch.isnan(values).any()) else "infinite, or too large for bfloat16"
        raise ModelError(f"tensor {tensor.name} cannot be quantized", why=f"it holds a value that is {where}",
                         do="use another copy or version of the model")
    return values


def lattice_rows(tensor: StoredTensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [start, stop) of a Q4_0, Q4_1 or Q8_0 tensor as codes uint8 [n, K] and fp32 scale and zero [n, K / 32].

    w = (code - 8) * scale + zero holds exactly in fp32 (source: llama.cpp's block_q4_0, block_q4_1): scale = d,
    zero = 0 or m + 8 d; for Q8_0 w = (code - 128) * scale, stored as signed bytes. Raises ModelError when a scale or
    offset is not finite.
    """
    import torch

    size = (LATTICE | TABLE_LATTICE)[tensor.kind]
    coded = 32 if tensor.kind in TABLE_LATTICE else 16
    blocks = raw_rows(tensor, start, stop).reshape(stop - start, -1, size)
    halves = blocks[..., : size - coded].contiguous().view(torch.float16).float()
    stored = blocks[..., size - coded :]
    codes = stored ^ 128 if coded == 32 else torch.cat([stored & 15, stored >> 4], dim=-1)
    codes = codes.reshape(stop - start, tensor.columns)
    scale = halves[..., 0]
    zero = halves[..., 1] + 8 * scale if tensor.kind == "Q4_1" else torch.zeros_like(scale)
    if not bool(torch.isfinite(halves).all()):
        raise ModelError(f"tensor {tensor.name} cannot be used", why="a scale or offset of it is NaN or infinite",
                         do="use another copy of the model")
    return codes, scale, zero
