"""Tiny random models of each family as Hugging Face folders, for llama.cpp's converter. Runs in the worker's Python.

The weights are scaled so that log-probabilities spread (standard deviation of at least 1.5): at the usual
initialization two unrelated models hardly differ, and a layer that is mapped wrongly would pass.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
import transformers

TEXT = Path(__file__).parents[2] / "docs/architecture.md"
VOCAB = 512
SHAPE = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 7,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1,
         "eos_token_id": 2, "pad_token_id": 0}
"""Seven layers: in Gemma 3 the sixth is the first that sees everything."""

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_theta": 50000.0, "tie_word_embeddings": False}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-3": ("Llama", {"max_position_embeddings": 131072, "head_dim": 64, "rope_parameters": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0,
        "original_max_position_embeddings": 8192}}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0,
                                                "original_max_position_embeddings": 128}}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3Text", {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32,
                              "rope_parameters": {
                                  "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                                  "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
    "phi3": ("Phi3", {"sliding_window": None, "original_max_position_embeddings": 512}),
    "phi3-long": ("Phi3", {"max_position_embeddings": 1024, "original_max_position_embeddings": 256,
                           "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0,
                                               "original_max_position_embeddings": 256,
                                               "short_factor": [1.0 + i / 16 for i in range(8)],
                                               "long_factor": [2.0 + i / 4 for i in range(8)]}}),
    "granite": ("Granite", {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
                            "logits_scaling": 2.0, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "partial_rotary_factor": 0.25}),
    "starcoder2": ("Starcoder2", {"sliding_window": None, "use_bias": True, "tie_word_embeddings": True}),
}
"""Name -> class of transformers (without Config, ForCausalLM) and what differs from SHAPE."""
SENTENCEPIECE = ("gemma", "gemma2", "gemma3", "phi3", "phi3-long", "llama-tied", "mistral")


def make(folder: Path, name: str, *, shape: dict[str, Any] | None = None, gain: float = 1.5) -> Any:
    """Write the folder of a model with tokenizer; returns the transformers model in fp32 with the weights as stored."""
    family, more = ARCHITECTURES[name]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **(shape or {}), **more})
    torch.manual_seed(7)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            scale_up(parameter_name, parameter, gain)
    model.save_pretrained(folder)
    if name in SENTENCEPIECE:
        # llama.cpp wants this token of Phi-3, which it knows by its name.
        sentencepiece(folder, config.vocab_size, marks=("<|endoftext|>",) if family == "Phi3" else ())
    else:
        byte_level(folder, config.vocab_size)
    return model


def scale_up(name: str, parameter: torch.Tensor, gain: float) -> None:
    if "norm" in name and name.endswith("weight"):
        parameter.add_(torch.randn_like(parameter) * 0.1)
    elif parameter.ndim == 1:
        parameter.copy_(torch.randn_like(parameter) * 0.2)
    elif "embed_tokens" in name or "lm_head" in name:
        parameter.copy_(torch.randn_like(parameter) * 3 / parameter.shape[1] ** 0.5)
    else:
        parameter.copy_(torch.randn_like(parameter) * gain / parameter.shape[1] ** 0.5)


def byte_level(folder: Path, vocab: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab - 12, special_tokens=["<pad>", "<s>", "</s>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train([str(TEXT)], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>",
                                                pad_token="<pad>")
    fast.save_pretrained(folder)


def sentencepiece(folder: Path, vocab: int, *, marks: tuple[str, ...] = ()) -> None:
    """tokenizer.model, from which llama.cpp converts, trained as Llama's and Gemma's are."""
    import sentencepiece as spm

    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.read_text().splitlines()), model_writer=model, vocab_size=vocab, model_type="bpe",
        byte_fallback=True, control_symbols=list(marks), pad_id=0, bos_id=1, eos_id=2, unk_id=3, normalization_rule_name="identity",
        remove_extra_whitespaces=False, split_digits=True, minloglevel=2, hard_vocab_limit=True)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>",
        "unk_token": "<unk>"}))
