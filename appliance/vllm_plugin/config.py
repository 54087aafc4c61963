"""`CpuInt4Config`: what vLLM asks about a checkpoint: which layers are int4, at which group size, by which method.

The fields are those of `appliance.quantize.format.Int4Config`. vLLM pickles this object into its processes, so it holds
plain values. A choice that changes the compiled graph is a field, because fields enter vLLM's compile-cache key.

Rules: names in `ignore` and `group_size_overrides` are checkpoint names (`q_proj`) or fused ones (`qkv_proj`); fused
siblings agree on both or the model is refused. A tied table and head are decided together. Experts stay bf16.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from appliance.errors import ConfigError, ModelError
from appliance.quantize.format import FUSED, QUANT_METHOD, TABLES, Int4Config, parse_config
from appliance.vllm_plugin.mapped import Mapped

DIRECT_DEQUANT_ENV = "VLLM_OMNI_CPU_INT4_DIRECT_DEQUANT"


class CpuInt4Config(QuantizationConfig):  # type: ignore[misc]  # vLLM is not typed here
    """vLLM's view of one checkpoint's `quantization_config`."""

    def __init__(self, fields: Int4Config | None = None) -> None:
        super().__init__()
        self.fields = fields or Int4Config()
        self.tied = False
        self.prepared: Mapped | None = None
        """The prepared layout, while the loader builds the model."""

    def __repr__(self) -> str:
        return f"CpuInt4Config({self.fields})"

    @classmethod
    def get_name(cls) -> str:
        return QUANT_METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """bf16 alone: torch's kernel has no vector path for fp32 and none at all for fp16."""
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CpuInt4Config:
        """Read `quantization_config`. Raises ModelError on a value that cannot be used."""
        return cls(apply_environment(parse_config(config), os.environ))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Note whether the head is tied to the table: both are then int4 or neither."""
        if hf_config is not None:
            text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
            self.tied = bool(getattr(text, "tie_word_embeddings", False))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Follow a model's renaming of its modules."""

        def renamed(names: list[str]) -> list[str]:
            """Modules by the names of their tensors: some models rename those (`.gate.weight` to `.router.weight`)."""
            tensors = hf_to_vllm_mapper.apply_list([f"{name}.weight" for name in names])
            return [tensor.removesuffix(".weight") for tensor in tensors]

        self.fields = dataclasses.replace(
            self.fields, ignore=tuple(renamed(list(self.fields.ignore))),
            group_size_overrides={new: group for name, group in self.fields.group_size_overrides.items()
                                  for new in renamed([name])})
        if self.prepared is not None:
            self.prepared.rename(renamed)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method for a layer named `prefix`; None leaves vLLM's own bf16 method in place."""
        from appliance.vllm_plugin.embedding import Int4TableMethod, KeptTableMethod
        from appliance.vllm_plugin.linear import Int4LinearMethod, KeptLinearMethod

        if self.fields.wide_residual:
            from appliance.vllm_plugin.norm import register_norm

            register_norm()  # the table is asked for first, before any norm is built
        if isinstance(layer, RoutedExperts):
            return None
        if isinstance(layer, VocabParallelEmbedding):
            head = isinstance(layer, ParallelLMHead)
            if not self.quantizes_table(prefix, head=head):
                return KeptTableMethod()
            return Int4TableMethod(self.fields, self.table_group(prefix, head=head), prefix, prepared=self.prepared)
        if isinstance(layer, LinearBase):
            if self.ignores(prefix):
                return KeptLinearMethod()
            return Int4LinearMethod(self.fields, self.group_of(prefix), prefix, prepared=self.prepared)
        return None

    def ignores(self, prefix: str) -> bool:
        """Whether this linear layer stays bf16. Raises ModelError when fused siblings disagree."""
        try:
            fused = {**{whole: list(parts) for whole, parts in FUSED.items()}, **self.packed_modules_mapping}
            skipped: bool = is_layer_skipped(prefix, list(self.fields.ignore), fused, match_mode="suffix")
            return skipped
        except ValueError as error:
            raise ModelError(f"the ignore list splits the fused layer {prefix}", why=str(error),
                             do="ignore all of its parts or none") from error

    def group_of(self, prefix: str) -> int:
        """Group size of a linear layer. Raises ModelError when fused siblings have different ones."""
        parent, _, name = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(name) or FUSED.get(name, ())  # not every model file says what it fuses
        names = [prefix] if prefix in self.fields.group_size_overrides or not parts else [
            f"{parent}.{part}" if parent else part for part in parts
        ]
        groups = {self.fields.group_of(n) for n in names}
        if len(groups) > 1:
            raise ModelError(f"the parts of the fused layer {prefix} have different group sizes",
                             why=", ".join(f"{n}: {self.fields.group_of(n)}" for n in names),
                             do="quantize the model again with one group size for them")
        return groups.pop()

    def quantizes_table(self, prefix: str, *, head: bool) -> bool:
        """Whether the embedding table (or head) is quantized, to 4 or 8 bits. A tied head follows the table."""
        if self.fields.stored_table_bits == 16:
            return False
        if head and not self.tied:
            return not is_layer_skipped(prefix, list(self.fields.ignore), match_mode="suffix")
        return not any(_names_table(name, prefix if not head else "") for name in self.fields.ignore)

    def table_group(self, prefix: str, *, head: bool) -> int:
        """Group size of the table or head."""
        if head and not self.tied:
            return self.fields.group_of(prefix)
        for name, group in self.fields.group_size_overrides.items():
            if _names_table(name, prefix if not head else ""):
                return group
        return self.fields.group_size


def _names_table(name: str, prefix: str) -> bool:
    if prefix:
        return prefix == name or prefix.endswith("." + name)  # several vLLM models give their table no name at all
    return name.rpartition(".")[2] in TABLES


def apply_environment(fields: Int4Config, env: Mapping[str, str]) -> Int4Config:
    """The experiment switch wins over the config. Raises ConfigError when it is neither 0 nor 1."""
    value = env.get(DIRECT_DEQUANT_ENV)
    if value is None or value == "":
        return fields
    if value not in ("0", "1"):
        raise ConfigError(f"{DIRECT_DEQUANT_ENV} has a wrong value", why=f"{value!r} is neither 0 nor 1", do="unset it")
    return dataclasses.replace(fields, direct_dequant=value == "1")
