"""Negative controls: known defects put into the reference, one into the stored model; both must then differ by more than the limit.

A comparison that would pass with a broken layer proves nothing. A control of the reference is one change of configuration or weights in place; it says
whether the model has what it breaks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Config = dict[str, Any]
Weights = dict[str, Tensor]
QKV_BIAS = r"\.(q_proj|k_proj|v_proj|query_key_value|qkv_proj|c_attn)\.bias$"
SCALED = 1.1


def bias_doubled(config: Config, weights: Weights) -> bool:
    """Biases of queries, keys and values added twice (vLLM did that on CPUs once)."""
    found = [name for name in weights if re.search(QKV_BIAS, name)]
    for name in found:
        weights[name] = 2 * weights[name]
    return bool(found)


def queries_and_keys_swapped(config: Config, weights: Weights) -> bool:
    """Keys of the first layer in the place of as many queries, and the other way round."""
    name = next((name for name in weights if re.search(r"\.0\..*\.q_proj\.weight$", name)), None)
    if name is None:
        return False
    queries, keys = weights[name].clone(), weights[name.replace("q_proj", "k_proj")].clone()
    rows = len(keys)
    weights[name] = torch.cat((keys, queries[rows:]))
    weights[name.replace("q_proj", "k_proj")] = queries[:rows]
    return True


def window_off(config: Config, weights: Weights) -> bool:
    """Every token sees all before it."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return False
    config |= {"sliding_window": 1 << 20, "use_sliding_window": False}
    if "layer_types" in config:
        config["layer_types"] = ["full_attention"] * len(config["layer_types"])
    return True


CONTROLS: Mapping[str, Callable[[Config, Weights], bool]] = {
    "bias doubled": bias_doubled, "q and k swapped": queries_and_keys_swapped, "window off": window_off}


def group_scaled(folder: Path, module: str, row: int, group: int) -> Callable[[Config, Weights], bool]:
    """One scale of the stored model times 1.1; the offset of its group stays."""
    stored: Weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    zero = stored[f"{module}.weight_zero"].float()[row, group]
    groups = stored[f"{module}.weight_zero"].shape[1]

    def change(config: Config, weights: Weights) -> bool:
        weight = weights[f"{module}.weight"].clone()
        columns = slice(group * weight.shape[1] // groups, (group + 1) * weight.shape[1] // groups)
        weight[row, columns] = (weight[row, columns] - zero) * SCALED + zero
        weights[f"{module}.weight"] = weight
        return True

    return change


def damage(folder: Path, module: str, row: int, group: int) -> None:
    """The same in the stored model itself: one scale times 1.1."""
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        if f"{module}.weight_scale" in tensors:
            tensors[f"{module}.weight_scale"][row, group] *= SCALED
            save_file(tensors, file, metadata={"format": "pt"})


def heaviest_group(folder: Path) -> tuple[str, int, int]:
    """Module, row and group with the largest scale among the stored linears: where a model has an outlier, it is there."""
    best = (0.0, "", 0, 0)
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name.endswith(".weight_scale") and re.search(r"\.\d+\.", name):
                largest = float(tensor.float().max())
                if largest > best[0]:
                    place = int(tensor.float().argmax())
                    best = (largest, name.removesuffix(".weight_scale"), place // tensor.shape[1], place % tensor.shape[1])
    return best[1], best[2], best[3]
