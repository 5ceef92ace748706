"""`phasewise simulate`: a trace through a cluster, by the production scheduler, on simulated time."""

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
from phasewise.cli.options import DbOption, JsonOption
from phasewise.cli.present import print_json, write_atomically

if TYPE_CHECKING:
    from phasewise.cluster.simulate import ClusterSpec
    from phasewise.cluster.spec_file import MachineCatalogue, StepSources


class MachineScheduler(StrEnum):
    """Which scheduler each machine runs."""

    production = "production"
    paper = "paper"


class RoutingPolicy(StrEnum):
    """How requests are assigned to machines."""

    splitwise = "splitwise"
    round_robin = "round-robin"
    prefix_aware = "prefix-aware"
    splitwise_sim = "splitwise-sim"


def simulate(
    trace: TraceArgument,
    pools: Annotated[
        str,
        typer.Option(
            "--pools",
            metavar="FILE|POOLS",
            help="the cluster: a TOML file, or pools in a line such as prompt=27*h100,token=3*h100",
        ),
    ],
    scheduler: Annotated[
        MachineScheduler,
        typer.Option(
            "--scheduler",
            help="production: the scheduler of phasewise serve; paper: mixed batches and routing as in the "
            "Splitwise authors' simulator (the same as --policy splitwise-sim)",
        ),
    ] = MachineScheduler.production,
    policy: Annotated[
        RoutingPolicy | None,
        typer.Option("--policy", help="how requests are routed [default: the file's, else splitwise]"),
    ] = None,
    model: ModelOption = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            min=0.001,
            help="requests/s, drawn anew at exponential intervals with the trace's lengths [default: the "
            "trace's own arrivals]",
        ),
    ] = None,
    duration: DurationOption = 120.0,
    draw: DrawOption = Lengths.requests,
    seed: SeedOption = 0,
    perf_model: PerfModelOption = None,
    machine_from_db: MachineFromDbOption = None,
    machine_from_xml: MachineFromXmlOption = None,
    prefix_reuse: Annotated[
        bool, typer.Option("--prefix-reuse", help="reuse common beginnings of prompts (Mooncake traces)")
    ] = False,
    slo: Annotated[
        str | None,
        typer.Option(
            "--slo",
            metavar="SLO",
            help="promises to judge by: table6 (the Splitwise paper's slowdowns), or times such as "
            "ttft=1.5s,tbt=100ms,e2e.p99=20s (P90 where no percentile is named)",
        ),
    ] = None,
    reference: ReferenceOption = "a100",
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.svg", help="draw the time by batch size, a line a pool"),
    ] = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a cluster: latencies, slowdowns, utilisation, batch sizes and KV transfers of a trace.

    Every machine runs the scheduler, KV pool and pacing of phasewise serve; only the time of a step is
    modelled. The same input gives the same output. Machine types a100, h100 and h100-capped are built in;
    a cluster file may describe others. See docs/guide/planning-capacity.md.
    """
    from phasewise.cli.render.cluster_text import occupancy_chart, simulation_text
    from phasewise.cluster.metrics import parse_slo, summarise
    from phasewise.cluster.simulate import simulate as run
    from phasewise.workflows.cluster_json import simulation_fields
    from phasewise.workflows.cluster_load import Load, arrivals_of

    promises = None if slo is None else parse_slo(slo)
    spec, catalogue = _cluster(pools, sources_of(perf_model, machine_from_db, machine_from_xml, db), model)
    spec = _with_policy(spec, scheduler, policy, prefix_reuse=prefix_reuse)
    arrivals = arrivals_of(Load(trace, rate, duration, seed, draw.value))
    summary = summarise(run(spec, arrivals), reference_of(reference, catalogue))
    if as_json:
        print_json(simulation_fields(spec, summary, promises))
    else:
        print(simulation_text(spec, summary, promises))
    if plot is not None:
        write_atomically(plot, occupancy_chart(summary))


def _cluster(text: str, sources: StepSources, model: str | None) -> tuple[ClusterSpec, MachineCatalogue]:
    from phasewise.cluster.simulate import ClusterSpec
    from phasewise.cluster.spec_file import (
        DEFAULT_MODEL,
        MachineCatalogue,
        names_a_file,
        parse_pools,
        read_cluster,
    )

    if names_a_file(text):
        return read_cluster(text, sources, model)
    catalogue = MachineCatalogue(model or DEFAULT_MODEL, sources)
    return ClusterSpec(parse_pools(text, catalogue)), catalogue


def _with_policy(
    spec: ClusterSpec, scheduler: MachineScheduler, policy: RoutingPolicy | None, *, prefix_reuse: bool
) -> ClusterSpec:
    from dataclasses import replace

    from phasewise.cluster.requests import PREFIX_BLOCK_TOKENS

    if scheduler is MachineScheduler.paper and policy not in (None, RoutingPolicy.splitwise_sim):
        raise typer.BadParameter(f"--scheduler paper has its own routing: leave --policy {policy.value} out")
    if scheduler is MachineScheduler.paper:
        policy = RoutingPolicy.splitwise_sim
    limits = replace(spec.limits, prefix_block_tokens=PREFIX_BLOCK_TOKENS)
    name = spec.policy if policy is None else policy.value
    return replace(spec, policy=name, limits=limits, prefix_reuse=prefix_reuse)
