"""`python fused_model.py MODEL`: serve a stored object by real vLLM and compare it with fp32 transformers.

One JSON line: whether the decoder layers are fused, the differences of log-probabilities, and what the gate says of
layers that were changed.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PROMPTS = (3, 30, 300)
"""Tokens of the prompts: few rows, many, more than one parallel region and more than one chunk of prefill."""
GENERATED = 9


def main() -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "cpu_int4", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1",
                   "GLOO_SOCKET_IFNAME": "lo"}
    from vllm import LLM, SamplingParams

    llm = LLM(sys.argv[1], load_format="cpu_int4", enforce_eager=True, dtype="bfloat16", max_model_len=400, max_num_seqs=4, max_num_batched_tokens=280,
              skip_tokenizer_init=True, kv_cache_memory_bytes=32 << 20)
    prompts = [[(7 * i * i + 3 * n) % 77 + 3 for i in range(n)] for n in PROMPTS]
    sampling = SamplingParams(max_tokens=GENERATED, temperature=0, logprobs=0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
    alone = [llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)[0] for ids in prompts]
    together = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    config = llm.llm_engine.vllm_config
    for layer in model.model.layers:
        layer.forward.__self__.plain_from = 4  # as on AMX hosts, where many rows go to the library
    mixed = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    print("\n" + json.dumps({
        "fused": "FusedLayer" in repr(model.model.layers[0].forward), "head_type": str(model.logits_processor.head_dtype),
        "alone": differences(alone), "together": differences(together),
        "mixed": differences(mixed),
        "layers": dict(changed_layers(model.model.layers[0])), "models": dict(changed_models(model, config)),
    }))


def differences(results: list[Any]) -> dict[str, float]:
    """Mean absolute difference over the prompts' tokens and over the generated ones."""
    import torch

    from tests.served.reference import load

    torch.set_default_dtype(torch.float32)
    model = load(Path(sys.argv[1]))
    found: dict[str, list[float]] = {"prompt": [], "generated": []}
    for result in results:
        prompt, generated = list(result.prompt_token_ids), list(result.outputs[0].token_ids)
        got = [entry[token].logprob for token, entry in zip(prompt[1:], result.prompt_logprobs[1:], strict=True)]
        got += [entry[token].logprob for token, entry in zip(generated, result.outputs[0].logprobs, strict=True)]
        tokens = torch.tensor([prompt + generated])
        with torch.no_grad():
            table = torch.log_softmax(model(tokens).logits[0, :-1].float(), dim=-1)
        off = (table.gather(1, tokens[0, 1:, None])[:, 0] - torch.tensor(got)).abs()
        found["prompt"] += off[: len(prompt) - 1].tolist()
        found["generated"] += off[len(prompt) - 1 :].tolist()
    return {part: statistics.fmean(values) for part, values in found.items()}


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name, None)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


def changed_layers(layer: Any) -> Iterator[tuple[str, str | None]]:
    """What the gate says of a layer with one part changed."""
    import torch

    from appliance.vllm_plugin.fusion import why_not

    part = layer.self_attn
    yield "unchanged", why_not(layer)
    packed = part.o_proj.int4
    for name, owner, attribute, value in (
        ("other rotation", part.rotary_emb, "is_neox_style", False),
        ("other kernel", part.o_proj, "int4", SimpleNamespace(kernel=SimpleNamespace(name="aten"), shape=packed.shape)),
        ("bias", layer.mlp.down_proj, "bias", torch.nn.Parameter(torch.zeros(1))),
        ("other activation", layer.mlp, "act_fn", torch.nn.GELU()),
        ("partial norm", layer.input_layernorm, "variance_size_override", 8),
        ("scaled queries", part, "do_llama_4_scaling", True),
        ("encoder", part.attn, "attn_type", "encoder_only"),
        ("shared cache", part.attn, "kv_sharing_target_layer_name", "model.layers.0"),
        ("other layer", layer, "mlp", torch.nn.Identity()),
    ):
        with changed(owner, attribute, value):
            yield name, why_not(layer)


def changed_models(model: Any, config: Any) -> Iterator[tuple[str, str | None]]:
    """What the gate says of the model in another configuration."""
    import torch
    from vllm.config import CompilationMode

    from appliance.vllm_plugin.fusion import model_refusal

    yield "unchanged", model_refusal(model, config)
    for name, part, attribute, value in (
        ("compiled", "compilation_config", "mode", CompilationMode.VLLM_COMPILE),
        ("tensor parallel", "parallel_config", "tensor_parallel_size", 2),
        ("pipeline parallel", "parallel_config", "pipeline_parallel_size", 2),
        ("pooling", "model_config", "runner_type", "pooling"),
    ):
        other = copy.copy(config)
        object.__setattr__(other, part, copy.copy(getattr(config, part)))
        object.__setattr__(getattr(other, part), attribute, value)
        yield name, model_refusal(model, other)
    for name, attribute in (("lora", "lora_config"), ("speculative", "speculative_config"), ("transfer", "kv_transfer_config")):
        other = copy.copy(config)
        object.__setattr__(other, attribute, object())
        yield name, model_refusal(model, other)
    yield "other model", model_refusal(torch.nn.Identity(), config)


if __name__ == "__main__":
    main()
