"""Pseudo-random Llama models, written row by row: speed and memory do not depend on the values of the weights.

    worker_python -m tests.bench.random_llama NAME safetensors FOLDER
    worker_python -m tests.bench.random_llama NAME gguf FILE --tokenizer GGUF

`1b` is a Llama of 1B shape. `hollow` has SmolLM2-135M's layers and vocabulary, nearly its heads (8/4 for 9/3: 64
columns must be whole heads), and linears of 64 columns that cost nothing: what is left of a step is the server's work.
The others are for the memory benchmark and differ in what memory depends on; they are folders only.
The folder has no tokenizer of its own; the GGUF file takes the tokenizer of another one. Needs the worker's environment (torch, gguf).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

SHARD_LAYERS = 4
POOL_VALUES = 1 << 22
VOCAB = 49152  # SmolLM2's, so that its tokenizer serves


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a model of Llama's kind consists of. `extra`: further fields of its config.json."""

    hidden: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int
    head: int
    """Columns of one attention head."""
    vocab: int = VOCAB
    architecture: str = "LlamaForCausalLM"
    tied: bool = True
    context: int = 8192
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    qkv_bias: bool = False
    head_norms: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


SMALL = Shape(hidden=1024, layers=12, mlp=2816, heads=16, kv_heads=4, head=64, context=32768)
SHAPES = {
    "1b": Shape(hidden=2048, layers=16, mlp=8192, heads=32, kv_heads=8, head=64),
    "hollow": Shape(hidden=64, layers=30, mlp=64, heads=8, kv_heads=4, head=64),
    "gqa": SMALL,
    "mha": replace(SMALL, kv_heads=16),
    "mqa": replace(SMALL, kv_heads=1),
    "window": replace(SMALL, kv_heads=8, architecture="MistralForCausalLM", tied=False, extra={"sliding_window": 4096}),
    "qwen2": replace(SMALL, kv_heads=2, architecture="Qwen2ForCausalLM", vocab=151936, tied=False, qkv_bias=True),
    "qwen3": replace(SMALL, kv_heads=8, head=128, architecture="Qwen3ForCausalLM", vocab=151936, head_norms=True),
    "granite": replace(SMALL, architecture="GraniteForCausalLM"),
    "gemma2": replace(
        SMALL, heads=4, kv_heads=2, head=256, architecture="Gemma2ForCausalLM",
        norms=("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        extra={"sliding_window": 4096, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
               "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh"}),
}


GGUF_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def tensors(shape: Shape, layer: int) -> list[tuple[str, str, list[int]]]:
    """One layer's tensors: name in a folder, name in GGUF, shape."""
    hf, gguf = f"model.layers.{layer}", f"blk.{layer}"
    queries, keys, hidden, mlp = shape.heads * shape.head, shape.kv_heads * shape.head, shape.hidden, shape.mlp
    return [
        (f"{hf}.self_attn.q_proj.weight", f"{gguf}.attn_q.weight", [queries, hidden]),
        (f"{hf}.self_attn.k_proj.weight", f"{gguf}.attn_k.weight", [keys, hidden]),
        (f"{hf}.self_attn.v_proj.weight", f"{gguf}.attn_v.weight", [keys, hidden]),
        (f"{hf}.self_attn.o_proj.weight", f"{gguf}.attn_output.weight", [hidden, queries]),
        (f"{hf}.mlp.gate_proj.weight", f"{gguf}.ffn_gate.weight", [mlp, hidden]),
        (f"{hf}.mlp.up_proj.weight", f"{gguf}.ffn_up.weight", [mlp, hidden]),
        (f"{hf}.mlp.down_proj.weight", f"{gguf}.ffn_down.weight", [hidden, mlp]),
        *((f"{hf}.{norm}.weight", f"{gguf}.{GGUF_NORMS.get(norm, norm)}.weight", [hidden]) for norm in shape.norms),
        *((f"{hf}.self_attn.{part}_proj.bias", "", [size]) for part, size in
          (("q", queries), ("k", keys), ("v", keys)) if shape.qkv_bias),
        *((f"{hf}.self_attn.{part}_norm.weight", "", [shape.head]) for part in "qk" if shape.head_norms),
    ]


def outer(shape: Shape) -> list[tuple[str, str, list[int]]]:
    """The tensors that belong to no layer."""
    head = [] if shape.tied else [("lm_head.weight", "output.weight", [shape.vocab, shape.hidden])]
    return [("model.embed_tokens.weight", "token_embd.weight", [shape.vocab, shape.hidden]),
            ("model.norm.weight", "output_norm.weight", [shape.hidden]), *head]


def write_safetensors(shape: Shape, folder: Path) -> int:
    """A sharded bf16 folder without tokenizer, from a little pool of random values; returns its bytes."""
    import torch

    pool = (torch.randn(POOL_VALUES) * 0.02).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    shards = [outer(shape)]
    for first in range(0, shape.layers, SHARD_LAYERS):
        layers = range(first, min(first + SHARD_LAYERS, shape.layers))
        shards.append([tensor for layer in layers for tensor in tensors(shape, layer)])
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, offset = {}, 0
        for tensor, _, size in shard:
            count = 2 * size[0] * (size[1] if len(size) > 1 else 1)
            header[tensor] = {"dtype": "BF16", "shape": size, "data_offsets": [offset, offset + count]}
            weight_map[tensor] = name
            offset += count
        text = json.dumps(header).encode()
        with open(folder / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            left = offset
            while left:
                left -= file.write(pool[: min(left, len(pool))])
        total += offset
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({
        "architectures": [shape.architecture], "model_type": shape.architecture.removesuffix("ForCausalLM").lower(),
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers, "intermediate_size": shape.mlp, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head, "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5,
        "max_position_embeddings": shape.context, **shape.extra}))
    (folder / "tokenizer.json").write_text("{}")
    return total


def write_gguf(shape: Shape, file: Path, tokenizer: Path) -> None:
    """The same model as an f16 GGUF file with the tokenizer of another GGUF file."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(str(file), "llama")
    for key, value, kind in tokenizer_fields(gguf.GGUFReader(str(tokenizer))):
        writer.add_key_value(key, value, kind[0], kind[1] if len(kind) > 1 else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_block_count(shape.layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.mlp)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_dimension_count(shape.head)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    everything = outer(shape) + [tensor for layer in range(shape.layers) for tensor in tensors(shape, layer)]
    # Vectors are fp32 in GGUF; matrices f16.
    kinds = [(name, size, np.float32 if len(size) == 1 else np.float16) for _, name, size in everything]
    for name, size, kind in kinds:
        writer.add_tensor_info(name, size, np.dtype(kind), int(np.prod(size)) * np.dtype(kind).itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    pool = (np.random.default_rng(1).standard_normal(POOL_VALUES, dtype=np.float32) * 0.02)
    for _, size, kind in kinds:
        writer.write_tensor_data(np.resize(pool.astype(kind), size))
    writer.close()


def tokenizer_fields(reader: Any) -> Iterator[tuple[str, Any, list[Any]]]:
    """Every field of a GGUF file that describes its tokenizer: key, value, types."""
    for found in reader.fields.values():
        if found.name.startswith("tokenizer."):
            yield found.name, found.contents(), found.types


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(SHAPES))
    parser.add_argument("kind", choices=["safetensors", "gguf"])
    parser.add_argument("target", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    args = parser.parse_args()
    if args.kind == "safetensors":
        args.target.mkdir(parents=True)
        write_safetensors(SHAPES[args.name], args.target)
    else:
        write_gguf(SHAPES[args.name], args.target, args.tokenizer)


if __name__ == "__main__":
    main()
