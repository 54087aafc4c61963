"""Tables of 8 bits: the fallback kernel against the fp64 reference, and who refuses them."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from appliance.kernels import reference  # noqa: E402  # after the guard for the agent's environment
from appliance.kernels.aten import AtenKernel  # noqa: E402
from appliance.kernels.portable import PortableKernel  # noqa: E402
from appliance.kernels.registry import TABLE, LayerShape, torch_host  # noqa: E402
from appliance.kernels.selftest import signal_db  # noqa: E402

pytestmark = pytest.mark.worker


def test_the_reference_writes_its_formula_out() -> None:
    portable = reference.Portable(packed=torch.tensor([[0, 128, 255] + [129] * 29], dtype=torch.uint8), bits=8,
                                  scale=torch.tensor([[0.5]], dtype=torch.bfloat16), zero=torch.tensor([[2.0]], dtype=torch.bfloat16))
    assert (portable.n, portable.k, portable.group) == (1, 32, 32)
    assert reference.dequantize(portable)[0, :4].tolist() == [-62.0, 2.0, 65.5, 2.5]


@pytest.mark.parametrize("gemm", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k", "group"), [(100, 192, 64), (23, 96, 32), (640, 576, 64), (16, 512, 256)])
def test_the_fallback_serves_them(n: int, k: int, group: int, gemm: torch.dtype) -> None:
    kernel = PortableKernel(host=dataclasses.replace(torch_host(), gemm=gemm))
    shape = LayerShape(n=n, k=k, group=group, kind=TABLE, bits=8)
    portable = reference.quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(n)), group, 8)
    tensors = list(kernel.prepare(portable, direct=True).values())
    for rows in (0, 1, 2, 7):
        x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
        out = torch.full((rows, n), float("nan"), dtype=torch.float32)
        kernel.linear(x, tensors, shape, 2, out)
        assert rows == 0 or signal_db(out, reference.linear(x, portable)) > (44 if gemm == torch.bfloat16 else 90)
    ids = torch.tensor([0, n - 1, n // 2])
    assert signal_db(kernel.rows(ids, tensors, shape), reference.dequantize(portable)[ids]) > 120
    assert signal_db(kernel.whole(tensors, shape), reference.dequantize(portable)) > (44 if gemm == torch.bfloat16 else 120)


def test_torchs_kernel_refuses_them() -> None:
    host = torch_host()
    shape = LayerShape(n=64, k=64, group=64, kind=TABLE, bits=8)
    assert AtenKernel(host=host).why_not(shape, host) == "torch's kernel takes 4 bits, not 8"
