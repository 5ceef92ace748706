"""Commands of benchmarks and soaks that pages name are there, and have the options that they are given."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import typer

from tests.support import ROOT

PAGES = [
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
        for path in PAGES
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
