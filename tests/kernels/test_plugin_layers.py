"""Real vLLM layers with int4 methods: loading by vLLM's own loaders, packing, tying, biases, refusals."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from appliance.errors import ModelError  # noqa: E402  # after the guard for the agent's environment
from appliance.kernels import reference  # noqa: E402
from appliance.kernels.selftest import signal_db  # noqa: E402
from tests.kernels.recorder import Int4Calls  # noqa: E402
from tests.kernels.vllm_layers import int4_config, load  # noqa: E402

pytestmark = [
    pytest.mark.worker,
    pytest.mark.usefixtures("vllm_context"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from vLLM's own imports
]

K = 192


def _weight(n: int, k: int, seed: int, group: int = 64) -> reference.Portable:
    generator = torch.Generator().manual_seed(seed)
    return reference.quantize(torch.randn(n, k, generator=generator, dtype=torch.float32), group)


def _linear(config: Any, n: int = 80, *, bias: bool = False, k: int = K) -> Any:
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    return ColumnParallelLinear(k, n, bias=bias, quant_config=config, prefix="model.layers.0.mlp.up", disable_tp=True)


def _x(rows: int, k: int = K) -> Any:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(rows), dtype=torch.float32).to(torch.bfloat16)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("custom_op", [True, False])
def test_a_linear_layer_holds_its_packed_weight_alone(direct: bool, custom_op: bool) -> None:
    portable = _weight(80, K, 1)
    layer = _linear(int4_config(kernel="aten", direct_dequant=direct, use_custom_op=custom_op))
    load(layer, portable)
    layer.quant_method.process_weights_after_loading(layer)
    codes, groups = 80 * K // 2, 2 * 2 * 80 * (K // 64)
    held = sum(p.untyped_storage().nbytes() for p in layer.parameters())
    assert held == groups + (codes if direct else 2 * codes)
    for rows in (0, 1, 2, 7):
        with Int4Calls() as calls:
            out, _ = layer(_x(rows))
        assert calls.rows == ([1] if rows == 1 else [])
        assert out.shape == (rows, 80)
        assert out.dtype == torch.bfloat16
        if rows:
            assert signal_db(out, reference.linear(_x(rows), portable)) > 44


@pytest.mark.parametrize("custom_op", [True, False])
def test_a_native_layer_holds_one_tensor(custom_op: bool) -> None:
    portable = _weight(80, K, 1)
    layer = _linear(int4_config(use_custom_op=custom_op))
    load(layer, portable)
    layer.quant_method.process_weights_after_loading(layer)
    assert [(name, p.numel()) for name, p in layer.named_parameters()] == [("int4_blocked", 80 * K // 2 + 2 * 2 * 80 * (K // 64))]
    for rows in (0, 1, 2, 7, 40):
        with Int4Calls() as calls:
            out, _ = layer(_x(rows))
        assert calls.rows == [], "torch's kernel has no part in it"
        assert (out.shape, out.dtype) == ((rows, 80), torch.bfloat16)
        if rows:
            assert signal_db(out, reference.linear(_x(rows), portable)) > 44


def test_a_channel_count_torch_refuses_is_served_from_its_portable_copy() -> None:
    portable = _weight(23, K, 2)
    layer = _linear(int4_config(kernel="aten"), 23)
    load(layer, portable)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.int4.kernel.name == "portable", "the next one after the wanted kernel, not one before it"
    assert signal_db(layer(_x(3))[0], reference.linear(_x(3), portable)) > 44


@pytest.mark.parametrize("kernel", ["native", "aten"])
def test_case_035_a_fused_bias_is_added_once(kernel: str) -> None:
    from vllm.model_executor.layers.linear import QKVParallelLinear

    parts = {"q": _weight(128, K, 3), "k": _weight(64, K, 4), "v": _weight(64, K, 5)}
    layers = []
    for bias in (True, False):
        layer = QKVParallelLinear(K, 64, 2, 1, bias=bias, quant_config=int4_config(kernel=kernel), prefix="a.qkv_proj", disable_tp=True)
        for shard, portable in parts.items():
            load(layer, portable, shard)
        if bias:
            layer.bias.data.copy_(torch.arange(256) * 4.0 - 500)
        layer.quant_method.process_weights_after_loading(layer)
        layers.append(layer)
    for rows in (1, 5):
        with_bias, without = (layer(_x(rows))[0] for layer in layers)
        # Once in either order: the native kernel adds before it rounds to bf16, torch's after.
        assert (with_bias - (without + layers[0].bias)).abs().max() <= (4.0 if kernel == "native" else 0.0)
        want = torch.cat([reference.linear(_x(rows), portable) for portable in parts.values()], dim=1)
        assert signal_db(without, want) > 44


@pytest.mark.parametrize("rows", [1, 6])
def test_activations_of_three_dimensions(rows: int) -> None:
    layer = _linear(int4_config())
    load(layer, _weight(80, K, 6))
    layer.quant_method.process_weights_after_loading(layer)
    x = _x(rows).view(1, rows, K)
    assert torch.equal(layer(x)[0], layer(x[0])[0].view(1, rows, 80))


def test_case_026_a_scale_of_another_group_size_is_refused() -> None:
    layer = _linear(int4_config(group_size=64))
    with pytest.raises(ModelError, match=r"weight_scale does not fit its config: shape \[80, 6\], expected 3 columns"):
        load(layer, _weight(80, K, 7, group=32))


def test_case_026_holds_for_a_table_without_a_name() -> None:
    with pytest.raises(ModelError, match=r"embed_tokens\.weight_scale does not fit its config"):
        load(_table(int4_config(group_size=32), head=False), _weight(100, K, 7, group=64))


def test_a_weight_of_another_width_or_kind_is_refused() -> None:
    layer = _linear(int4_config())
    with pytest.raises(ModelError, match="weight_packed does not fit its config"):
        load(layer, _weight(80, 256, 8))
    with pytest.raises(ModelError, match=r"type torch\.float32, expected torch\.uint8"):
        layer.weight_packed.weight_loader(layer.weight_packed, torch.zeros(80, K // 2, dtype=torch.float32))


def test_columns_that_are_not_whole_groups_are_refused() -> None:
    with pytest.raises(ModelError, match="160 columns are not whole groups of 64"):
        _linear(int4_config(), k=160)


def _table(config: Any, *, head: bool, rows: int = 100) -> Any:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    kind, prefix = (ParallelLMHead, "lm_head") if head else (VocabParallelEmbedding, "")
    return kind(rows, K, quant_config=config, prefix=prefix, disable_tp=True)


@pytest.mark.parametrize("head_first", [True, False])
@pytest.mark.parametrize("kernel", ["native", "aten"])
def test_a_tied_table_is_packed_once(head_first: bool, kernel: str) -> None:
    config = int4_config(tied=True, kernel=kernel)
    table, head = _table(config, head=False), _table(config, head=True)
    assert head.tie_weights(table) is head
    portable = _weight(100, K, 9)
    load(table, portable)
    for module in (head, table) if head_first else (table, head):
        module.quant_method.process_weights_after_loading(module)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
                for module in (table, head) for p in module.parameters()}
    assert sum(storages.values()) == 128 * K // 2 + 2 * 2 * 128 * (K // 64)  # padded to 128 rows, once
    ids = torch.tensor([[0, 99], [42, 7]])
    assert torch.equal(table(ids), reference.dequantize(portable)[ids].to(torch.bfloat16))
    for rows in (1, 2, 7):
        with Int4Calls() as calls:
            logits = head.quant_method.apply(head, _x(rows))
        assert calls.rows == ([1] if rows == 1 and kernel == "aten" else []), "the head obeys the safety rule"
        assert signal_db(logits[:, :100], reference.linear(_x(rows), portable)) > 44
        assert not logits[:, 100:].any(), "padding rows are zero"


@pytest.mark.parametrize("head_first", [True, False])
def test_a_tied_table_of_eight_bits(head_first: bool) -> None:
    config = int4_config(tied=True, table_bits=8)
    table, head = _table(config, head=False), _table(config, head=True)
    head.tie_weights(table)
    portable = reference.quantize(torch.randn(100, K, generator=torch.Generator().manual_seed(13), dtype=torch.float32), 64, 8)
    load(table, portable)
    for module in (head, table) if head_first else (table, head):
        module.quant_method.process_weights_after_loading(module)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
                for module in (table, head) for p in module.parameters()}
    assert sum(storages.values()) == 128 * K + 2 * 2 * 128 * (K // 64)
    ids = torch.tensor([[0, 99], [42, 7]])
    assert signal_db(table(ids), reference.dequantize(portable)[ids]) > 50
    for rows in (1, 2, 7):
        logits = head.quant_method.apply(head, _x(rows))
        assert signal_db(logits[:, :100], reference.linear(_x(rows), portable)) > 44
        assert not logits[:, 100:].any(), "padding rows are zero"


def test_an_untied_head_has_its_own_weight() -> None:
    config = int4_config()
    table, head = _table(config, head=False), _table(config, head=True)
    first, second = _weight(100, K, 10), _weight(100, K, 11)
    for module, portable in ((table, first), (head, second)):
        load(module, portable)
        module.quant_method.process_weights_after_loading(module)
    assert torch.equal(table(torch.tensor([5])), reference.dequantize(first)[[5]].to(torch.bfloat16))
    assert signal_db(head.quant_method.apply(head, _x(1))[:, :100], reference.linear(_x(1), second)) > 44


def test_a_kept_table_stays_plain() -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    assert isinstance(_table(int4_config(quantize_embedding=False), head=False).quant_method, UnquantizedEmbeddingMethod)


def test_experts_stay_plain() -> None:
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    experts = RoutedExperts.__new__(RoutedExperts)
    assert int4_config().get_quant_method(experts, "model.layers.0.mlp.experts") is None


def test_the_operators_survive_compilation_with_any_number_of_rows() -> None:
    """One trace for all row counts, strided views included; the `aot_eager` backend needs no compiler."""
    portable = _weight(80, K, 12)
    layer = _linear(int4_config())
    load(layer, portable)
    layer.quant_method.process_weights_after_loading(layer)
    inline = _linear(int4_config(use_custom_op=False))
    load(inline, portable)
    inline.quant_method.process_weights_after_loading(inline)
    for module in (layer, inline):
        compiled = torch.compile(lambda x, m=module: m.quant_method.apply(m, x[:, ::2]), backend="aot_eager",
                                 fullgraph=True, dynamic=True)
        for rows in (5, 2, 1):
            x = _x(rows, 2 * K)
            with Int4Calls() as calls:
                got = compiled(x)
            assert signal_db(got, reference.linear(x[:, ::2], portable)) > 44
            assert max(calls.rows, default=1) == 1
