"""`phasewise help`: every page of the guide can be read in a terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phasewise.cli.commands.help_topic import COLUMNS, page_text, titles
from phasewise.cli.main import app

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
    for command in (line for line in page.splitlines() if line.startswith("$ ")):
        assert command in told
    text = "".join(re.split(r"^```.*?^```$", told, flags=re.S | re.M))
    assert [line for line in text.splitlines() if len(line) > COLUMNS] == []


def test_a_command_s_help_is_its_own() -> None:
    asked = CliRunner().invoke(app, ["topo", "--help"], env={"PHASEWISE_CONFIG": "/dev/null"}).output

    assert _help("topo") == (0, asked)


def test_a_page_that_is_not_there_is_one_line() -> None:
    code, told = _help("tunning")

    assert (code, told) == (2, "phasewise: no page or command 'tunning'; did you mean tuning?\n")
