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

LATTICE = ("Q4_0", "Q4_1", "Q4_K")
"""GGUF types that are a 4-bit lattice of 32 columns already."""
TABLE_LATTICE = ("Q5_0", "Q5_1", "Q5_K", "Q8_0", "IQ4_NL", "IQ4_XS")
"""Those that are one of 8 bits, or of less whose codes are codes of 8 bits as well; kept for tables, where the format
has 8 bits too. Not Q6_K: its scales are for 16 columns."""
LATTICE_GROUP = 32
GGUF_DECODED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS",
                "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4")
"""Quantized types that the gguf package decodes as llama.cpp does."""
FLOATS = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of the normal form: its Hugging Face name and where its bytes are.

    `kind` is a safetensors dtype (`BF16`) or a GGUF type name (`Q4_1`). `rotary_heads`: number of heads whose rows
    stand in llama.cpp's rotary order and must be put back; None = rows as they are. `shift` is added to
    what is stored (GGUF files of Gemma hold norms plus 1).
    """

    name: str
    file: Path
    offset: int
    bytes: int
    shape: tuple[int, ...]
    kind: str
    rotary_heads: int | None = None
    shift: float = 0.0

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

    `write_extras(out)` puts the tokenizer, the templates and generation_config.json into a directory.
    """

    kind: str
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    write_extras: Callable[[Path], None]


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
    if tensor.shift:
        values = values + tensor.shift
    # Rounding keeps the order, so the two ends speak for all; NaN wins both.
    if values.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(values)).to(torch.bfloat16)).all()):
        where = "NaN" if bool(torch.isnan(values).any()) else "infinite, or too large for bfloat16"
        raise ModelError(f"tensor {tensor.name} cannot be quantized", why=f"it holds a value that is {where}",
                         do="use another copy or version of the model")
    return values


def lattice_rows(
    tensor: StoredTensor, start: int, stop: int, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [start, stop) of a tensor of LATTICE (4 bits) or TABLE_LATTICE (8) as the format's own numbers.

    Returns codes uint8 [n, K], fp32 scale and zero [n, K / 32] with w = (code - 8) * scale + zero, with 8 bits - 128,
    exact but for the rounding of fp32. Raises ModelError when a scale or offset is not finite.
    """
    import torch

    steps, scale, low = _blocks(tensor.kind, raw_rows(tensor, start, stop))
    if not bool(torch.isfinite(scale).all() and torch.isfinite(low).all()):
        raise ModelError(f"tensor {tensor.name} cannot be used", why="a scale or offset of it is NaN or infinite",
                         do="use another copy of the model")
    center = CENTER.get(tensor.kind, 0)
    codes = (steps + ((1 << (bits - 1)) - center)).to(torch.uint8).view(stop - start, tensor.columns)
    zero = low + center * scale
    return codes, scale.view(stop - start, -1), zero.view(stop - start, -1)


CENTER = {"Q4_1": 8, "Q4_K": 8, "Q5_1": 16, "Q5_K": 16}
"""Types whose steps begin at their offset -> the step that becomes the format's own offset, in the middle of the range:
the rounding of a stored offset is small against a step only there. The steps of the others lie around zero."""


def _blocks(kind: str, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stored rows uint8 [n, bytes] -> steps int16 [G, 32], scale and offset fp32 [G]: w = step * scale + offset.

    Layouts: llama.cpp's block_q4_0 and so on; the arithmetic of scales as in the gguf package.
    """
    import torch

    if kind in ("Q4_K", "Q5_K", "IQ4_XS"):
        return _super_blocks(kind, raw)
    head = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8, "Q8_0": 2, "IQ4_NL": 2}[kind]
    blocks = raw.reshape(-1, head + (32 if kind == "Q8_0" else 16))
    halves = blocks[:, : 4 if kind in ("Q4_1", "Q5_1") else 2].contiguous().view(torch.float16).float()
    stored = blocks[:, head:].contiguous()
    scale = halves[:, 0]
    offset = halves[:, 1] if halves.shape[1] == 2 else torch.zeros_like(scale)
    if kind == "Q8_0":
        return stored.view(torch.int8).short(), scale, offset
    steps = torch.cat([stored & 15, stored >> 4], dim=-1).short()
    if kind in ("Q5_0", "Q5_1"):
        fifth = blocks[:, head - 4 : head].contiguous().view(torch.int32).long()
        steps += (((fifth >> torch.arange(32)) & 1) << 4).short()
    if kind == "IQ4_NL":
        steps = _uneven()[steps.long()]
    elif kind in ("Q4_0", "Q5_0"):
        steps -= 8 if kind == "Q4_0" else 16
    return steps, scale, offset


def _super_blocks(kind: str, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of types with 8 blocks of 32 columns under common scales."""
    import gguf
    import torch

    size = {"Q4_K": 144, "Q5_K": 176, "IQ4_XS": 136}[kind]
    blocks = raw.reshape(-1, size)
    count = blocks.shape[0]
    common = blocks[:, :2].contiguous().view(torch.float16).float()
    if kind == "IQ4_XS":
        high = blocks[:, 2:4].contiguous().view(torch.int16).int() & 0xFFFF
        low = blocks[:, 4:8].repeat_interleave(2, dim=1).int() >> torch.tensor([0, 4] * 4)
        level = (low & 15) | (((high >> torch.arange(0, 16, 2)) & 3) << 4)
        stored = blocks[:, 8:].reshape(count, 8, 16)
        steps = _uneven()[torch.cat([stored & 15, stored >> 4], dim=-1).long()]
        scale = common * (level - 32).float()
        return steps.view(-1, 32), scale.flatten(), torch.zeros_like(scale).flatten()
    least = blocks[:, 2:4].contiguous().view(torch.float16).float()
    levels = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16].contiguous().numpy())
    scale, offset = (torch.from_numpy(level.astype("float32")) for level in levels)
    stored = blocks[:, size - 128 :].reshape(count, 4, 1, 32)
    steps = torch.cat([stored & 15, stored >> 4], dim=2).reshape(count, 8, 32).short()
    if kind == "Q5_K":
        fifth = blocks[:, 16:48].reshape(count, 1, 32).int() >> torch.arange(8).view(1, 8, 1)
        steps += ((fifth & 1) << 4).short()
    return steps.view(-1, 32), (common * scale).flatten(), -(least * offset).flatten()


def _uneven() -> torch.Tensor:
    """The values that the codes of IQ4 types stand for."""
    import gguf
    import torch

    return torch.tensor(gguf.quants.IQ4_NL.kvalues, dtype=torch.int16)
