"""Recipes for contributors: the files that they name are there and suffice, and their code runs."""

from __future__ import annotations

import re
from functools import cache
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
