"""Service plans as JSON values and pictures; plans that `tune-config --json` printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from phasewise._files import read_input
from phasewise._json import read_json
from phasewise.topology import Machine
from phasewise.topology.picture import GROUP_FILLS, PuGroup
from phasewise.tuner.errors import PlanError
from phasewise.tuner.plans import MAX_BANDS, PHASES, LoadBand, Phase, RankCores, ServicePlan, ranks_fields

Plans = Mapping[Phase, ServicePlan]


MAX_PLAN_FILE_BYTES = 1 << 20


def plan_fields(plans: Plans) -> dict[str, Any]:
    """The plans as JSON values, ranks with their NUMA nodes."""
    return _fields(plans, ranks_fields)


def plan_cores(plans: Plans) -> dict[str, Any]:
    """The plans as JSON values, each rank as a list of its cores."""
    return _fields(plans, lambda ranks: [list(rank.cores) for rank in ranks])


def _fields(plans: Plans, ranks_of: Callable[[Sequence[RankCores]], Any]) -> dict[str, Any]:
    def bands(plan: ServicePlan) -> list[dict[str, Any]]:
        return [{"sequences": band.sequences, "ranks": ranks_of(band.ranks)} for band in plan.bands]

    return {
        phase: {"ranks": ranks_of(plan.ranks), "source": plan.source, "bands": bands(plan)}
        for phase, plan in plans.items()
    }


def model_name(reference: str) -> str:
    """The database's name for a model of a command line: a file's own name, else as given."""
    path = Path(reference).expanduser()
    if not path.exists():
        return reference
    path = path.resolve()
    return path.parent.name if path.name == "config.json" else path.name.removesuffix(".gguf")


def read_plans(path: Path, machine: Machine) -> Plans:
    """The plans in what `tune-config --json` printed. PlanError, saying why, for anything else."""
    try:
        text = read_input(path, MAX_PLAN_FILE_BYTES)
    except OSError as error:
        raise PlanError(f"plans {path} cannot be read: {error.strerror or error}") from None
    try:
        plans = _plans(read_json(text))
        for plan in plans.values():
            foreign = sorted(plan.all_cores.difference(machine.tree.cpus))
            if foreign:
                raise PlanError(f"the {plan.phase} plan names PU {foreign[0]}, which is not there")
    except (PlanError, ValueError) as error:
        raise PlanError(f"{path}: {error}") from None
    return plans


def _plans(fields: Any) -> Plans:
    plans = fields.get("plans") if isinstance(fields, dict) else None
    if not isinstance(plans, dict) or not plans or not set(plans) <= set(PHASES):
        raise PlanError("there is no object `plans` with prefill or decode, as tune-config --json prints it")
    return {
        phase: ServicePlan(phase, tuple(_ranks(plans[phase])), "file", _bands(plans[phase]))
        for phase in PHASES
        if phase in plans
    }


def _bands(plan: Any) -> tuple[LoadBand, ...]:
    bands = plan.get("bands", []) if isinstance(plan, dict) else []
    if not isinstance(bands, list) or not all(isinstance(band, dict) for band in bands):
        raise PlanError("the bands of a plan are a list of objects")
    return tuple(LoadBand(band.get("sequences"), tuple(_ranks(band))) for band in bands[: MAX_BANDS + 1])


def _ranks(plan: Any) -> Iterator[RankCores]:
    ranks = plan.get("ranks") if isinstance(plan, dict) else None
    if not isinstance(ranks, list):
        raise PlanError("a plan has a list `ranks`")
    for rank in ranks:
        cores = rank.get("cores") if isinstance(rank, dict) else None
        if not isinstance(cores, list):
            raise PlanError("a rank has a list `cores`")
        yield RankCores(tuple(cores), rank.get("numa_node"))


def picture_groups(plans: Plans) -> tuple[PuGroup, ...]:
    """Groups of PUs, one for each rank of each phase; no colour stands for two phases."""
    return tuple(
        PuGroup(f"{phase}, rank {number}", frozenset(rank.cores), fills[number % len(fills)])
        for phase, fills in _fills(plans).items()
        for number, rank in enumerate(plans[phase].ranks)
    )


def _fills(plans: Plans) -> dict[Phase, Sequence[str]]:
    """The colours of each phase: a fair share for both where there are not enough."""
    first, *others = plans
    if not others:
        return {first: GROUP_FILLS}
    (second,) = others
    half = len(GROUP_FILLS) // 2
    n_first = min(len(plans[first].ranks), len(GROUP_FILLS) - min(len(plans[second].ranks), half))
    return {first: GROUP_FILLS[:n_first], second: GROUP_FILLS[n_first:]}
