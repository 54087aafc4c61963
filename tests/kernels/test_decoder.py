"""The fused decoder in real vLLM: four architectures against fp32 transformers, and what the gate refuses."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from appliance.quantize.checkpoint import quantize  # noqa: E402  # after the guard for the agent's environment
from appliance.quantize.layers import Recipe  # noqa: E402
from tests.quantize.models import LLAMA, shapes, write_random  # noqa: E402

pytestmark = pytest.mark.worker

SIZES: Mapping[str, Any] = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_hidden_layers": 3, "max_position_embeddings": 512, "hidden_act": "silu",
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 40},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False},
}
LIMIT = 0.03
"""Mean |difference| of log-probabilities; these random models are several times as sensitive as trained ones."""


def tensors_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Weights large enough that every part of a layer shows in the answer."""
    make = torch.Generator().manual_seed(5)
    wanted = shapes(config)
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}.self_attn"
        if config["model_type"] == "qwen2":
            wanted |= {f"{prefix}.{p}_proj.bias": wanted[f"{prefix}.{p}_proj.weight"][:1] for p in "qkv"}
        if config["model_type"] == "qwen3":
            wanted |= {f"{prefix}.{p}_norm.weight": [config["head_dim"]] for p in "qk"}
    return {
        name: (torch.randn(shape, generator=make) * 0.15 + (name.endswith("norm.weight"))).to(torch.bfloat16)
        for name, shape in wanted.items()
    }


@functools.cache
def served(name: str, folder: Path) -> dict[str, Any]:
    config = LLAMA | SIZES | MODELS[name]
    write_random(folder / "source", config, tensors=tensors_of(config))
    quantize(folder / "source", folder / "object", Recipe(), lambda event: None)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("fused_model.py")), str(folder / "object")], capture_output=True, text=True,
        timeout=900, check=False, env=os.environ | {"PYTHONPATH": f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}"})
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fused")


@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_transformers(folders: Path, name: str) -> None:
    result = served(name, folders / name)
    assert result["fused"]
    assert result["head_type"] == "None", "the head gets fp32 hidden states as they are"
    for way, limit in (("alone", LIMIT), ("together", LIMIT), ("mixed", 2 * LIMIT)):  # vLLM's own layers round to bf16
        for part, difference in result[way].items():
            assert difference < limit, f"{way}, {part}: {difference}"


def test_a_changed_layer_is_refused_by_name(folders: Path) -> None:
    result = served("llama", folders / "llama")["layers"]
    assert result.pop("unchanged") is None
    for name, word in (("other rotation", "neox"), ("other kernel", "o_proj is not a native"), ("bias", "down_proj has a bias"),
                       ("other activation", "GELU"), ("partial norm", "partial"), ("scaled queries", "position"),
                       ("encoder", "encoder_only"), ("shared cache", "shared"), ("other layer", "Identity")):
        assert word in (result.pop(name) or ""), name
    assert not result


def test_another_configuration_is_refused_by_name(folders: Path) -> None:
    result = served("llama", folders / "llama")["models"]
    assert result.pop("unchanged") is None
    for name, word in (("compiled", "compiled"), ("tensor parallel", "split"), ("pipeline parallel", "split"), ("pooling", "pooling"),
                       ("lora", "LoRA"), ("speculative", "speculative"), ("transfer", "transfer"), ("other model", "Identity")):
        assert word in (result.pop(name) or ""), name
    assert not result
