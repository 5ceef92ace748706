"""The whole extension with dots of 16 bits emulated: `python -m tests.support.kernels.emulated_native`.

Prints KNOWN_OF_DOTS of `workflows/replay/bits_check.py`, and the results of the arithmetics that all CPUs
share: what `doctor --bits` finds on CPUs that have such dots. Compiling takes some minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.support.kernels.cross import HERE, KERNELS, ROOT, common_sources, compile_all, compile_isa

_WRAPPED = "-Wl,--wrap=pw_cpu_features"


class _Emulated(NamedTuple):
    """An instruction set: its words, the machine that has it, and the linker's flags for that machine."""

    isa: str
    words: str
    machine: str
    wrapped: tuple[str, ...] = (_WRAPPED,)


EMULATED = (
    _Emulated("avx512_bf16", "emulated_bf16", "emulated_bf16_machine"),
    _Emulated("avx512_fp16", "emulated_fp16", "emulated_fp16_machine"),
    _Emulated("amx", "emulated_amx", "emulated_machine", (_WRAPPED, "-Wl,--wrap=syscall")),
)

_LOADED = """
import importlib.util, sys
name = "phasewise.cython_kernels._native"
import phasewise.cython_kernels
spec = importlib.util.spec_from_file_location(name, sys.argv[1])
phasewise.cython_kernels._native = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
from phasewise.cython_kernels import isa
assert isa.active() == sys.argv[2], isa.active()
"""
_KNOWN = """
import json
from phasewise.cython_kernels._native import compute_paths
from phasewise.topology import read_machine
from phasewise.workflows.replay import bits_check
core = read_machine().allowed_pus[0]
def known(kinds, *path):
    return bits_check.computed(bits_check.known_model(kinds), "f32", core, *path)[0]
every = {"every": known(bits_check.KINDS), "default of q4_k": compute_paths("q4_k")[0]}
every["int8_block"] = known(bits_check.BLOCK_KINDS, bits_check.BLOCK_PATH)
print(json.dumps(every | {path: known(("bf16",), path) for path in bits_check.paths_of_bf16()}))
"""


def built(folder: Path) -> Iterator[tuple[str, Path]]:
    """Of each instruction set its name, and the extension of a machine that has it emulated."""
    pic = ("-fPIC", "-fvisibility=hidden")
    bindings, units = folder / "bindings", folder / "units"
    for subfolder in (bindings, units):
        subfolder.mkdir()
    include = f"-I{sysconfig.get_path('include')}"
    common = compile_all("gcc", [KERNELS / "_native.c"], bindings, *pic, "-O1", "-w", include)
    common += compile_all("gcc", common_sources(), units, *pic)
    common += compile_isa("gcc", KERNELS / "isa" / "portable.h", folder, *pic)
    for emulated in EMULATED:
        out = folder / emulated.isa
        out.mkdir()
        objects = [
            *common,
            *compile_all("gcc", [HERE / f"{emulated.machine}.c"], out, *pic, "-DPW_WHOLE_PROGRAMS"),
        ]
        objects += compile_isa("gcc", HERE / f"{emulated.words}.h", out, *pic)
        target = out / "_native.so"
        subprocess.run(
            ["gcc", "-shared", "-pthread", *emulated.wrapped, *objects, "-lm", "-o", target], check=True
        )
        yield emulated.isa, target


def run(isa: str, extension: Path, program: str) -> str:
    """The output of a Python program whose kernels are those of `extension`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _LOADED + program, str(extension), isa]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def known(folder: Path) -> Mapping[str, Mapping[str, str]]:
    """By instruction set and compute path, the results of bf16 weights; those of K-quants by blocks, and of
    the weights of all CPUs; and the default path of Q4_K.
    """
    with ThreadPoolExecutor() as pool:
        futures = {name: pool.submit(run, name, extension, _KNOWN) for name, extension in built(folder)}
        return {name: json.loads(future.result()) for name, future in futures.items()}


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:
        print(json.dumps(known(Path(folder)), indent=4))


if __name__ == "__main__":
    main()
