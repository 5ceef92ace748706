"""Options that `simulate` and `provision` share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from phasewise.cli.option_sets import opt, option_set
from phasewise.cli.options import DbOption
from phasewise.workflows.capacity.settings import ClusterInputs

TraceArgument = Annotated[
    str,
    typer.Argument(
        metavar="TRACE",
        help="requests: a trace file (Azure, Mooncake, splitwise-sim), or a distribution such as "
        "lognormal:220,1.1/160,0.8",
    ),
]


Lengths = Literal["requests", "columns"]
"""The lengths of drawn requests."""

RoutingPolicy = Literal["splitwise", "round-robin", "prefix-aware", "splitwise-sim"]
"""The assignment of requests to machines."""

INPUTS = option_set(
    ClusterInputs,
    None,
    model=opt("model whose step times machine types state [default: bloom-176b]"),
    duration_s=opt("with --rate: seconds for which requests are drawn", "--duration", min=1.0),
    draw=opt(
        "requests: each drawn request has the prompt and the answer of one request of the trace; "
        "columns: prompts and answers are drawn independently",
        kind=Lengths,
    ),
    seed=opt("seed of the drawn requests", min=0),
    perf_model=opt(
        "measured step times in the format of splitwise-sim's data/perf_model.csv, in place of the "
        "fitted curves of the shipped machine types",
        metavar="CSV",
    ),
    machine_from_db=opt(
        "take the step times of the machine type db, which a cluster file describes, from the tuning "
        "database: the beginning of a core signature, or CORE@PLACEMENT",
        metavar="SIGNATURE",
    ),
    machine_from_xml=opt(
        "model the step times of the machine type xml, which a cluster file describes: XML from lstopo "
        "of a machine that need not exist, and a model, e.g. machine.xml:config.json",
        metavar="XML:MODEL",
    ),
    reference=opt("machine type whose times slowdowns are relative to", metavar="TYPE"),
    db=DbOption,
)
