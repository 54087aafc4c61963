"""The real default model, when APPLIANCE_SMOLLM2_GGUF names its file: weights, tokens and an answer."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

from appliance.quantize.checkpoint import quantize  # noqa: E402  (after the skips)
from appliance.quantize.layers import Recipe  # noqa: E402
from tests.quantize.models import dequantized, read_out  # noqa: E402

GGUF = os.environ.get("APPLIANCE_SMOLLM2_GGUF", "")
pytestmark = [
    pytest.mark.worker,
    pytest.mark.skipif(not Path(GGUF).is_file(), reason="APPLIANCE_SMOLLM2_GGUF does not name the model's file"),
]
ENGLISH = (
    "The city of Paris is the capital of France and one of the largest cities in Europe. It lies on the river Seine. "
    "Many people visit it every year to see the Eiffel Tower, the museums and the old streets. The first people who "
    "lived there were fishermen. Later the Romans built a town on the island in the middle of the river."
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("smollm2") / "out"
    return out, quantize(Path(GGUF), out, Recipe(), lambda e: None)


def test_report(written: tuple[Path, dict[str, Any]]) -> None:
    _, report = written
    assert report["parameters"] == 134_515_008
    assert (report["group_size"], report["chat"]) == (32, True)
    assert report["kept"] == []
    assert sum(layer["route"] == "codes kept" for layer in report["layers"]) == 211
    assert [layer["name"] for layer in report["layers"] if layer["bits"] == 8] == ["model.embed_tokens"]
    assert min(layer["snr_db"] for layer in report["layers"]) > 45
    assert report["bits_per_weight"] < 5.9


def test_weights_are_exact_up_to_the_rounding_of_scale_and_zero(written: tuple[Path, dict[str, Any]]) -> None:
    reader = gguf.GGUFReader(GGUF)
    exact = {t.name: t for t in reader.tensors}
    back = dequantized(read_out(written[0])[1], table_bits=8)
    t = exact["token_embd.weight"]
    table = torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type))
    assert 20 * math.log10(float(table.norm() / (table - back["model.embed_tokens.weight"]).norm())) > 55
    for ours, theirs, heads in (("mlp.down_proj", "ffn_down", 0), ("self_attn.q_proj", "attn_q", 9),
                                ("self_attn.k_proj", "attn_k", 3)):
        for layer in (0, 17, 29):
            t = exact[f"blk.{layer}.{theirs}.weight"]
            w = torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type))
            if heads:
                w = w.view(heads, -1, 2, w.shape[1]).transpose(1, 2).reshape(w.shape)
            found = back[f"model.layers.{layer}.{ours}.weight"]
            assert 20 * math.log10(float(w.norm() / (w - found).norm())) > 45


def test_tokens(written: tuple[Path, dict[str, Any]]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(written[0])
    assert len(tokenizer) == 49152
    assert tokenizer("<|im_start|>").input_ids == [1]
    assert tokenizer.eos_token == "<|im_end|>"
    for text in (ENGLISH, "def f(x):\n    return x  # 1234", "é 日本 ½"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("x   12").input_ids) == ["x", "ĠĠĠ", "1", "2"]


def test_it_speaks(written: tuple[Path, dict[str, Any]]) -> None:
    config = transformers.AutoConfig.from_pretrained(written[0])
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.load_state_dict(dequantized(read_out(written[0])[1], table_bits=8), strict=False)
    model.tie_weights()
    tokenizer = transformers.AutoTokenizer.from_pretrained(written[0])
    ids = tokenizer(ENGLISH, return_tensors="pt").input_ids
    with torch.no_grad():
        perplexity = math.exp(float(model(ids, labels=ids).loss))
    print(f"perplexity {perplexity:.2f}")
    assert perplexity < 12
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}],
                                         add_generation_prompt=True, tokenize=False)
    ids = tokenizer(chat, return_tensors="pt").input_ids
    with torch.no_grad():
        answer = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
