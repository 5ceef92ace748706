"""`phasewise bench serve`: a load on any server of the OpenAI API, and what its clients saw."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from phasewise._options import REQUIRED, argument, option
from phasewise._words import counted
from phasewise.cli.options import Form
from phasewise.cli.present import EXIT_INTERRUPTED, check_target, fail, note, owns_stdout, say, write_target
from phasewise.cli.status_line import status_line
from phasewise.loadtest.settings import Asking, Promises, SendingTimes, SentLengths

if TYPE_CHECKING:
    from phasewise.loadtest.metrics import RequestOutcome


def serve(
    *,
    url: str = argument(REQUIRED, "the server, e.g. http://127.0.0.1:8000", "URL"),
    times: SendingTimes,
    lengths: SentLengths,
    asking: Asking,
    promises: Promises,
    model: str = option("", "model to ask for [default: the first listed]", metavar="NAME"),
    output: Form = option("md", "form of the results", "-o", "--output", panel="What is printed"),
    plot: Path | None = option(
        None,
        "draw the distributions of latencies and, with --slo, attainment over the rate; -: stdout",
        panel="What is printed",
        metavar="FILE.svg",
    ),
) -> None:
    """Load a server of the OpenAI API and measure what its clients see: TTFT, TPOT, ITL, end to end, goodput.

    $ phasewise bench serve http://127.0.0.1:8000 --concurrency 8
    $ phasewise bench serve http://127.0.0.1:8000 --find-rate --slo tpot=200ms

    Without --rate and --trace, --concurrency clients (8) send their next
    request when they have their answer. Failed requests are counted by kind;
    where all have failed, the exit code is 1.

    Fields have the names and the meaning of vLLM's bench serve. Ctrl-C
    prints what was measured.
    """
    from phasewise.cli.commands.bench.serve_text import FORMATS, draw_report
    from phasewise.loadtest.session import load_test_of, run_load_test

    check_target(plot)
    test = load_test_of(url, model, times, lengths, asking, promises)
    report = run_load_test(test, note, load_progress)
    if not owns_stdout(plot):
        say(FORMATS[output](report), end="")
    if plot is not None:
        picture = draw_report(report)
        if picture is None:
            note(f"{plot} is not written: no answer is complete")
        else:
            write_target(plot, picture)
    if report.was_stopped:
        raise typer.Exit(EXIT_INTERRUPTED)
    outcomes = report.measured.outcomes
    if outcomes and not any(outcome.is_complete for outcome in outcomes):
        fail(f"none of {counted(len(outcomes), 'request')} was answered; the results say why", 1)


@contextmanager
def load_progress(n_requests: int) -> Iterator[Callable[[RequestOutcome], None]]:
    """Yield an observer that counts outcomes on a status line, which is removed at the end."""
    counts = {"answered": 0, "failed": 0}

    def line() -> str:
        failed = f", {counts['failed']} failed" if counts["failed"] else ""
        return f"{counts['answered']} of {n_requests} answered{failed}"

    with status_line(line_every_s=math.inf) as status:

        def observe(outcome: RequestOutcome) -> None:
            counts["answered"] += 1
            counts["failed"] += outcome.failure is not None
            status.show(line)

        yield observe
