"""`python -m appliance.kernels.selftest [--json]`: every kernel of this build against the reference, in seconds.

One line a variant: the native kernel once for each instruction set that this machine runs, torch's kernel on each of
its routes, the portable one. Exit status 0 when all agree, 1 when one differs or cannot be used. A variant runs in a
child of its own, so that one which dies by a signal is an answer too.

`check_at_start` is the worker's: the preferred native variant on a subset; one that fails is left out, with a line that
says so, and the next one is tried; torch's kernel is tried when none is left. Rules: a native variant that failed is
never used; a worker whose native and torch's kernel both fail does not start.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from appliance.errors import ConfigError, CpuNotSupported, DoesNotFit, TransientError
from appliance.kernels import reference
from appliance.kernels.host import TorchHost
from appliance.kernels.library import FILE, REFUSED_ENV, VARIANT_ENV, open_library
from appliance.kernels.registry import TABLE, Kernel, LayerShape, kernels, torch_host
from appliance.quantize.format import KERNELS

SHAPES = ((16, 64), (48, 192), (80, 576), (144, 256), (576, 512))
"""N, K: whole blocks, blocks and a tail, an odd number of groups."""
GROUPS = (32, 64, 128, 256)
ROWS = (1, 2, 7, 17)
QUICK_SHAPES, QUICK_GROUPS = ((48, 192), (80, 576)), (32, 64)
FLOOR_DB = 44.0
"""bf16 output rounding alone leaves about 55 dB; a wrong nibble anywhere leaves far less than 44."""
NATIVE_FLOOR_DB = 74.0
"""fp32 results with int16 activations leave about 92 dB."""
THRESHOLD = 2
PLANNED_ENV = "APPLIANCE_PLANNED_KERNEL"
"""The plan's kernel: with `aten` the native one is neither tried nor used."""
TRIAL_ENV = "APPLIANCE_KERNEL_TRIAL"
"""Where `check_at_start` writes what it found, for the agent's plans."""
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
    """Check every available kernel: each route of torch's, each instruction set of the native one."""
    for kernel in available:
        if kernel.name == "aten" and host.int4_refusal:
            yield Variant(name=kernel.name, ok=False, reason=host.int4_refusal)
        elif kernel.name == "native":
            yield from _native_variants()
        else:
            for direct in (True, False) if kernel.name == "aten" else (True,):
                for rows in ROWS:
                    yield _checked(kernel, host, direct=direct, rows=rows)


def _native_variants() -> Iterator[Variant]:
    env = {key: value for key, value in os.environ.items() if key != VARIANT_ENV}
    loaded = open_library(FILE, env)
    if loaded.library is None:
        yield Variant(name="native", ok=False, reason=loaded.refusal or "")
        return
    for name in loaded.library.variants:
        # A process of its own: one that dies by a signal is an answer, and a fork would miss this one's OpenMP threads.
        done = subprocess.run([sys.executable, "-m", __spec__.name, "--variant", name, "--json"], env=env, text=True,
                              capture_output=True, timeout=DEADLINE_S, check=False)
        if done.returncode < 0:
            yield Variant(name=f"native {name}", ok=False, reason=f"died by {signal.Signals(-done.returncode).name}")
        elif not done.stdout:
            yield Variant(name=f"native {name}", ok=False, reason=done.stderr.strip().splitlines()[-1])
        else:
            yield from (Variant(**found) for found in json.loads(done.stdout)["variants"])


def _native_results(variant: str, *, quick: bool) -> list[Variant]:
    """Check one instruction set in this process."""
    kernel = next(kernel for kernel in kernels() if kernel.name == "native")
    loaded = open_library(FILE, {VARIANT_ENV: variant})
    if loaded.library is None:
        return [Variant(name=f"native {variant}", ok=False, reason=loaded.refusal or "")]
    loaded.library.use(variant)
    return [_checked(kernel, torch_host(), direct=True, rows=rows, bits=bits, quick=quick, suffix=f" {variant}")
            for bits in (4, 8) for rows in ROWS]


def _judge(variant: str) -> int:
    """Exit status of a native variant on the quick subset; what failed is printed."""
    failed = [result for result in _native_results(variant, quick=True) if not result.ok]
    for result in failed:
        print(result.line, flush=True)
    return 1 if failed else 0


def _checked(kernel: Kernel, host: TorchHost, *, direct: bool, rows: int, bits: int = 4, quick: bool = False,
             suffix: str = "") -> Variant:
    copies = "" if kernel.name != "aten" else " direct" if direct else " halves"
    name = f"{kernel.name}{suffix}{copies}, {bits} bits, {rows} row{'s' if rows > 1 else ''}"
    native = kernel.name == "native"
    worst, cases = float("inf"), 0
    shapes, groups = (QUICK_SHAPES, QUICK_GROUPS) if quick else (SHAPES, GROUPS)
    for (n, k), group in ((shape, group) for shape in shapes for group in groups):
        layer = LayerShape(n=n, k=k, group=group, bits=bits, kind=TABLE)
        if k % group:
            continue
        if refusal := kernel.why_not(layer, host):
            return Variant(name=name, ok=False, reason=refusal)
        generator = torch.Generator().manual_seed(n * k + group)
        portable = reference.quantize(torch.randn(n, k, generator=generator), group, bits)
        tensors = list(kernel.prepare(portable, direct=direct).values())
        x = torch.randn(rows, k, generator=generator).to(torch.bfloat16)
        out = torch.full((rows, n), float("nan"), dtype=torch.float32 if native else torch.bfloat16)
        kernel.linear(x, tensors, layer, THRESHOLD, out)
        cases += 1
        worst = min(worst, signal_db(out, reference.linear(x, portable)))
        ids = torch.tensor([0, n - 1, n // 2])
        if not torch.equal(kernel.rows(ids, tensors, layer).float(), reference.dequantize(portable)[ids].float()):
            return Variant(name=name, ok=False, reason=f"rows of a table {n} x {k} differ")
    floor = NATIVE_FLOOR_DB if native else FLOOR_DB
    return Variant(name=name, ok=worst > floor, worst_db=round(worst, 1), shapes=cases)


def signal_db(got: torch.Tensor, want: torch.Tensor) -> float:
    """Signal-to-noise ratio of `got` against `want`, in dB; minus infinity when `got` is not finite."""
    error = (got.double() - want.double()).square().sum()
    if not torch.isfinite(error):
        return float("-inf")
    return float(10 * torch.log10(want.double().square().sum() / error.clamp(min=1e-300)))


def check_at_start(env: MutableMapping[str, str] | None = None) -> None:
    """Choose the native variant by trying it, and check torch's kernel, each in a forked child; print one line. Call it
    before this process has run anything parallel (a child forked later waits for OpenMP threads that it does not have).

    The choice goes to `env` (the process's), where `appliance.kernels.library.load` reads it. Raises ConfigError when
    this torch does not fit, CpuNotSupported when every kernel is wrong or dies, TransientError when a child does not
    end.
    """
    env = os.environ if env is None else env
    began = time.monotonic()
    host = torch_host()
    if host.int4_refusal:
        raise ConfigError("the worker's torch does not fit", why=host.int4_refusal,
                          do="install the worker again")
    if env.get(PLANNED_ENV) == "aten":
        variant, failures = None, ["native: the plan serves without it"]
    else:
        variant, failures = choose_variant(env)
        if record := env.get(TRIAL_ENV):
            Path(record).write_text(json.dumps({"variant": variant, "left_out": failures}))
    if variant is None:
        env[REFUSED_ENV] = "; ".join(failures)
        died = in_child(lambda: main(["--torch"], quiet=True))
        if died:
            raise CpuNotSupported("the int4 kernels cannot run here", why=f"under {host.capability}: {died}",
                                  do="run `python -m appliance.kernels.selftest` with the worker's Python; "
                                     "ATEN_CPU_CAPABILITY in worker.env lowers the instruction set of torch's kernel")
    else:
        env[VARIANT_ENV] = variant
    for failure in failures:
        print(f"int4 kernel left out: {failure}", flush=True)
    chosen = f"native, {variant}" if variant else f"torch's, {host.capability}"
    print(f"int4 kernels agree with the reference ({chosen}, {time.monotonic() - began:.1f} s)", flush=True)


def choose_variant(env: MutableMapping[str, str]) -> tuple[str | None, list[str]]:
    """The first native variant that agrees with the reference (the forced one alone, if `env` forces one), and why
    others did not come to it."""
    loaded = open_library(FILE, env)
    if loaded.library is None:
        return None, [f"native: {loaded.refusal}"]
    forced = env.get(VARIANT_ENV)
    forced = None if forced in KERNELS else forced
    failures: list[str] = []
    for name in (forced,) if forced else loaded.library.variants:
        died = in_child(functools.partial(_judge, name))
        if died is None:
            return name, failures
        failures.append(f"native {name}: {died}")
    return None, failures


def in_child(check: Callable[[], int]) -> str | None:
    """Run `check` in a forked child: None when it returns 0, else what happened.

    Raises DoesNotFit when the child was killed, TransientError when it broke off or did not end."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = CRASHED
        try:
            status = check()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    status = _wait(child, deadline=time.monotonic() + DEADLINE_S)
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) == signal.SIGKILL:
            raise DoesNotFit("the int4 self-test was killed", why="most likely memory ran out",
                             do="free memory or raise the memory ceiling")
        return f"died by {signal.Signals(os.WTERMSIG(status)).name}"
    if os.WEXITSTATUS(status) == CRASHED:
        raise TransientError("the int4 self-test broke off", why="see the traceback above", do="start again")
    return "wrong results" if os.WEXITSTATUS(status) else None


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
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--torch", action="store_true", help="only torch's own kernel")
    which.add_argument("--variant", help="only this instruction set of the native kernel, in this process")
    arguments = parser.parse_args(argv)
    host = torch_host()
    if arguments.variant:
        variants = _native_results(arguments.variant, quick=False)
    else:
        variants = list(run(host, tuple(k for k in kernels() if not arguments.torch or k.name == "aten")))
    ok = all(variant.ok for variant in variants)
    if arguments.json:
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
