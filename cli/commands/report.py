"""`phasewise report`: what the database knows of this machine, as one page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from phasewise.cli.options import DbOption
from phasewise.cli.present import note, owns_stdout, write_target


def report(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="HTML file to write; -: stdout")
    ] = Path("phasewise-report.html"),
    no_measure: Annotated[
        bool,
        typer.Option("--no-measure", help="leave out the machine's limits, which take seconds to measure"),
    ] = False,
    db: DbOption = None,
) -> None:
    """Write a page of what the database knows of this machine.

    Topology and plans, the schedule in use for each weight with its gain,
    a roofline plot, the trials of each search, and what each version of
    phasewise wrote. The page is one file that fetches nothing; host and
    user names are not in it.
    """
    from phasewise._version import __version__
    from phasewise.workflows.machine_report.facts import report_of
    from phasewise.workflows.machine_report.page import page

    found = report_of(db, measure=not no_measure, report=note)
    write_target(output, page(found, __version__, time.time()))
    if not owns_stdout(output):
        note(f"report written to {output}")
