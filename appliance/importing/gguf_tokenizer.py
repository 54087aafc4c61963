"""The tokenizer of a GGUF file as tokenizer.json, tokenizer_config.json and chat_template.jinja.

transformers rebuilds the tokenizer; this module sets what it leaves open: how text is cut before merging for the
families whose rule it does not know, the begin token, and plain class names that every reader has.
Rules: a cutting rule (`tokenizer.ggml.pre`) that nobody here knows is refused, because a wrong one gives slightly
wrong tokens without an error; the result must have as many tokens as the table has rows, or fewer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.errors import ModelError

DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
"""Families that cut every digit apart and then follow GPT-2 (source: llama.cpp's llm_tokenizer_bpe)."""
PLAIN_GPT2 = ("gpt-2", "gpt2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "default")
"""Families that use GPT-2's rule, which is what transformers builds when the file names none."""


def write_tokenizer(path: Path, fields: Mapping[str, Any], table_rows: int, out: Path) -> bool:
    """Write the tokenizer files of the GGUF at `path` into `out`; returns whether there is a chat template.

    `fields`: the file's metadata. Raises ModelError when the tokenizer is of a kind that cannot be rebuilt exactly.
    """
    tokenizer = _build(path, fields)
    if len(tokenizer) > table_rows:
        raise ModelError(f"{path} is inconsistent", do="use the safetensors folder of the same model",
                         why=f"its tokenizer has {len(tokenizer)} tokens, its table {table_rows} rows")
    tokenizer.save_pretrained(out)
    _plain_config(out / "tokenizer_config.json", fields)
    return bool(fields.get("tokenizer.chat_template"))


def _build(path: Path, fields: Mapping[str, Any]) -> Any:
    import transformers
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    model, pre = str(fields.get("tokenizer.ggml.model")), str(fields.get("tokenizer.ggml.pre") or "default")
    if model not in ("gpt2", "llama"):
        raise _unknown(path, f"tokenizer model {model!r}")
    if model == "gpt2" and pre not in (*GGUF_PRE_TOKENIZER_SPLITS, *DIGITS_APART, *PLAIN_GPT2):
        raise _unknown(path, f"pre-tokenizer {pre!r}")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as error:  # the library raises whatever it meets; one line for all of it
        raise ModelError(f"the tokenizer of {path} cannot be rebuilt", do="use the safetensors folder of the same model",
                         why=f"{type(error).__name__}: {str(error)[:120]}") from error
    if model == "gpt2" and pre in DIGITS_APART:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ])
    # llama.cpp's defaults where the file says nothing: SentencePiece models begin with bos, byte-level ones do not,
    # but for Llama 3.
    begins = fields.get("tokenizer.ggml.add_bos_token", model == "llama" or pre in ("llama-bpe", "llama3", "llama-v3"))
    tokenizer.add_bos_token = bool(begins) and fields.get("tokenizer.ggml.bos_token_id") is not None
    return tokenizer


def _unknown(path: Path, what: str) -> ModelError:
    return ModelError(f"the tokenizer of {path} cannot be rebuilt", why=f"{what} is not known here",
                      do="use the safetensors folder of the same model")


def _plain_config(file: Path, fields: Mapping[str, Any]) -> None:
    """Leave only what every reader of tokenizer_config.json understands."""
    config = json.loads(file.read_text("utf-8"))
    for local in ("backend", "is_local", "local_files_only", "gguf_file"):
        config.pop(local, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    context = fields.get(f"{fields.get('general.architecture')}.context_length")
    if context:
        config["model_max_length"] = int(context)
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
