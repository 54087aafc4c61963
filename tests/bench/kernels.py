"""Speed and error of the int4 kernels of this build, through `appliance.kernels.registry`, against what torch can do.

    worker_python -m tests.bench.kernels [--threads 1 2] [--isa native|avx2] [--repeat 7] [--group 32]
                                          [--shape 2048x2048 49152x576@8 ...] [--kernel native] [--json FILE]

For every shape (channels x columns, @8: 8 bits) and number of threads, in a process of its own, kernels and yardsticks take turns:

- 1 row: GB/s of the packed weight, against this machine's read bandwidth before and after (bandwidth.cpp), from huge
  pages and from small ones. The call goes round over copies that together exceed the caches: a model's weights come from memory.
- 8 and 16 rows: time against 1 row.
- 512 rows: GFLOP/s against torch's fp32 and bf16 GEMM on dequantized weights. Not for vocabulary heads: they see one
  row a prompt.
- error: relative RMS against fp64, for fp32 and for bf16 output, and what rounding the exact result to bf16 costs.

Every time is of the whole Python call. `--isa avx2` holds ATen and the native kernels to AVX2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.bench import machine

SHAPES = ("2048x2048", "8192x2048", "2048x8192", "3072x2048", "49152x2048", "49152x2048@8", "576x576", "1536x576", "576x1536",
          "49152x576@8")
ISA_ENV = {"native": {}, "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "APPLIANCE_KERNEL": "avx2"}}
HEAD_CHANNELS = 32768
"""From this many channels on a shape is a vocabulary head."""
COLD_BYTES = 1 << 30
"""Copies of one weight take at most this; beyond any last-level cache of an edge node."""
LEAST_S = 0.05
"""Shortest time of one sample."""
PAGES = ("huge", "small")
SLOW_KERNELS = ("portable",)
"""The fallback is not measured unless asked for: it has no fast route."""


def timed(call: Callable[[int], None]) -> float:
    """Seconds of one call; `call(i)` is made with a running number, for at least LEAST_S and at least twice."""
    count, began = 0, time.perf_counter()
    while True:
        call(count)
        count += 1
        passed = time.perf_counter() - began
        if passed > LEAST_S and count > 1:
            return passed / count


def child(shape: str, threads: int, repeat: int, names: Sequence[str], group: int) -> dict[str, Any]:
    """All figures of one shape in this process."""
    import torch

    from appliance.kernels import reference
    from appliance.kernels.registry import LINEAR, TABLE, LayerShape, kernels, torch_host

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    size, _, bits = shape.partition("@")
    n, k = map(int, size.split("x"))
    head = n >= HEAD_CHANNELS
    layer = LayerShape(n=n, k=k, group=group, kind=TABLE if head else LINEAR, bits=int(bits or 4))
    rows = n if not head else 4096  # the grid of a whole head takes minutes; its rows repeat
    weight = reference.quantize(torch.randn(rows, k) * 0.02, group, layer.bits)
    if head:
        times = -(-n // rows)
        weight = reference.Portable(packed=weight.packed.repeat(times, 1)[:n].contiguous(),
                                    scale=weight.scale.repeat(times, 1)[:n].contiguous(),
                                    zero=weight.zero.repeat(times, 1)[:n].contiguous(), bits=layer.bits)
    result: dict[str, Any] = {"shape": shape, "threads": threads, "group": group, "head": head, "refused": {}, "kernels": {}}
    prepared: dict[str, list[list[torch.Tensor]]] = {}
    usable = {}
    for kernel in kernels():
        if kernel.name not in names if names else kernel.name in SLOW_KERNELS:
            continue
        if reason := kernel.why_not(layer, torch_host()):
            result["refused"][kernel.name] = reason
            continue
        tensors = list(kernel.prepare(weight, direct=True).values())
        held = sum(t.numel() * t.element_size() for t in tensors)
        copies = max(1, min(512, COLD_BYTES // held))
        prepared[kernel.name] = [tensors] + [[t.clone() for t in tensors] for _ in range(copies - 1)]
        usable[kernel.name] = kernel
        result["kernels"][kernel.name] = {"layout": kernel.layout_id, "weight_bytes": held, "copies": copies}

    def call(name: str, m: int) -> Callable[[int], float]:
        x, out = torch.randn(m, k).to(torch.bfloat16), torch.empty(m, n, dtype=torch.bfloat16 if not head else torch.float32)
        kernel, copies = usable[name], prepared[name]

        def once(number: int) -> None:
            kernel.linear(x, copies[number % len(copies)], layer, 2, out)

        once(0)
        return lambda _: timed(once)

    def gemm(dtype: torch.dtype) -> Callable[[int], float]:
        x, dense = torch.randn(512, k).to(dtype), reference.dequantize(weight).to(dtype)
        torch.nn.functional.linear(x, dense)
        return lambda _: timed(lambda _: void(torch.nn.functional.linear(x, dense)))

    with torch.inference_mode():
        reads = {pages: [machine.bandwidth(threads, repeat, pages)] for pages in PAGES}
        for m in (1, 8, 16) if head else (1, 8, 16, 512):
            measures = {name: call(name, m) for name in usable}
            if m == 512:
                measures |= {"torch fp32": gemm(torch.float32), "torch bf16": gemm(torch.bfloat16)}
            found = machine.alternate(measures, repeat)
            for name, seconds in found.items():
                entry = result["kernels"].setdefault(name, {})
                entry[f"{m} rows us"] = machine.Samples(values=tuple(s * 1e6 for s in seconds.values)).to_dict()
                if m == 512:
                    entry["512 rows GFLOP/s"] = machine.Samples(
                        values=tuple(2 * m * n * k / s / 1e9 for s in seconds.values)).to_dict()
                    entry["512 rows / torch fp32"] = machine.ratio(found["torch fp32"], seconds).to_dict()
                if m == 1:
                    speed = machine.Samples(values=tuple(entry["weight_bytes"] / s / 1e9 for s in seconds.values))
                    entry["1 row GB/s"] = speed.to_dict()
        for pages, found_reads in reads.items():
            found_reads.append(machine.bandwidth(threads, repeat, pages))
    result["read bandwidth GB/s"] = {
        pages: machine.Samples(values=tuple(v for samples in both if samples for v in samples.values)).to_dict()
        for pages, both in reads.items() if all(both)}
    for name in usable:
        entry = result["kernels"][name]
        one = entry["1 rows us"]["median"]
        entry["8 rows / 1 row"], entry["16 rows / 1 row"] = (entry[f"{m} rows us"]["median"] / one for m in (8, 16))
        entry["share of bandwidth"] = {pages: entry["1 row GB/s"]["median"] / read["median"]
                                       for pages, read in result["read bandwidth GB/s"].items()}
        entry["error"] = {str(m): errors(usable[name], prepared[name][0], weight, layer, m, rows) for m in (1, 8)}
    return result


def void(_: object) -> None:
    """Drops a result."""


def errors(kernel: Any, tensors: Any, weight: Any, layer: Any, m: int, channels: int) -> dict[str, float]:
    """Relative RMS error of `m` rows over the first `channels` channels: fp32 out, bf16 out, bf16 rounding alone.

    One column in 64 of the activations is 30 times larger than the others, as in real models.
    """
    import torch

    from appliance.kernels import reference

    x = torch.randn(m, layer.k, generator=torch.Generator().manual_seed(m))
    x[:, ::64] *= 30
    x = x.to(torch.bfloat16)
    first = reference.Portable(packed=weight.packed[:channels], scale=weight.scale[:channels], zero=weight.zero[:channels],
                               bits=layer.bits)
    exact = reference.linear(x, first)

    def relative(got: torch.Tensor) -> float:
        return float((got.double() - exact).norm() / exact.norm())

    found = {"bf16 rounding alone": relative(exact.to(torch.bfloat16))}
    for name, dtype in (("fp32 out", torch.float32), ("bf16 out", torch.bfloat16)):
        out = torch.empty(m, layer.n, dtype=dtype)
        kernel.linear(x, tensors, layer, 2, out)
        found[name] = relative(out[:, :channels])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, len(os.sched_getaffinity(0))])
    parser.add_argument("--isa", choices=list(ISA_ENV), default="native")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--shape", nargs="+", default=SHAPES, metavar="NxK")
    parser.add_argument("--kernel", nargs="+", default=[], help="default: all but the slow fallback")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.shape[0], args.threads[0], args.repeat, args.kernel, args.group)))
        return
    result: dict[str, Any] = {"bench": "kernels", "isa": args.isa, "machine": machine.facts(), "results": []}
    for threads in sorted(set(args.threads)):
        for shape in args.shape:
            idle = machine.wait_quiet()
            done = subprocess.run(
                [sys.executable, "-m", "tests.bench.kernels", "--child", "--threads", str(threads), "--shape", shape,
                 "--repeat", str(args.repeat), "--group", str(args.group), *(["--kernel", *args.kernel] if args.kernel else [])],
                env={**os.environ, **ISA_ENV[args.isa], "OMP_NUM_THREADS": str(threads)}, stdout=subprocess.PIPE,
                text=True, check=True)
            result["results"].append({**json.loads(done.stdout), "idle_before": idle})
            print_one(result["results"][-1])
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


def print_one(one: dict[str, Any]) -> None:
    """One shape as lines."""
    reads = ", ".join(f"{read['median']:.1f} GB/s ({pages} pages)" for pages, read in one["read bandwidth GB/s"].items())
    print(f"{one['shape']}, {one['threads']} threads, memory {reads or 'not measured'}, idle before {one['idle_before']}")
    for name, entry in one["kernels"].items():
        words = []
        if "1 row GB/s" in entry:
            shares = "/".join(f"{share:.2f}" for share in entry["share of bandwidth"].values())
            words += [f"1 row {entry['1 row GB/s']['median']:.1f} GB/s ({shares or '-'})",
                      f"8 rows x{entry['8 rows / 1 row']:.2f}", f"16 rows x{entry['16 rows / 1 row']:.2f}"]
        if "512 rows GFLOP/s" in entry:
            words.append(f"512 rows {entry['512 rows GFLOP/s']['median']:.0f} GFLOP/s "
                         f"({entry['512 rows / torch fp32']['median']:.2f} of fp32)")
        if "error" in entry:
            error = entry["error"]["1"]
            words.append(f"error {error['fp32 out']:.1e} / {error['bf16 out']:.2e} (floor {error['bf16 rounding alone']:.2e})")
        print(f"  {name:11} " + ", ".join(words), flush=True)
    for name, reason in one["refused"].items():
        print(f"  {name:11} refused: {reason}", flush=True)


if __name__ == "__main__":
    main()
