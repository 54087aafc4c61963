"""Reference log-probabilities: fp32 transformers on the dequantized weights of a stored model, whatever its architecture.

The format is written out again here, it is not the code under test. Transformers itself reads the dequantized folder, so that its own renaming and
fusing of tensors (experts, old names) applies as it does to any checkpoint; a missing or surplus tensor fails.

    worker_python -m tests.models.reference MODEL_FOLDER < {"sequences": [[token ids], ...]}
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def dequantized(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration without its quantization, and every weight in fp32."""
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    overrides = quantization.get("group_size_overrides", {})
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    weights: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(".weight_packed"):
            module = name.removesuffix(".weight_packed")
            scale, zero = (stored[f"{module}.weight_{part}"].float()[..., None] for part in ("scale", "zero"))
            columns = scale.shape[1] * overrides.get(module, quantization["group_size"])
            wide = tensor.shape[1] == columns  # a byte a code
            codes = tensor if wide else torch.stack((tensor & 15, tensor >> 4), dim=-1)
            grouped = codes.reshape(*scale.shape[:2], -1).float() - (128 if wide else 8)
            weights[f"{module}.weight"] = (grouped * scale + zero).flatten(1)
        elif not name.endswith((".weight_scale", ".weight_zero")):
            weights[name] = tensor.float() if tensor.is_floating_point() else tensor
    return config, weights


def load(folder: Path, change: Change | None = None) -> Any:
    """The model; `change` may alter configuration and weights in place first (a negative control)."""
    config, weights = dequantized(folder)
    config |= {"dtype": "float32"}
    if change is not None:
        change(config, weights)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(config))
        save_file({key: value.contiguous() for key, value in weights.items()}, Path(name) / "model.safetensors", metadata={"format": "pt"})
        model, report = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not report["missing_keys"] - {"lm_head.weight"}, report
    assert not report["unexpected_keys"], report
    assert not report["mismatched_keys"], report
    return model.eval()


def logprobs(model: Any, sequences: list[list[int]]) -> list[list[float]]:
    """Log-probability of each token given those before it, from the second token on."""
    out = []
    with torch.no_grad():
        for ids in sequences:
            tokens = torch.tensor([ids])
            table = torch.log_softmax(model(tokens).logits[0, :-1].float(), dim=-1)
            out.append(table.gather(1, tokens[0, 1:, None])[:, 0].tolist())
    return out


def spread(model: Any, ids: list[int]) -> float:
    """Standard deviation of the log-probabilities over the vocabulary, mean over positions."""
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1)
    return float(table.std(dim=-1).mean())


def mean_difference(a: list[list[float]], b: list[list[float]]) -> float:
    pairs = [abs(x - y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True)]
    return sum(pairs) / len(pairs)




if __name__ == "__main__":
    print(json.dumps({"logprobs": logprobs(load(Path(sys.argv[1])), json.load(sys.stdin)["sequences"])}))
