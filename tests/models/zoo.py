"""The architectures of the table in docs/models.md: one tiny configuration each, as data.

A row is what transformers' configuration class of its `model_type` is given. Sizes are chosen so that every kind of part shows in the answer: several
layers, heads that share keys, windows shorter than the prompt, widths that groups divide unevenly, vocabularies that are no multiple of 64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 331
"""Rows of every table: more than the tokenizer has, no multiple of 16, 32 or 64."""
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 224, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """`fields`: of the configuration, over `COMMON`; None leaves a common field out. `recipe`: what is asked of the quantization. `spread`: standard
    deviation of its log-probabilities. `outlier`: one group of weights is that many times as large as the others; such a row is served a second
    time with that group's stored scale times 1.1. `architecture`: what published models call it, where transformers writes another name.
    `context`: what the operator asks for. `lengths`: tokens of the prompts: few rows, beyond no window, beyond every window and one chunk of
    prefill. `reference`: fields that the reference's configuration has instead. `whole`: served by the whole service, not by the engine alone."""

    name: str
    model_type: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 1
    spread: float = 2.0
    outlier: float = 1.0
    architecture: str | None = None
    context: int | None = None
    lengths: tuple[int, ...] = (3, 40, 300)
    reference: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False

    @property
    def config(self) -> dict[str, Any]:
        return {key: value for key, value in (COMMON | self.fields).items() if value is not None}


OWN_NAMES: Mapping[str, Any] = {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 2048, "hidden_size": None, "num_hidden_layers": None,
                                "num_attention_heads": None, "num_key_value_heads": None, "intermediate_size": None, "max_position_embeddings": None}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
               "rope_theta": 10000.0}
LONG_ROPE: Mapping[str, Any] = {"partial_rotary_factor": 0.75, "rope_theta": 10000.0, "sliding_window": None, "rope_scaling": {
    "type": "longrope", "short_factor": [1.0 + 0.05 * i for i in range(12)], "long_factor": [2.0 + 0.5 * i for i in range(12)]}}
EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}

ROWS: tuple[Row, ...] = (
    Row(name="Llama", model_type="llama"),
    Row(name="Llama 3 (scaled rotation, untied)", model_type="llama", fields={
        "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False, "head_dim": 32}),
    Row(name="SmolLM2 (tied, odd width)", model_type="llama", fields={
        "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True}, whole=True),
    Row(name="Llama (biases)", model_type="llama", fields={"attention_bias": True, "mlp_bias": True}),
    Row(name="Llama (a width that no group divides)", model_type="llama", fields={"intermediate_size": 216}),
    Row(name="Llama (k_proj named in --ignore)", model_type="llama", recipe={"ignore": ("k_proj",)}),
    Row(name="Llama (16-bit table)", model_type="llama", recipe={"table_bits": 16}, fields={"tie_word_embeddings": True}),
    Row(name="Llama (groups of 64, 4-bit table)", model_type="llama", recipe={"table_bits": 4, "group_size": 64}),
    Row(name="Llama (an outlier)", model_type="llama", outlier=60.0, spread=4.0),
    Row(name="Mistral (sliding window)", model_type="mistral", fields={"sliding_window": 40}),
    Row(name="Qwen2 (biases)", model_type="qwen2", fields={"tie_word_embeddings": True}, whole=True),
    Row(name="Qwen2 (windows in all layers)", model_type="qwen2", fields={
        "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 0}),
    Row(name="Qwen3 (head norms)", model_type="qwen3", fields={"head_dim": 64}),
    Row(name="Phi-3 (fused tensors)", model_type="phi3", fields={"sliding_window": 40}, whole=True),
    Row(name="Phi-4-mini (partial rotation in two lengths)", model_type="phi3", fields=LONG_ROPE | {
        "original_max_position_embeddings": 512, "tie_word_embeddings": True}),
    Row(name="Phi-4-mini (a long context asked for)", model_type="phi3", fields=LONG_ROPE | {
        "original_max_position_embeddings": 128, "tie_word_embeddings": True}, context=1024, lengths=(200, 300)),
    Row(name="Phi (parallel block)", model_type="phi", fields={"num_key_value_heads": 4}),
    Row(name="Gemma", model_type="gemma", fields={"head_dim": 64, "num_key_value_heads": 1}),
    Row(name="Gemma 2 (soft caps, windows)", model_type="gemma2", fields={
        "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 40, "num_hidden_layers": 4}, whole=True),
    Row(name="Gemma 3 (text)", model_type="gemma3_text", fields={
        "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 40, "num_hidden_layers": 6, "sliding_window_pattern": 3}),
    Row(name="Granite", model_type="granite", fields={
        "embedding_multiplier": 2.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}),
    Row(name="OLMo", model_type="olmo"),
    Row(name="OLMo 2", model_type="olmo2"),
    Row(name="StableLM", model_type="stablelm", fields={"use_qkv_bias": True}),
    Row(name="GPT-NeoX", model_type="gpt_neox", fields={"num_key_value_heads": None}, whole=True),
    Row(name="GPT-2", model_type="gpt2", fields=OWN_NAMES),
    Row(name="GPT-J", model_type="gptj", fields=OWN_NAMES | {"rotary_dim": 16}),
    Row(name="GPT-BigCode", model_type="gpt_bigcode", fields=OWN_NAMES | {"multi_query": True}),
    Row(name="OPT", model_type="opt", fields={
        "ffn_dim": 224, "word_embed_proj_dim": 128, "intermediate_size": None, "num_key_value_heads": None, "activation_function": "relu"}),
    Row(name="Bloom", model_type="bloom", fields=OWN_NAMES | {"hidden_size": 128, "n_embd": None, "n_positions": None, "seq_length": 2048}),
    Row(name="Falcon (multi query)", model_type="falcon", fields={
        "num_key_value_heads": None, "intermediate_size": None, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True}),
    Row(name="Falcon (new decoder)", model_type="falcon", fields={
        "num_key_value_heads": None, "num_kv_heads": 2, "intermediate_size": None, "new_decoder_architecture": True}),
    Row(name="Starcoder2", model_type="starcoder2", fields={"sliding_window": 40}),
    Row(name="Cohere", model_type="cohere", fields={"logit_scale": 0.5}),
    Row(name="Cohere 2", model_type="cohere2", fields={"logit_scale": 0.5, "sliding_window": 40, "num_hidden_layers": 4},
        reference={"sliding_window": 41}),  # vLLM counts the token itself on top, as in training; transformers does not
    Row(name="Nemotron", model_type="nemotron"),
    Row(name="GLM", model_type="glm", fields={"head_dim": 32}),
    Row(name="GLM 4", model_type="glm4", fields={"head_dim": 32}),
    Row(name="SmolLM3", model_type="smollm3", fields={"no_rope_layer_interval": 3}),
    Row(name="Exaone 4", model_type="exaone4", fields={"sliding_window": 40, "num_hidden_layers": 4, "sliding_window_pattern": 4}),
    Row(name="Mixtral (experts)", model_type="mixtral", fields={"num_local_experts": 4, "num_experts_per_tok": 2}, whole=True),
    Row(name="Qwen2-MoE (shared expert)", model_type="qwen2_moe", fields=EXPERTS | {"shared_expert_intermediate_size": 160, "decoder_sparse_step": 1}),
    Row(name="Qwen3-MoE", model_type="qwen3_moe", fields=EXPERTS | {"head_dim": 32, "decoder_sparse_step": 1}),
    Row(name="OLMoE", model_type="olmoe", fields={"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96}),
    Row(name="Granite-MoE", model_type="granitemoe", fields={
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96, "attention_multiplier": 0.2}),
    Row(name="Phi-3.5-MoE", model_type="phimoe", architecture="PhiMoEForCausalLM", seed=3, spread=1.6, fields={  # its routing jumps in bf16
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96, "attention_bias": True, "lm_head_bias": True}),
    Row(name="GPT-OSS (sinks)", model_type="gpt_oss", fields={
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 40, "intermediate_size": 96}),
)
