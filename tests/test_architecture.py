"""The arrows between the rooms (docs/architecture.md): every import of ours is one that the table allows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

LINKS = sorted(path for path in (ROOT / "phasewise").iterdir() if path.is_symlink())
"""What makes a folder at the top of the repository a package of ours: phasewise/tuner -> ../tuner."""

ROOMS = ("phasewise", *(link.name for link in LINKS))

# Integers in, decisions out: no tensors, sockets or clock, so that a simulator can run the same code.
PURE = (
    "serving.request",
    "serving.prefixes",
    "serving.waiting_line",
    "serving.client_turns",
    "serving.admission",
    "serving.client_shares",
    "serving.prefill_turns",
    "serving.scheduler_terms",
    "serving.scheduler_laws",
    "serving.pools",
    "serving.batch",
    "serving.errors",
    "tuner.plans",
)

# Longest matching prefix decides. A module may always import its own room unless its row says less.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "phasewise": ("",),
    "phasewise.torch": ("torch", "cython_kernels"),
    "cli": ("",),
    "workflows": (
        "workflows",
        "cluster",
        "serving",
        "tuner",
        "ir",
        "kerneldb",
        "topology",
        "cython_kernels",
        "_files",
        "_places",
        "_toml",
        "_version",
    ),
    "loadtest": (
        "loadtest",
        "tuner.config.slo",
        "tuner.config.trace",
        "tuner.config.lengths",
        "tuner.errors",
        "_version",
    ),
    "serving": (
        "serving",
        "tuner.plans",
        "kerneldb",
        "topology",
        "cython_kernels",
        "_files",
        "_places",
    ),
    "serving.instance": ("serving", "cython_kernels", "_version"),
    "serving.request": PURE,
    "serving.pools": PURE,
    "serving.scheduler": PURE,
    "serving.prefixes": PURE,
    "serving.waiting_line": PURE,
    "serving.client_turns": PURE,
    "serving.admission": PURE,
    "serving.client_shares": PURE,
    "serving.prefill_turns": PURE,
    "serving.scheduler_terms": PURE,
    "serving.scheduler_laws": PURE,
    "serving.pacing": PURE,
    "cluster": (
        "cluster",
        "_files",
        "_toml",
        *PURE,
        "tuner.config.slo",
        "tuner.errors",
        "serving.scheduler",
        "serving.pacing",
        "kerneldb",
        "topology",
    ),
    "cluster.front": ("cluster.routing", "cluster.supervisor", "cluster.errors", "serving"),
    "cluster.supervisor": ("cluster.routing", "serving", "_version"),
    "cluster.local_instances": ("cluster", "serving"),
    "cluster.ray_cluster": ("cluster", "serving"),
    "cluster.routing": ("cluster.errors",),
    "tuner": ("tuner", "kerneldb", "topology", "cython_kernels", "_files", "_places"),
    "tuner.topotree": ("tuner.topotree", "tuner.plans", "tuner.errors", "topology"),
    "tuner.search": ("tuner.search", "kerneldb.records", "topology"),
    "ir": ("ir", "_files"),
    "kerneldb": ("kerneldb", "topology", "migrations", "_places"),
    "kerneldb.records": ("kerneldb.errors",),
    "migrations": ("kerneldb.models",),
    "migrations.versions": (),
    "topology": ("topology", "_files"),
    "cython_kernels": ("cython_kernels",),
}

COMMON = ("_words",)
"""Rules for numbers in sentences; it imports nothing. For every room that imports others or itself."""

# Libraries with one home.
HOMES: dict[str, tuple[str, ...]] = {
    "sqlalchemy": ("kerneldb", "migrations"),
    "alembic": ("kerneldb", "migrations"),
    "typer": ("cli",),
    "rich": ("cli",),
    "optuna": ("tuner.config",),
    "torch": ("phasewise.torch",),
    "fastapi": ("serving.http",),
    "starlette": ("serving.http",),
    "h11": ("serving.http",),
    "llguidance": ("serving.guides",),
    "tree_sitter": ("ir.parse", "ir.parse_source", "ir.parse_expressions"),
    "tree_sitter_c": ("ir.parse_source",),
    "aiohttp": ("loadtest",),
    "ray": ("cluster.ray_cluster",),
    "zmq": ("serving.sockets", "serving.instance", "cluster.front"),
}


def _sources() -> Iterator[tuple[str, Path]]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):  # which follows no links
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), path


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:  # a process of another interpreter, which has no phasewise
                assert path.parent.name == "peer_worker", f"{path}: relative import; write phasewise.<room>"
                continue
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _under(module: str, prefix: str) -> bool:
    return prefix == "" or module == prefix or module.startswith(prefix + ".")


def _rule(module: str) -> tuple[str, ...]:
    return MAY_IMPORT[max((row for row in MAY_IMPORT if _under(module, row)), key=len)]


def _may_import(module: str, target: str) -> bool:
    if _under(target, "cli") and not _under(module, "cli"):
        return module == "phasewise.__main__"
    allowed = _rule(module)
    return any(_under(target, prefix) for prefix in (*allowed, *(COMMON if allowed else ())))


SOURCES = list(_sources())


def test_imports_follow_the_arrows() -> None:
    """No module imports a room above it, and nothing imports `cli` but the entry point."""
    broken = [
        f"{module} imports {target}"
        for module, path in SOURCES
        for target in _imports(path)
        if target.startswith("phasewise.")
        if not _may_import(module, target.removeprefix("phasewise."))
    ]
    assert not broken


def test_only_tests_of_the_command_line_import_it() -> None:
    """A test or benchmark that needs what a command does imports the workflow."""
    for folder in ("tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.parts[len(ROOT.parts) + 1] != "cli":
                imported = [target for target in _imports(path) if _under(target, "phasewise.cli")]
                assert not imported, f"{path.relative_to(ROOT)} imports {imported}"


def test_nothing_below_the_command_line_prints() -> None:
    """Except workers, whose stdout is a pipe to the process that started them."""
    for module, path in SOURCES:
        if _under(module, "workflows") and not _under(module, "workflows.bench"):
            calls = (
                node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
            )
            names = {func.id for func in calls if isinstance(func, ast.Name)}
            assert "print" not in names, f"{module} prints"


def test_libraries_stay_in_their_room() -> None:
    """SQLAlchemy in the database, typer and rich in the command line, the web framework in `serving.http`."""
    broken = [
        f"{module} imports {target}"
        for module, path in SOURCES
        for target in _imports(path)
        if not any(_under(module, home) for home in HOMES.get(target.split(".")[0], ("",)))
    ]
    assert not broken


def test_every_room_is_linked_into_the_import_root() -> None:
    """A package without a link, or a folder without `__init__.py`, would be missing from the wheel."""
    for link in LINKS:
        assert link.readlink() == Path("..", link.name)
        assert {path.parent for path in link.resolve().rglob("*.py")} == {
            path.parent for path in link.resolve().rglob("__init__.py")
        }, f"a folder of {link.name}/ lacks __init__.py"
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(ROOMS), f"ln -s ../ROOM phasewise/ROOM for each of {packages - set(ROOMS)}"


def test_modules_have_one_name() -> None:
    """An editable install puts the root on sys.path; `import tuner` would be a second phasewise.tuner."""
    ours = [
        path for folder in (*ROOMS, "tests", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")
    ]
    wrong = [
        f"{path.relative_to(ROOT)} imports {target}"
        for path in ours
        for target in _imports(path)
        if target.split(".")[0] in ROOMS[1:]
    ]
    assert not wrong


def test_public_classes_have_one_name() -> None:
    """A class that two rooms could mean by one word is hard to search for."""
    homes: dict[str, list[str]] = {}
    for module, path in SOURCES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert not {name: modules for name, modules in homes.items() if len(modules) > 1}


def test_docstrings_name_what_they_describe() -> None:
    """A docstring that begins with "Of" can be read only with the name above it."""
    broken = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for _, path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str) and node.value.value.lstrip().startswith("Of ")
    ]
    assert not broken
