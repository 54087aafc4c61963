"""Tiny model folders with real headers: zeros as data, so shapes and sizes are true and files stay small."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BYTES = {"BF16": 2, "U8": 1, "F32": 4}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
    "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 512, "torch_dtype": "bfloat16", "tie_word_embeddings": True,
}
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> (safetensors dtype, shape)."""


def write_safetensors(path: Path, shapes: Shapes, fill: int = 0) -> None:
    header: dict[str, Any] = {}
    position = 0
    for name, (dtype, shape) in shapes.items():
        size = BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes([fill]) * position)


def int4(module: str, n: int, k: int, group: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The three tensors of one quantized linear [n, k]."""
    return {
        f"{module}.weight_packed": ("U8", (n, k // 2)),
        f"{module}.weight_scale": ("BF16", (n, k // group)),
        f"{module}.weight_zero": ("BF16", (n, k // group)),
    }


def llama_int4(config: Mapping[str, Any], group: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """All tensors of a tied Llama of these sizes."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    cache = hidden // heads * config["num_key_value_heads"]
    shapes = int4("model.embed_tokens", config["vocab_size"], hidden, group) | {"model.norm.weight": ("BF16", (hidden,))}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for name, n, k in (("self_attn.q_proj", hidden, hidden), ("self_attn.k_proj", cache, hidden), ("self_attn.v_proj", cache, hidden),
                           ("self_attn.o_proj", hidden, hidden), ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden),
                           ("mlp.down_proj", hidden, inner)):
            shapes |= int4(f"{layer}.{name}", n, k, group)
        shapes |= {f"{layer}.{norm}.weight": ("BF16", (hidden,)) for norm in ("input_layernorm", "post_attention_layernorm")}
    return shapes


def write_model(
    folder: Path, config: Mapping[str, Any], shapes: Shapes, *, template: bool = True, fill: int = 0
) -> Path:
    """A whole Hugging Face folder with one weight file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"} if template else {}))
    write_safetensors(folder / "model.safetensors", shapes, fill)
    return folder


def source_folder(folder: Path, *, fill: int = 0, **behaviour: Any) -> Path:
    """A bf16 source for the fake quantizer; `behaviour` tells it what to do (see fake_quantizer)."""
    write_model(folder, LLAMA, {"model.embed_tokens.weight": ("BF16", (256, 64))}, fill=fill)
    (folder / "behaviour.json").write_text(json.dumps(behaviour))
    return folder


def fake_python(folder: Path, **environment: str) -> str:
    """An executable that stands for the worker's Python and runs the fake quantizer with these variables."""
    import sys

    script = folder / "fake-worker-python"
    said = "".join(f"export {name}={value}\n" for name, value in environment.items())
    script.write_text(f'#!/bin/sh\n{said}exec {sys.executable} {Path(__file__).with_name("fake_quantizer.py")} "$@"\n')
    script.chmod(0o755)
    return str(script)
