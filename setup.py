"""The compiled extension: Cython doors over C kernels, each kernel source compiled once per ISA.

Everything else about the package is in setup.cfg.
"""

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from runpy import run_path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

KERNELS = Path("cython_kernels")
abi_macros = run_path(str(KERNELS / "abi.py"))["abi_macros"]
IS_X86 = platform.machine().lower() in {"x86_64", "amd64"}

COMMON_FLAGS = ["-O3", "-std=gnu11", "-Wall", "-Wextra", "-ffp-contract=off", "-fno-math-errno"]
BASELINE_FLAGS = ["-march=x86-64-v2"] if IS_X86 else []

# isa/<name>.c includes every family; the flags here are what that source may assume of the CPU.
ISA_FLAGS: dict[str, list[str]] = {"portable": BASELINE_FLAGS}
if IS_X86:
    avx2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
    avx512 = [*avx2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
    ISA_FLAGS |= {
        "avx2": avx2,
        "avx512": avx512,
        "avx512_vnni": [*avx512, "-mavx512vnni"],
        "avx512_bf16": [*avx512, "-mavx512vnni", "-mavx512bf16"],
        "amx": [*avx512, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
    }


class build_kernels(build_ext):
    """Compiles the per-ISA sources, each with its own flags, side by side; links them into the extension."""

    def build_extension(self, ext: Extension) -> None:
        if not self.force and not newer_group([*ext.sources, *ext.depends], self.get_ext_fullpath(ext.name)):
            return

        def compile_isa(isa: str) -> list[str]:
            source = str(KERNELS / "isa" / f"{isa}.c")
            objects = self.compiler.object_filenames([source], output_dir=self.build_temp)
            if self.force or newer_group([source, *ext.depends], objects[0]):
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


# Everything that the kernels are made of beside their own source file.
INGREDIENTS = ("*.h", "*/*.h", "*.pxi", "families/*.c", "isa/*.c", "abi.py")
native = Extension(
    "phasewise.cython_kernels._native",
    sources=[
        str(KERNELS / "_native.pyx"),
        *sorted(str(path) for path in KERNELS.glob("*.c") if path.name != "_native.c"),
    ],
    include_dirs=[str(KERNELS)],
    depends=["setup.py", *(str(path) for pattern in INGREDIENTS for path in sorted(KERNELS.glob(pattern)))],
    define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
    extra_compile_args=[*COMMON_FLAGS, *BASELINE_FLAGS],
    extra_link_args=["-pthread"],
    libraries=["m"],
)

setup(
    ext_modules=cythonize([native], language_level=3, compiler_directives={"binding": True}),
    cmdclass={"build_ext": build_kernels},
)
