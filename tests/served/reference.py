"""Reference log-probabilities: fp32 transformers on the dequantized weights of a stored model. Runs in the worker's Python.

    worker_python tests/served/reference.py MODEL_FOLDER < {"sequences": [[token ids], ...]}

Prints {"logprobs": [[log-probability of token i given the tokens before it, from token 1 on], ...]}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM


def dequantized(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = json.loads((folder / "config.json").read_text())
    table_bits = config.pop("quantization_config").get("table_bits", 4)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    weights = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight_packed"):
            module = name.removesuffix(".weight_packed")
            scale, zero = (tensors[f"{module}.weight_{part}"].float()[..., None] for part in ("scale", "zero"))
            wide = table_bits == 8 and module.rpartition(".")[2] in ("embed_tokens", "lm_head")
            codes = tensor if wide else torch.stack((tensor & 15, tensor >> 4), dim=-1)
            codes = codes.view(*scale.shape[:2], -1).float() - (128 if wide else 8)
            weights[f"{module}.weight"] = (codes * scale + zero).flatten(1)
        elif not name.endswith((".weight_scale", ".weight_zero")):
            weights[name] = tensor.float()
    return config, weights


def load(folder: Path) -> Any:
    config, weights = dequantized(folder)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model


if __name__ == "__main__":
    model = load(Path(sys.argv[1]))
    logprobs = []
    with torch.no_grad():
        for ids in json.load(sys.stdin)["sequences"]:
            tokens = torch.tensor([ids])
            table = torch.log_softmax(model(tokens).logits[0, :-1].float(), dim=-1)
            logprobs.append(table.gather(1, tokens[0, 1:, None])[:, 0].tolist())
    print(json.dumps({"logprobs": logprobs}))
