"""Provisioning: each design's cheapest cluster for a rate, or its fastest for a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from phasewise._words import number, percent
from phasewise.cluster.errors import ClusterError
from phasewise.cluster.routing import Role
from phasewise.cluster.simulated.metrics import Slo, Summary, broken, parse_slo, summarise
from phasewise.cluster.simulated.provision import Cell, Objective, Outcome, Search, cheapest, fastest
from phasewise.cluster.simulated.simulate import ClusterSpec, MachineType, Pool, simulate
from phasewise.cluster.simulated.simulated_requests import poisson
from phasewise.cluster.simulated.spec_file import DEFAULT_MODEL, MachineCatalogue, read_machines
from phasewise.cluster.simulated.steps import StepTimes
from phasewise.workflows.capacity.settings import ClusterInputs, ProvisionWish
from phasewise.workflows.capacity.simulate import lengths_of, reference_steps, step_sources
from phasewise.workflows.report import Report

NAMED_DESIGNS = {
    "baseline": ("mixed:a100", "mixed:h100"),
    "split-homogeneous": ("split:a100/a100", "split:h100/h100"),
    "split-heterogeneous": ("split:h100/a100",),
    "capped": ("split:h100/h100-capped",),
}
"""Clusters of the Splitwise paper (IV-D, V-B): Baseline-A100 and -H100, Splitwise-AA, -HH, -HA and -HHcap."""

BATCH_GUESS = 16
"""Sequences of a decode step, only to guess where the search begins."""


@dataclass(frozen=True)
class Design:
    """A cluster's design: the machine type of each role. Provisioning finds the numbers of machines."""

    name: str
    axes: tuple[tuple[Role, MachineType], ...]

    def pools(self, cell: Cell) -> tuple[Pool, ...]:
        return tuple(Pool(role, kind, count) for (role, kind), count in zip(self.axes, cell, strict=True))


@dataclass(frozen=True)
class Question:
    """The load, the promises and the limits that every design is provisioned for."""

    wish: ProvisionWish
    inputs: ClusterInputs
    lengths: Sequence[tuple[int, int]]
    """Prompt and output tokens of requests to draw from."""
    slo: Slo
    reference: StepTimes | None
    report: Report

    def run(self, design: Design, cell: Cell, rate: float) -> tuple[Summary, Outcome]:
        """Simulate a design with these numbers of machines."""
        arrivals = poisson(self.lengths, rate, self.inputs.duration_s, self.inputs.seed)
        summary = summarise(simulate(self.spec(design, cell), arrivals), self.reference)
        values = summary.slowdowns if self.slo.is_slowdown else summary.times_s
        assert values is not None
        used = max(values[bound.metric][bound.percentile] / bound.below for bound in self.slo.bounds)
        return summary, Outcome(not broken(summary, self.slo), used)

    def spec(self, design: Design, cell: Cell) -> ClusterSpec:
        return ClusterSpec(design.pools(cell), self.wish.policy)


@dataclass(frozen=True)
class Provisioned:
    """The cluster found for a design, or the `reason` why there is none."""

    design: Design
    cell: Cell = ()
    rate: float = 0.0
    spec: ClusterSpec | None = None
    summary: Summary | None = None
    tightness: float = 0.0
    n_runs: int = 0
    frontier: list[Cell] = field(default_factory=list)
    reason: str | None = None


def parse_designs(text: str, catalogue: MachineCatalogue) -> list[Design]:
    """Parse `baseline,capped`, or custom designs: `mixed:TYPE`, `split:PROMPT_TYPE/TOKEN_TYPE`."""
    designs = []
    for part in (entry.strip() for entry in text.split(",")):
        for written in NAMED_DESIGNS.get(part, (part,)):
            kind, _, names = written.partition(":")
            if kind == "mixed" and names:
                axes: tuple[tuple[Role, MachineType], ...] = (("mixed", catalogue[names]),)
            elif kind == "split" and names.count("/") == 1:
                prompt, token = names.split("/")
                axes = (("prompt", catalogue[prompt]), ("token", catalogue[token]))
            else:
                raise ClusterError(
                    f"{part!r:.40} is no design: one of {', '.join(NAMED_DESIGNS)}, mixed:TYPE or "
                    "split:TYPE/TYPE"
                )
            designs.append(Design(written, axes))
    return designs


def provision_cluster(
    trace: str, wish: ProvisionWish, inputs: ClusterInputs, report: Report
) -> tuple[list[Provisioned], Slo]:
    """Find each design's answer to `wish`; also return the promises that designs were judged by.

    Raises ClusterError, TraceError and KernelDbError for input that cannot be read, and UsageError.
    """
    wish.check()
    slo = parse_slo(wish.slo)
    timed = step_sources(inputs, report)
    if wish.machines is None:
        catalogue = MachineCatalogue(inputs.model or DEFAULT_MODEL, timed)
    else:
        catalogue = read_machines(wish.machines, timed, inputs.model)
    designs = parse_designs(wish.design, catalogue)
    lengths = [(request.prompt_tokens, request.output_tokens) for request in lengths_of(trace)]
    reference = reference_steps(inputs.reference, catalogue, report)
    question = Question(wish, inputs, lengths, slo, reference, report)
    answer = _for_budget if wish.rate is None else _for_rate
    return [answer(question, design) for design in designs], slo


def _for_rate(question: Question, design: Design) -> Provisioned:
    """The cluster with the least cost, power or machines that keeps the promises at the wish's rate."""
    wish, summaries = question.wish, dict[Cell, Summary]()
    assert wish.rate is not None
    rate = wish.rate

    def run(cell: Cell) -> Outcome:
        summaries[cell], outcome = question.run(design, cell, rate)
        used = f"{_verdict(outcome)}, tightest bound used {percent(outcome.tightness)}"
        question.report(f"{design.name} {_written(cell)}: {used}")
        return outcome

    weights = tuple(_weight(kind, wish.minimise or "cost") for _, kind in design.axes)
    search = Search(weights, run, wish.most)
    try:
        answer = cheapest(search, _busy(question, design, rate))
    except ClusterError as error:
        return Provisioned(design, rate=rate, n_runs=len(search.outcomes), reason=str(error))
    spec, tightness = question.spec(design, answer.cell), answer.outcome.tightness
    summary = summaries[answer.cell]
    return Provisioned(design, answer.cell, rate, spec, summary, tightness, answer.n_runs, answer.frontier)


def _for_budget(question: Question, design: Design) -> Provisioned:
    """The cluster within the wish's cost or power that keeps the promises at the highest rate."""
    wish = question.wish
    budget: Objective = "power" if wish.cost is None else "cost"
    amount = wish.power if wish.cost is None else wish.cost
    assert amount is not None
    cells = _affordable(design, budget, amount, wish.most)
    if not cells:
        reason = f"a {budget} of {number(amount)} does not pay for this design at all"
        return Provisioned(design, reason=reason)
    runs: dict[tuple[Cell, float], tuple[Summary, Outcome]] = {}

    def run(cell: Cell, rate: float) -> bool:
        runs[cell, rate] = question.run(design, cell, rate)
        outcome = runs[cell, rate][1]
        question.report(f"{design.name} {_written(cell)} at {number(rate)} requests/s: {_verdict(outcome)}")
        return outcome.is_feasible

    busy = _busy(question, design, 1.0)
    share = busy[0] / sum(busy)
    start = min(range(len(cells)), key=lambda index: abs(cells[index][0] / sum(cells[index]) - share))
    try:
        best = fastest(cells, start, run, wish.rate_step, wish.most_rate)
    except ClusterError as error:
        return Provisioned(design, n_runs=len(runs), reason=str(error))
    (summary, outcome), spec = runs[best.cell, best.rate], question.spec(design, best.cell)
    return Provisioned(design, best.cell, best.rate, spec, summary, outcome.tightness, best.n_runs)


def _verdict(outcome: Outcome) -> str:
    return "kept" if outcome.is_feasible else "broken"


def _affordable(design: Design, budget: Objective, amount: float, most: int) -> list[Cell]:
    """For each count on the first axis, the cell that leaves less than one machine's worth of the budget."""
    weights = [_weight(kind, budget) for _, kind in design.axes]
    if not all(weights):
        raise ClusterError(f"design {design.name}: a machine type states no {budget}")
    if len(weights) == 1:
        count = min(most, math.floor(amount / weights[0] + 1e-9))
        return [(count,)] if count else []
    cells: list[Cell] = []
    for first in range(1, most + 1):
        second = math.floor((amount - first * weights[0]) / weights[1] + 1e-9)
        if second < 1:
            break
        cells.append((first, min(most, second)))
    return cells


def _weight(kind: MachineType, objective: Objective) -> float:
    weight = {"cost": kind.cost, "power": kind.power_w, "machines": 1.0}[objective]
    if weight <= 0:
        raise ClusterError(f"machine type {kind.name} states no {objective}: minimise machines, or state it")
    return weight


def _busy(question: Question, design: Design, rate: float) -> list[float]:
    """Estimate the number of machines that the load keeps busy on each axis of the design."""
    count = len(question.lengths)
    prompts = sum(prompt for prompt, _ in question.lengths) / count
    outputs = sum(output for _, output in question.lengths) / count
    busy = {}
    for role, kind in design.axes:
        prefill = kind.steps.prefill_s(round(prompts))
        context = round(BATCH_GUESS * (prompts + outputs / 2))
        decode = kind.steps.decode_s(BATCH_GUESS, context) / BATCH_GUESS * outputs
        busy[role] = rate * {"prompt": prefill, "token": decode, "mixed": prefill + decode}[role]
    return [max(busy[role], 1e-3) for role, _ in design.axes]


def _written(cell: Cell) -> str:
    return "+".join(map(str, cell))
