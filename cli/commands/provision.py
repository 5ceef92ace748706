"""`phasewise provision`: how many machines of which kind a load and its promises need."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise.cli.commands.cluster_options import (
    DrawOption,
    DurationOption,
    Lengths,
    MachineFromDbOption,
    MachineFromXmlOption,
    ModelOption,
    PerfModelOption,
    ReferenceOption,
    SeedOption,
    TraceArgument,
    reference_of,
    sources_of,
)
from phasewise.cli.commands.simulate import RoutingPolicy
from phasewise.cli.options import DbOption, JsonOption
from phasewise.cli.present import fail, note, print_json, write_atomically

if TYPE_CHECKING:
    from phasewise.cluster.provision import Objective
    from phasewise.cluster.spec_file import MachineCatalogue, StepSources

EXIT_FAILURE = 1


class Minimised(StrEnum):
    """What the cheapest cluster has least of."""

    cost = "cost"
    power = "power"
    machines = "machines"


class Maximised(StrEnum):
    """What the best cluster for a budget has most of."""

    rate = "rate"


def provision(
    trace: TraceArgument,
    design: Annotated[
        str,
        typer.Option(
            "--design",
            metavar="LIST",
            help="designs to compare: baseline, split-homogeneous, split-heterogeneous, capped (the six of "
            "the Splitwise paper), or kinds of your own: mixed:TYPE, split:PROMPT_TYPE/TOKEN_TYPE",
        ),
    ] = "baseline,split-homogeneous,split-heterogeneous,capped",
    rate: Annotated[
        float | None, typer.Option("--rate", min=0.001, help="rate that the cluster must serve, requests/s")
    ] = None,
    cost: Annotated[
        float | None, typer.Option("--cost", min=0.0, help="highest cost of the cluster per hour")
    ] = None,
    power: Annotated[
        float | None, typer.Option("--power", min=0.0, help="highest power of the cluster in watts")
    ] = None,
    slo: Annotated[
        str,
        typer.Option(
            "--slo",
            metavar="SLO",
            help="promises: table6, or times such as ttft=1.5s,tbt=100ms (P90 where no percentile is named)",
        ),
    ] = "table6",
    minimise: Annotated[
        Minimised | None, typer.Option("--minimise", help="with --rate [default: cost]")
    ] = None,
    maximise: Annotated[
        Maximised | None, typer.Option("--maximise", help="with --cost or --power [default: rate]")
    ] = None,
    rate_step: Annotated[
        float, typer.Option("--rate-step", min=0.001, help="rates tried are multiples of this")
    ] = 5.0,
    most_rate: Annotated[
        float, typer.Option("--most-rate", min=0.001, help="the highest rate tried")
    ] = 500.0,
    most: Annotated[int, typer.Option("--most", min=1, max=2000, help="most machines of each kind")] = 120,
    machines: Annotated[
        Path | None,
        typer.Option(
            "--machines", metavar="FILE", help="TOML file with [machines.NAME] tables of more types"
        ),
    ] = None,
    policy: Annotated[
        RoutingPolicy, typer.Option("--policy", help="how requests are routed and scheduled")
    ] = RoutingPolicy.splitwise,
    model: ModelOption = None,
    duration: DurationOption = 120.0,
    draw: DrawOption = Lengths.requests,
    seed: SeedOption = 0,
    perf_model: PerfModelOption = None,
    machine_from_db: MachineFromDbOption = None,
    machine_from_xml: MachineFromXmlOption = None,
    reference: ReferenceOption = "a100",
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.svg", help="draw the frontiers of designs with two kinds"),
    ] = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the smallest cluster for a rate, or the fastest one for a budget, that keeps its promises.

    With --rate each design's cheapest cluster is found; with --cost or --power its highest rate. Clusters are
    judged by simulation (phasewise simulate). Only cells near the frontier of what keeps the promises are
    run, and the cells around the answer certify it. Exit code 1 if no design has an answer.
    """
    from phasewise.cli.render.cluster_text import frontier_chart, provision_text
    from phasewise.cluster.metrics import parse_slo
    from phasewise.workflows.cluster_json import provision_fields
    from phasewise.workflows.cluster_load import lengths_of
    from phasewise.workflows.plan_cluster import (
        Question,
        parse_designs,
        provision_for_budget,
        provision_for_rate,
    )

    if sum(one is not None for one in (rate, cost, power)) != 1:
        raise typer.BadParameter("give exactly one of --rate, --cost and --power")
    if (rate is None and minimise is not None) or (rate is not None and maximise is not None):
        raise typer.BadParameter("--minimise goes with --rate, --maximise with --cost or --power")
    promises = parse_slo(slo)
    catalogue = _catalogue(machines, sources_of(perf_model, machine_from_db, machine_from_xml, db), model)
    designs = parse_designs(design, catalogue)
    lengths = [(one.prompt_tokens, one.output_tokens) for one in lengths_of(trace)]
    told = reference_of(reference, catalogue)
    question = Question(lengths, promises, told, policy.value, duration, seed, draw.value, most)
    if rate is not None:
        goal: Objective = (minimise or Minimised.cost).value
        answers = provision_for_rate(question, designs, rate, goal, note)
    elif cost is not None:
        answers = provision_for_budget(question, designs, "cost", cost, rate_step, most_rate, note)
    else:
        assert power is not None
        answers = provision_for_budget(question, designs, "power", power, rate_step, most_rate, note)
    if as_json:
        print_json(provision_fields(answers, promises))
    else:
        print(provision_text(answers, promises))
    if all(answer.spec is None for answer in answers):
        fail(f"no design has an answer: {answers[0].reason}", EXIT_FAILURE)
    if plot is not None:
        if not any(len(answer.cell) > 1 and answer.frontier for answer in answers):
            fail("--plot: no design has a frontier of two kinds of machines", EXIT_FAILURE)
        write_atomically(plot, frontier_chart(answers))


def _catalogue(path: Path | None, sources: StepSources, model: str | None) -> MachineCatalogue:
    from phasewise.cluster.spec_file import DEFAULT_MODEL, MachineCatalogue, read_machines

    if path is None:
        return MachineCatalogue(model or DEFAULT_MODEL, sources)
    return read_machines(path, sources, model)
