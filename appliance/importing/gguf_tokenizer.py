"""The tokenizer of a GGUF file as tokenizer.json, tokenizer_config.json and chat_template.jinja.

Byte-level vocabularies (`gpt2`) are put together from the tokens and merges of the file, SentencePiece ones (`llama`)
from its tokens and scores. Runs in the worker's environment.
Rules: token ids are the file's, no token is added; a cutting rule (`tokenizer.ggml.pre`) that is not known here is
refused, because a wrong one gives slightly wrong tokens and no error; control tokens are special, user-defined ones
are matched whole; llama.cpp makes the same tokens of the same text (tests/gguf).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.errors import ModelError

# How text is cut before merging (source: llama.cpp's llm_tokenizer_bpe; the models' own tokenizer.json agree).
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
PLAIN_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo")
LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")
QWEN2 = ("qwen2", "deepseek-r1-qwen")
FIXED = {"qwen2": QWEN2}
"""Families that transformers cuts by a rule of its own, whatever tokenizer.json says -> names of that rule."""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = dict.fromkeys(LLAMA3, _WORDS + r"\p{N}{1,3}" + _REST) | dict.fromkeys(QWEN2, _WORDS + r"\p{N}" + _REST)
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
KEEP = ("<unk>", "<s>", "<|endoftext|>")
LONGEST_PIECE = 1024
"""Letters of a SentencePiece token: every cut of each is tried, so one of a megabyte would take minutes."""
SPACE = "\u2581"
"""What SentencePiece writes for a space."""
SAFETENSORS = "use the safetensors folder of the same model"


def write_tokenizer(path: Path, fields: Mapping[str, Any], table_rows: int, out: Path) -> bool:
    """Write the tokenizer files of the GGUF at `path` into `out`; returns whether there is a chat template.

    `fields`: the file's metadata. Raises ModelError when the tokenizer cannot be rebuilt exactly.
    """
    why = _type_refusal(fields)
    if why:
        raise ModelError(f"the tokenizer of {path} is damaged", why=why, do=SAFETENSORS)
    model = fields.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level(path, fields)
    elif model == "llama":
        tokenizer = _sentencepiece(path, fields)
    else:
        raise _unknown(path, f"tokenizer model {model!r}")
    count = tokenizer.get_vocab_size(with_added_tokens=True)
    if count > table_rows:
        raise ModelError(f"{path} is inconsistent", do=SAFETENSORS,
                         why=f"its tokenizer has {count} tokens, its table {table_rows} rows")
    config = _config(fields)
    if config["add_bos_token"]:
        _begin_with(tokenizer, config["bos_token"])
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
    template = fields.get("tokenizer.chat_template")
    if template:
        (out / "chat_template.jinja").write_text(template, "utf-8")
    return bool(template)


KINDS: Mapping[str, type] = {
    "tokens": str, "merges": str, "scores": float, "token_type": int, "model": str, "pre": str, "add_bos_token": bool,
    "add_space_prefix": bool, "bos_token_id": int, "eos_token_id": int, "unknown_token_id": int,
    "padding_token_id": int,
}
LISTS = ("tokens", "merges", "scores", "token_type")


def _type_refusal(fields: Mapping[str, Any]) -> str | None:
    """Why the tokenizer's fields are not of the types they must have, or None. What is absent is no matter here."""
    for name, kind in KINDS.items():
        value = fields.get(f"tokenizer.ggml.{name}")
        listed = isinstance(value, list)
        if value is not None and (listed != (name in LISTS)
                                  or not all(type(one) is kind for one in (value if listed else [value]))):
            return f"tokenizer.ggml.{name} is not {'a list of ' if name in LISTS else ''}{kind.__name__}"
    tokens, scores, types = (fields.get(f"tokenizer.ggml.{name}") for name in ("tokens", "scores", "token_type"))
    if not tokens:
        return "it has no tokens"
    if len(set(tokens)) != len(tokens):
        return "a token stands twice in it"
    if any(there is not None and len(there) != len(tokens) for there in (scores, types)):
        return "its tokens, scores and types are not equally many"
    template = fields.get("tokenizer.chat_template")
    return None if template is None or isinstance(template, str) else "its chat template is not a text"


def _unknown(path: Path, what: str) -> ModelError:
    return ModelError(f"the tokenizer of {path} cannot be rebuilt", why=f"{what} is not known here", do=SAFETENSORS)


def _byte_level(path: Path, fields: Mapping[str, Any]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = fields.get("tokenizer.ggml.pre")
    if pre not in (*SPLITS, *DIGITS_APART, *PLAIN_GPT2):
        raise _unknown(path, f"pre-tokenizer {pre!r}")
    family = fields.get("general.architecture")
    if pre not in FIXED.get(str(family), (pre,)):
        raise _unknown(path, f"pre-tokenizer {pre!r} of a {family} model")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple((*merge.split(" ", 1), "")[:2]) for merge in fields.get("tokenizer.ggml.merges") or []]
    try:
        # Llama 3 takes a word that is in the vocabulary whole, whatever the merges say.
        bpe = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, ignore_merges=pre in LLAMA3)
    except Exception as error:  # the library raises plain Exception for a merge outside the vocabulary
        raise ModelError(f"the tokenizer of {path} is damaged", why=str(error)[:120], do=SAFETENSORS) from None
    tokenizer = Tokenizer(bpe)
    if pre in QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    cut: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in SPLITS)]
    if pre in DIGITS_APART:
        cut.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif pre in SPLITS:
        cut.insert(0, pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)
    tokenizer.decoder = decoders.ByteLevel()
    _add_whole_tokens(tokenizer, tokens, fields)
    return tokenizer


def _add_whole_tokens(tokenizer: Any, tokens: list[str], fields: Mapping[str, Any]) -> None:
    """Tokens that text is searched for before it is cut; runs of one kind at once, which keeps their order."""
    from tokenizers import AddedToken

    types = fields.get("tokenizer.ggml.token_type") or []
    # The file does not say it: Phi-3's marks swallow the white space behind them (its tokenizer.json; llama.cpp too).
    strips = fields.get("general.architecture") == "phi3" and fields.get("tokenizer.ggml.model") == "llama"
    for kind, run in itertools.groupby(zip(tokens, types, strict=False), key=lambda pair: pair[1]):
        if kind in (CONTROL, USER_DEFINED):
            added = [AddedToken(token, normalized=False, special=kind == CONTROL, rstrip=strips and token not in KEEP)
                     for token, _ in run]
            (tokenizer.add_special_tokens if kind == CONTROL else tokenizer.add_tokens)(added)


def _sentencepiece(path: Path, fields: Mapping[str, Any]) -> Any:
    """Pairs are merged by the score of what they become; what is in no token is spelled in bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    scores, types = (fields.get(f"tokenizer.ggml.{key}") for key in ("scores", "token_type"))
    if scores is None or types is None:
        raise ModelError(f"the tokenizer of {path} is damaged", why="it has no scores or types", do=SAFETENSORS)
    if max(map(len, tokens)) > LONGEST_PIECE:
        raise ModelError(f"the tokenizer of {path} is damaged", do=SAFETENSORS,
                         why=f"a token of it has {max(map(len, tokens))} letters")
    merged = sorted((token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL and len(token) > 1),
                    key=lambda token: (-scores[ids[token]], ids[token]))
    merges = [(token[:cut], token[cut:]) for token in merged for cut in range(1, len(token))
              if token[:cut] in ids and token[cut:] in ids]
    unknown = fields.get("tokenizer.ggml.unknown_token_id")
    unknown = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True,
                                     byte_fallback=BYTE in types))
    prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    _add_whole_tokens(tokenizer, tokens, fields)
    return tokenizer


def _config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json in the words that every reader understands."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    tokens = fields.get("tokenizer.ggml.tokens") or []
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        number = fields.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and 0 <= number < len(tokens):
            config[name] = tokens[number]
    # llama.cpp's defaults where the file says nothing.
    default = fields.get("tokenizer.ggml.model") == "llama" or fields.get("tokenizer.ggml.pre") in LLAMA3
    config["add_bos_token"] = bool(fields.get("tokenizer.ggml.add_bos_token", default)) and "bos_token" in config
    context = fields.get(f"{fields.get('general.architecture')}.context_length")
    if isinstance(context, int):
        config["model_max_length"] = context
    return config


def _begin_with(tokenizer: Any, token: str) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", token, "$B"], special_tokens=[(token, tokenizer.token_to_id(token))])
