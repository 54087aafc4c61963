"""Peak memory and speed of quantizing a synthetic 1B-parameter sharded bf16 Llama.

    worker_python -m tests.bench.quantize_memory [--limit-mb 1500] [--grid minmax]

Writes the model (2.2 GB of pseudo-random bf16) and its checkpoint (0.7 GB) into a temporary directory, runs
`python -m appliance.quantize` as the agent does and prints its peak resident memory (ru_maxrss of the child) and rate.
Exits 1 above the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.random_llama import SHAPES, write_safetensors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mb", type=int, default=1500)
    parser.add_argument("--grid", default="auto", help="auto (which is `search` at this size), minmax, search or calibrated")
    parser.add_argument("--directory", help="where the temporary files go")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        folder, out = Path(name, "source"), Path(name, "out")
        folder.mkdir()
        # The model is written by another process: a child's peak begins with the memory of the process that forks it.
        pid = os.fork()
        if pid == 0:
            write_safetensors(SHAPES["1b"], folder)
            os._exit(0)
        if os.waitpid(pid, 0)[1] != 0:
            return 1
        total = sum(file.stat().st_size for file in folder.iterdir())
        written = resource.getrusage(resource.RUSAGE_CHILDREN)
        before = time.monotonic()
        run = subprocess.run([sys.executable, "-m", "appliance.quantize", str(folder), str(out), "--recipe",
                              json.dumps({"grid": args.grid})],
                             stdout=subprocess.PIPE, text=True, check=False)
        seconds = time.monotonic() - before
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        last = json.loads(run.stdout.splitlines()[-1])
        if run.returncode:
            print(last)
            return 1
        # The larger of the two children; the one that wrote the model holds torch and little else.
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        report = last["report"]
        cpu_s = used.ru_utime + used.ru_stime - written.ru_utime - written.ru_stime
        print(f"grid {report['grid']}: {total / cpu_s / 1e6:.0f} MB/s of source per core ({cpu_s:.0f} s of CPU time)")
        print(f"{report['parameters'] / 1e9:.2f}e9 parameters, group {report['group_size']}, "
              f"{report['bits_per_weight']} bits per weight")
        print(f"peak {peak:.0f} MiB (limit {args.limit_mb}), {seconds:.0f} s, {total / seconds / 1e6:.0f} MB/s of "
              f"source, {report['out_bytes'] / 1e6:.0f} MB written")
        return int(peak > args.limit_mb)


if __name__ == "__main__":
    sys.exit(main())
