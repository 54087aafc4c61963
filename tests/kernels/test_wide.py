"""fp32 where it is free: wide results, the wide norm, and logits of tables that stay bf16."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from appliance.kernels.dequantize import linear_bf16  # noqa: E402  # after the guard for the agent's environment
from appliance.kernels.reference import Portable  # noqa: E402
from appliance.kernels.registry import LayerShape, kernels, torch_host  # noqa: E402

pytestmark = [
    pytest.mark.worker,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from vLLM's own imports
]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_wide_results_are_the_narrow_ones_before_rounding(rows: int) -> None:
    from appliance.vllm_plugin.ops import int4_linear

    n, k, group = 64, 192, 32
    portable = Portable(
        packed=torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator()),
        scale=torch.rand(n, k // group, generator=generator()).add(0.1).bfloat16(), zero=torch.zeros(n, k // group).bfloat16())
    x = torch.randn(rows, k, generator=generator())
    for kernel in kernels():
        tensors = list(kernel.prepare(portable, direct=True).values())
        shape = LayerShape(n=n, k=k, group=group)
        wide, narrow = (int4_linear(x, tensors, kernel.name, shape.n, shape.k, shape.group, 2, w) for w in (True, False))
        assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(wide.bfloat16(), narrow)
        if rows > 1 and (kernel.name == "native" or torch_host().gemm == torch.float32):
            assert not torch.equal(wide, narrow.float()), "the many-row route keeps what bf16 would round away"


@pytest.mark.parametrize("with_residual", [False, True])
def test_the_wide_norm_keeps_fp32(with_residual: bool) -> None:
    from appliance.vllm_plugin.norm import WideRMSNorm

    x, residual = (torch.randn(5, 96, generator=generator()) * 100 for _ in range(2))
    norm = SimpleNamespace(variance_size_override=None, variance_epsilon=1e-5, has_weight=True, weight=torch.rand(96).bfloat16())
    out = WideRMSNorm.forward_native(norm, x, residual if with_residual else None)
    total = (x + residual if with_residual else x).double()
    want = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    got = out[0] if with_residual else out
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    if with_residual:
        torch.testing.assert_close(out[1].double(), total, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_logits_of_a_kept_table_are_fp32(rows: int) -> None:
    from appliance.vllm_plugin.embedding import KeptTableMethod

    table = torch.randn(5000, 64, generator=generator()).bfloat16()
    layer = SimpleNamespace(weight=table)
    x = torch.randn(rows, 64, generator=generator()).bfloat16()
    logits = KeptTableMethod.apply(KeptTableMethod.__new__(KeptTableMethod), layer, x)
    assert logits.shape == (rows, 5000)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), x.double() @ table.double().T, rtol=1e-5, atol=1e-4)
    assert KeptTableMethod.embedding(KeptTableMethod.__new__(KeptTableMethod), layer, torch.tensor([3, 4999])).equal(table[[3, 4999]])


def test_the_table_is_widened_block_by_block() -> None:
    out = torch.empty(2, 40000)
    linear_bf16(torch.ones(2, 64), torch.ones(40000, 64).bfloat16(), out)
    assert torch.equal(out, torch.full((2, 40000), 64.0))


def test_a_kept_linear_takes_fp32_activations() -> None:
    from appliance.vllm_plugin.linear import KeptLinearMethod

    method = KeptLinearMethod()
    weight = torch.randn(16, 32, generator=generator()).bfloat16()
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.cpu_linear = torch.nn.functional.linear
    out = method.apply(layer, torch.ones(2, 32))
    assert out.dtype == torch.bfloat16
