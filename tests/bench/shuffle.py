"""The same model with its channels in another order: a GGUF file in F32, changed in place.

Weights that were quantized before lie on a lattice of their groups of columns, which the same format finds again without
loss; a comparison on them says nothing. Here the channels of the residual stream, of each feed-forward part and within
each head are put in a random order, in every tensor that reads or writes them. The function stays what it was, but
neighbours come from different groups, so that no format has its lattice. Does decoders of the Llama and Gemma kind (RMS
norms, no biases, no experts); refuses others.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN_VECTORS = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "output_norm")
UNTOUCHED = ("attn_q_norm", "attn_k_norm", "rope_freqs")
READS_HIDDEN = ("token_embd", "output", "attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")


def shuffle(file: Path, seed: int = 1) -> None:
    import gguf

    reader = gguf.GGUFReader(file, "r+")
    architecture = str(reader.fields["general.architecture"].contents())

    def number(key: str) -> int:
        return int(reader.fields[f"{architecture}.{key}"].contents())

    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    chance = np.random.default_rng(seed)
    heads, key_heads = number("attention.head_count"), number("attention.head_count_kv")
    hidden = chance.permutation(number("embedding_length"))
    orders: dict[str, tuple[Any, Any, Any]] = {}
    for name, data in tensors.items():
        block, part = re.fullmatch(r"(?:(blk\.\d+)\.)?(\w+)\.weight", name).groups()  # type: ignore[union-attr]
        if block and block not in orders:
            wide = tensors[f"{block}.attn_v.weight"].shape[0] // key_heads
            each = [chance.permutation(wide) for _ in range(key_heads)]
            values = np.concatenate([wide * i + order for i, order in enumerate(each)])
            mixed = np.concatenate([wide * i + each[i * key_heads // heads] for i in range(heads)])
            orders[block] = values, mixed, chance.permutation(tensors[f"{block}.ffn_up.weight"].shape[0])
        values, mixed, inner = orders.get(block or "", (None, None, None))
        if part in HIDDEN_VECTORS:
            data[:] = data[hidden]
        elif part in READS_HIDDEN:
            rows = {"attn_v": values, "ffn_gate": inner, "ffn_up": inner}.get(part)
            data[:] = data[:, hidden] if rows is None else data[rows][:, hidden]
        elif part in ("attn_output", "ffn_down"):
            data[:] = data[hidden][:, mixed if part == "attn_output" else inner]
        elif part not in UNTOUCHED:
            raise ValueError(f"{name}: not a tensor of a decoder that this knows")
    reader.data.flush()
