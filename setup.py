"""Builds the int4 library `appliance/kernels/libint4.so`: C++17, one object a source, flags only where they belong.

The package installs without it too: no compiler, another CPU family or APPLIANCE_NATIVE=0 leave the library out, and
the worker then serves with torch's own kernels.
"""

from __future__ import annotations

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("appliance/kernels/native")
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
AVX2 = ["-mavx2", "-mfma"]
# GCC 12 warns of its own headers.
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-Wno-maybe-uninitialized"]
SPECIAL = {
    "avx2": AVX2,
    "avxvnni": [*AVX2, "-mavxvnni"],
    "avx512": AVX512,
    "avx512vnni": [*AVX512, "-mavx512vnni"],
}
"""Only these units may use more than the base instruction set."""


class BuildLibrary(build_ext):
    """Compiles each source with its own flags and links no OpenMP and no torch."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", os.sep) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # no PyInit function: this is a C library

    def build_extension(self, ext: Extension) -> None:
        def compile_one(source: str) -> str:
            flags = FLAGS + SPECIAL.get(Path(source).stem, [])
            return self.compiler.compile([source], output_dir=self.build_temp, extra_postargs=flags)[0]

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, ext.sources))
        target = self.get_ext_fullpath(ext.name)
        self.compiler.link_shared_object(objects, target, libraries=["dl"], target_lang="c++",
                                         extra_postargs=["-Wl,--no-undefined", "-Wl,-s"])


class AnyPython(bdist_wheel):
    """The library uses nothing of Python, so a wheel fits each Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, plat = super().get_tag()
        return ("py3", "none", plat) if self.distribution.ext_modules else (python, abi, plat)


wanted = platform.machine() == "x86_64" and os.environ.get("APPLIANCE_NATIVE", "1") != "0"
library = Extension(
    "appliance.kernels.libint4",
    sources=sorted(map(str, SOURCES.glob("*.cpp"))),
    depends=sorted(map(str, SOURCES.glob("*.h"))),
    language="c++",
    optional=True,
)
setup(ext_modules=[library] if wanted else [], cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPython})
