"""Table 1 of the Sandwich paper for a model on this machine: parts of the plan left out one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from typer import Option

from benchmarks.harness import Model, Rounds, Spread, Yielded, in_turns, note, numbers, ratios
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.cython_kernels.schedules import RowRange, ScheduleLookup
from phasewise.serving.engine.throughput import Workload, measure
from phasewise.serving.errors import RanksError
from phasewise.serving.ranks.open_ranks import STEP_TOKENS, KvSettings, RankOptions, open_ranks
from phasewise.topology import Machine, read_machine
from phasewise.tuner.plans import PHASES, Phase, RankCores, ServicePlan, default_plan, rank_on
from phasewise.workflows.opening.open_model import OpenModel, open_model
from phasewise.workflows.opening.settings import Weights

Lookups = Mapping[Phase, ScheduleLookup]
NO_LOOKUPS: Lookups = {phase: ScheduleLookup() for phase in PHASES}


@dataclass(frozen=True)
class Rung:
    """One way of running the model, a part less than the rung above it."""

    name: str
    plans: Mapping[Phase, ServicePlan]
    lookups: Lookups


class WholeSums(ScheduleLookup):
    """The schedules of another lookup without those that divide sums over threads: the default instead."""

    def __init__(self, tuned: ScheduleLookup) -> None:
        self._tuned = tuned
        self.n_left_out = 0
        """Ranges of rows whose schedule divides sums."""

    def arithmetic(self, weight: PackedWeight) -> tuple[str | None, int]:
        path, _ = self._tuned.arithmetic(weight)
        return path, 1

    def products(self, weight: PackedWeight, max_m: int) -> Sequence[RowRange]:
        _, k_parts = self._tuned.arithmetic(weight)
        return [self._whole(rows, k_parts) for rows in self._tuned.products(weight, max_m)]

    def attention(self, kv_format: str, n: int, k: int, max_m: int) -> Sequence[RowRange]:
        return self._tuned.attention(kv_format, n, k, max_m)

    def _whole(self, rows: RowRange, k_parts: int) -> RowRange:
        if k_parts == 1 and (rows.schedule is None or rows.schedule["threads_k"] == 1):
            return rows
        self.n_left_out += 1
        return RowRange(rows.last_m, None, "without split-k: the default")


def rungs_of(opened: OpenModel, machine: Machine) -> list[Rung]:
    """From all that is tuned down to a process on every core, with the kernels' own schedules."""
    default = {phase: default_plan(machine, phase) for phase in PHASES}
    apart = {phase: core_by_core(plan, machine) for phase, plan in default.items()}
    whole_sums = {phase: WholeSums(lookup) for phase, lookup in opened.schedules.items()}
    return [
        Rung("all that is tuned", opened.plans, opened.schedules),
        Rung("without split-k", opened.plans, whole_sums),
        Rung("without tuned kernels", opened.plans, NO_LOOKUPS),
        Rung("without a tuned configuration", default, NO_LOOKUPS),
        Rung("without a team's shared rows", apart, NO_LOOKUPS),
    ]


def core_by_core(plan: ServicePlan, machine: Machine) -> ServicePlan:
    """A rank of its own on every core, as an engine runs whose parallelism is between processes alone."""
    ranks: tuple[RankCores, ...] = tuple(rank_on(machine, (core,)) for core in plan.cores)
    return replace(plan, ranks=ranks, source="flag")


def same_as_above(rungs: Sequence[Rung], opened: OpenModel) -> Iterator[str]:
    """Remarks on parts whose removal changes nothing here, since nothing was found that is better."""
    whole, no_split, *_ = rungs
    if not any(table.is_tuned for table in opened.schedules.values()):
        yield "no schedule is tuned here (phasewise tune-kernels): kernels change nothing"
    counts = [lookup.n_left_out for lookup in no_split.lookups.values() if isinstance(lookup, WholeSums)]
    if not sum(counts):
        yield "no schedule in use divides sums: split-k changes nothing"
    default = rungs[3]
    if all(whole.plans[phase].ranks == default.plans[phase].ranks for phase in PHASES):
        yield "the plans in use are the default ones: the configuration changes nothing"


def ladder(
    model: Model,
    weight_format: Annotated[str, Option("--format", help="of the weights")] = "native",
    sequences: Annotated[str, Option(help="sequences that are decoded together")] = "1,8",
    prompt: Annotated[int, Option(help="tokens of a prefill")] = 256,
    answer: Annotated[int, Option(help="tokens that each sequence decodes")] = 32,
    rounds: Rounds = 5,
    db: Annotated[str | None, Option(help="the tuning database")] = None,
) -> Yielded:
    """Tokens/s of a model as parts of its plan are left out, one after another: the paper's Table 1.

        phasewise tune-kernels MODEL && phasewise tune-config MODEL
        python benchmarks/figures.py ladder MODEL

    From all that the database has for this machine: without schedules that divide sums (split-k), without
    tuned schedules, without the tuned configuration (one team on all cores for both phases), and without
    what a team shares (a process on every core, which gathers what the others computed). All in turns; the
    ratios are to the first rung, round by round.
    """
    opened = open_model(model, Weights(weight_format), db=db, report=note)
    rungs = rungs_of(opened, read_machine())
    workloads = {f"decode x{count}": Workload(0, answer, count) for count in numbers(sequences)}
    workloads["prefill"] = Workload(prompt, 0, 1)
    runnable, refused = {}, {}
    for rung in rungs:
        try:
            speeds_of(opened, rung, {})
            runnable[rung.name] = rung
        except RanksError as error:
            refused[rung.name] = str(error)
    calls: dict[str, Callable[[], dict[str, float]]] = {
        name: partial(speeds_of, opened, rung, workloads) for name, rung in runnable.items()
    }
    taken = in_turns(calls, rounds, warm_ups=0)
    first = taken[rungs[0].name]
    for name, runs in taken.items():
        row: dict[str, object] = {"rung": name}
        for test in workloads:
            row[f"{test}, tokens/s"] = Spread.of([run[test] for run in runs])
            row[f"{test}, ratio"] = ratios([run[test] for run in runs], [run[test] for run in first])
        yield row
    yield from same_as_above(rungs, opened)
    yield from (f"{name}: not run here: {why}" for name, why in refused.items())


def speeds_of(opened: OpenModel, rung: Rung, workloads: Mapping[str, Workload]) -> dict[str, float]:
    """Tokens/s of each workload, on ranks that are opened for it. RanksError where the plan cannot be run."""
    n_sequences = max((workload.n_sequences for workload in workloads.values()), default=1)
    slots = max((workload.kv_slots for workload in workloads.values()), default=16)
    kv = KvSettings(slots, states=n_sequences)
    options = RankOptions(kv, STEP_TOKENS, n_sequences, rung.lookups)
    with closing(open_ranks(opened.model, rung.plans, options)) as ranks:
        return {
            name: measure(ranks, workload, opened.model.config.vocab_size, STEP_TOKENS, 1).samples_ts[0]
            for name, workload in workloads.items()
        }
