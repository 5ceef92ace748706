"""`phasewise provision`: how many machines of which kind a load and its promises need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phasewise.cli.option_sets import spread
from phasewise.cli.options import JsonOption, TraceArgument, WideOption
from phasewise.cli.present import check_target, fail, note, owns_stdout, print_json, write_target
from phasewise.cli.tables import show
from phasewise.workflows.capacity.settings import ClusterInputs, ProvisionWish

EXIT_FAILURE = 1


@spread
def provision(
    trace: TraceArgument,
    wish: ProvisionWish,
    inputs: ClusterInputs,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE.svg", help="draw the frontiers of designs with two kinds; -: stdout"
        ),
    ] = None,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the smallest cluster for a rate, or the fastest one for a budget, that keeps its promises.

    $ phasewise provision lognormal:1500,0.8/30,0.8 --rate 6 --minimise machines
    $ phasewise provision trace.csv --cost 100 --design mixed:h100,split:h100/h100

    With --rate each design's cheapest cluster is found; with --cost or --power its highest rate. Clusters are
    judged by simulation (phasewise simulate): those near the border between numbers of machines that keep
    the promises and numbers that do not, and every neighbour of the answer. Exit code 1 if no design has an
    answer.

    With --embeddings the machines for a day of embedding queries are counted, with their CPUs and without.
    """
    if wish.embeddings is not None:
        _provision_embeddings(trace, wish, as_json=as_json)
        return
    from phasewise.cli.commands.capacity.text import frontier_chart, provision_text
    from phasewise.workflows.capacity.json import provision_fields
    from phasewise.workflows.capacity.provision import provision_cluster

    owns_stdout(plot, as_json)
    check_target(plot)
    answers, slo = provision_cluster(trace, wish, inputs, note)
    if as_json:
        print_json(provision_fields(answers, slo))
    elif not owns_stdout(plot):
        show(*provision_text(answers, slo, wide=wide))
    if all(answer.spec is None for answer in answers):
        fail(f"no design has an answer: {answers[0].reason}", EXIT_FAILURE)
    if plot is not None:
        if not any(len(answer.cell) > 1 and answer.frontier for answer in answers):
            fail("--plot: no design has a frontier of two kinds of machines", EXIT_FAILURE)
        write_target(plot, frontier_chart(answers))


def _provision_embeddings(day: str, wish: ProvisionWish, *, as_json: bool) -> None:
    from phasewise.cli.commands.capacity.text import embedding_text
    from phasewise.workflows.capacity.embeddings import provision_embeddings
    from phasewise.workflows.capacity.json import embedding_fields

    answer = provision_embeddings(day, wish)
    if as_json:
        print_json(embedding_fields(answer))
    else:
        show(*embedding_text(answer))
