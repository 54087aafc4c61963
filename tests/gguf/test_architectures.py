"""Each architecture, written by llama.cpp's converter: every weight comes back, and the logits are llama.cpp's."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from appliance.importing import gguf_architectures  # noqa: E402
from appliance.importing.gguf import open_gguf  # noqa: E402
from appliance.importing.source import inspect  # noqa: E402
from tests.gguf import imported, llama_cpp, models, results  # noqa: E402

pytestmark = [pytest.mark.worker, pytest.mark.heavy]
IDS = [1] + [(37 * i + 11) % 460 + 10 for i in range(40)]
ROWS = (0, 8, 19, 29, 40)
TEXTS = ("Hello, world!  two  spaces", "é 日本 ½ naïve", "x   12 ab9\n\n\ttab", " lead", "", "the layout of the weights",
         "<s>marked</s> after", "don't WE'LL 2024-01-02", "a\u2581b", "🚀🚀")
MEAN_LIMIT, GELU_LIMIT = 1e-4, 0.01
"""llama.cpp takes GELU from a table of fp16 values."""
GELU = ("gemma", "gemma2", "gemma3", "starcoder2")


@pytest.mark.parametrize("name", list(models.ARCHITECTURES))
def test_weights_logits_and_tokens(tmp_path: Path, name: str) -> None:
    source = models.make(tmp_path / "hf", name)
    file = tmp_path / "m.gguf"
    # llama.cpp knows by the name that the marks of Phi-3 swallow white space; the architecture says it as well.
    llama_cpp.convert(tmp_path / "hf", file, name="phi-3" if name.startswith("phi3") else "tiny",
                      pre="qwen2" if name.startswith("qwen") else "smollm")
    config, state = imported.weights(file)
    stored = {key: value for key, value in source.state_dict().items()
              if key != "lm_head.weight" or not config["tie_word_embeddings"]}
    assert state.keys() == stored.keys()
    shifted = gguf_architectures.ARCHITECTURES[config_arch(file)].norm_shift
    for key, value in stored.items():
        assert bool(((state[key] - value).abs() <= (1e-6 if shifted and "norm" in key else 0)).all()), key
    loaded = imported.model(config, state, tmp_path / "config")
    ours, theirs = imported.logprobs(loaded, IDS), imported.logprobs(source, IDS)
    assert float(ours.std()) >= 1.5, "a wrong layer would not show"
    assert float((ours - theirs).abs().max()) < 1e-3, "config.json is not the source's"
    open_gguf(inspect(file)).write_extras(tmp_path / "config")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "config")
    with llama_cpp.serving(file) as server:
        found = torch.tensor([server.logprobs(IDS[: row + 1], models.VOCAB) for row in ROWS]).double()
        for text in TEXTS:
            assert tokenizer(text).input_ids == server.tokens(text), text
    difference = (ours[list(ROWS)] - found).abs()
    results.keep("architectures", name, {
        "class": config["architectures"][0], "mean": float(difference.mean()), "largest": float(difference.max()),
        "spread": float(ours.std())})
    assert float(difference.mean()) < (GELU_LIMIT if name in GELU else MEAN_LIMIT)


def config_arch(file: Path) -> str:
    from appliance.importing.gguf_header import read_header

    return str(read_header(file).fields["general.architecture"])


def test_every_architecture_is_tried() -> None:
    assert {name.split("-")[0] for name in models.ARCHITECTURES} >= set(gguf_architectures.ARCHITECTURES)


@pytest.mark.parametrize("change", ["bias doubled", "q and k swapped", "window off"])
def test_a_wrong_mapping_would_show(tmp_path: Path, change: str) -> None:
    """Negative controls: what this test would say of a layer mapped wrongly."""
    name = {"bias doubled": "qwen2", "q and k swapped": "mistral", "window off": "gemma2"}[change]
    source = models.make(tmp_path / "hf", name, shape={"num_key_value_heads": 4})
    right = imported.logprobs(source, IDS)
    with torch.no_grad():
        layer = source.model.layers[0].self_attn
        if change == "bias doubled":
            layer.q_proj.bias *= 2
        elif change == "q and k swapped":
            layer.q_proj.weight.data, layer.k_proj.weight.data = layer.k_proj.weight.data, layer.q_proj.weight.data
        else:
            source.config.layer_types = ["full_attention"] * source.config.num_hidden_layers
            source = imported.model({**source.config.to_dict(), "architectures": ["Gemma2ForCausalLM"]},
                                    source.state_dict(), tmp_path / "changed")
    assert float((imported.logprobs(source, IDS) - right).abs().mean()) > 5 * GELU_LIMIT
