"""A measuring child that implements the real interface and can misbehave: `fake_gauge.py -m appliance.gauge ORDER`.

Everything else goes to the fake worker. Its behaviour is the file `gauge.json` beside the script that calls it:

    figures     gauge -> threads -> value of every figure (default 10.0)
    sleep_s     before each figure
    after       after so many figures of this process ... `then`
    then        sigill (runs an instruction that no CPU has), oom (allocates beyond its limit), kill, hang, error, raise
    only        the gauge that misbehaves; default all

Each order is appended to `orders.jsonl` there.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any


def say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def misbehave(mode: str) -> None:
    if mode == "sigill":  # a real one: ud2
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(b"\x0f\x0b")
        ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    elif mode == "oom":
        resource.setrlimit(resource.RLIMIT_AS, (256 << 20, 256 << 20))
        try:
            held = [bytearray(16 << 20) for _ in range(64)]
            say(event="phase", phase=str(len(held)), note="")
        except MemoryError as error:
            say(event="error", exit_code=70, what="the measurement failed by a defect", why=f"MemoryError: {error}", do="")
            sys.exit(70)
    elif mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif mode == "hang":
        time.sleep(600)
    elif mode == "error":
        say(event="error", exit_code=75, what="the canary found wrong results", why="int4, 2 rows", do="")
        sys.exit(75)
    elif mode == "raise":
        raise RuntimeError("no such luck")


def settings_of(order: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """What the real gauge measures, in its order: settings and the figure's name."""
    if order["gauge"] == "canary":
        return [({"rows": rows}, "passed") for rows in order["rows"]]
    if order["gauge"] == "bandwidth":
        return [({"threads": threads}, "GB/s") for threads in order["threads"]]
    return [({"threads": threads, "rows": rows, "kernel": order["kernel"], "variant": variant, "route": route}, "tok/s")
            for variant in order["variants"] for threads in order["threads"] for rows in order["rows"] for route in order["routes"]]


def main() -> None:
    here, args = Path(sys.argv[1]), sys.argv[2:]
    if args[:2] != ["-m", "appliance.gauge"]:
        sys.argv = [str(Path(__file__).with_name("fake_worker.py")), *args]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    order = json.loads(args[2])
    behaviour: dict[str, Any] = json.loads((here / "gauge.json").read_text()) if (here / "gauge.json").exists() else {}
    with open(here / "orders.jsonl", "a") as log:
        log.write(json.dumps(order) + "\n")
    bad = behaviour.get("only", order["gauge"]) == order["gauge"] and "then" in behaviour
    figures = behaviour.get("figures", {}).get(order["gauge"], {})
    for number, (settings, name) in enumerate(settings_of(order)):
        say(event="trying", settings=settings)
        if bad and number == behaviour.get("after", 0):
            misbehave(behaviour["then"])
        time.sleep(behaviour.get("sleep_s", 0))
        value = figures.get(str(settings.get("threads")), 10.0)
        say(event="figure", settings=settings, figures={name: [value, value * 1.01, value * 0.99]})
    say(event="result", report={})


if __name__ == "__main__":
    main()
