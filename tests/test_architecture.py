"""The arrows between the rooms (docs/architecture.md): every import of ours is one that the table allows."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

LINKS = sorted(path for path in (ROOT / "phasewise").iterdir() if path.is_symlink())
"""Links that make a folder at the top of the repository a package of ours: phasewise/tuner -> ../tuner."""

ROOMS = ("phasewise", *(link.name for link in LINKS))


def _rows(table: str) -> dict[str, tuple[str, ...]]:
    """`room: rooms`, whose lines but the first are indented; `*` is every room."""
    rows = re.findall(r"^(\S+):(.*(?:\n .*)*)", table, re.MULTILINE)
    return {room: tuple("" if name == "*" else name for name in names.split()) for room, names in rows}


# Longest matching prefix decides. A module may always import its own room unless its row says less.
MAY_IMPORT = _rows("""
phasewise: *
phasewise.torch: torch cython_kernels
phasewise.vllm: vllm torch workflows.opening.tuned_schedules tuner kerneldb topology cython_kernels _version
cli: *
workflows: workflows cluster serving tuner ir kerneldb topology cython_kernels _files _interrupts _places
    _toml _version
loadtest: loadtest tuner.config.slo tuner.config.trace tuner.config.lengths tuner.errors _version
# Below: the rooms of serving, the lowest first. A room may import itself and what its row names.
serving: serving tuner.plans kerneldb topology cython_kernels _files _places _safetensors _words
serving.errors:
serving.batch: tuner.plans
serving.batches: serving.batches serving.errors _files
serving.processes: serving.processes serving.errors
serving.sandbox: serving.sandbox serving.processes serving.errors
serving.text: serving.text serving.sandbox serving.errors
serving.pools: serving.pools serving.batch serving.errors
# Integers in, decisions out: no tensors, sockets or clock, so that a simulator can run the same code.
serving.scheduling: serving.scheduling serving.pools serving.batch serving.errors tuner.plans
serving.grammar: serving.grammar serving.sandbox serving.processes.headroom serving.scheduling.waiting_line
    serving.errors
serving.tools: serving.tools serving.text serving.grammar serving.errors
serving.sampling: serving.sampling serving.grammar serving.errors cython_kernels
serving.models: serving.models serving.sampling serving.errors cython_kernels _files
serving.loaders: serving.loaders serving.models serving.sampling serving.text serving.processes
    serving.errors cython_kernels _files _places _safetensors _words
serving.ranks: serving.ranks serving.models serving.pools serving.processes serving.batch serving.errors
    cython_kernels tuner.plans topology
serving.prefix_store: serving.prefix_store serving.scheduling serving.pools serving.batch serving.errors
    cython_kernels _files _words
serving.drafts: serving.drafts serving.ranks serving.models serving.sampling serving.scheduling serving.text
    serving.processes serving.batch serving.errors
serving.engine: serving.engine serving.drafts serving.prefix_store serving.ranks serving.models
    serving.sampling serving.grammar serving.scheduling serving.pools serving.text serving.processes
    serving.batch serving.errors cython_kernels tuner.plans topology
serving.embedding: serving.embedding serving.engine.engine_host serving.engine.core_watch serving.loaders
    serving.ranks.rank_teams serving.models serving.scheduling.waiting_line serving.text serving.processes
    serving.errors cython_kernels topology _files _places
# The HTTP layer knows the engine by its messages. It never sees the scheduler, ranks or loaders.
serving.http: serving.http serving.batches serving.embedding serving.engine serving.sampling serving.tools
    serving.grammar serving.pools.contract serving.scheduling.waiting_line serving.text serving.sandbox
    serving.processes serving.errors topology.energy tuner.plans _files
cluster: cluster.errors
cluster.simulated: cluster.simulated cluster.routing cluster.errors serving.scheduling serving.pools
    serving.batch serving.errors tuner.plans tuner.config.slo tuner.errors kerneldb topology _files _toml
    _words
cluster.real: cluster.real cluster.routing cluster.errors serving cython_kernels _version
cluster.routing: cluster.errors serving.scheduling.held_prefixes
tuner: tuner kerneldb topology cython_kernels _files _places _safetensors
tuner.topotree: tuner.topotree tuner.plans tuner.errors topology
tuner.search: tuner.search kerneldb.records topology
ir: ir _files
kerneldb: kerneldb topology migrations _files _places
kerneldb.fields: kerneldb.errors
kerneldb.records: kerneldb.errors kerneldb.fields
migrations: kerneldb.tables
migrations.ddl:
migrations.versions: migrations.ddl
topology: topology _files
cython_kernels: cython_kernels _places
""")

COMMON = ("_json", "_options", "_rows", "_words")
"""The reader of JSON, fields that are options or columns, and rules for numbers in sentences, which import no
room: for every room that imports others or itself."""

# Libraries with one home.
HOMES = _rows("""
sqlalchemy: kerneldb migrations
alembic: kerneldb migrations
typer: cli
rich: cli
optuna: tuner.config
torch: phasewise.torch phasewise.vllm
vllm: phasewise.vllm
starlette: serving.http
h11: serving.http
python_multipart: serving.http
llguidance: serving.grammar.guides
tree_sitter: ir.raising.parse ir.raising.parse_compound ir.raising.parse_expressions ir.raising.parse_source
tree_sitter_c: ir.raising.parse_source
aiohttp: loadtest
ray: cluster.real.ray_connection
zmq: serving.processes.sockets cluster.real
""")


def _sources() -> Iterator[tuple[str, Path]]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):  # which follows no links
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), path


@dataclass
class Contents:
    """The parts of a file that the tests below ask for."""

    imports: list[str] = field(default_factory=list)
    prints: bool = False
    classes: list[str] = field(default_factory=list)
    """The module's own."""
    functions: list[tuple[str, int, int]] = field(default_factory=list)
    """Name, lines, parameters."""
    of_lines: list[int] = field(default_factory=list)
    """Lines of texts that stand alone and begin with "Of "."""


PRINTS = re.compile(r"(?<![\w.])print\(")


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Every statement. Expressions, of which there are twenty times as many, are not walked through."""
    blocks = [tree.body]
    while blocks:
        for statement in blocks.pop():
            yield statement
            for part in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
                blocks += (getattr(part, name, None) or [] for name in ("body", "orelse", "finalbody"))


@cache
def contents(path: Path) -> Contents:
    """Each file is parsed and walked once: several tests ask, and all files take seconds."""
    source, those = path.read_text(encoding="utf-8"), Contents()
    tree = ast.parse(source)
    those.prints = PRINTS.search(source) is not None
    those.classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in _statements(tree):
        match node:
            case ast.Import():
                those.imports += [alias.name for alias in node.names]
            case ast.ImportFrom(level=0):
                those.imports += [f"{node.module}.{alias.name}" for alias in node.names]
            case ast.ImportFrom():
                raise AssertionError(f"{path}: relative import; write phasewise.<room>")
            case ast.FunctionDef(args=args) | ast.AsyncFunctionDef(args=args):
                n_parameters = len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs)
                n_lines = (node.end_lineno or 0) - node.lineno + 1
                those.functions.append((node.name, n_lines, n_parameters))
            case ast.Expr(value=ast.Constant(value=str(text))) if text.lstrip().startswith("Of "):
                those.of_lines.append(node.lineno)
            case _:
                pass
    return those


def _imports(path: Path) -> list[str]:
    return contents(path).imports


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
            assert not contents(path).prints, f"{module} prints"


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
        for name in contents(path).classes:
            if not name.startswith("_"):
                homes.setdefault(name, []).append(module)
    assert not {name: modules for name, modules in homes.items() if len(modules) > 1}


def test_docstrings_name_what_they_describe() -> None:
    """A docstring that begins with "Of" can be read only with the name above it."""
    broken = [f"{path.relative_to(ROOT)}:{line}" for _, path in SOURCES for line in contents(path).of_lines]
    assert not broken


MOST_FILES = 25
SUFFIXES = (".py", ".pyx", ".pxi", ".pyi", ".c", ".h")


def test_folders_can_be_read_at_a_glance() -> None:
    """No folder has more than 25 source files of its own."""
    sizes = Counter(
        str(path.parent.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in SUFFIXES and path.name != "_native.c" and not path.is_symlink()
    )
    assert not {folder: n for folder, n in sizes.items() if n > MOST_FILES}


MOST_LINES, MOST_FUNCTION_LINES, MOST_PARAMETERS = 600, 80, 12
NO_NAMES = frozenset({"one", "found", "at", "known", "made", "gone"})
"""Words that say nothing of what a value is."""
MAY_BE_ASSIGNED = re.compile(
    rf"\b(?:{'|'.join(sorted(NO_NAMES))})\b\s*(?:[-=:,)\]}}|;#+*/%&^<>@\\]|in\b|if\b|$)", re.MULTILINE
)
"""Such a name and text that may follow where it gets a value: files without it need not be parsed."""


def test_a_module_that_is_a_program_starts_at_its_end() -> None:
    """What stands below is not there yet when `python -m` runs from above."""
    starts = 'if __name__ == "__main__":\n'
    broken = [
        module
        for module, path in SOURCES
        for _, _, after in [path.read_text(encoding="utf-8").partition(f"\n{starts}")]
        if re.search(r"^\S", after, re.MULTILINE)
    ]
    assert not broken


def test_modules_are_short() -> None:
    """No source of the product has more than 600 lines; the stub of a compiled module cannot be divided."""
    lengths = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n")
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in SUFFIXES and path.name not in ("_native.c", "_native.pyi")
    }
    assert not {name: n for name, n in lengths.items() if n > MOST_LINES}


def test_functions_are_short_and_have_few_parameters() -> None:
    """80 lines and 12 parameters; typer needs a parameter for each option of a command."""
    broken = []
    for module, path in SOURCES:
        for name, n_lines, n_parameters in contents(path).functions:
            is_wide = n_parameters > MOST_PARAMETERS and not _under(module, "cli.commands")
            if is_wide or n_lines > MOST_FUNCTION_LINES:
                broken.append(f"{module}.{name}: {n_lines} lines, {n_parameters} parameters")
    assert not broken


def _assigned(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names that values get, with their lines: variables, parameters, captures, fields, attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=str(name), ctx=ast.Store()) | ast.arg(arg=str(name)):
                yield name, node.lineno
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno
            case ast.ExceptHandler(name=str(name)) | ast.Attribute(attr=str(name), ctx=ast.Store()):
                yield name, node.lineno
            case _:
                pass


def test_values_have_names_of_what_they_hold() -> None:
    """None is called one, found, at, known, made or gone."""
    beside = [path for room in ("tests", "benchmarks") for path in (ROOT / room).rglob("*.py")]
    broken = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in [*(path for _, path in SOURCES), *beside]
        for source in [path.read_text(encoding="utf-8")]
        if MAY_BE_ASSIGNED.search(source)  # walking through a tree takes longer
        for name, line in _assigned(ast.parse(source))
        if name in NO_NAMES
    ]
    assert not broken


def test_every_folder_of_serving_and_cluster_has_a_row() -> None:
    """Each says what it may import, and every row is a folder or a file that is there."""
    folders = {
        f"{room}.{path.parent.name}"
        for room in ("serving", "cluster")
        for path in (ROOT / room).glob("*/__init__.py")
    }
    assert folders <= set(MAY_IMPORT)
    modules = {module for module, _ in SOURCES}
    assert set(MAY_IMPORT) <= modules | {"phasewise", "migrations.versions"}
    targets = {target for row in MAY_IMPORT.values() for target in row} - {"", "torch"}
    assert targets <= modules | {f"phasewise.{name}" for name in modules} | {
        module.removeprefix("phasewise.") for module in modules
    }


def test_rooms_of_serving_are_layers() -> None:
    """By their rows: a room imports only rooms whose rows are above its own."""
    rows = [row for row in MAY_IMPORT if row.startswith("serving.")]
    broken = [
        f"{row} may import {target}"
        for index, row in enumerate(rows)
        for target in MAY_IMPORT[row]
        if target.startswith("serving.") and not any(_under(target, below) for below in rows[: index + 1])
    ]
    assert not broken


def test_files_form_no_circle() -> None:
    """Imports within functions and for types count as well."""
    paths = dict(SOURCES)
    graph: dict[str, set[str]] = {}
    for module, path in SOURCES:
        names = (
            target.removeprefix("phasewise.") for target in _imports(path) if target.startswith("phasewise.")
        )
        imported = (name if name in paths else name.rpartition(".")[0] for name in names)
        graph[module] = {name for name in imported if name in paths and name != module}
    TopologicalSorter(graph).prepare()  # CycleError names the files of a circle
