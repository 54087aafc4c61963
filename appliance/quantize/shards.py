"""A safetensors writer that streams: every size is planned first, then tensors are filled piece by piece.

The headers are written at once, the data goes to its final place in any order, and no tensor is ever held whole.
Rules: shards are cut between modules (a layer's codes, scales and zeros stand in one file), at most `limit` bytes of
data each unless one module alone is larger; one shard is `model.safetensors`, more get the usual numbered names and
an index; what was planned and not written is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Output:
    """One tensor to write: `dtype` in safetensors' words, `bytes` = its whole size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


class ShardWriter:
    """Context manager over a directory; `write(name, tensor)` appends to that tensor's data.

    `modules`: outputs that stay together, in the order in which they are stored. `hollow`: files of their full size
    with headers and no data, on no more disk than the headers need.
    """

    def __init__(self, directory: Path, modules: Sequence[Sequence[Output]], *, limit: int = SHARD_BYTES,
                 hollow: bool = False) -> None:
        self.directory = directory
        self._hollow = hollow
        self._files: dict[str, int] = {}
        self._next: dict[str, tuple[int, int, int]] = {}  # tensor -> (fd, next position, end)
        self._shards = _cut(modules, limit)

    def __enter__(self) -> ShardWriter:
        weight_map: dict[str, str] = {}
        for number, outputs in enumerate(self._shards, 1):
            count = len(self._shards)
            name = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            self._begin(name, outputs)
            weight_map.update(dict.fromkeys((o.name for o in outputs), name))
        if len(self._shards) > 1:
            total = sum(o.bytes for outputs in self._shards for o in outputs)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self.directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._files.values():
            os.close(fd)
        if kind is None and not self._hollow:
            short = [name for name, (_, position, end) in self._next.items() if position != end]
            if short:
                raise AssertionError(f"tensors not written to their end: {short[:3]}")

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the bytes of a contiguous tensor to `name`."""
        import torch

        fd, position, end = self._next[name]
        data = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        if position + len(data) > end:
            raise AssertionError(f"{name} is longer than planned")
        self._next[name] = (fd, position + len(data), end)
        while data:
            count = os.pwrite(fd, data, position)
            data, position = data[count:], position + count

    def _begin(self, file: str, outputs: Sequence[Output]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for o in outputs:
            header[o.name] = {"dtype": o.dtype, "shape": list(o.shape), "data_offsets": [offset, offset + o.bytes]}
            offset += o.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        fd = os.open(self.directory / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._files[file] = fd
        if self._hollow:
            os.ftruncate(fd, 8 + len(text) + offset)
        else:
            os.posix_fallocate(fd, 0, 8 + len(text) + offset)  # a full disk says so here, not at 90 %
        os.pwrite(fd, len(text).to_bytes(8, "little") + text, 0)
        position = 8 + len(text)
        for o in outputs:
            self._next[o.name] = (fd, position, position + o.bytes)
            position += o.bytes


def _cut(modules: Sequence[Sequence[Output]], limit: int) -> list[list[Output]]:
    shards: list[list[Output]] = []
    room = 0
    for module in modules:
        size = sum(o.bytes for o in module)
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].extend(module)
        room -= size
    return shards
