"""The default plan of a machine with several NUMA nodes, L3s or kinds of core, chosen by the cost model.

Candidates are one rank over all nodes with interleaved memory, one node alone, and a rank on each of some
nodes; for decode also with fewer cores of each L3, which saturate it and meet sooner; and all of these on the
cores of one kind alone. The model's rates are stated ones (`rates.default_rates`), so a plan is chosen only
for a clear gain: see FEWER_CORES and OTHER_RANKS."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from phasewise._words import counted, number
from phasewise.topology import Kind, Machine
from phasewise.tuner.config.modelled import ModelledEvaluator
from phasewise.tuner.config.rates import MachineRates
from phasewise.tuner.config.steps import ModelShape, Step
from phasewise.tuner.errors import EvaluationError
from phasewise.tuner.plans import (
    MAX_RANKS,
    Phase,
    RankCores,
    ServicePlan,
    default_plan,
    default_thread_count,
    rank_on,
)
from phasewise.tuner.topotree import Configuration

FEWER_CORES = 1.10
"""The least ratio of gain for a plan that leaves cores idle: memory may be faster than stated."""
OTHER_RANKS = 1.05
"""The least ratio of gain for a plan of several ranks, which start more slowly; in prefill, for other ranks
than decode's."""
CORES_OF_L3 = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
STEPS: dict[Phase, Step] = {"decode": Step("decode", 1, context=512), "prefill": Step("prefill", 512)}


@dataclass(frozen=True)
class _Candidate:
    ranks: tuple[RankCores, ...]
    words: str
    leaves_cores: bool = False


@dataclass(frozen=True)
class SuitedPlan:
    """A default plan. `line`: a line for people about the choice; empty where there was none."""

    plan: ServicePlan
    line: str = ""


def has_choice(machine: Machine) -> bool:
    """True if a machine's default plan depends on the model."""
    by_l3 = _by_l3(machine, machine.allowed_pus)
    return len(_nodes(machine)) > 1 or len(by_l3) > 1 or len(_kinds(machine)) > 1


def suited_plan(
    machine: Machine, phase: Phase, shape: ModelShape, rates: MachineRates | None = None
) -> SuitedPlan:
    """The default plan of a phase for a model of this shape. `rates`: None for the stated ones."""
    default = default_plan(machine, phase)
    if not has_choice(machine):
        return SuitedPlan(default)
    evaluator = ModelledEvaluator(machine, shape, rates)
    usual = 1 if phase == "decode" else len(suited_plan(machine, "decode", shape, rates).plan.ranks)
    timed = [
        (_step_ns(evaluator, candidate, phase) * _handicap(candidate, usual), candidate)
        for candidate in _candidates(machine, phase, shape.n_heads)
    ]
    least_ns, best = min(timed, key=lambda each: each[0])
    if least_ns == float("inf"):
        return SuitedPlan(default)
    plan = replace(default, ranks=best.ranks)
    if plan.cores == default.cores and len(_nodes(machine)) == len(plan.ranks) == 1:
        return SuitedPlan(default)
    return SuitedPlan(plan, f"{phase} by default: {best.words} ({_told(evaluator, best, timed, phase)})")


def _told(
    evaluator: ModelledEvaluator, best: _Candidate, timed: Sequence[tuple[float, _Candidate]], phase: Phase
) -> str:
    """A line for people: modelled milliseconds of the best plan, and of the plans with one rank and with the
    most ranks on all cores."""
    most = max(len(candidate.ranks) for _, candidate in timed)
    rivals = "".join(
        f"; {candidate.words} {_ms(_step_ns(evaluator, candidate, phase))}"
        for _, candidate in timed
        if candidate is not best and not candidate.leaves_cores and len(candidate.ranks) in (1, most)
    )
    return f"modelled {_ms(_step_ns(evaluator, best, phase))} ms{rivals}"


def _ms(ns: float) -> str:
    return number(ns / 1e6, 3)


def _step_ns(evaluator: ModelledEvaluator, candidate: _Candidate, phase: Phase) -> float:
    """Modelled nanoseconds of a step on a candidate; infinite where it cannot run."""
    try:
        with evaluator.open(Configuration(candidate.ranks), phase) as timer:
            return timer(STEPS[phase])
    except EvaluationError:
        return float("inf")


def _handicap(candidate: _Candidate, usual_ranks: int) -> float:
    fewer = FEWER_CORES if candidate.leaves_cores else 1.0
    return fewer * (OTHER_RANKS if len(candidate.ranks) != usual_ranks else 1.0)


def _candidates(machine: Machine, phase: Phase, most_ranks: int) -> Iterator[_Candidate]:
    most = min(most_ranks, MAX_RANKS)
    kinds = _kinds(machine)
    for name, pus in kinds if len(kinds) > 1 else ():
        yield from _on_nodes(replace(machine, allowed_pus=pus), phase, most, f" on {name} cores")
    yield from _on_nodes(machine, phase, most, "")


def _kinds(machine: Machine) -> list[tuple[str, tuple[int, ...]]]:
    """The allowed PUs of each kind of core, fastest first; PUs without a kind under `other`."""
    allowed, kinds = machine.allowed_pus, list[tuple[str, tuple[int, ...]]]()
    for kind in reversed(machine.kinds):
        kinds.append((kind.name, tuple(pu for pu in allowed if pu in set(kind.cpus))))
    named = {pu for _, pus in kinds for pu in pus}
    kinds.append(("other", tuple(pu for pu in allowed if pu not in named)))
    return [(name, pus) for name, pus in kinds if pus]


def _on_nodes(machine: Machine, phase: Phase, most_ranks: int, of_kind: str) -> Iterator[_Candidate]:
    nodes = _nodes(machine)
    for n_cores in _cores_of_l3(machine, phase):
        yield from _of_nodes(machine, nodes, n_cores, most_ranks, of_kind)


def _of_nodes(
    machine: Machine, nodes: Sequence[tuple[int, ...]], n_cores: int | None, most_ranks: int, of_kind: str
) -> Iterator[_Candidate]:
    """Candidates with all cores of each L3, or with `n_cores` of each. `of_kind`: the kind of the cores in
    words; "": all kinds."""
    threads, n_all = default_thread_count(machine), len(nodes)
    fewer = of_kind + ("" if n_cores is None else f", {n_cores} of each L3's cores")
    for count in range(1, n_all + 1):
        each = threads // count
        if each == 0:
            return
        parts = [_some(machine, node, n_cores)[:each] for node in nodes[:count]]
        leaves = n_cores is not None or bool(of_kind)
        if count == 1:
            alone = "one rank" if n_all == 1 else f"node {_number(machine, nodes[0])} alone"
            yield _Candidate((rank_on(machine, parts[0]),), alone + fewer, leaves)
            continue
        if count <= most_ranks:
            all_nodes = counted(n_all, "node")
            where = all_nodes if count == n_all else f"{count} of {all_nodes}"
            ranks = tuple(rank_on(machine, part) for part in parts)
            yield _Candidate(ranks, f"a rank on each of {where}{fewer}", leaves)
        if count == n_all:
            whole = tuple(pu for part in parts for pu in part)
            yield _Candidate(
                (rank_on(machine, whole),), f"one rank over {counted(n_all, 'node')}{fewer}", leaves
            )


def _cores_of_l3(machine: Machine, phase: Phase) -> list[int | None]:
    """The numbers of cores of each L3 to try: None for all, then, in decode, fewer."""
    if phase == "prefill":
        return [None]
    most = max(len(part) for part in _by_l3(machine, machine.allowed_pus))
    return [None, *(count for count in CORES_OF_L3 if count < most)]


def _some(machine: Machine, pus: tuple[int, ...], n_cores: int | None) -> tuple[int, ...]:
    if n_cores is None:
        return pus
    return tuple(pu for part in _by_l3(machine, pus) for pu in part[:n_cores])


def _by_l3(machine: Machine, pus: Sequence[int]) -> list[tuple[int, ...]]:
    """The first PU of each core among `pus`, by L3; in one list where the machine names no L3."""
    chosen = set(pus)
    cores = [own for core in machine.allowed_cores() if (own := [pu for pu in core if pu in chosen])]
    first = {core[0] for core in cores} or chosen
    parts = [tuple(pu for pu in l3.cpus if pu in first) for l3 in machine.nodes(Kind.L3)]
    parts = [part for part in parts if part]
    held = {pu for part in parts for pu in part}
    return parts if held == first else [tuple(sorted(first))]


def _nodes(machine: Machine) -> list[tuple[int, ...]]:
    """The first allowed PU of each core by NUMA node; in one list where the machine names no nodes."""
    nodes = [
        tuple(pu for part in _by_l3(machine, own) for pu in part)
        for node in machine.nodes(Kind.NUMA)
        if (own := [pu for pu in node.cpus if pu in set(machine.allowed_pus)])
    ]
    is_sound = len({pu for node in nodes for pu in node}) == sum(map(len, nodes))
    return nodes if nodes and is_sound else [default_plan(machine, "decode").cores]


def _number(machine: Machine, pus: tuple[int, ...]) -> int:
    return rank_on(machine, pus).numa_node or 0
