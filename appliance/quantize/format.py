"""The `cpu_int4` checkpoint format: names, sizes and the fields of `quantization_config`.

Portable and interchangeable with vllm-omni's `cpu_int4`. Per quantized linear `<name>` with weight [N, K]:

    <name>.weight_packed  uint8 [N, K/2]   byte j = code[2j] | code[2j+1] << 4
    <name>.weight_scale   bf16  [N, K/g]   scale of the group of g columns
    <name>.weight_zero    bf16  [N, K/g]   offset of the group

Dequantize: w = (code - 8) * scale + zero. An embedding table or head of 8 bits (`table_bits: 8`) has one code a byte,
`weight_packed` uint8 [N, K], and w = (code - 128) * scale + zero. This module knows sizes and rules only: no torch, no
I/O.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from appliance.errors import ModelError

QUANT_METHOD = "cpu_int4"
FORMAT_VERSION = 1
GROUP_SIZES = (32, 64, 128, 256)
GRIDS = ("minmax", "search", "calibrated")
"""How codes are chosen: by the ends of each group, by the smallest error of the weights, or by the smallest error of
the layers' results on a calibration text."""
KERNELS = ("auto", "native", "aten")
NATIVE_VARIANTS = ("scalar", "avx2", "avx-vnni", "avx512", "avx512-vnni")
"""Instruction sets of the native kernel; the self-test chooses one, the setting `kernel` may force one."""
PLAIN_DECODERS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures made of RMSNorm and plain linears only. Native operators run their layers whole, and the residual
stream may stay fp32, there and in a compiled graph."""
PACKED, SCALE, ZERO = "weight_packed", "weight_scale", "weight_zero"
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Modules that vLLM computes as one, and the parts that a checkpoint stores."""
TABLES = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "embeddings")
HEADS = ("lm_head", "output_layer", "embed_out")


@dataclass(frozen=True, kw_only=True)
class Int4Config:
    """The fields of `quantization_config`; the first block is the reference's, with its defaults.

    `ignore` names layers that stay bf16: exact module names or suffixes, unfused (`q_proj`) or fused (`qkv_proj`).
    `dequant_threshold`: the smallest number of rows that takes the dequantize route; 2 is the safe value.
    `wide_residual`: the compiled graph keeps the residual stream in fp32 (only for models whose parts allow it).
    `table_bits`: bits of the embedding table and head (4 int4, 8 int8, 16 kept); None = 4 if `quantize_embedding`.
    """

    group_size: int = 64
    ignore: tuple[str, ...] = ()
    quantize_embedding: bool = True
    prefill_dequant: bool = True
    dequant_threshold: int = 2
    use_custom_op: bool = True
    direct_dequant: bool = True

    kernel: str = "auto"
    wide_residual: bool = False
    group_size_overrides: Mapping[str, int] = field(default_factory=dict)
    table_bits: int | None = None
    format_version: int | None = None

    @property
    def stored_table_bits(self) -> int:
        """Bits of the embedding table and head: 4, 8, or 16 when they are kept."""
        return self.table_bits or (4 if self.quantize_embedding else 16)

    def group_of(self, module: str) -> int:
        """Group size of the module with this (unfused) name."""
        return self.group_size_overrides.get(module, self.group_size)

    def bits_of(self, module: str) -> int:
        """Bits of a code of the quantized module with this (unfused) name: only tables may have 8."""
        return 8 if self.stored_table_bits == 8 and module.rpartition(".")[2] in TABLES + HEADS else 4

    def to_dict(self) -> dict[str, Any]:
        """The JSON value for config.json: reference fields always, our extensions only where they say something."""
        out: dict[str, Any] = {"quant_method": QUANT_METHOD}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            extension = f.name in ("kernel", "wide_residual", "group_size_overrides", "table_bits", "format_version")
            if extension and value == (f.default if f.default is not dataclasses.MISSING else {}):
                continue
            if isinstance(value, Mapping):
                value = dict(value)
            out[f.name] = list(value) if isinstance(value, tuple) else value
        return out


def group_refusal(group: object) -> str | None:
    """Why this value is not a usable group size, or None."""
    if isinstance(group, bool) or not isinstance(group, int):
        return f"group size {group!r} is not a whole number"
    if group not in GROUP_SIZES:
        return f"group size {group} is not one of {', '.join(map(str, GROUP_SIZES))}"
    return None


def parse_config(raw: Mapping[str, Any]) -> Int4Config:
    """Read `quantization_config` of a checkpoint. Unknown fields are ignored (newer writers may add some).

    Raises ModelError when a value is of the wrong type or out of range.
    """
    values: dict[str, Any] = {}
    for f in dataclasses.fields(Int4Config):
        if f.name in raw and raw[f.name] is not None:
            values[f.name] = raw[f.name]
    _check_types(values)
    for where, group in [("group_size", values.get("group_size", 64)), *values.get("group_size_overrides", {}).items()]:
        reason = group_refusal(group)
        if reason:
            raise ModelError("quantization_config cannot be used", why=f"{where}: {reason}",
                             do="quantize the model again")
    version = values.get("format_version") or FORMAT_VERSION
    if version > FORMAT_VERSION:
        raise ModelError(
            "quantization_config cannot be used",
            why=f"format_version {version} is newer than {FORMAT_VERSION}, the newest this release reads",
            do="upgrade the appliance",
        )
    if "ignore" in values:
        values["ignore"] = tuple(values["ignore"])
    return Int4Config(**values)


def _check_types(values: Mapping[str, Any]) -> None:
    def bad(name: str, want: str) -> ModelError:
        return ModelError("quantization_config cannot be used", why=f"{name} is {values[name]!r}, expected {want}",
                          do="correct config.json or quantize the model again")

    for name in ("quantize_embedding", "prefill_dequant", "use_custom_op", "direct_dequant", "wide_residual"):
        if name in values and not isinstance(values[name], bool):
            raise bad(name, "true or false")
    for name in ("dequant_threshold", "format_version"):
        if name in values and (isinstance(values[name], bool) or not isinstance(values[name], int) or values[name] < 1):
            raise bad(name, "a whole number of at least 1")
    if "kernel" in values and values["kernel"] not in KERNELS:
        raise bad("kernel", " or ".join(KERNELS))
    if "table_bits" in values and values["table_bits"] not in (4, 8, 16):
        raise bad("table_bits", "4, 8 or 16")
    ignore = values.get("ignore", [])
    if not isinstance(ignore, (list, tuple)) or not all(isinstance(v, str) for v in ignore):
        raise bad("ignore", "a list of module names")
    if not isinstance(values.get("group_size_overrides", {}), Mapping):
        raise bad("group_size_overrides", "a mapping of module name to group size")


def packed_columns(k: int, bits: int) -> int:
    """Bytes of one row of `weight_packed` with K columns."""
    return k * bits // 8


def choose_group(k: int, preferred: int) -> int | None:
    """The largest allowed group size <= `preferred` that divides `k` columns; None: keep the layer in bf16."""
    for group in sorted(GROUP_SIZES, reverse=True):
        if group <= preferred and k % group == 0:
            return group
    return None
