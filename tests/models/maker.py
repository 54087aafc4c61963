"""A tiny random model of any architecture that transformers knows, as a Hugging Face folder with a small tokenizer.

The usual initialization gives nearly equal logits, at which a broken layer would pass. So weights are as large as those of a trained model relative to
their width, biases and norms differ from 0 and 1, and the head is scaled until log-probabilities spread as the row says.

    worker_python -m tests.models.maker ROW FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.zoo import ROWS, Row

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def make(folder: Path, row: Row) -> float:
    """Write the row's model; returns the spread that its log-probabilities have."""
    config = AutoConfig.for_model(row.model_type, **row.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model, torch.Generator().manual_seed(row.seed))
    if row.outlier != 1.0:
        with torch.no_grad():
            model.model.layers[-1].mlp.down_proj.weight[5, 32:64] *= row.outlier
    found = scale_head(model, row.spread)
    model.to(torch.bfloat16).save_pretrained(folder)
    if row.architecture:
        stored = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(stored | {"architectures": [row.architecture]}))
    write_tokenizer(folder)
    return found


def randomize(model: Any, make: torch.Generator) -> None:
    """Every parameter anew, by its number of dimensions and the place of its name."""
    done: set[int] = set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.data_ptr() in done:
                continue
            done.add(parameter.data_ptr())
            noise = torch.randn(parameter.shape, generator=make)
            if parameter.dim() == 1:
                centre = float(parameter.mean()) if name.endswith("weight") else 0.0  # 1, or 0 where a model adds the 1
                parameter.copy_(centre + 0.2 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def scale_head(model: Any, wanted: float) -> float:
    """Scale the head (a tied table with it) until the log-probabilities spread by `wanted`; returns the spread."""
    ids = tokens(model.config.vocab_size, 200)
    found = 0.0
    head = model.get_output_embeddings()
    for _ in range(8):
        found = spread(model, ids)
        if abs(found - wanted) < 0.05 * wanted:
            break
        with torch.no_grad():
            head.weight.mul_(wanted / found)
            if head.bias is not None:
                head.bias.mul_(wanted / found)
    return found


def spread(model: Any, ids: list[int]) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float()
    return float(torch.log_softmax(logits, dim=-1).std(dim=-1).mean())


def tokens(vocabulary: int, count: int, seed: int = 0) -> list[int]:
    """Token ids without pattern, special ones left out."""
    return torch.randint(3, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes and a few words: fewer tokens than the table has rows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE}))


if __name__ == "__main__":
    make(Path(sys.argv[2]), next(row for row in ROWS if row.name == sys.argv[1]))
