"""The vLLM plugin (entry point `vllm.general_plugins`): `register()` makes `cpu_int4` known, as a quantization and as a
load format. Nothing happens at import.

vLLM calls `register` in every one of its processes; a second call changes nothing.
"""

from __future__ import annotations


def register() -> None:
    """Register the quantization and the load format `cpu_int4` with vLLM."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from appliance.quantize.format import QUANT_METHOD
    from appliance.vllm_plugin.config import CpuInt4Config
    from appliance.vllm_plugin.loader import register_loader

    if QUANT_METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(QUANT_METHOD)(CpuInt4Config)
    register_loader()
