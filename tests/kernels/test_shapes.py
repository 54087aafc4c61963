"""Awkward shapes in real vLLM layers: odd group counts, channels and vocabularies that fill no block, rows that loading moves."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from appliance.kernels import blocked, reference  # noqa: E402  # after the guard for the agent's environment
from appliance.kernels.registry import LINEAR, LayerShape  # noqa: E402
from appliance.kernels.selftest import signal_db  # noqa: E402
from appliance.prepared import Run  # noqa: E402
from appliance.vllm_plugin import rows as loaded_rows  # noqa: E402
from tests.kernels.vllm_layers import int4_config, load  # noqa: E402

pytestmark = [pytest.mark.worker, pytest.mark.usefixtures("vllm_context"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

LINEARS = [  # channels, columns, group
    (1, 32, 32), (7, 64, 64), (15, 96, 32), (17, 160, 32), (23, 192, 64), (33, 288, 32), (40, 576, 64), (48, 896, 128), (65, 896, 64), (100, 8640, 64),
    (130, 13696, 128), (216, 224, 32), (331, 128, 128), (63, 256, 256),
]


def weight(n: int, k: int, group: int, bits: int = 4) -> reference.Portable:
    values = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k), dtype=torch.float32)
    return reference.quantize(values, group, bits)


def inputs(count: int, k: int) -> Any:
    return torch.randn(count, k, generator=torch.Generator().manual_seed(count), dtype=torch.float32).to(torch.bfloat16)


@pytest.mark.parametrize("kernel", ["native", "aten"])
@pytest.mark.parametrize(("n", "k", "group"), LINEARS)
def test_a_linear_of_any_shape_equals_the_reference(n: int, k: int, group: int, kernel: str) -> None:
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    layer = ColumnParallelLinear(k, n, bias=True, quant_config=int4_config(kernel=kernel, group_size=group), prefix="model.layers.0.mlp.up", disable_tp=True)
    portable = weight(n, k, group)
    load(layer, portable)
    bias = torch.linspace(-3, 3, n).to(torch.bfloat16)
    layer.bias.data.copy_(bias)
    layer.quant_method.process_weights_after_loading(layer)
    for count in (1, 2, 5, 33):
        out, _ = layer(inputs(count, k))
        assert signal_db(out, reference.linear(inputs(count, k), portable) + bias.double()) > 40


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocabulary", [257, 331, 1001])
def test_case_041_a_vocabulary_that_fills_no_block(vocabulary: int, tied: bool, bits: int) -> None:
    """Rows beyond the vocabulary are zero, and vLLM cuts their logits off; 50257, 32001, 151646 are of the same kinds."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    made = int4_config(tied=tied, group_size=32, **({"table_bits": 8} if bits == 8 else {}))
    table = VocabParallelEmbedding(vocabulary, 96, quant_config=made, prefix="model.embed_tokens", disable_tp=True)
    head = ParallelLMHead(vocabulary, 96, quant_config=made, prefix="lm_head", disable_tp=True)
    portable = weight(vocabulary, 96, 32, bits)
    load(table, portable)
    if tied:
        head = head.tie_weights(table)
    else:
        load(head, portable)
    for module in (table, head):
        module.quant_method.process_weights_after_loading(module)
    ids = torch.tensor([0, 1, vocabulary - 1])
    assert torch.equal(table.quant_method.embedding(table, ids).float(), reference.dequantize(portable)[ids].to(torch.bfloat16).float())
    for count in (1, 4):
        logits = head.quant_method.apply(head, inputs(count, 96))
        assert signal_db(logits[:, :vocabulary], reference.linear(inputs(count, 96), portable)) > 44
        assert not logits[:, vocabulary:].any()


@pytest.mark.parametrize("handed_on", [True, False])
def test_a_head_adds_its_bias_once_whether_the_model_hands_it_on_or_not(handed_on: bool) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    head = ParallelLMHead(256, 96, bias=True, quant_config=int4_config(group_size=32), prefix="lm_head", disable_tp=True)
    portable = weight(256, 96, 32)
    load(head, portable)
    head.bias.data.copy_(torch.linspace(-3, 3, 256))
    head.quant_method.process_weights_after_loading(head)
    logits = head.quant_method.apply(head, inputs(4, 96), head.bias if handed_on else None)
    assert signal_db(logits, reference.linear(inputs(4, 96), portable) + head.bias.double()) > 44


def test_a_table_that_is_given_no_quantization_gets_it() -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    from appliance.vllm_plugin.embedding import Int4TableMethod, quantized_tables

    made = int4_config(group_size=32)
    with quantized_tables(made, 331):
        assert isinstance(VocabParallelEmbedding(331, 64, disable_tp=True).quant_method, Int4TableMethod)
        assert not isinstance(VocabParallelEmbedding(16, 64, disable_tp=True).quant_method, Int4TableMethod), "a table of something else"
    assert not isinstance(VocabParallelEmbedding(331, 64, disable_tp=True).quant_method, Int4TableMethod)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [1, 0, 3, 2], [3, 2, 1, 0]])
def test_rows_that_loading_moves_are_moved_in_a_mapped_weight(order: list[int]) -> None:
    """`order`: of blocks of five rows, as Falcon and Bloom move heads of queries, keys and values."""
    shape = LayerShape(n=20, k=64, group=32, kind=LINEAR, bits=4)
    portable = weight(20, 64, 32)
    layer = torch.nn.Module()
    layer.register_parameter("int4_blocked", torch.nn.Parameter(blocked.pack(portable), requires_grad=False))
    moved = torch.cat([torch.arange(5 * i, 5 * i + 5) for i in order])

    def loader(parameter: Any, value: Any) -> None:
        parameter.data.copy_(value[moved])

    loaded_rows.expect_rows(layer, 20, {"weight_loader": loader})
    run = Run(name="a.b", kind=LINEAR, offset=0, bytes=0, n=20, k=64, group=32, bits=4, replaces=("a.b.weight_packed", "a.b.weight_scale", "a.b.weight_zero"))
    ((name, numbers),) = loaded_rows.numbered([run], {"a.b": 20})
    assert name == "a.b.weight_rows"
    layer.weight_rows.weight_loader(layer.weight_rows, numbers)
    before = layer.int4_blocked
    loaded_rows.settle_rows(layer, "int4_blocked", shape, "a.b")
    assert (layer.int4_blocked is before) == (order == [0, 1, 2, 3])
    assert not hasattr(layer, "weight_rows")
    got = reference.dequantize(blocked.unpack(layer.int4_blocked.data, 20, 64, 32, 4))
    assert torch.equal(got, reference.dequantize(portable)[moved])


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(4, 2, 4), (3, 1, 2)])
def test_splitting_among_processes_is_not_offered(heads: int, kv_heads: int, ranks: int) -> None:
    """Heads that tensor parallelism would split or repeat do not occur: one process computes everything, and the flag is the plan's."""
    from appliance.launch import extra_args_refusal

    assert extra_args_refusal(["--tensor-parallel-size", str(ranks)]) is not None
    assert extra_args_refusal([f"-tp={ranks}"]) is not None
