"""The compiled extension: Cython bindings over C kernels, each kernel source compiled once for each ISA.

PHASEWISE_ISA_BUILD chooses the instruction sets: `all` (the default), `native` (portable C and the highest
that this machine runs), names separated by commas, or `none` (an editable install, whose extension is
compiled in place on its own). Everything else about the package is in setup.cfg.

What is built for a wheel asks for CPython's stable ABI alone, so that one wheel runs on every Python from
3.11 on; what is built in place is for the Python that builds it (decision 0075).
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from runpy import run_path
from sysconfig import get_config_var, get_platform

from Cython.Build import cythonize
from Cython.Compiler.Options import get_directive_defaults
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

KERNELS = Path("phasewise/cython_kernels")
BUILT_FOR = get_platform().rpartition("-")[2].lower()  # another machine than this one under a cross compiler
MACHINE = {"amd64": "x86_64", "arm64": "aarch64"}.get(BUILT_FOR, BUILT_FOR)
abi_macros = run_path(str(KERNELS / "abi.py"))["abi_macros"]

ISA_BUILD = os.environ.get("PHASEWISE_ISA_BUILD", "all")
ASKED_FLAGS = os.environ.get("CFLAGS", "").split()
# Code that AddressSanitizer checks has many more instructions: at -O3 a source takes gcc 15 minutes.
LEVEL = "-O1" if "-fsanitize=address" in ASKED_FLAGS else "-O3"
# Portable C beside a set that this machine has is a reference: at -O3 it takes gcc twice the time.
REFERENCE_LEVEL = "-O1"
COMMON_FLAGS = [LEVEL, "-std=gnu11", "-Wall", "-Wextra", "-ffp-contract=off", "-fno-math-errno"]
COMMON_FLAGS.append("-fvisibility=hidden")
if not any(flag.startswith("-g") for flag in ASKED_FLAGS):
    COMMON_FLAGS.append("-g0")  # Python's own flags ask for debug tables, ten times the code's size

# Each families/*.c is a unit for each instruction set, compiled after isa/<name>.h. Flags are what it
# may assume of the CPU, those of `portable` what everything else may. On aarch64, where NEON is always there,
# `portable` is a reference only: at -O3 gcc 12 takes more than 8 minutes for it, at -O2 one and a half.
FLAGS_FILE = str(KERNELS / "isa" / "flags.json")
ISA_FLAGS: dict[str, list[str]] = {
    isa: flags.split()
    for isa, flags in json.loads(Path(FLAGS_FILE).read_text()).get(MACHINE, {"portable": ""}).items()
}

STABLE_ABI = "cp311"
STABLE_ABI_MACROS = [("Py_LIMITED_API", "0x030b0000"), ("CYTHON_LIMITED_API", "1")]
HAS_STABLE_ABI = not get_config_var("Py_GIL_DISABLED")

LATE = {"avx512_fp16"}  # gcc 12, clang 14: without them dispatch.c finds no such table


RUNGS_HERE = """
#include <stdio.h>
#include "dispatch.h"
int main(void) {
    for (int i = 0; pw_isa_name(i); ++i) if (pw_isa_runs_here(i)) puts(pw_isa_name(i));
    return 0;
}
"""


class build_kernels(build_ext):
    """Compiles all sources side by side, each instruction set's with its own flags; links the extension."""

    def finalize_options(self) -> None:
        super().finalize_options()
        for ext in self.extensions:
            ext.py_limited_api = HAS_STABLE_ABI and not self.inplace

    def build_extension(self, ext: Extension) -> None:
        isas = self.chosen_isas()
        built = Path(self.build_temp, "instruction_sets")
        is_same_choice = built.exists() and built.read_text().split() == isas
        target = self.get_ext_fullpath(ext.name)
        if is_same_choice and not self.force and not newer_group([*ext.sources, *ext.depends], target):
            return
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            others = [pool.submit(self.compile_source, ext, source) for source in ext.sources]
            units = [(isa, unit) for isa in reversed(isas) for unit in UNITS]
            reference = isas[0] if ISA_BUILD == "native" and len(isas) > 1 else None
            kernels = [
                pool.submit(self.compile_unit, ext, isa, unit, isa == reference) for isa, unit in units
            ]
            objects = [done.result() for done in [*kernels, *others]]
        if not self.inplace:  # an earlier build's, with another suffix
            for earlier in Path(target).parent.glob("_native.*.so"):
                earlier.unlink()
        libraries = self.get_libraries(ext)
        self.compiler.link_shared_object(
            objects, target, libraries=libraries, extra_postargs=ext.extra_link_args, target_lang="c"
        )
        built.write_text(" ".join(isas))

    def chosen_isas(self) -> list[str]:
        """The instruction sets of PHASEWISE_ISA_BUILD, lowest first; portable C is always among them."""
        if ISA_BUILD == "native":
            chosen = self.isas_of_this_machine()[-1:]
        else:
            chosen = list(ISA_FLAGS) if ISA_BUILD == "all" else ISA_BUILD.split(",")
        if unknown := set(chosen) - set(ISA_FLAGS):
            raise SystemExit(
                f"PHASEWISE_ISA_BUILD: {MACHINE} has no instruction set {', '.join(sorted(unknown))};"
                f" choose all, native, none, or of {', '.join(ISA_FLAGS)}"
            )
        return [isa for isa in ISA_FLAGS if isa == "portable" or (isa in chosen and self.is_understood(isa))]

    def isas_of_this_machine(self) -> list[str]:
        """The names of the ladder that run here, lowest first, by the code that chooses one at import."""
        with tempfile.TemporaryDirectory() as folder:
            main, program = Path(folder, "rungs.c"), Path(folder, "rungs")
            main.write_text(RUNGS_HERE)
            sources = [main, KERNELS / "dispatch.c", KERNELS / "cpu.c"]
            compiler = self.compiler.compiler_so[0]
            subprocess.run([compiler, "-std=gnu11", f"-I{KERNELS}", *sources, "-o", program], check=True)
            runs_here = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
        return [isa for isa in runs_here if isa in ISA_FLAGS and self.is_understood(isa)]

    def is_understood(self, isa: str) -> bool:
        """True if the compiler knows an instruction set's flags; not every compiler knows those of LATE."""
        if isa not in LATE:
            return True
        command = [*self.compiler.compiler_so, *ISA_FLAGS[isa], "-fsyntax-only", "-x", "c", os.devnull]
        if subprocess.run(command, capture_output=True).returncode == 0:
            return True
        print(f"{isa}: {self.compiler.compiler_so[0]} does not know its flags; built without")
        return False

    def compile_unit(self, ext: Extension, isa: str, source: str, is_reference: bool) -> str:
        """A source of families/ for one instruction set. Its table tells the names of the others' code."""
        flags, folder = [*COMMON_FLAGS, *ISA_FLAGS[isa]], isa
        if is_reference:  # in another folder: a build of all instruction sets must not find it
            flags, folder = [*flags, REFERENCE_LEVEL], "reference"
        after = [*flags, "-include", f"isa/{isa}.h"]
        if not source.endswith("table.c"):
            return self.compile_with(ext, source, after, folder)
        names = partial(abi_macros, KERNELS, isa, self.compiler.compiler_so, flags)
        return self.compile_with(ext, source, after, folder, FAMILIES, names)

    def compile_source(self, ext: Extension, source: str) -> str:
        if not source.endswith("_native.c"):
            return self.compile_with(ext, source, ext.extra_compile_args)
        # The bindings check and call: at -O3 gcc spends twice the time on them, and no call is faster.
        flags = [*ext.extra_compile_args, "-O1"]
        if not ext.py_limited_api:
            return self.compile_with(ext, source, flags)
        # Cython's own helper for large integers leaves a parameter unused under the limited API.
        flags += ["-Wno-unused-parameter", *(f"-D{name}={value}" for name, value in STABLE_ABI_MACROS)]
        return self.compile_with(ext, source, flags, "stable_abi")

    def compile_with(
        self,
        ext: Extension,
        source: str,
        flags: list[str],
        folder: str = "",
        depends: Sequence[str] = (),
        macros: Callable[[], list[tuple[str, str]]] = list,
    ) -> str:
        """The object file of a source, in a folder of the build's.

        Compiled anew where one of the files that the compiler read for it, or of `depends`, has changed.
        """
        output = str(Path(self.build_temp, folder))
        (target,) = self.compiler.object_filenames([source], output_dir=output)
        read = Path(target).with_suffix(".d")
        made_of = read.read_text().replace("\\\n", " ").split()[1:] if read.exists() else [""]
        if self.force or newer_group([*made_of, "setup.py", FLAGS_FILE, *depends], target, missing="newer"):
            self.compiler.compile(
                [source],
                output_dir=output,
                macros=[*ext.define_macros, *macros()],
                include_dirs=ext.include_dirs,
                extra_postargs=[*flags, "-MMD"],
            )
        return target


def files_like(*patterns: str) -> list[str]:
    return [str(path) for pattern in patterns for path in sorted(KERNELS.glob(pattern))]


UNITS = files_like("families/*.c")
FAMILIES = files_like("gemm.h", "blocks.h", "sparse.h", "families/**/*.[ch]", "isa/*.h", "simd/*.h", "abi.py")
native = Extension(
    "phasewise.cython_kernels._native",
    sources=[
        str(KERNELS / "_native.pyx"),
        *sorted(
            str(path)
            for folder in (".", "adapters", "group", "indexer", "memory", "program", "state", "team")
            for path in KERNELS.joinpath(folder).glob("*.c")
            if path.name != "_native.c"
        ),
    ],
    include_dirs=[str(KERNELS)],
    depends=["setup.py", *files_like("*.h", "*/*.h", "bindings/*.pxi", "isa/*.json"), *UNITS, *FAMILIES],
    define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
    extra_compile_args=[*COMMON_FLAGS, *ISA_FLAGS["portable"]],
    extra_link_args=["-pthread"],
    libraries=["m"],
)

extensions = [] if ISA_BUILD == "none" else [native]
# Cython before 3.1 gives no hints, and refuses a directive that it does not know.
HINTS = {"show_performance_hints": False} if "show_performance_hints" in get_directive_defaults() else {}
DIRECTIVES = {"binding": True, **HINTS}

setup(
    ext_modules=cythonize(extensions, language_level=3, compiler_directives=DIRECTIVES, quiet=True),
    cmdclass={"build_ext": build_kernels},
    options={"bdist_wheel": {"py_limited_api": STABLE_ABI}} if HAS_STABLE_ABI else {},
)
