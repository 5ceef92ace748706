"""Pages for users of other engines: every flag of ours that they name is one of a command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.command_options import commands

GUIDE = Path(__file__).parents[2] / "docs" / "guide"
PAGES = sorted(GUIDE.glob("coming-from-*.md"))
SHORT = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]*)")


def test_there_is_a_page_for_each_engine() -> None:
    assert [page.stem for page in PAGES] == [
        "coming-from-intel-and-deepsparse",
        "coming-from-llama-cpp",
        "coming-from-vllm",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_flags_that_a_table_maps_to_are_ours(page: Path) -> None:
    ours = {
        flag for command in commands().values() for parameter in command.params for flag in parameter.opts
    }
    rows = [
        line.split(" | ") for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ]
    named = {flag for row in rows for flag in SHORT.findall(row[1])}

    assert named
    assert named <= ours, named - ours


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_that_a_page_names_are_ours(page: Path) -> None:
    named = set(re.findall(r"`phasewise ([a-z-]+)", page.read_text(encoding="utf-8")))

    assert named
    assert named <= {name.split()[0] for name in commands()} | {"bench"}
