"""`phasewise simulate`: a trace through a cluster, by the production scheduler, on simulated time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phasewise.cli.option_sets import spread
from phasewise.cli.options import JsonOption, TraceArgument
from phasewise.cli.present import check_target, note, owns_stdout, print_json, write_target
from phasewise.cli.tables import show
from phasewise.workflows.capacity.settings import ClusterInputs, SimulationWish


@spread
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
    wish: SimulationWish,
    inputs: ClusterInputs,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE.svg", help="draw the time by batch size, a line a pool; -: stdout"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a cluster: latencies, slowdowns, utilisation, batch sizes and KV transfers of a trace.

    $ phasewise simulate lognormal:1500,0.8/30,0.8 --pools mixed=4*h100 --rate 6
    $ phasewise simulate trace.csv --pools prompt=3*h100,token=1*h100 --slo table6

    Every machine runs the scheduler, KV pool and pacing of phasewise serve; only the time of a step is
    modelled. The same input gives the same output. Machine types a100, h100 and h100-capped are built in;
    a cluster file may describe others. See docs/guide/planning-capacity.md.
    """
    from phasewise.cli.commands.capacity.text import occupancy_chart, simulation_text
    from phasewise.workflows.capacity.json import simulation_fields
    from phasewise.workflows.capacity.simulate import simulate_cluster

    owns_stdout(plot, as_json)
    check_target(plot)
    simulated = simulate_cluster(trace, pools, wish, inputs, note)
    if as_json:
        print_json(simulation_fields(simulated.spec, simulated.summary, simulated.slo))
    elif not owns_stdout(plot):
        show(*simulation_text(simulated.spec, simulated.summary, simulated.slo))
    if plot is not None:
        write_target(plot, occupancy_chart(simulated.summary))
