"""Tiny models as files: safetensors written by hand (standard library) and, for the worker's tests, whole folders."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 80,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "float16",
    "bos_token_id": 1, "eos_token_id": 2,
}


def shapes(config: Mapping[str, Any] = LLAMA) -> dict[str, list[int]]:
    """Tensor names and shapes of a llama of this configuration, without the head of a tied one."""
    h, m, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    out = {"model.embed_tokens.weight": [v, h], "model.norm.weight": [h]}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        out |= {
            f"{layer}.self_attn.q_proj.weight": [q, h], f"{layer}.self_attn.k_proj.weight": [kv, h],
            f"{layer}.self_attn.v_proj.weight": [kv, h], f"{layer}.self_attn.o_proj.weight": [h, q],
            f"{layer}.mlp.gate_proj.weight": [m, h], f"{layer}.mlp.up_proj.weight": [m, h],
            f"{layer}.mlp.down_proj.weight": [h, m], f"{layer}.input_layernorm.weight": [h],
            f"{layer}.post_attention_layernorm.weight": [h],
        }
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = [v, h]
    return out


def write_safetensors(path: Path, tensors: Mapping[str, Sequence[int]], *, dtype: str = "BF16") -> None:
    """Zero tensors of these shapes; no torch."""
    header, offset = {}, 0
    for name, shape in tensors.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


def write_folder(folder: Path, config: Mapping[str, Any] = LLAMA) -> Path:
    """A folder with config, a tokenizer file and zero weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    write_safetensors(folder / "model.safetensors", shapes(config))
    return folder


def random_tensors(config: Mapping[str, Any] = LLAMA, *, seed: int = 0) -> dict[str, Any]:
    """bf16 tensors of a llama: normal weights, norms around one."""
    import torch

    make = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=make) * 0.05 + (1 if len(shape) == 1 else 0)).to(torch.bfloat16)
        for name, shape in shapes(config).items()
    }


def write_random(folder: Path, config: Mapping[str, Any] = LLAMA, *, tensors: dict[str, Any] | None = None,
                 shards: int = 1) -> dict[str, Any]:
    """A folder with random weights in one or more shards; returns the tensors."""
    from safetensors.torch import save_file

    write_folder(folder, config)
    tensors = random_tensors(config) if tensors is None else tensors
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return tensors
    (folder / "model.safetensors").unlink()
    names, weight_map = list(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({n: tensors[n] for n in names[i::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[i::shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def read_out(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and all tensors of a written checkpoint, through the safetensors library."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return json.loads((folder / "config.json").read_text()), tensors


def dequantized(tensors: Mapping[str, Any], *, table_bits: int = 4) -> dict[str, Any]:
    """float32 weights of a checkpoint, by the format's formula written out again (not the code under test)."""
    import torch

    out = {}
    for name, value in tensors.items():
        if name.endswith(".weight_packed"):
            base = name.removesuffix("_packed")
            n, half = value.shape
            middle = 128 if table_bits == 8 and base in ("model.embed_tokens.weight", "lm_head.weight") else 8
            codes = torch.empty(n, 2 * half)
            codes[:, 0::2], codes[:, 1::2] = (value % 16).float(), (value // 16).float()
            codes = value.float() if middle == 128 else codes
            scale, zero = tensors[base + "_scale"].float(), tensors[base + "_zero"].float()
            group = codes.shape[1] // scale.shape[1]
            out[base] = (codes - middle) * scale.repeat_interleave(group, 1) + zero.repeat_interleave(group, 1)
        elif not name.endswith((".weight_scale", ".weight_zero")):
            out[name] = value.float()
    return out
