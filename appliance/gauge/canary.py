"""The canary: does this machine survive several rows in torch's int4 kernel, then attention, then a bf16 GEMM?

On hosts with AMX the first has been seen to leave tile state behind that ends the process by SIGILL in the second. So
the three are repeated in one process, over `rows` (1, 2, 7, 8, 9, 64), `times` each, and every result is compared with
fp64. That this process dies is an answer, for whoever started it. Order: `rows`, `times`, `threads`.
Uses vLLM's own C++ operators, the ones that serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from appliance.errors import TransientError
from appliance.kernels import reference
from appliance.kernels.registry import LayerShape, kernel_named, torch_host
from appliance.report import Event

HEADS, KV_HEADS, HEAD, BLOCK, BLOCKS = 8, 4, 64, 32, 8
CHANNELS, COLUMNS, GROUP = 512, 512, 32
EVERY_ROWS = 1 << 30
NOISE = 0.02
"""Relative error of a bf16 result: rounding inputs and output leaves 0.4 %."""


def measure(order: Mapping[str, Any], emit: Event) -> None:
    """Repeat; one figure `passed` with the number of rounds for each number of rows. Raises TransientError when a
    result is wrong."""
    import vllm.platforms

    vllm.platforms.current_platform.import_kernels()
    torch.set_num_threads(int(order["threads"]))
    layer = LayerShape(n=CHANNELS, k=COLUMNS, group=GROUP)
    kernel = kernel_named("aten")
    if reason := kernel.why_not(layer, torch_host()):
        raise TransientError("the canary cannot run", why=reason)
    generator = torch.Generator().manual_seed(1)
    weight = reference.quantize(torch.randn(CHANNELS, COLUMNS, generator=generator) * 0.05, GROUP)
    tensors = list(kernel.prepare(weight, direct=True).values())
    dense = torch.randn(COLUMNS, COLUMNS, generator=generator).to(torch.bfloat16)
    with torch.inference_mode():
        for rows in order["rows"]:
            emit({"event": "trying", "settings": {"rows": rows}})
            x = torch.randn(rows, COLUMNS, generator=generator).to(torch.bfloat16)
            attention = Attention(rows, generator)
            want_linear, want_mm = reference.linear(x, weight), x.double() @ dense.double()
            want_attention = attention.expected()
            for number in range(int(order["times"])):
                out = torch.empty(rows, CHANNELS, dtype=torch.bfloat16)
                kernel.linear(x, tensors, layer, EVERY_ROWS, out)
                attended, product = attention(), x @ dense
                for name, got, want in (("int4", out, want_linear), ("attention", attended, want_attention),
                                        ("bf16 GEMM", product, want_mm)):
                    check(name, got, want, rows, number)
            emit({"event": "figure", "settings": {"rows": rows}, "figures": {"passed": [float(order["times"])]}})


def check(name: str, got: Tensor, want: Tensor, rows: int, number: int) -> None:
    """Raises TransientError when a result differs by more than bf16's noise."""
    error = float((got.double() - want).norm() / want.norm())
    if not error <= NOISE:
        raise TransientError("the canary found wrong results",
                             why=f"{name}, {rows} rows, round {number}: relative error {error:.3g}")


class Attention:
    """vLLM's attention of one sequence of `rows` tokens, each of which sees those before it."""

    def __init__(self, rows: int, generator: torch.Generator) -> None:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        def random(heads: int) -> Tensor:
            return torch.randn(rows, heads, HEAD, generator=generator).to(torch.bfloat16)

        self.rows = rows
        self.query, self.key, self.value = random(HEADS), random(KV_HEADS), random(KV_HEADS)
        self.isa = _get_attn_isa(torch.bfloat16, BLOCK, HEAD)
        cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK, 2 * HEAD, dtype=torch.bfloat16)
        self.key_cache, self.value_cache = cache.view(BLOCKS, KV_HEADS, BLOCK * 2, -1).chunk(2, dim=2)
        self.slots = torch.arange(rows, dtype=torch.int64)
        self.starts = torch.tensor([0, rows], dtype=torch.int32)
        self.lengths = torch.tensor([rows], dtype=torch.int32)
        self.table = torch.arange(BLOCKS, dtype=torch.int32)[None]

    def __call__(self) -> Tensor:
        from vllm import _custom_ops as ops

        ops.cpu_attn_reshape_and_cache(self.key, self.value, self.key_cache, self.value_cache, self.slots, self.isa)
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD, seq_lens=self.lengths,
            dtype=torch.bfloat16, query_start_loc=self.starts, causal=True, sliding_window_size=-1, isa=self.isa,
            enable_kv_split=True)
        out = torch.empty(self.rows, HEADS, HEAD, dtype=torch.bfloat16)
        ops.cpu_attention_with_kv_cache(
            query=self.query, key_cache=self.key_cache, value_cache=self.value_cache, output=out,
            query_start_loc=self.starts, seq_lens=self.lengths, scale=HEAD**-0.5, causal=True, alibi_slopes=None,
            sliding_window=-1, block_table=self.table, softcap=0.0, scheduler_metadata=metadata, s_aux=None)
        return out

    def expected(self) -> Tensor:
        """The same in fp64."""
        query, key, value = (t.double().transpose(0, 1) for t in (self.query, self.key, self.value))
        key, value = (t.repeat_interleave(HEADS // KV_HEADS, dim=0) for t in (key, value))
        scores = query @ key.transpose(1, 2) * HEAD**-0.5
        unseen = torch.ones(self.rows, self.rows, dtype=torch.bool).triu(1)
        return (scores.masked_fill(unseen, float("-inf")).softmax(-1) @ value).transpose(0, 1)
