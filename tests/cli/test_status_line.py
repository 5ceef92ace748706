"""The status line: one changing line on a terminal, plain lines or none elsewhere."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console
from rich.live import Live

from phasewise.cli.status_line import StatusLine, status_line


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
