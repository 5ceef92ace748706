"""Build phasewise in every way that it is installed, check what would land in site-packages, and run it.

python3 tests/check_wheel.py SCRATCH_DIR [PYTHON ...]

From a copy of the tree, whose kernels are compiled once: a wheel and an sdist; a wheel from that sdist,
installed and run from outside the repository; `python -m phasewise` in the checkout; an editable install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD_NEEDS = ("setuptools>=77", "cython>=3.0.11", "numpy>=1.26")
NOT_COPIED = (".*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "_native.c")
COMMANDS = (["--version"], ["topo", "--json"], ["db", "upgrade", "--db", "fresh.db"], ["--help"])


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """The output of a command that succeeds; one that fails ends the check with its own messages."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def sources(*patterns: str) -> set[str]:
    """The files of every room that match, as the wheel must name them: phasewise/ROOM/..."""
    rooms = [path for path in (ROOT / "phasewise").iterdir() if path.is_symlink()]
    linked = (path for pattern in patterns for room in rooms for path in room.resolve().rglob(pattern))
    own = (path for pattern in patterns for path in (ROOT / "phasewise").glob(pattern))
    names = {f"phasewise/{path.relative_to(ROOT)}" for path in linked}
    names |= {str(path.relative_to(ROOT)) for path in own}
    return {name for name in names if not name.endswith("/_native.c")}


def must_ship() -> set[str]:
    guide = {f"phasewise/cli/guide/{path.name}" for path in (ROOT / "docs" / "guide").glob("*.md")}
    return sources("*.py", "*.mako", "*.jsonl.gz") | guide | {"phasewise/py.typed"}


def check_contents(wheel: Path) -> None:
    """Only `phasewise` (and its metadata) may land in a user's site-packages, and all of it must."""
    names = zipfile.ZipFile(wheel).namelist()
    strangers = {name.split("/")[0] for name in names} - {"phasewise"}
    assert all(name.endswith(".dist-info") for name in strangers), f"{wheel} also installs {strangers}"
    missing = must_ship() - set(names)
    assert not missing, f"{wheel} lacks {sorted(missing)}"
    licences = {name.split("/")[-1] for name in names if "/licenses/" in name and not name.endswith("/")}
    assert licences == {"LICENSE", "NOTICE"}, f"{wheel} has the licences {licences}"
    assert any("/_native." in name and name.endswith(".so") for name in names), f"{wheel} has no kernels"


def check_installed(bin_folder: Path, outside: Path) -> None:
    """The command runs outside the repository, and no room has become a module of its own."""
    for arguments in COMMANDS:
        run(bin_folder / "phasewise", *arguments, cwd=outside)
    (outside / "fresh.db").unlink()
    run(bin_folder / "python", "-m", "phasewise", "--version", cwd=outside)


def check(python: str, scratch: Path) -> None:
    """Build with `python`, and install into an environment of `scratch`'s own."""
    tree, dist, outside, venv = (scratch / name for name in ("checkout", "dist", "outside", "venv"))
    outside.mkdir()
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    run(python, "-m", "venv", venv, cwd=scratch)
    bin_folder = venv / "bin"
    pip = bin_folder / "pip"
    run(pip, "install", "-q", "build", *BUILD_NEEDS, cwd=scratch)

    run(
        bin_folder / "python",
        "-m",
        "build",
        "-q",
        "--no-isolation",
        "--sdist",
        "--wheel",
        "-o",
        dist,
        tree,
        cwd=scratch,
    )
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    check_contents(wheel)
    print(f"{wheel.name} from the checkout: installs only phasewise, and all of it")

    with tarfile.open(sdist) as archive:
        archive.extractall(scratch / "unpacked", filter="data")
    (unpacked,) = (scratch / "unpacked").iterdir()
    needed = sources("*.py", "*.pyx", "*.pxi", "*.[ch]", "*.json", "*.mako")
    missing = [name for name in needed if not (unpacked / name).exists()]
    assert not missing, f"{sdist.name} lacks {missing}"
    shutil.copytree(tree / "build", unpacked / "build")  # the objects: only the bindings compile again
    run(
        pip,
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        scratch / "again",
        unpacked,
        cwd=scratch,
    )
    (again,) = (scratch / "again").glob("*.whl")
    check_contents(again)
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(wheel).namelist())
    run(pip, "install", "-q", again, cwd=scratch)
    check_installed(bin_folder, outside)
    print(f"{sdist.name}: its wheel has the same files, and runs")

    run(pip, "uninstall", "-q", "-y", "phasewise", cwd=scratch)
    for kernels in (unpacked / "build").glob("lib*/phasewise/cython_kernels/_native.*.so"):
        shutil.copy(kernels, tree / "cython_kernels")  # where `build_ext --inplace` puts them
    run(bin_folder / "python", "-m", "phasewise", "--version", cwd=tree)
    print("python -m phasewise: runs in a bare checkout")

    editable = ("--no-deps", "--no-build-isolation", "-e", tree)
    run(pip, "install", "-q", *editable, cwd=scratch, PHASEWISE_ISA_BUILD="none")  # the kernels are in place
    check_installed(bin_folder, outside)
    where = run(
        bin_folder / "python", "-c", "import phasewise.tuner as room; print(room.__file__)", cwd=outside
    )
    assert where.strip() == str(tree / "phasewise/tuner/__init__.py"), where
    hooks = [path.name for path in venv.rglob("__editable__*finder*")]
    assert not hooks, f"the editable install is an import hook: {hooks}"
    print("editable install: a path, no hook, and runs")


def main() -> None:
    scratch, *pythons = sys.argv[1:]
    for index, python in enumerate(pythons or [sys.executable]):
        folder = Path(scratch).resolve() / str(index)
        folder.mkdir(parents=True)
        check(python, folder)


if __name__ == "__main__":
    main()
