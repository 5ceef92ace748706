"""Options that `simulate` and `provision` share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise.cli.present import note

if TYPE_CHECKING:
    from phasewise.cluster.spec_file import MachineCatalogue, StepSources
    from phasewise.cluster.steps import StepTimes

DB_MACHINE, XML_MACHINE = "db", "xml"
"""Names of the machine types that --machine-from-db and --machine-from-xml give step times."""


class Lengths(StrEnum):
    """How drawn requests get their lengths."""

    requests = "requests"
    columns = "columns"


TraceArgument = Annotated[
    str,
    typer.Argument(
        metavar="TRACE",
        help="requests: a trace file (Azure, Mooncake, splitwise-sim), or a distribution such as "
        "lognormal:220,1.1/160,0.8",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="model whose step times machine types state [default: bloom-176b]"),
]
PerfModelOption = Annotated[
    Path | None,
    typer.Option(
        "--perf-model",
        metavar="CSV",
        help="measured step times in the format of splitwise-sim's data/perf_model.csv, in place of the "
        "fitted curves of the shipped machine types",
    ),
]
MachineFromDbOption = Annotated[
    str | None,
    typer.Option(
        "--machine-from-db",
        metavar="SIGNATURE",
        help="take the step times of the machine type db, which a cluster file describes, from the tuning "
        "database: the beginning of a core signature, or CORE@PLACEMENT",
    ),
]
MachineFromXmlOption = Annotated[
    str | None,
    typer.Option(
        "--machine-from-xml",
        metavar="XML:MODEL",
        help="model the step times of the machine type xml, which a cluster file describes: XML from lstopo "
        "of a machine that need not exist, and a model, e.g. machine.xml:config.json",
    ),
]
DurationOption = Annotated[
    float, typer.Option("--duration", min=1.0, help="seconds of drawn requests, where a rate is given")
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="seed of the drawn requests")]
DrawOption = Annotated[
    Lengths,
    typer.Option(
        "--draw",
        help="requests: each drawn request has the prompt and the answer of one request of the trace; "
        "columns: prompts and answers are drawn independently",
    ),
]
ReferenceOption = Annotated[
    str,
    typer.Option("--reference", metavar="TYPE", help="machine type whose times slowdowns are relative to"),
]


def sources_of(
    perf_model: Path | None, signature: str | None, described: str | None, db: str | None
) -> StepSources:
    """Where step times come from, besides the machine types' own curves."""
    from phasewise.cluster.spec_file import StepSources
    from phasewise.cluster.steps import read_profile

    profile = None if perf_model is None else read_profile(perf_model)
    timed: dict[str, StepTimes] = {}
    if signature is not None:
        from phasewise.workflows.cluster_load import steps_from_db

        timed[DB_MACHINE] = steps_from_db(db, signature, note)
    if described is not None:
        from phasewise.workflows.cluster_load import steps_from_xml

        xml, _, model = described.partition(":")
        if not xml or not model:
            raise typer.BadParameter(f"--machine-from-xml takes XML:MODEL, not {described!r:.60}")
        timed[XML_MACHINE] = steps_from_xml(xml, model, "native", note)
    return StepSources(profile, timed)


def reference_of(name: str, catalogue: MachineCatalogue) -> StepTimes | None:
    """None where the catalogue's model is not known on that type: then nothing is told as a slowdown."""
    from phasewise.cluster.errors import ClusterError

    try:
        return catalogue[name].steps
    except ClusterError as error:
        note(f"no slowdowns: {error}")
        return None
