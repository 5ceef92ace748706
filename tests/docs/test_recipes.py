"""Recipes for contributors and commands of benchmarks: what pages name is there and suffices."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.support import ROOT
from tests.test_architecture import ROOMS

PAGES = ("docs/recipes.md", "docs/architecture.md", "docs/guide/model-families.md", "CONTRIBUTING.md")
ROOTS = (".", "cython_kernels", "serving/loaders")
"""Folders that paths of the pages begin at."""
SUFFIXES = (".py", ".pyi", ".pyx", ".pxi", ".c", ".h")
PLACEHOLDERS = re.compile(r"NAME|ROOM|<name>|\*|calm|example|[A-Z]+=")


def recipes() -> dict[str, str]:
    """The text of each recipe, by its title."""
    text = (ROOT / "docs/recipes.md").read_text()
    return dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.M | re.S))


@cache
def product() -> dict[str, str]:
    """The text of every source of the product, by its path."""
    files = [file for room in ROOMS for file in (ROOT / room).rglob("*")]
    return {
        str(file.relative_to(ROOT)): file.read_text()
        for file in files
        if file.suffix in SUFFIXES and not file.is_symlink() and file.name != "_native.c"
    }


def named_files(text: str) -> set[str]:
    return set(re.findall(r"`([\w/.-]+\.(?:py|pyi|c|h|pxi|md|json|cfg))`", text))


@pytest.mark.parametrize("title", recipes())
def test_a_recipes_example_is_in_the_files_that_it_names_and_no_others(title: str) -> None:
    text = recipes()[title]
    (word,) = re.findall(r"^Example: `(\w+)`", text, re.M)
    mention = re.compile(rf"\b(?:PW_)?{word}(?:_lanes)?\b", re.I)
    if title == "A layer that differs":  # kernels have a word of their own that is spelled so
        mention = re.compile(rf"\b{word}=|\.{word}\b|\b{word}: bool")

    mentioning = {path for path, source in product().items() if mention.search(source)}

    assert mentioning
    assert mentioning <= named_files(text)


@pytest.mark.parametrize("page", PAGES)
def test_files_and_modules_that_a_page_names_are_there(page: str) -> None:
    """Paths from the root of the repository, or from the folder that a row of the page is about."""
    text = (ROOT / page).read_text()
    for name in named_files(text):
        if "/" in name and not PLACEHOLDERS.search(name):
            assert any((ROOT / folder / name).exists() for folder in ROOTS), name
    for module in re.findall(r"`((?:[a-z]\w+\.)+[a-z]\w+)`", text):
        if module.split(".")[0] in ROOMS:
            assert is_module_or_attribute(module), module


def is_module_or_attribute(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").is_file() or (ROOT / f"{name}").is_file():
        return True
    parent, _, attribute = name.rpartition(".")
    file = (ROOT / parent.replace(".", "/")).with_suffix(".py")
    return file.is_file() and re.search(rf"\b{attribute}\b", file.read_text()) is not None


def code_of(title: str) -> dict[str, Any]:
    (block,) = re.findall(r"```python\n(.*?)```", recipes()[title], re.S)
    module: dict[str, Any] = {}
    exec(compile(block, title, "exec", dont_inherit=True), module)
    return module


def test_the_option_of_the_recipe_arrives_as_one_value_within_its_bounds() -> None:
    app = typer.Typer()
    app.command()(code_of("An option of serve")["serve"])

    assert CliRunner().invoke(app, ["--patience", "2.5"]).output == "Patience(patience_s=2.5)\n"
    assert CliRunner().invoke(app, []).output == "Patience(patience_s=30.0)\n"
    assert CliRunner().invoke(app, ["--patience", "-1"]).exit_code == 2


def test_the_command_of_the_recipe_reads_its_argument_and_its_option() -> None:
    app = code_of("A command")["app"]

    assert CliRunner().invoke(app, ["a.txt", "--words"]).output == "a.txt True\n"
    assert CliRunner().invoke(app, ["a.txt"]).output == "a.txt False\n"
    assert CliRunner().invoke(app, []).exit_code == 2


WITH_COMMANDS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "benchmarks/README.md")),
    *sorted((ROOT / "benchmarks" / "notes").glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
GUIDES = [*(ROOT / "docs" / "guide").glob("*.md"), *(ROOT / "docs").glob("*.md")]
COMMAND = re.compile(r"(?:benchmarks/([a-z_0-9]+)\.py|tests\.soak\.([a-z_]+))((?: [^`\n#|$\\]+)?)")


def named() -> list[tuple[str, str, str]]:
    """(page, module, what follows on its line), each once."""
    mentions = {
        (str(path.relative_to(ROOT)), f"benchmarks.{own}" if own else f"tests.soak.{soak}", rest.strip())
        for path in WITH_COMMANDS
        for own, soak, rest in COMMAND.findall(path.read_text(encoding="utf-8"))
    }
    return sorted(mentions)


@cache
def options(module: str) -> set[str]:
    """Options of a benchmark, and names of its commands."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8")
    if "app = commands(" not in text:
        for name in re.findall(r"from tests\.soak\.(\w+) import \(?[^)]*?options_of", text):
            text += (ROOT / "tests" / "soak" / f"{name}.py").read_text(encoding="utf-8")
        return set(re.findall(r'"(--?[a-z][a-z-]*)"', text)) | {"--model", "--quick", "--only", "--help"}
    command = typer.main.get_command(importlib.import_module(module).app)
    every = [command, *getattr(command, "commands", {}).values()]
    flags = {
        flag
        for own_command in every
        for param in own_command.params
        for flag in (*param.opts, *param.secondary_opts)
    }
    return flags | set(getattr(command, "commands", {})) | {"--help"}


def gone() -> set[str]:
    """The programs that notes and decisions name although they have gone, as the README lists them."""
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    listed = text.partition("### Programs that have gone")[2].partition("went before:")[2].partition("##")[0]
    return {f"benchmarks.{name}" for name in re.findall(r"`([a-z_0-9]+)\.py`", listed)}


def gone_figures() -> set[str]:
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").partition("their figures (")[2]
    return set(re.findall(r"`([a-z-]+)`", text.partition(")")[0]))


def is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def test_every_program_that_a_page_names_is_there_or_listed_as_gone() -> None:
    missing = {module for _, module, _ in named() if not is_there(module)}

    assert missing == gone()
    assert not [module for module in gone() if is_there(module)]


def test_no_guide_names_a_program_that_has_gone() -> None:
    guides = {str(path.relative_to(ROOT)) for path in GUIDES}

    assert not [(page, module) for page, module, _ in named() if page in guides and module in gone()]


@pytest.mark.parametrize("module", sorted({module for _, module, _ in named()} - gone()))
def test_every_option_that_a_page_gives_is_one(module: str) -> None:
    offered = options(module)
    for page, own, rest in named():
        if own != module or rest.split(" ")[0] in gone_figures():
            continue
        words = shlex.split(rest.replace("'", " ")) if rest.count('"') % 2 == 0 else rest.split()
        given = words[: words.index("--")] if "--" in words else words
        flags = {word.split("=")[0] for word in given if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word)}
        assert flags <= offered, f"{page}: {module} {rest}"


def test_the_figures_that_pages_name_are_figures() -> None:
    asked = {rest.split()[0] for _, module, rest in named() if module == "benchmarks.figures" and rest}
    assert asked - {"NAME"} - gone_figures() <= options("benchmarks.figures")


SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fetch_early.py"


def test_the_early_fetch_needs_the_standard_library_alone() -> None:
    """`-I -S`: an interpreter that sees no installed package."""
    code = (
        f"from runpy import run_path; names = run_path({str(SCRIPT)!r});"
        "print(names['registry']().KNOWN[names['MODEL']].name)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )

    assert done.stdout == "smollm2-135m-instruct\n"
