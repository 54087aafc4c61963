"""A GGUF file as this project reads it: as a transformers model in fp32, before and after quantizing to cpu_int4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from appliance.importing.gguf import open_gguf
from appliance.importing.source import inspect
from appliance.importing.tensors import float_rows
from appliance.quantize.checkpoint import quantize
from appliance.quantize.layers import Recipe
from tests.served.reference import dequantized


def weights(file: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """config.json and the decoded tensors under their Hugging Face names."""
    form = open_gguf(inspect(file))
    return dict(form.config), {name: float_rows(t, 0, t.rows).view(t.shape) for name, t in form.tensors.items()}


def model(config: dict[str, Any], state: dict[str, torch.Tensor], folder: Path) -> Any:
    """The model that config.json describes, with these weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    loaded = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)).float().eval()
    missing, unexpected = loaded.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    loaded.tie_weights()
    return loaded


def requantized(file: Path, folder: Path, **recipe: Any) -> tuple[dict[str, Any], Any]:
    """The report of quantizing this file, and the model of what is stored."""
    report = quantize(file, folder, Recipe(**recipe), lambda event: None)
    config, state = dequantized(folder)
    return report, model(config, state, folder.with_name(folder.name + "-config"))


def logprobs(loaded: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(loaded(torch.tensor([ids])).logits[0].double(), dim=-1)
