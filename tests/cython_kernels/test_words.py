"""Every SIMD vocabulary means the same by its words: words.c, compiled with each and run, on Arm emulated."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from phasewise.cython_kernels import isa
from tests.support.kernels.cross import COMMON_FLAGS, HERE, KERNELS, isa_flags

ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
FLAGS_HERE = isa_flags(platform.machine())


def built(compiler: str, name: str, flags: list[str], out: Path) -> str:
    target = out / name
    command = [compiler, *COMMON_FLAGS, *flags, "-static", "-I", KERNELS, "-include", f"isa/{name}.h"]
    subprocess.run([*command, HERE / "words.c", "-lm", "-o", target], check=True)
    return str(target)


def assert_keeps_the_laws(command: list[str]) -> None:
    got = subprocess.run(command, capture_output=True, text=True)
    assert got.returncode == 0, got.stderr


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to compile with")
@pytest.mark.parametrize("name", isa.usable())
def test_words_here(name: str, tmp_path: Path) -> None:
    assert_keeps_the_laws([built("gcc", name, FLAGS_HERE[name], tmp_path)])


@pytest.mark.many
@pytest.mark.skipif(shutil.which(ARM_COMPILER) is None, reason=f"no {ARM_COMPILER} to cross-compile with")
@pytest.mark.skipif(shutil.which(ARM_EMULATOR) is None, reason=f"no {ARM_EMULATOR} to run it with")
@pytest.mark.parametrize("name", isa_flags("aarch64"))
def test_words_on_arm(name: str, tmp_path: Path) -> None:
    program = built(ARM_COMPILER, name, isa_flags("aarch64")[name], tmp_path)
    assert_keeps_the_laws([ARM_EMULATOR, "-cpu", "max", program])
