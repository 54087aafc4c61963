"""`python -m appliance.kernels.selftest [--json]`: every kernel of this build against the reference, in seconds.

One line a variant; exit status 0 when all agree, 1 when one differs or torch's own kernel is refused because of the
torch release. A CPU that cannot execute a kernel ends this process by a signal, which is an answer too:
`check_at_start` is the same check in a forked child, for the worker's launcher.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from appliance.errors import ConfigError, CpuNotSupported, DoesNotFit, TransientError
from appliance.kernels import reference
from appliance.kernels.host import TorchHost
from appliance.kernels.registry import Kernel, LayerShape, kernels, torch_host

SHAPES = ((16, 64), (48, 192), (80, 576), (144, 256), (576, 512))
"""N, K: whole blocks, blocks and a tail, an odd number of groups."""
GROUPS = (32, 64, 128, 256)
ROWS = (1, 2, 7)
FLOOR_DB = 44.0
"""bf16 output rounding alone leaves about 55 dB; a wrong nibble anywhere leaves far less than 44."""
THRESHOLD = 2
DEADLINE_S = 120.0
CRASHED = 3


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One kernel on one route: the worst signal-to-noise ratio over all shapes, in dB, or why it did not run."""

    name: str
    ok: bool
    worst_db: float | None = None
    shapes: int = 0
    reason: str = ""

    @property
    def line(self) -> str:
        if self.reason:
            return f"{self.name}: FAILED: {self.reason}"
        return f"{self.name}: {'ok' if self.ok else 'FAILED'}: {self.worst_db:.1f} dB over {self.shapes} cases"


def run(host: TorchHost, available: tuple[Kernel, ...]) -> Iterator[Variant]:
    """Check every available kernel, with and without the second copy, at every row count."""
    for kernel in available:
        if kernel.name == "aten" and host.int4_refusal:
            yield Variant(name=kernel.name, ok=False, reason=host.int4_refusal)
            continue
        for direct in (True, False) if kernel.name == "aten" else (True,):
            for rows in ROWS:
                yield _variant(kernel, host, direct=direct, rows=rows)


def _variant(kernel: Kernel, host: TorchHost, *, direct: bool, rows: int) -> Variant:
    copies = "" if kernel.name != "aten" else " direct" if direct else " halves"
    name = f"{kernel.name}{copies}, {rows} row{'s' if rows > 1 else ''}"
    worst, cases = float("inf"), 0
    for (n, k), group in ((shape, group) for shape in SHAPES for group in GROUPS):
        layer = LayerShape(n=n, k=k, group=group)
        if k % group:
            continue
        if refusal := kernel.why_not(layer, host):
            return Variant(name=name, ok=False, reason=refusal)
        generator = torch.Generator().manual_seed(n * k + group)
        portable = reference.quantize(torch.randn(n, k, generator=generator), group)
        tensors = list(kernel.prepare(portable, direct=direct).values())
        x = torch.randn(rows, k, generator=generator).to(torch.bfloat16)
        out = torch.full((rows, n), float("nan"), dtype=torch.bfloat16)
        kernel.linear(x, tensors, layer, THRESHOLD, out)
        cases += 1
        worst = min(worst, signal_db(out, reference.linear(x, portable)))
    return Variant(name=name, ok=worst > FLOOR_DB, worst_db=round(worst, 1), shapes=cases)


def signal_db(got: torch.Tensor, want: torch.Tensor) -> float:
    """Signal-to-noise ratio of `got` against `want`, in dB; minus infinity when `got` is not finite."""
    error = (got.double() - want.double()).square().sum()
    if not torch.isfinite(error):
        return float("-inf")
    return float(10 * torch.log10(want.double().square().sum() / error.clamp(min=1e-300)))


def check_at_start() -> None:
    """Run the self-test in a forked child and print one line; call it before this process has run anything parallel
    (a child forked later waits for OpenMP threads that it does not have).

    Raises ConfigError when this torch does not fit, CpuNotSupported when a kernel is wrong or dies by a signal,
    TransientError when the child does not end.
    """
    began = time.monotonic()
    host = torch_host()
    if host.int4_refusal:
        raise ConfigError("the worker's torch does not fit", why=host.int4_refusal,
                          do="install the worker again from its lock file")
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = CRASHED
        try:
            status = main([], quiet=True)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    status = _wait(child, deadline=began + DEADLINE_S)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        raise DoesNotFit("the int4 self-test was killed", why="most likely memory ran out",
                         do="free memory or raise the memory ceiling")
    if os.WEXITSTATUS(status) == CRASHED:
        raise TransientError("the int4 self-test broke off", why="see the traceback above", do="start again")
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        raise CpuNotSupported("the int4 kernels cannot run here",
                              do="set ATEN_CPU_CAPABILITY to avx2 or default in worker.env",
                              why=f"the self-test under {host.capability} died by {name}")
    if os.WEXITSTATUS(status):
        raise CpuNotSupported("the int4 kernels give wrong results here",
                              why=f"the self-test under {host.capability} failed",
                              do="run `python -m appliance.kernels.selftest` with the worker's Python")
    print(f"int4 kernels agree with the reference ({host.capability}, {time.monotonic() - began:.1f} s)", flush=True)


def _wait(child: int, *, deadline: float) -> int:
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TransientError("the int4 self-test did not end", why=f"no result within {DEADLINE_S:.0f} s",
                                 do="start again when the machine is less busy")
        time.sleep(0.01)


def main(argv: list[str], *, quiet: bool = False) -> int:
    parser = argparse.ArgumentParser(prog="appliance.kernels.selftest", description="Check the int4 kernels.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    json_wanted = parser.parse_args(argv).json
    host = torch_host()
    variants = list(run(host, kernels()))
    ok = all(variant.ok for variant in variants)
    if json_wanted:
        print(json.dumps({"ok": ok, "torch": host.torch_version, "capability": host.capability,
                          "gemm": str(host.gemm).removeprefix("torch."),
                          "variants": [asdict(variant) for variant in variants]}))
    else:
        for variant in variants:
            if not (quiet and variant.ok):
                print(variant.line, flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
