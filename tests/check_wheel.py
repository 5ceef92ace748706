"""Build the wheel, check what it would put in site-packages, and run the installed command.

python3 tests/check_wheel.py SCRATCH_DIR [PYTHON ...]
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MUST_SHIP = (
    "phasewise/cli/main.py",
    "phasewise/migrations/env.py",
    "phasewise/migrations/script.py.mako",
    "phasewise/py.typed",
)


def check_contents(wheel: Path) -> None:
    """Only `phasewise` (and its metadata) may land in a user's site-packages, and all of it must."""
    names = zipfile.ZipFile(wheel).namelist()
    strangers = {name.split("/")[0] for name in names} - {"phasewise"}
    assert all(name.endswith(".dist-info") for name in strangers), f"{wheel.name} also installs {strangers}"
    missing = [name for name in MUST_SHIP if name not in names]
    assert not missing, f"{wheel.name} lacks {missing}"
    assert any("/_native." in name for name in names), f"{wheel.name} has no compiled kernels"


def check(python: str, scratch: Path) -> None:
    """Build with `python`, install into a fresh environment, run the command from outside the repository."""
    venv = scratch / "venv"
    subprocess.run([python, "-m", "venv", venv], check=True)
    pip = [venv / "bin" / "pip", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", scratch, ROOT], check=True)
    (wheel,) = scratch.glob("phasewise-*.whl")
    check_contents(wheel)
    subprocess.run([*pip, "install", wheel], check=True)
    command = venv / "bin" / "phasewise"
    for arguments in (["--version"], ["topo", "--json"], ["db", "upgrade", "--db", "fresh.db"], ["--help"]):
        subprocess.run([command, *arguments], cwd=scratch, check=True, stdout=subprocess.DEVNULL)
    print(f"{wheel.name}: installs only phasewise, and runs")


def main() -> None:
    scratch, *pythons = sys.argv[1:]
    for index, python in enumerate(pythons or [sys.executable]):
        folder = Path(scratch) / str(index)
        folder.mkdir(parents=True)
        check(python, folder)


if __name__ == "__main__":
    main()
