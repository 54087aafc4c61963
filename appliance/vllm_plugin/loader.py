"""vLLM's load format `cpu_int4`: prepared weights are mapped, everything else comes from the safetensors files.

vLLM's own loader does the work. This one opens the prepared layout before the model is built, so that layers can take
their weights from it (`linear.Int4Weights`), keeps the tensors that are not needed any more from being read, and counts
mapped weights as loaded. In place of a mapped linear it hands the model the numbers of its rows (`rows`). While a model
is built its vocabulary tables get the quantization, whether the model's author passes it on or not.
Rule: a tensor that is neither mapped nor in the checkpoint is refused by name, as ever.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from appliance.quantize.format import PACKED
from appliance.vllm_plugin.config import CpuInt4Config
from appliance.vllm_plugin.embedding import quantized_tables
from appliance.vllm_plugin.mapped import BLOCKED, Mapped, open_prepared
from appliance.vllm_plugin.rows import numbered

LOAD_FORMAT = "cpu_int4"

logger = init_logger("vllm.cpu_int4")


class MappedLoader(DefaultModelLoader):  # type: ignore[misc]  # vLLM is not typed here
    """vLLM's default loader with a prepared layout in front of it."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(dataclasses.replace(load_config, load_format="safetensors"))
        self.mapped: Mapped | None = None

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Module:
        """Load as vLLM does, then fuse the decoder layers where that is possible."""
        from appliance.vllm_plugin.fusion import fuse

        model: Module = super().load_model(vllm_config, model_config, prefix)
        fuse(model, vllm_config)
        return model

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Module:
        """Build the model while its quantization method can see the prepared layout."""
        quantization = vllm_config.quant_config
        if not isinstance(quantization, CpuInt4Config):
            plain: Module = super().create_model(vllm_config, model_config, prefix)
            return plain
        self.mapped = quantization.prepared = open_prepared(os.environ, Path(model_config.model), logger.info)
        try:
            with quantized_tables(quantization, model_config.get_vocab_size()):
                model: Module = super().create_model(vllm_config, model_config, prefix)
        finally:
            quantization.prepared = None  # the configuration is copied and pickled; a mapping must not be
        if self.mapped is not None:
            unmapped = [name for name, module in model.named_modules() if hasattr(module, PACKED)]
            if unmapped:
                logger.info("%d layers are not mapped and will be packed in memory: %s%s", len(unmapped),
                            ", ".join(unmapped[:3]), ", ..." if len(unmapped) > 3 else "")
        return model

    def get_all_weights(self, model_config: Any, model: Module) -> Generator[tuple[str, Tensor], None, None]:
        """The tensors of the checkpoint that no mapped layer replaces; the others are not read."""
        if self.mapped is None or not self.mapped.replaced:
            yield from super().get_all_weights(model_config, model)
            return
        from safetensors import safe_open

        replaced = self.mapped.replaced
        packed_rows: dict[str, int] = {}

        self.counter_before_loading_weights = time.perf_counter()  # vLLM logs the time since then
        _, files, _, _ = self._prepare_weights(model_config.model, None, None, False, None)
        for path in sorted(files):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # it is no mapping
                    if name not in replaced:
                        yield name, file.get_tensor(name)
                    elif name.endswith(f".{PACKED}"):
                        packed_rows[name.removesuffix(f".{PACKED}")] = file.get_slice(name).get_shape()[0]
        yield from numbered(self.mapped.taken, packed_rows)

    def track_weights_loading(self, model: Module, loaded_weights: set[str] | None, quantized: bool = False) -> None:
        """vLLM's check that every parameter came from somewhere; the mapped ones did."""
        if loaded_weights is not None:
            loaded_weights = loaded_weights | {
                name for name, _ in model.named_parameters() if name.rpartition(".")[2] == BLOCKED
            }
        super().track_weights_loading(model, loaded_weights, quantized)


def register_loader() -> None:
    """Make the load format known to vLLM; a second call changes nothing."""
    if LOAD_FORMAT not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(LOAD_FORMAT)(MappedLoader)
