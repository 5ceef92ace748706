"""The arrows between the rooms (docs/architecture.md): every import of ours is one that the table allows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

ROOMS = ("phasewise", "cli", "serving", "tuner", "kerneldb", "migrations", "topology", "cython_kernels")

# Integers in, decisions out: no tensors, sockets or clock, so that a simulator can run the same code.
PURE = (
    "serving.request",
    "serving.prefixes",
    "serving.pools",
    "serving.batch",
    "serving.errors",
    "tuner.plans",
)

# Longest matching prefix decides. A module may always import its own room unless its row says less.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "phasewise": ("",),
    "cli": ("",),
    "serving": ("serving", "tuner.plans", "kerneldb", "topology", "cython_kernels"),
    "serving.request": PURE,
    "serving.pools": PURE,
    "serving.scheduler": PURE,
    "serving.prefixes": PURE,
    "serving.pacing": PURE,
    "tuner": ("tuner", "kerneldb", "topology", "cython_kernels"),
    "tuner.topotree": ("tuner.topotree", "tuner.plans", "tuner.errors", "topology"),
    "tuner.search": ("tuner.search", "kerneldb.records", "topology"),
    "kerneldb": ("kerneldb", "topology", "migrations"),
    "kerneldb.records": ("kerneldb.errors",),
    "migrations": ("kerneldb.models",),
    "migrations.versions": (),
    "topology": ("topology",),
    "cython_kernels": ("cython_kernels",),
}

# Libraries with one home.
HOMES: dict[str, tuple[str, ...]] = {
    "sqlalchemy": ("kerneldb", "migrations"),
    "alembic": ("kerneldb", "migrations"),
    "typer": ("cli",),
    "rich": ("cli",),
    "optuna": ("tuner.config",),
    "fastapi": ("serving.http",),
    "starlette": ("serving.http",),
    "uvicorn": ("serving.http",),
    "llguidance": ("serving.guides",),
    "aiohttp": ("cli",),
}


def _sources() -> Iterator[tuple[str, Path]]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), path


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write phasewise.<room>"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _under(module: str, prefix: str) -> bool:
    return prefix == "" or module == prefix or module.startswith(prefix + ".")


def _rule(module: str) -> tuple[str, ...]:
    return MAY_IMPORT[max((row for row in MAY_IMPORT if _under(module, row)), key=len)]


SOURCES = list(_sources())


@pytest.mark.parametrize(("module", "path"), SOURCES, ids=[module for module, _ in SOURCES])
def test_imports_follow_the_arrows(module: str, path: Path) -> None:
    """No module imports a room above it, and nobody imports `cli` but the entry point."""
    for target in _imports(path):
        if target.startswith("phasewise."):
            ours = target.removeprefix("phasewise.")
            allowed = any(_under(ours, prefix) for prefix in _rule(module))
            assert allowed, f"{module} imports {target}"
            assert not _under(ours, "cli") or _under(module, "cli") or module == "phasewise.__main__", (
                f"{module} imports cli"
            )


@pytest.mark.parametrize(("module", "path"), SOURCES, ids=[module for module, _ in SOURCES])
def test_libraries_stay_in_their_room(module: str, path: Path) -> None:
    """SQLAlchemy in the database, typer and rich in the command line, the web framework in `serving.http`."""
    for target in _imports(path):
        homes = HOMES.get(target.split(".")[0])
        assert homes is None or any(_under(module, home) for home in homes), f"{module} imports {target}"


def test_every_room_is_mapped_into_the_import_root() -> None:
    """A package folder that setup.cfg forgets would be missing from the wheel."""
    mapping = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    for room in ROOMS:
        for init in (ROOT / room).rglob("__init__.py"):
            package = ".".join(init.parent.relative_to(ROOT).parts)
            name = package if package == "phasewise" else f"phasewise.{package}"
            assert f"\n    {name}\n" in mapping, f"setup.cfg does not list {name}"
