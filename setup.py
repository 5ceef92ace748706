"""The compiled extension: Cython doors over C kernels, each kernel source compiled once per ISA.

Everything else about the package is in setup.cfg.
"""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from runpy import run_path
from sysconfig import get_platform

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

KERNELS = Path("phasewise/cython_kernels")
BUILT_FOR = get_platform().rpartition("-")[2].lower()  # another machine than this one under a cross compiler
MACHINE = {"amd64": "x86_64", "arm64": "aarch64"}.get(BUILT_FOR, BUILT_FOR)
abi_macros = run_path(str(KERNELS / "abi.py"))["abi_macros"]

ASKED_FLAGS = os.environ.get("CFLAGS", "").split()
# Code that AddressSanitizer checks has many more instructions: at -O3 a source takes gcc 15 minutes.
LEVEL = "-O1" if "-fsanitize=address" in ASKED_FLAGS else "-O3"
COMMON_FLAGS = [LEVEL, "-std=gnu11", "-Wall", "-Wextra", "-ffp-contract=off", "-fno-math-errno"]
if not any(flag.startswith("-g") for flag in ASKED_FLAGS):
    COMMON_FLAGS.append("-g0")  # Python's own flags ask for debug tables, ten times the code's size

# isa/<name>.c includes every family; the flags are what that source may assume of the CPU, those of
# `portable` what everything else may. On aarch64, where NEON is always there, `portable` is a reference only:
# at -O3 gcc 12 spends more than 8 minutes on it, at -O2 one and a half.
ISA_FLAGS: dict[str, list[str]] = {
    isa: flags.split()
    for isa, flags in json.loads((KERNELS / "isa" / "flags.json").read_text())
    .get(MACHINE, {"portable": ""})
    .items()
}

LATE = {"avx512_fp16"}  # gcc 12, clang 14: without them dispatch.c finds no such table


class build_kernels(build_ext):
    """Compiles the per-ISA sources, each with its own flags, side by side; links them into the extension."""

    def build_extension(self, ext: Extension) -> None:
        if not self.force and not newer_group([*ext.sources, *ext.depends], self.get_ext_fullpath(ext.name)):
            return

        def is_understood(isa: str) -> bool:
            command = [*self.compiler.compiler_so, *ISA_FLAGS[isa], "-fsyntax-only", "-x", "c", os.devnull]
            return subprocess.run(command, capture_output=True).returncode == 0

        def compile_isa(isa: str) -> list[str]:
            if isa in LATE and not is_understood(isa):
                print(f"{isa}: {self.compiler.compiler_so[0]} does not know its flags; built without")
                return []
            source = str(KERNELS / "isa" / f"{isa}.c")
            objects = self.compiler.object_filenames([source], output_dir=self.build_temp)
            if self.force or newer_group([source, *ISA_DEPENDS], objects[0]):
                flags = [*COMMON_FLAGS, *ISA_FLAGS[isa]]
                self.compiler.compile(
                    [source],
                    output_dir=self.build_temp,
                    macros=abi_macros(KERNELS, isa, self.compiler.compiler_so, flags),
                    include_dirs=ext.include_dirs,
                    extra_postargs=flags,
                )
            return objects

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            for objects in pool.map(compile_isa, reversed(ISA_FLAGS)):  # the longest first
                ext.extra_objects += objects
        super().build_extension(ext)


def files_like(*patterns: str) -> list[str]:
    return ["setup.py", *(str(path) for pattern in patterns for path in sorted(KERNELS.glob(pattern)))]


# What isa/<name>.c is made of; doors, programs and teams can change without compiling the kernels again.
ISA_HEADERS = ("blocks.h", "cpu.h", "dispatch.h", "gemm.h", "ops.h", "sparse.h", "*/*.h")
ISA_DEPENDS = files_like(*ISA_HEADERS, "families/*.c", "isa/*.json", "abi.py")
native = Extension(
    "phasewise.cython_kernels._native",
    sources=[
        str(KERNELS / "_native.pyx"),
        *sorted(str(path) for path in KERNELS.glob("*.c") if path.name != "_native.c"),
    ],
    include_dirs=[str(KERNELS)],
    depends=files_like("*.h", "*/*.h", "*.pxi", "families/*.c", "isa/*.c", "isa/*.json", "abi.py"),
    define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
    extra_compile_args=[*COMMON_FLAGS, *ISA_FLAGS["portable"]],
    extra_link_args=["-pthread"],
    libraries=["m"],
)

setup(
    ext_modules=cythonize([native], language_level=3, compiler_directives={"binding": True}),
    cmdclass={"build_ext": build_kernels},
)
