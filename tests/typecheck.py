"""Run mypy over the import root as users see it.

Type checkers follow files, not import hooks, and our packages are folders at the top of the repository.
So a temporary tree of links is laid out as `phasewise/<room>` and checked; a count of the files seen guards
against checking nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("cli", "serving", "tuner", "kerneldb", "topology", "cython_kernels", "migrations")


def lay_out(tree: Path) -> int:
    """Link every room below `tree`/phasewise; return how many Python files mypy must see."""
    package = tree / "phasewise"
    package.mkdir()
    for path in (ROOT / "phasewise").iterdir():
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    for room in ROOMS:
        (package / room).symlink_to(ROOT / room)
    return sum(1 for room in ("phasewise", *ROOMS) for _ in (ROOT / room).rglob("*.py"))


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        expected = lay_out(Path(folder))
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "mypy",
                "--config-file",
                str(ROOT / "pyproject.toml"),
                "--cache-dir",
                str(ROOT / ".mypy_cache"),
                "-p",
                "phasewise",
            ],
            cwd=folder,
            env={**os.environ, "MYPYPATH": folder},
            capture_output=True,
            text=True,
            check=False,
        )
    print(result.stdout, end="")
    print(result.stderr, end="", file=sys.stderr)
    seen = re.search(r"(?:in|checked) (\d+) source files?", result.stdout)
    if result.returncode == 0 and (seen is None or int(seen[1]) < expected):
        print(f"mypy saw {seen and seen[1]} of {expected} files", file=sys.stderr)
        return 1
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
