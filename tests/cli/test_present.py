"""Text from outside reaches a terminal as text; a status line changes there and is plain elsewhere."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.live import Live

from phasewise.cli.present import note, on_one_line, print_json, printable
from phasewise.cli.status_line import StatusLine, status_line
from tests.cli import command
from tests.support import ROOT
from tests.support.models.tiny_models import write_tiny_gguf

FAMILY = "\U0001f468\u200d\U0001f469"
HOSTILE = "a\x1b]0;owned\x07\x1b[2J\x9b31m\u202egpj.exe\rb"


def steers(text: str) -> bool:
    """True if a terminal would do anything but show it, lines and tabs apart."""
    return any(
        not character.isprintable() and character not in "\n\t" and not character.isspace()
        for character in text
    )


@given(st.text())
def test_nothing_that_steers_a_terminal_is_left(text: str) -> None:
    shown = printable(text)

    assert "\x1b" not in shown
    assert not any(ord(character) < 32 and character not in "\n\t" for character in shown)
    assert not any(0x7F <= ord(character) < 0xA0 or 0x202A <= ord(character) <= 0x202E for character in shown)
    assert printable(shown) == shown
    shown.encode()


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126)))
def test_plain_text_stays_as_it_is(text: str) -> None:
    assert printable(text + "\n\tä日本語") == text + "\n\tä日本語"


@pytest.mark.parametrize("text", [HOSTILE, "\ud800", "\u2066"])
def test_json_says_the_same_in_printable_characters(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"name": text})
    said = capsys.readouterr().out

    assert json.loads(said)["name"] == text
    assert not steers(said)


def test_an_answer_is_escaped_on_a_terminal_and_whole_in_a_pipe() -> None:
    """Joiners of scripts and emoji stay: a terminal only shows them."""
    script = f"from phasewise.cli.present import write_text; write_text({HOSTILE + FAMILY!r})"
    command = [sys.executable, "-c", script]
    ours, theirs = pty.openpty()
    try:
        subprocess.run(command, stdout=theirs, check=True)
        shown = os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    piped = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.decode()

    assert piped == HOSTILE + FAMILY
    assert shown.endswith(FAMILY)
    assert not steers(shown.replace(FAMILY, ""))


def test_no_command_prints_past_the_escaping() -> None:
    """`print` and echo stand in present.py alone; --version prints what is ours."""
    printing_lines = [
        f"{path.name}: {line.strip()}"
        for path in (ROOT / "cli").rglob("*.py")
        if path.name != "present.py"
        for line in path.read_text().splitlines()
        if re.search(r"(?<![\w.])print\(|typer\.echo\(", line)
    ]

    assert printing_lines == ['main.py: typer.echo(f"phasewise {__version__}")']


def test_a_name_of_several_lines_stays_on_one() -> None:
    assert on_one_line("a\nmodel  forged\tb\x1b[2J") == "a\\u000amodel  forged\\u0009b\\u001b[2J"


def test_progress_and_errors_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    note(HOSTILE)

    assert not steers(capsys.readouterr().err)


def test_a_models_name_does_not_steer_the_terminal(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a\x1b[31mb.gguf")
    text = command.text_of("models", "inspect", path)

    assert "\\u001b[31mb" in text
    assert not steers(text)


def test_a_terminal_gets_remarks_broken_between_words_and_a_pipe_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every word arrives, in order; a long word stays whole; lines that fit stay as they are."""
    monkeypatch.setenv("COLUMNS", "40")
    path = "/" + "x" * 60
    remark = f"| a   table |\nseveral words that do not fit on a line of forty, of {path}, which is long"

    shown = {}
    for is_terminal in (True, False):
        screen = io.StringIO()
        monkeypatch.setattr(screen, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr(sys, "stderr", screen)
        note(remark)
        shown[is_terminal] = screen.getvalue()

    assert shown[False] == remark + "\n"
    assert shown[True].split() == remark.split()
    assert shown[True].startswith("| a   table |\n")
    assert [line for line in shown[True].splitlines() if len(line) > 40] == [f"{path},"]


def test_off_a_terminal_a_line_is_printed_at_most_so_often(capsys: pytest.CaptureFixture[str]) -> None:
    with status_line(line_every_s=3600.0) as status:
        for number in range(5):
            status.show(lambda number=number: f"step {number}")  # type: ignore[misc]
        status.say("a remark")

    assert capsys.readouterr().err == "step 0\na remark\n"


def test_an_infinite_interval_prints_no_state_and_does_not_make_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def never() -> str:
        raise AssertionError("made for no reader")

    with status_line(line_every_s=math.inf) as status:
        status.show(never)

    assert capsys.readouterr().err == ""


def test_on_a_terminal_the_line_goes_and_remarks_stay_without_what_would_steer_it() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        status = StatusLine(live, 0.0)
        status.show(lambda: "state \x1b[2J1")
        status.say("remark \x1b[2J2")

    assert "\x1b[2J" not in screen.getvalue()
    assert "remark \\u001b[2J2\n" in screen.getvalue()
