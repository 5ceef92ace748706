"""Help of every command: plain text within 80 columns, without colours, and no words that one reads twice."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.cli import command
from tests.cli.command_options import commands

COLUMNS = 80
READ_TWICE = (
    r"\bso many\b",
    r"\b[0-9.]+e[+-][0-9]",  # a number with an exponent
    r"\b1 [a-z]+[^s\W]s\b",  # a plural of one
    r"\.{4,}|\[\[",  # an argument's name with dots of its own
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
