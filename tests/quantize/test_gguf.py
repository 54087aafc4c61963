"""GGUF files, written with the gguf package, become the same model in the normal form."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

import numpy as np  # noqa: E402  (after the skips)

from appliance.errors import ModelError  # noqa: E402
from appliance.importing.gguf import open_gguf  # noqa: E402
from appliance.importing.gguf_architectures import ARCHITECTURES, Metadata, Unmapped  # noqa: E402
from appliance.importing.source import inspect  # noqa: E402
from appliance.importing.tensors import StoredTensor, float_rows, lattice_rows  # noqa: E402
from appliance.quantize.checkpoint import quantize  # noqa: E402
from appliance.quantize.layers import Recipe  # noqa: E402
from tests.quantize.models import LLAMA, dequantized, random_tensors, read_out  # noqa: E402

pytestmark = pytest.mark.worker

NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "mlp.up_proj": "ffn_up", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
         "mlp.down_proj": "ffn_down",
         "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm",
         "self_attn.k_norm": "attn_k_norm"}
TOKENS = ["<unk>", "<|im_start|>", "<|im_end|>"]
PRE = "gpt-2"
WIDE = LLAMA | {"vocab_size": 320}
"""Enough rows for the byte alphabet."""


def gguf_name(hf: str) -> str:
    head = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight"}
    if hf in head:
        return head[hf]
    _, _, number, rest = hf.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{number}.{NAMES[module]}.{kind}"


def permuted(w: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of q and k rows (convert_hf_to_gguf.py, LlamaModel.permute)."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def byte_tokens(rows: int) -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return (TOKENS + list(bytes_to_unicode().values()) + ["ab"] + [f"[PAD{i}]" for i in range(rows)])[:rows]


def write_gguf(path: Path, tensors: dict[str, torch.Tensor], *, kind: str = "F32", arch: str = "llama",
               config: dict[str, Any] = WIDE, pre: str = PRE, model: str = "gpt2", kinds: dict[str, str] | None = None,
               skip: tuple[str, ...] = ()) -> None:
    """Write the model as llama.cpp would: matrices in `kind` (or by name), vectors in F32, llama's q and k permuted."""
    w = gguf.GGUFWriter(path, arch)
    w.add_block_count(config["num_hidden_layers"])
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_head_count_kv(config["num_key_value_heads"])
    w.add_key_length(config["head_dim"])
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_rope_freq_base(10000.0)
    tokens = byte_tokens(config["vocab_size"])
    types = [3 if t in TOKENS else 5 if t.startswith("[PAD") else 1 for t in tokens]
    w.add_tokenizer_model(model)
    if model == "llama":
        pieces = ["▁", "a", "b", "c", "ab", "▁ab", "▁c"]
        rest = config["vocab_size"] - len(TOKENS) - 256 - len(pieces)
        tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)] + pieces
        tokens += [f"[PAD{i}]" for i in range(rest)]
        types = [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [5] * rest
        w.add_token_scores([-float(i) for i in range(len(tokens))])
    else:
        w.add_tokenizer_pre(pre)
        w.add_token_merges(["a b"])
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_chat_template("{{ messages }}")
    for name, t in tensors.items():
        if name in skip:
            continue
        t = t.float()
        if arch == "llama" and "q_proj" in name:
            t = permuted(t, WIDE["num_attention_heads"])
        if arch == "llama" and "k_proj" in name:
            t = permuted(t, WIDE["num_key_value_heads"])
        used = (kinds or {}).get(name, kind) if t.ndim > 1 else "F32"
        qtype = gguf.GGMLQuantizationType[used]
        data = np.ascontiguousarray(t.numpy())
        if used == "F32":
            w.add_tensor(gguf_name(name), data)
        else:
            w.add_tensor(gguf_name(name), gguf.quants.quantize(data, qtype), raw_dtype=qtype)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def opened(path: Path) -> dict[str, torch.Tensor]:
    form = open_gguf(inspect(path))
    return {name: float_rows(t, 0, t.rows).view(t.shape) for name, t in form.tensors.items()}


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_names_shapes_and_rotary_order(tmp_path: Path, arch: str) -> None:
    source = random_tensors(WIDE)
    for i in range(2):
        if arch == "qwen2":
            for module, rows in (("q", 64), ("k", 32), ("v", 32)):
                source[f"model.layers.{i}.self_attn.{module}_proj.bias"] = torch.randn(rows).to(torch.bfloat16)
        if arch == "qwen3":
            for module in "qk":
                source[f"model.layers.{i}.self_attn.{module}_norm.weight"] = torch.randn(16).to(torch.bfloat16)
    write_gguf(tmp_path / "m.gguf", source, arch=arch)
    found = opened(tmp_path / "m.gguf")
    assert found.keys() == source.keys()
    for name, t in source.items():
        assert torch.equal(found[name], t.float()), name
    # Any block of rows is the same part of the whole, across heads as well.
    q = open_gguf(inspect(tmp_path / "m.gguf")).tensors["model.layers.1.self_attn.q_proj.weight"]
    for span in ((0, 1), (3, 20), (16, 32), (31, 64), (63, 64)):
        assert torch.equal(float_rows(q, *span), source[q.name][slice(*span)].float())


def test_llama_with_biases_permutes_them_too(tmp_path: Path) -> None:
    source = random_tensors(WIDE)
    for i in range(2):
        for module, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
            source[f"model.layers.{i}.self_attn.{module}_proj.bias"] = torch.randn(rows).to(torch.bfloat16)
    write_gguf(tmp_path / "m.gguf", source)
    assert open_gguf(inspect(tmp_path / "m.gguf")).config["attention_bias"] is True
    found = opened(tmp_path / "m.gguf")
    assert all(torch.equal(found[name], t.float()) for name, t in source.items())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_codes_of_a_four_bit_source_are_kept(tmp_path: Path, kind: str) -> None:
    source = random_tensors(WIDE)
    source["model.layers.0.mlp.up_proj.weight"][5] = 0.5  # constant groups
    source["model.layers.0.mlp.up_proj.weight"][6] = 0.0
    write_gguf(tmp_path / "m.gguf", source, kind=kind)
    report = quantize(tmp_path / "m.gguf", tmp_path / "out", Recipe(group_size=64), lambda e: None)
    assert {layer["route"] for layer in report["layers"]} == {"codes kept"}
    assert {layer["group"] for layer in report["layers"]} == {32}
    assert "rounded to bf16" in report["loss"]
    _, tensors = read_out(tmp_path / "out")
    back, exact = dequantized(tensors), opened(tmp_path / "m.gguf")
    form = open_gguf(inspect(tmp_path / "m.gguf"))
    for name, t in form.tensors.items():
        if len(t.shape) == 1:
            continue
        codes, scale, zero = lattice_rows(t, 0, t.rows, 4)
        # llama.cpp's own dequantization says the same as our reading of the blocks ...
        spread = (8 * scale.abs() + zero.abs()).repeat_interleave(32, 1)
        grouped = (codes.float() - 8) * scale.repeat_interleave(32, 1) + zero.repeat_interleave(32, 1)
        assert bool(((grouped - exact[name]).abs() <= 1e-6 * spread + 1e-12).all())
        # ... and what is stored differs from it by the bf16 rounding of scale and zero only: 2^-8 of each.
        assert bool(((back[name] - exact[name]).abs() <= 2.0**-8 * 1.001 * spread + 1e-37).all()), name
        assert bool((tensors[name.removesuffix("weight") + "weight_scale"] != 0).all())


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_other_types_are_decoded_and_quantized(tmp_path: Path, kind: str) -> None:
    source = random_tensors(WIDE)
    write_gguf(tmp_path / "m.gguf", source, kind=kind)
    report = quantize(tmp_path / "m.gguf", tmp_path / "out", Recipe(table_bits=4), lambda e: None)
    assert {layer["route"] for layer in report["layers"]} == {"min/max"}
    back = dequantized(read_out(tmp_path / "out")[1])
    for name, t in source.items():
        assert float((back[name] - t.float()).square().sum() / t.float().square().sum()) < 0.01, name


def test_the_codes_of_an_eight_bit_table_are_kept(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", random_tensors(WIDE), kind="Q8_0")
    report = quantize(tmp_path / "m.gguf", tmp_path / "out", Recipe(), lambda e: None)
    assert [(layer["name"], layer["bits"]) for layer in report["layers"] if layer["route"] == "codes kept"] == [
        ("model.embed_tokens", 8)]
    stored = next(t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors if t.name == "token_embd.weight")
    exact = torch.tensor(gguf.quants.dequantize(stored.data, stored.tensor_type))
    tensors = read_out(tmp_path / "out")[1]
    back = dequantized(tensors, table_bits=8)["model.embed_tokens.weight"]
    assert not tensors["model.embed_tokens.weight_zero"].any()
    assert bool(((back - exact).abs() <= 2.0**-8 * exact.abs()).all()), "the rounding of the scale, nothing else"


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q4_K", 4), ("Q5_0", 8), ("Q5_1", 8), ("Q5_K", 8),
                                            ("Q8_0", 8), ("IQ4_NL", 8), ("IQ4_XS", 8)])
def test_codes_and_scales_are_what_the_gguf_package_decodes(tmp_path: Path, kind: str, bits: int) -> None:
    """Any bytes are a block: random ones reach every bit of codes, scales and offsets."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rows, columns = 24, 512
    raw = np.random.default_rng(3).integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    halves = 2 if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 1
    scales = np.random.default_rng(4).normal(0, 0.02, (rows, columns // block, halves)).astype(np.float16)
    raw[..., : 2 * halves] = scales.view(np.uint8).reshape(rows, columns // block, 2 * halves)
    (tmp_path / "t").write_bytes(raw.tobytes())
    tensor = StoredTensor(name="t", file=tmp_path / "t", offset=0, bytes=raw.size, shape=(rows, columns), kind=kind)
    codes, scale, zero = lattice_rows(tensor, 0, rows, bits)
    assert int(codes.max()) < 1 << bits
    ours = (codes.double().view(rows, -1, 32) - (1 << (bits - 1))) * scale.double()[..., None] + zero.double()[..., None]
    exact = torch.tensor(gguf.quants.dequantize(raw.reshape(rows, -1), gguf.GGMLQuantizationType[kind])).double()
    # fp32 rounds the offset once: a few of its last bits.
    assert float((ours.flatten(1) - exact).abs().max() / exact.abs().max()) < 1e-6
    assert torch.equal(lattice_rows(tensor, 5, 9, bits)[0], codes[5:9])


def test_mixed_types_and_an_untied_head(tmp_path: Path) -> None:
    config = WIDE | {"tie_word_embeddings": False}
    q = "model.layers.0.self_attn.q_proj.weight"
    write_gguf(tmp_path / "m.gguf", random_tensors(config), kind="Q8_0", config=config, kinds={q: "Q4_0"})
    report = quantize(tmp_path / "m.gguf", tmp_path / "out", Recipe(table_bits=4), lambda e: None)
    routes = {layer["name"]: layer["route"] for layer in report["layers"]}
    assert routes["model.layers.0.self_attn.q_proj"] == "codes kept"
    assert routes["model.layers.0.self_attn.k_proj"] == "min/max"
    assert report["group_size"] == 32
    written, tensors = read_out(tmp_path / "out")
    assert written["tie_word_embeddings"] is False
    assert "lm_head.weight_packed" in tensors


def test_logits_are_those_of_the_source_model(tmp_path: Path) -> None:
    """The folder loads as a Hugging Face model; the GGUF's F32 weights give the logits of the source exactly."""
    transformers = pytest.importorskip("transformers")
    source = random_tensors(WIDE)
    write_gguf(tmp_path / "m.gguf", source)
    quantize(tmp_path / "m.gguf", tmp_path / "out", Recipe(table_bits=4), lambda e: None)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.eos_token_id == 2
    assert config.rms_norm_eps == 1e-5
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    ids = torch.arange(10, 40).view(1, -1)
    logits = []
    for weights in (opened(tmp_path / "m.gguf"), source, dequantized(read_out(tmp_path / "out")[1])):
        missing, unexpected = model.load_state_dict({n: t.float() for n, t in weights.items()}, strict=False)
        model.tie_weights()
        assert (missing, unexpected) == (["lm_head.weight"], [])
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert torch.equal(logits[0], logits[1])
    assert float((logits[2] - logits[1]).square().sum() / logits[1].square().sum()) < 0.1


def test_tokenizer_round_trip_and_special_tokens(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_gguf(tmp_path / "m.gguf", random_tensors(WIDE), pre="smollm")
    report = quantize(tmp_path / "m.gguf", tmp_path / "out", Recipe(table_bits=4), lambda e: None)
    assert report["chat"] is True
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("Hello, world!  two spaces", "é 日本 ½", "x   12 ab9\n\n\ttab"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("<|im_start|>a<|im_end|>").input_ids[0::2] == [1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.chat_template == "{{ messages }}"
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert [piece for piece, _ in pieces] == ["a", "ĠĠ", "1", "2"]
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(("pre", "bos", "pieces"), [
    ("llama-bpe", True, ["a", "Ġ", "Ġ", "123", "4"]), ("qwen2", False, ["a", "Ġ", "Ġ", "1", "2", "3", "4"]),
    ("smollm", False, ["a", "ĠĠ", "1", "2", "3", "4"]), ("gpt-2", False, ["a", "Ġ", "Ġ1234"]),
])
def test_text_is_cut_as_the_family_does(tmp_path: Path, pre: str, bos: bool, pieces: list[str]) -> None:
    from tokenizers import Tokenizer

    from appliance.importing.gguf_tokenizer import write_tokenizer

    tokens = byte_tokens(320)
    fields = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
              "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.token_type": [3] * 3 + [1] * 317,
              "tokenizer.ggml.bos_token_id": 1}
    assert write_tokenizer(tmp_path / "m.gguf", fields, 320, tmp_path) is False
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 320
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a  1234")] == pieces
    assert (tokenizer.encode("a").ids[0] == 1) is bos


def test_sentencepiece_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_gguf(tmp_path / "m.gguf", random_tensors(WIDE), model="llama")
    quantize(tmp_path / "m.gguf", tmp_path / "out", Recipe(table_bits=4), lambda e: None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("ab c").input_ids
    assert ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab c"
    assert tokenizer("é").input_ids[-2:] == [3 + 0xC3, 3 + 0xA9]  # unknown letters fall back to bytes


def test_a_sentencepiece_token_of_a_megabyte_is_refused(tmp_path: Path) -> None:
    from appliance.importing.gguf_tokenizer import write_tokenizer

    tokens = ["<unk>", "a", "a" * 1_000_000]
    fields = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [0.0] * 3,
              "tokenizer.ggml.token_type": [2, 1, 1]}
    with pytest.raises(ModelError, match="a token of it has 1000000 letters"):
        write_tokenizer(tmp_path / "m.gguf", fields, 320, tmp_path)


@pytest.mark.parametrize(("said", "wanted"), [
    ({}, ("none", 1.0)), ({"rope.scaling.factor": 4.0}, ("linear", 4.0)), ({"rope.scale_linear": 8.0}, ("linear", 8.0)),
    ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, ("none", 1.0)), ({"rope.scale_linear": 0}, ("none", 1.0)),
    ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, ("none", 4.0)),
    ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, ("yarn", 4.0)),
])
def test_rope_scaling_is_read_as_llama_cpp_does(said: dict[str, Any], wanted: tuple[str, float]) -> None:
    fields = {f"llama.{key}": value for key, value in said.items()}
    assert Metadata(prefix="llama", fields=fields, present=frozenset()).rope_scaling() == wanted


@pytest.mark.parametrize(("arch", "said", "why"), [
    ("gemma3", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "rope scaling 'yarn' is not supported"),
    ("granite", {"rope.scaling.finetuned": False}, "without rotary positions"),
    ("gemma3", {"rope.scaling.factor": -1.0}, "says gemma3.rope.scaling.factor = -1.0"),
])
def test_a_rotation_that_is_not_mapped_is_refused(arch: str, said: dict[str, Any], why: str) -> None:
    fields = {f"{arch}.{key}": value for key, value in ({"attention.layer_norm_rms_epsilon": 1e-6} | said).items()}
    config = {"num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
    with pytest.raises(Unmapped, match=why):
        ARCHITECTURES[arch].extra(Metadata(prefix=arch, fields=fields, present=frozenset()), config)


def test_unknown_things_are_refused_by_name(tmp_path: Path) -> None:
    source = random_tensors(WIDE)

    def line(**options: Any) -> str:
        path = tmp_path / "m.gguf"
        path.unlink(missing_ok=True)
        write_gguf(path, options.pop("tensors", source), **options)
        with pytest.raises(ModelError) as caught:
            quantize(path, tmp_path / "out", Recipe(table_bits=4), lambda e: None)
        return caught.value.line

    assert "architecture 'bloom' is not supported (supported: llama, qwen2, qwen3, gemma" in line(arch="bloom")
    assert "pre-tokenizer 'viking' is not known" in line(pre="viking")
    (tmp_path / "out").rmdir()
    biases = {f"model.layers.{i}.self_attn.{module}_proj.bias": torch.zeros(rows) for i in range(2)
              for module, rows in (("q", 64), ("k", 32), ("v", 32))}
    assert "pre-tokenizer 'gpt-2' of a qwen2 model is not known" in line(arch="qwen2", tensors=source | biases)
    (tmp_path / "out").rmdir()
    assert "blk.1.ffn_up.weight is missing" in line(skip=("model.layers.1.mlp.up_proj.weight",))
    assert "says 0 heads and 2 layers" in line(config=WIDE | {"num_attention_heads": 0})
    assert "says llama.block_count = 4000000000" in line(config=WIDE | {"num_hidden_layers": 4_000_000_000})
    assert "blk.0.attn_q.weight has 64 rows, not 2 heads of 16" in line(config=WIDE | {"num_attention_heads": 2})
    assert "no single number llama.attention.head_count_kv" in line(config=WIDE | {"num_key_value_heads": [2, 2]})
    extra = source | {"model.layers.1.self_attn.q_norm.weight": torch.ones(16)}
    assert "the first is blk.1.attn_q_norm.weight" in line(tensors=extra)


ODD = (None, [], "", "x" * 5000, -1, 0, 2**63, 1e308, float("nan"), float("inf"), True, [1, 2], ["a", "b"], [1.5] * 320, "\n")


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_metadata_of_any_kind_is_used_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Each field of a whole file in turn holds something else; nothing but ModelError may come of it."""
    from appliance.importing import gguf as importer

    write_gguf(tmp_path / "m.gguf", random_tensors(WIDE), model=model)
    header = importer.read_header(tmp_path / "m.gguf")
    more = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0, "llama.expert_count": 0, "split.count": 1,
            "llama.attention.value_length": 16, "tokenizer.ggml.add_space_prefix": True, "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.padding_token_id": 2}
    refused, lines = 0, []
    for key in {**header.fields, **more}:
        for value in ODD:
            fields = {**header.fields, **(more if key in more else {}), key: value}
            odd = dataclasses.replace(header, fields={k: v for k, v in fields.items() if v is not None})
            monkeypatch.setattr(importer, "read_header", lambda path, odd=odd: odd)
            try:
                importer.open_gguf(inspect(tmp_path / "m.gguf")).write_extras(tmp_path)
            except ModelError as error:
                refused += 1
                lines.append(error.line)
    assert not [line for line in lines if "\n" in line]
    assert refused > 100


@pytest.mark.parametrize(("key", "value", "why"), [
    ("llama.attention.scale", 0.25, "its llama.attention.scale = '0.25' is not supported"),
    ("llama.expert_count", 8, "its llama.expert_count = '8' is not supported"),
    ("llama.rope.dimension_count", 8, "only 8 of 16 columns of its heads are rotated"),
    ("llama.attention.value_length", 8, "its keys and values have different widths"),
    ("llama.attention.causal", False, "its llama.attention.causal = 'False' is not supported"),
    ("llama.rope.scaling.type", "longest", "rope scaling 'longest' is not supported"),
])
def test_what_changes_a_model_and_is_not_mapped_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any,
                                                           why: str) -> None:
    from appliance.importing import gguf as importer

    write_gguf(tmp_path / "m.gguf", random_tensors(WIDE))
    header = importer.read_header(tmp_path / "m.gguf")
    odd = dataclasses.replace(header, fields={**header.fields, key: value})
    monkeypatch.setattr(importer, "read_header", lambda path: odd)
    with pytest.raises(ModelError) as caught:
        importer.open_gguf(inspect(tmp_path / "m.gguf"))
    assert why in caught.value.line


def test_case_030_a_cut_gguf_is_one_line(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", random_tensors(WIDE), kind="Q8_0")
    whole = (tmp_path / "m.gguf").read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 3000, 100, 30):
        (tmp_path / "m.gguf").write_bytes(whole[:length])
        with pytest.raises(ModelError) as caught:
            quantize(tmp_path / "m.gguf", tmp_path / "out", Recipe(table_bits=4), lambda e: None)
        assert "damaged or cut short" in caught.value.line
        assert not list((tmp_path / "out").iterdir())


def test_llama3_rope_factors_become_their_scaling(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from appliance.importing.gguf import _llama3_scaling
    from appliance.importing.gguf_architectures import Unmapped

    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    config = transformers.LlamaConfig(hidden_size=2048, num_attention_heads=32, head_dim=64, rope_parameters=scaling,
                                      max_position_embeddings=131072)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-torch.arange(0, 64, 2).float() / 64)
    (tmp_path / "f").write_bytes((plain / scaled).numpy().tobytes())
    factors = StoredTensor(name="rope_freqs.weight", file=tmp_path / "f", offset=0, bytes=128, shape=(32,), kind="F32")
    found = _llama3_scaling(factors, {"head_dim": 64, "rope_theta": 500000.0})
    assert found == {k: v for k, v in scaling.items() if k != "rope_theta"}
    with pytest.raises(Unmapped, match="rope_freqs are not those"):
        _llama3_scaling(factors, {"head_dim": 64, "rope_theta": 10000.0})
