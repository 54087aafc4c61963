"""Configurations and loading for real vLLM layers under our plugin."""

from __future__ import annotations

from typing import Any

from appliance.kernels import reference


def int4_config(tied: bool = False, **raw: Any) -> Any:
    from appliance.vllm_plugin.config import CpuInt4Config

    made = CpuInt4Config.from_config(raw)
    made.tied = tied
    return made


def load(layer: Any, portable: reference.Portable, *shard: Any) -> None:
    for name, tensor in (("weight_packed", portable.packed), ("weight_scale", portable.scale), ("weight_zero", portable.zero)):
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor, *shard)
