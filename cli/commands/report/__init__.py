"""`phasewise report`: what tuning is worth, and what the database knows of this machine, as one page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from phasewise.cli.options import DbOption, JsonOption
from phasewise.cli.present import check_target, note, owns_stdout, print_json, write_target

DEFAULT_PAGE = Path("phasewise-report.html")


def report(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help=f"HTML file to write; -: stdout [default: {DEFAULT_PAGE}; with --json none]",
            show_default=False,
        ),
    ] = None,
    no_measure: Annotated[
        bool,
        typer.Option("--no-measure", help="leave out the machine's limits, which take seconds to measure"),
    ] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what tuning gained, and write a page about this machine.

    $ phasewise report
    $ phasewise report -o machine.html --no-measure

    Printed: gains over the default schedules with their intervals, by kind of
    machine, format and rows; a whole model's tokens/s before and after, where
    tune-kernels or tune-config measured them; and where nothing was gained.
    The page has that too, and topology and plans, the schedule in use for
    each weight, a roofline plot, the trials of each search, and what each
    version of phasewise wrote. It is one file that fetches nothing; host and
    user names are not in it.
    """
    from phasewise._version import __version__
    from phasewise.cli.commands.report.text import print_worth
    from phasewise.workflows.machine_report.facts import report_of
    from phasewise.workflows.machine_report.json import worth_fields
    from phasewise.workflows.machine_report.page import page

    target = output if output is not None or as_json else DEFAULT_PAGE
    is_stdout = owns_stdout(target, as_json)
    measure = not no_measure and target is not None
    if measure:
        check_target(target)
    contents = report_of(db, measure=measure, report=note)
    if target is not None:
        write_target(target, page(contents, __version__, time.time()))
    if as_json:
        print_json(worth_fields(contents.worth))
    elif not is_stdout:
        print_worth(contents.worth)
    if target is not None and not is_stdout:
        note(f"report written to {target}")
