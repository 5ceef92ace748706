"""Install a wheel from a folder by every tool that the guide names, and run the command that it leaves.

    python3 tests/check_tools.py WHEEL SCRATCH_DIR

`uv tool install`, `pipx install` and `pip install --only-binary :all:`, with the wheels of all dependencies
in one folder. No tool may ask an index; each has a home of its own in SCRATCH_DIR and no compiler on PATH.
No bytecode is written, which would take the longest.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from check_wheel import run

TOOLS = ("uv>=0.5", "pipx>=1.7")
COMMANDS = (["--version"], ["topo", "--json"], ["help", "installing"])
Command = list[str | Path]


def by_uv(tools: Path, wheels: Path, _wheel: Path) -> Command:
    return [tools / "uv", "tool", "install", "-q", "--no-index", "--find-links", wheels, "phasewise"]


def by_pipx(tools: Path, wheels: Path, wheel: Path) -> Command:
    given = f"--no-index --find-links={wheels} --only-binary=:all: --no-compile"
    return [tools / "pipx", "install", "-q", f"--pip-args={given}", wheel]


def by_pip(_tools: Path, wheels: Path, _wheel: Path) -> Command:
    options = ("--only-binary", ":all:", "--no-compile", "--no-index", "--find-links", wheels)
    return [Path("venv", "bin", "pip"), "install", "-q", *options, "phasewise"]


WAYS = {"uv tool install": by_uv, "pipx install": by_pipx, "pip install --only-binary :all:": by_pip}


def surroundings(home: Path, path: Path) -> dict[str, str]:
    """An environment with nothing of this user's, in which every tool leaves its commands in `home`/bin."""
    return {
        "PATH": str(path),
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_DATA_HOME": str(home / "data"),
        "UV_TOOL_BIN_DIR": str(home / "bin"),
        "UV_PYTHON": sys.executable,
        "PIPX_HOME": str(home / "pipx"),
        "PIPX_BIN_DIR": str(home / "bin"),
        "PIPX_DEFAULT_PYTHON": sys.executable,
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def main() -> None:
    wheel, scratch = (Path(word).resolve() for word in sys.argv[1:3])
    wheels, tools, path = scratch / "wheels", scratch / "tools" / "bin", scratch / "path"
    path.mkdir(parents=True)
    (path / "python3").symlink_to(sys.executable)
    assert shutil.which("cc", path=str(path)) is None
    run(sys.executable, "-m", "venv", tools.parent, cwd=scratch)
    run(tools / "pip", "install", "-q", *TOOLS, cwd=scratch)
    run(tools / "pip", "download", "-q", "--only-binary", ":all:", "-d", wheels, wheel, cwd=scratch)
    for said, way in WAYS.items():
        home = scratch / way.__name__
        environment = surroundings(home, path)
        run(sys.executable, "-m", "venv", home / "venv", cwd=scratch)
        run(*way(tools, wheels, wheel), cwd=home, **environment)
        (command,) = [*home.glob("bin/phasewise"), *home.glob("venv/bin/phasewise")]
        for arguments in COMMANDS:
            run(command, *arguments, cwd=home, **environment)
        print(f"{said}: {wheel.name} from a folder, with no index and no compiler; runs", flush=True)


if __name__ == "__main__":
    main()
