"""Simulate a described cluster under a trace: `phasewise simulate`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phasewise._options import changed, refuse_unused
from phasewise.cluster.simulated.metrics import Slo, Summary, parse_slo, summarise
from phasewise.cluster.simulated.simulate import ClusterSpec, simulate
from phasewise.cluster.simulated.spec_file import (
    DEFAULT_MODEL,
    MachineCatalogue,
    TimedTypes,
    names_a_file,
    parse_pools,
    read_cluster,
)
from phasewise.workflows.capacity.load import Load, arrivals_of
from phasewise.workflows.capacity.settings import (
    ClusterInputs,
    SimulationWish,
    reference_steps,
    step_sources,
)
from phasewise.workflows.report import Report, silent


@dataclass(frozen=True)
class Simulated:
    """A cluster and what one trace was like on it. `slo`: the promises to judge by; None without any."""

    spec: ClusterSpec
    summary: Summary
    slo: Slo | None


def simulate_cluster(
    trace: str, pools: str, wish: SimulationWish, inputs: ClusterInputs, report: Report = silent
) -> Simulated:
    """The cluster `pools` (a TOML file, or pools in a line) under `trace`.

    Raises ClusterError, TraceError and KernelDbError for input that cannot be read.
    """
    if wish.rate is None:
        refuse_unused("without --rate", changed(inputs, "duration_s", "seed"))
    elif wish.prefix_reuse:
        refuse_unused("with --rate", ["prefix_reuse"], "drawn requests have no prompts in common")
    slo = None if wish.slo is None else parse_slo(wish.slo)
    spec, catalogue = _cluster(pools, step_sources(inputs, report), inputs.model)
    spec = replace(spec, policy=wish.policy or spec.policy, prefix_reuse=wish.prefix_reuse)
    arrivals = arrivals_of(Load(trace, wish.rate, inputs.duration_s, inputs.seed))
    reference = reference_steps(inputs.reference, catalogue, report)
    return Simulated(spec, summarise(simulate(spec, arrivals), reference), slo)


def _cluster(text: str, timed: TimedTypes, model: str | None) -> tuple[ClusterSpec, MachineCatalogue]:
    if names_a_file(text):
        return read_cluster(text, timed, model)
    catalogue = MachineCatalogue(model or DEFAULT_MODEL, timed)
    return ClusterSpec(parse_pools(text, catalogue)), catalogue
