"""The int4 library `libint4.so`: found beside this module, loaded with ctypes, its operators given to torch once.

Loading needs no compiler and no library but libc and libstdc++; the OpenMP runtime is the one that torch has loaded.
A missing library, another ABI or a torch without the C interface is a reason, not an error: `load` keeps it and the
registry hands it on. `APPLIANCE_KERNEL` names a variant to force; one that this machine cannot run is refused.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from appliance.quantize.format import KERNELS

ABI = 1
FILE = Path(__file__).with_name("libint4.so")
VARIANT_ENV = "APPLIANCE_KERNEL"
"""Names a variant to force. The agent's setting of the same name may also say auto, native or aten: no variant."""
REFUSED_ENV = "APPLIANCE_KERNEL_REFUSED"
"""Why the self-test at the worker's start left the whole library out; set by it, read by `load`."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """The loaded library; `variants` are those that this machine can run, the preferred one first."""

    handle: ctypes.CDLL
    variants: tuple[str, ...]

    @property
    def variant(self) -> str:
        """The variant in use."""
        return _text(self.handle.int4_variant)

    def use(self, variant: str) -> None:
        """Switch this process to a variant; only while nothing multiplies. Raises ValueError if it cannot run here."""
        if not self.handle.int4_use(variant.encode()):
            raise ValueError(f"this machine cannot run {variant}; it runs {', '.join(self.variants)}")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The library, or why there is none."""

    library: Library | None
    refusal: str | None


@functools.cache
def load() -> Loaded:
    """The library of this process, with its operators `torch.ops.cpu_int4.*` defined."""
    if reason := os.environ.get(REFUSED_ENV):
        return Loaded(library=None, refusal=reason)
    return open_library(FILE, os.environ)


def open_library(file: Path, env: Mapping[str, str]) -> Loaded:
    """Load `file` and register its operators; the reason when that fails."""
    if not file.exists():
        return Loaded(library=None, refusal="the package was installed without a C++ compiler: no libint4.so")
    try:
        handle = ctypes.CDLL(str(file))
    except OSError as error:
        return Loaded(library=None, refusal=f"libint4.so does not load: {error}")
    for name in ("int4_variant", "int4_variant_name", "int4_register_torch"):
        getattr(handle, name).restype = ctypes.c_char_p
    if handle.int4_abi() != ABI:
        return Loaded(library=None, refusal=f"libint4.so has ABI {handle.int4_abi()}, this release wants {ABI}")
    names: list[str] = []
    while (name := handle.int4_variant_name(len(names))) is not None:
        names.append(name.decode())
    runs = tuple(name for i, name in enumerate(names) if handle.int4_variant_runs(i))
    wanted = env.get(VARIANT_ENV)
    if wanted not in KERNELS and wanted and wanted not in runs:
        known = "this machine cannot run it" if wanted in names else f"known are {', '.join(names)}"
        return Loaded(library=None, refusal=f"{VARIANT_ENV}={wanted}: {known}")
    reason = handle.int4_register_torch()
    if reason:
        return Loaded(library=None, refusal=reason.decode())
    _register_fakes()
    return Loaded(library=Library(handle=handle, variants=runs), refusal=None)


@functools.cache  # torch takes them once
def _register_fakes() -> None:
    """Shapes of the operators' results, for torch.compile."""

    @torch.library.register_fake("cpu_int4::linear")
    def linear(x, weight, bias, n, k, group, bits, wide):  # type: ignore[no-untyped-def]  # the schema has the types
        return x.new_empty((x.shape[0], n), dtype=torch.float32 if wide else torch.bfloat16)

    @torch.library.register_fake("cpu_int4::rows")
    def rows(ids, weight, n, k, group, bits, wide):  # type: ignore[no-untyped-def]
        return ids.new_empty((ids.shape[0], k), dtype=torch.float32 if wide else torch.bfloat16)


def _text(function: ctypes._NamedFuncPointer) -> str:
    value: bytes = function()
    return value.decode()
