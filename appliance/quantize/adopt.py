"""Take over a folder that is `cpu_int4` already: check it against its configuration, then copy it as it is.

Nothing is quantized or rounded again. Rules: the configuration must parse; every packed weight needs its scales and
zeros, of the type and shape that its group size says; the files are copied, not linked, so that a later change of the
source cannot change what is served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from appliance.errors import ModelError
from appliance.importing.safetensors import Entry, read_header
from appliance.importing.shapes import shape_refusal
from appliance.importing.source import Source, merge_headers, quantization_config, read_config
from appliance.importing.template import settle
from appliance.quantize.format import PACKED, SCALE, ZERO, Int4Config, parse_config

COPY_BYTES = 8 << 20


def adopt(source: Source, out: Path, event: Callable[[dict[str, Any]], None], *, chat_template: str = "",
          ) -> dict[str, Any]:
    """Check and copy an inspected `cpu_int4` folder into the empty directory `out`; returns the report."""
    config = read_config(source.path)
    int4 = parse_config(quantization_config(config))
    entries, layers, kept = check(source)
    event({"event": "phase", "phase": "writing", "note": "the folder is cpu_int4 already; copied as it is"})
    done = 0
    for file in source.files:
        with open(file, "rb") as read, open(out / file.name, "xb") as write:
            while block := read.read(COPY_BYTES):
                write.write(block)
                done += len(block)
                event({"event": "progress", "done_bytes": done, "total_bytes": source.bytes, "item": file.name})
    template = settle(out, chat_template)
    parameters = sum(math.prod(e.shape) * (8 // int4.bits_of(name.removesuffix(f".{PACKED}"))
                                           if name.endswith(f".{PACKED}") else 1)
                     for name, e in entries.items() if not name.endswith((f".{SCALE}", f".{ZERO}")))
    return {
        "source_kind": "cpu_int4",
        "architecture": config["architectures"][0],
        "parameters": parameters,
        "group_size": int4.group_size,
        "group_size_overrides": dict(int4.group_size_overrides),
        "kept": kept,
        "layers": layers,
        "loss": "nothing: the stored codes, scales and zeros are served as they are",
        "experts": 0,
        "chat": template is not None and not template["fault"],
        "template": template,
        "source_bytes": source.bytes,
        "out_bytes": done,
        "bits_per_weight": round(8 * sum(e.bytes for e in entries.values()) / parameters, 3),
    }


Rows = list[dict[str, Any]]


def check(source: Source) -> tuple[dict[str, Entry], Rows, Rows]:
    """The tensors of an inspected `cpu_int4` folder, and the report's `layers` and `kept`.

    Raises ModelError when they contradict the quantization or the sizes of the configuration.
    """
    config = read_config(source.path)
    merged = merge_headers(source.path, {file: read_header(file) for file in source.weights})
    entries = {name: entry for name, (_, entry) in merged.items()}
    layers, kept = check_layers(entries, parse_config(quantization_config(config)), source.path)
    shapes = {name: entry.shape for name, entry in entries.items() if not name.endswith((PACKED, SCALE, ZERO))}
    shapes |= {f"{layer['name']}.weight": tuple(layer["shape"]) for layer in layers}
    if reason := shape_refusal(config, shapes):
        raise ModelError(f"{source.path} contradicts itself", why=reason, do="quantize the model again")
    return entries, layers, kept


def check_layers(entries: Mapping[str, Entry], int4: Int4Config, path: Path) -> tuple[Rows, Rows]:
    """Compare stored shapes with the configuration. Returns the report's `layers` and `kept`.

    Raises ModelError when a tensor is missing or its shape contradicts the group size (never loaded as something else).
    """
    layers = []
    for name, packed in entries.items():
        if not name.endswith(f".{PACKED}"):
            continue
        module = name.removesuffix(f".{PACKED}")
        group = int4.group_of(module)
        if packed.dtype != "U8" or len(packed.shape) != 2:
            raise _wrong(path, f"{name} is {packed.dtype} {list(packed.shape)}, not U8 in two dimensions")
        bits = int4.bits_of(module)
        n, k = packed.shape[0], packed.shape[1] * 8 // bits
        if k % group:
            raise _wrong(path, f"group size {group} does not divide the {k} columns of {module}")
        for part in (SCALE, ZERO):
            entry = entries.get(f"{module}.{part}")
            if entry is None:
                raise _wrong(path, f"{module}.{part} is missing")
            if entry.dtype != "BF16" or entry.shape != (n, k // group):
                raise _wrong(path, f"{module}.{part} is {entry.dtype} {list(entry.shape)}; group size {group} needs "
                                   f"BF16 {[n, k // group]}")
        layers.append({"name": module, "shape": [n, k], "group": group, "bits": bits, "route": "codes kept",
                       "snr_db": None})
    if not layers:
        raise _wrong(path, f"no tensor is named *.{PACKED}")
    kept = [{"name": name.removesuffix(".weight"), "reason": "kept by the source", "bytes": entry.bytes}
            for name, entry in entries.items()
            if len(entry.shape) >= 2 and not name.endswith((f".{PACKED}", f".{SCALE}", f".{ZERO}"))]
    return layers, kept


def _wrong(path: Path, why: str) -> ModelError:
    return ModelError(f"{path} contradicts its quantization_config", why=why, do="quantize the model again")
