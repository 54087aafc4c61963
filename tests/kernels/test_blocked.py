"""The layout `int4-b16-1`: byte for byte what its description says, and back."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from appliance.kernels import blocked, reference  # noqa: E402  # after the guard for the agent's environment
from appliance.prepared import record_bytes, run_bytes  # noqa: E402

pytestmark = pytest.mark.worker


def _weight(n: int, k: int, group: int, bits: int) -> reference.Portable:
    return reference.quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)), group, bits)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k", "group"), [(16, 32, 32), (48, 192, 64), (80, 576, 64), (23, 96, 32), (1, 256, 256), (576, 1536, 128)])
def test_round_trip(n: int, k: int, group: int, bits: int) -> None:
    portable = _weight(n, k, group, bits)
    packed = blocked.pack(portable)
    assert packed.numel() == run_bytes(n, k, group, bits)
    back = blocked.unpack(packed, n, k, group, bits)
    assert torch.equal(back.packed, portable.packed)
    assert torch.equal(back.scale, portable.scale)
    assert torch.equal(back.zero, portable.zero)
    assert torch.equal(reference.dequantize(back), reference.dequantize(portable))


@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_are_where_the_description_puts_them(bits: int) -> None:
    """Read as a kernel reads: record by record, step by step, channel by channel; no tensor operation of the packer."""
    n, k, group = 32, 128, 64
    portable = _weight(n, k, group, bits)
    data = bytes(blocked.pack(portable).numpy())
    per_step = 32 // bits
    size = record_bytes(group, bits)
    for block in range(n // 16):
        for g in range(k // group):
            record = data[(block * (k // group) + g) * size :][:size]
            for channel in range(16):
                row = block * 16 + channel
                codes: list[int] = []
                for step in range(group // per_step):
                    dword = record[(step * 16 + channel) * 4 :][:4]
                    codes += [c for byte in dword for c in ((byte & 15, byte >> 4) if bits == 4 else (byte,))]
                want = portable.packed[row] if bits == 8 else reference.unpack(portable.packed)[row]
                assert codes == want[g * group : (g + 1) * group].tolist()
                words = record[16 * group * bits // 8 :]
                for values, at in ((portable.scale, channel), (portable.zero, 16 + channel)):
                    assert words[2 * at : 2 * at + 2] == bytes(values[row, g : g + 1].view(torch.uint8).numpy())


def test_fused_siblings_are_one_after_the_other() -> None:
    parts = [_weight(n, 192, 64, 4) for n in (64, 16, 32)]
    whole = reference.Portable(packed=torch.cat([p.packed for p in parts]), scale=torch.cat([p.scale for p in parts]),
                               zero=torch.cat([p.zero for p in parts]))
    assert torch.equal(torch.cat([blocked.pack(p) for p in parts]), blocked.pack(whole))


def test_missing_channels_are_zero() -> None:
    packed = blocked.pack(_weight(20, 64, 32, 4), channels=64)
    back = blocked.unpack(packed, 64, 64, 32, 4)
    assert not back.packed[20:].any()
    assert not reference.dequantize(back)[20:].any()


def test_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="not a weight of 32 x 64"):
        blocked.unpack(blocked.pack(_weight(16, 64, 32, 4)), 32, 64, 32, 4)
