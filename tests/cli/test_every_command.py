"""Help of every command and every page of the guide: examples first, whole lines of 80 columns."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from phasewise.cli.commands.help_topic import COLUMNS as PAGE_COLUMNS
from phasewise.cli.commands.help_topic import page_text, titles
from phasewise.cli.config_file import unknown_key
from phasewise.cli.main import app
from tests.cli import command
from tests.cli.command_options import commands

COLUMNS = 80
READ_TWICE = (
    r"\bso many\b",
    r"\b[0-9.]+e[+-][0-9]",  # a number with an exponent
    r"\b1 [a-z]+[^s\W]s\b",  # a plural of one
    r"\.{4,}|\[\[",  # an argument's name with dots of its own
    r"\bwhoever\b|\bof late\b|\bso long\b|without effect, and therefore refused",
    r"\bshare the work\b|\bwhat can be made of it\b|\bstays in use\b|\btake part in the last run\b",
)
"""Words of a help text that a reader stumbles over."""


@cache
def help_of(path: str) -> str:
    environment = {"COLUMNS": str(COLUMNS), "PHASEWISE_CONFIG": "/dev/null"}
    return command.text_of(*path.split(), "--help", env=environment)


@pytest.mark.parametrize("path", ["", *commands()])
def test_help_fits_the_terminal(path: str) -> None:
    text = help_of(path)

    assert [line for line in text.splitlines() if len(line) > COLUMNS] == []
    assert "\x1b" not in text


@pytest.mark.parametrize("path", commands())
def test_a_command_and_each_of_its_options_are_explained(path: str) -> None:
    explained = commands()[path]

    assert (explained.help or "").strip(), "no help"
    silent = [
        param.name
        for param in explained.params
        if not re.sub(r"\[[^]]*\]", "", getattr(param, "help", None) or "").strip()
    ]
    assert silent == []


@pytest.mark.parametrize("path", ["", *commands()])
def test_no_help_has_words_that_one_reads_twice(path: str) -> None:
    text = " ".join(help_of(path).split())

    assert [match[0] for words in READ_TWICE for match in re.finditer(words, text)] == []


def groups(node: Any = None, path: str = "") -> dict[str, Any]:
    """Each command that has subcommands, by its name, the root's empty."""
    node = node or command.tree()
    below = {path: node}
    for name in node.commands:
        if hasattr(node.commands[name], "commands"):
            below |= groups(node.commands[name], f"{path} {name}".strip())
    return below


@pytest.mark.parametrize("path", [*groups(), *commands()])
def test_help_begins_with_two_examples(path: str) -> None:
    explained = groups().get(path) or commands()[path]
    usage, heading, *lines = [line for line in help_of(path).splitlines() if line]

    assert usage.startswith("Usage: ")
    assert heading == "Examples:"
    assert len(explained.examples) == len(set(explained.examples)) == 2
    assert lines[:2] == [f"  {example}" for example in explained.examples]


@pytest.mark.parametrize(("path", "example"), [(p, e) for p, c in commands().items() for e in c.examples])
def test_an_example_is_a_run_of_its_command(path: str, example: str) -> None:
    context = command.parsed(example)

    assert context.command.callback.__code__ is commands()[path].callback.__code__


@pytest.mark.parametrize("path", commands())
def test_what_the_configuration_file_alone_has_is_a_line_there_and_no_flag(path: str) -> None:
    context = commands()[path].make_context(path, [], resilient_parsing=True)
    for parameter in commands()[path].params:
        if not getattr(parameter, "hidden", False):
            continue
        key = parameter.opts[0].lstrip("-").replace("-", "_")
        values = {key: parameter.default}
        for table in reversed(path.split()):
            values = {table: values}
        with pytest.raises(typer.BadParameter, match=rf"phasewise config set .*{key} VALUE"):
            commands()[path].parse_args(context, [f"{parameter.opts[0]}=1"])
        assert unknown_key(values, command.tree()) is None
        assert parameter.opts[0] not in help_of(path)


@pytest.mark.parametrize("path", commands())
def test_values_have_nouns_and_bounds_are_numbers(path: str) -> None:
    text = help_of(path)

    assert (
        re.findall(r"<(?:int|float|str|path|bool)(?: range)?>|\b(?:list|tuple)\[|<=|>=|\d\.0[\];]", text)
        == []
    )
    usage = text.split("\n\n")[0]
    assert not re.search(r"[{}]", usage)
    for parameter in commands()[path].params:
        values = parameter.metavar
        assert values is None or re.search(r"[A-Z]|[|]", values), (parameter.opts, values)


@pytest.mark.parametrize("path", [*groups(), *commands()])
def test_no_line_of_a_help_is_cut(path: str) -> None:
    """Neither a sentence, by an ellipsis, nor a flag, at its hyphens."""
    lines = help_of(path).splitlines()

    assert [line for line in lines if re.search(r"[a-z]\.\.\.$", line)] == []
    assert [line for line in lines if re.search(r"[\w-]-$", line)] == []


GUIDE = Path(__file__).parents[2] / "docs" / "guide"


def _help(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["help", *arguments], env={"PHASEWISE_CONFIG": "/dev/null"})
    return done.exit_code, done.output


def test_every_page_of_the_guide_is_listed() -> None:
    code, told = _help()

    assert code == 0
    assert [line.split()[0] for line in told.splitlines()] == sorted(path.stem for path in GUIDE.glob("*.md"))


@pytest.mark.many
@pytest.mark.parametrize("name", titles())
def test_a_page_keeps_its_commands_and_breaks_its_paragraphs_and_tables(name: str) -> None:
    code, told = _help(name)
    page = (GUIDE / f"{name}.md").read_text(encoding="utf-8")

    assert code == 0
    assert told == page_text(name)
    assert "<!--" not in told
    assert not re.search("^!", told, flags=re.M)
    for shown in (line for line in page.splitlines() if line.startswith("$ ")):
        assert shown in told
    text = "".join(re.split(r"^```.*?^```$", told, flags=re.S | re.M))
    assert [line for line in text.splitlines() if len(line) > PAGE_COLUMNS] == []


def test_a_command_s_help_is_its_own() -> None:
    asked = CliRunner().invoke(app, ["topo", "--help"], env={"PHASEWISE_CONFIG": "/dev/null"}).output

    assert _help("topo") == (0, asked)


def test_a_page_that_is_not_there_is_one_line() -> None:
    code, told = _help("tunning")

    assert (code, told) == (2, "phasewise: no page or command 'tunning'; did you mean tuning?\n")
