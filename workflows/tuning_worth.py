"""The worth of tuning, as a database tells it: gains of products over the kernels' own schedules, by kind of
machine, format and rows, and a whole model's speed by default and by tuned schedules.

A product that was tuned and kept the default counts as a gain of exactly 1, so a mean is over all that was
tried. A whole model's gain is that of timings in pairs alone: single ones, of other minutes, make none.

A promotion says who won and who lost, and the default may be either. This program knows which of its own
kernels on cores like these; elsewhere a first winner that is not proven faster is taken for the default.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from phasewise._rows import Row, column
from phasewise._words import counted, multiple, number, plural, proven
from phasewise.kerneldb.counts import Key
from phasewise.kerneldb.location import locate
from phasewise.kerneldb.records import Promotion, StepTime
from phasewise.tuner import timing
from phasewise.tuner.standing import MeasuredRatio, ScheduleInUse, in_use_after, mean_of
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.kerneldb.records import Comparison, MachineKey, Problem, Schedule, ServedStep
    from phasewise.kerneldb.store import Store
    from phasewise.tuner.lookup import IsDefault

SEQUENCES = (1, 4, 8, 16)
"""Sequences that decode together, of a whole model before and after."""

ROWS = ((1, 1), (2, 8), (9, 64), (65, 512), (513, None))
"""The ranges of rows of activations that gains are told for; the last has no end."""


class ProductGains(Row):
    """Products of one format and of some range of rows on one kind of machine."""

    machine: MachineKey
    kernels: str = column("kernels", left=True)
    """The build's family and instruction set."""
    format: str = column("format", left=True)
    rows: tuple[int, int | None] = column("rows", lambda rows: _rows_words(*rows))
    products: int
    tuned: int = column("tuned", of_row=lambda row: f"{row.tuned}/{row.products}")
    """Those of them that left the default."""
    gain: float = column("gain", of_row=lambda row: proven(row.gain, row.gain_low, row.gain_high, 3))
    """Geometric mean over all of `products`, as are the ends of the interval."""
    gain_low: float = column(
        "interval", of_row=lambda row: f"{row.gain_low:.3f}-{row.gain_high:.3f}" if row.tuned else "none"
    )
    gain_high: float
    most: float | None = column("most", multiple)
    """The largest gain of one product that is proven; None: none is."""
    verified: bool
    """False: measured on the machine that the rows were imported from."""


class ModelSpeed(Row):
    """A whole model in one kind of step, by the kernels' own schedules and by tuned ones."""

    machine: MachineKey
    model_key: str = column("tokens/s of", left=True)
    step: ServedStep = column("step", lambda step: _step_words(step), left=True)
    before_tokens_per_s: float = column("before", lambda rate: number(rate, 4))
    after_tokens_per_s: float = column("after", lambda rate: number(rate, 4))
    comparison: Comparison = column("", of_row=lambda row: _gain_cells(row.comparison))
    """The gain, over pairs of turns."""
    verified: bool


def _rows_words(first: int, last: int | None) -> str:
    return f"{first}" if first == last else f"{first} up" if last is None else f"{first}-{last}"


def _step_words(step: ServedStep) -> str:
    return f"prompt of {step.tokens}" if step.phase == "prefill" else f"decode x {step.sequences}"


def _gain_cells(comparison: Comparison) -> dict[str, str]:
    low, high = comparison.gain_low, comparison.gain_high
    interval = f"{low:.3f}-{high:.3f}" if low > 0 else "too few pairs"
    return {"gain": proven(comparison.gain, low, high, 3), "interval": interval}


@dataclass(frozen=True)
class Worth:
    """All of it. `unmeasured`: models whose decode lacks some of SEQUENCES, and which."""

    products: Sequence[ProductGains]
    models: Sequence[ModelSpeed]
    unmeasured: Mapping[tuple[MachineKey, str], Sequence[int]]

    @property
    def nothing_gained(self) -> Sequence[ProductGains]:
        """Groups of which every product kept the default."""
        return [gains for gains in self.products if not gains.tuned]

    @property
    def models_without_gain(self) -> Sequence[ModelSpeed]:
        """Steps whose speed is not shown to be higher: the interval holds 1 or is below it."""
        return [speed for speed in self.models if not speed.comparison.proves_faster]


def worth_in(db: str | os.PathLike[str] | None = None, report: Report = silent) -> Worth:
    """The worth by a database. WorkflowError where there is none, KernelDbError where it cannot be read."""
    from phasewise.kerneldb.store import open_store

    location = locate(db)
    if location.is_absent:
        raise WorkflowError(
            f"there is no database at {location.name}: tune-kernels makes one; --db names another"
        )
    with open_store(db, report) as store:
        return worth_of(store, _default_here())


def _default_here() -> IsDefault:
    """True of schedules that the kernels of this program choose by themselves on cores like these."""
    from phasewise.cython_kernels.errors import KernelError
    from phasewise.tuner.errors import TunerError
    from phasewise.tuner.native import is_default_for

    @lru_cache(maxsize=4096)
    def is_default(problem: Problem, schedule: Schedule) -> bool:
        try:
            return is_default_for(schedule.threads)(problem, schedule)
        except (TunerError, KernelError, KeyError, ValueError):  # a stranger's product
            return False

    return is_default


def worth_of(store: Store, is_default: IsDefault = lambda *_: False) -> Worth:
    """The worth for every kind of machine in the database; of several builds the newest that won.

    Reads keys from an index, then promotions and step times, a few rows at a time. is_default: True if a
    schedule is the kernels' own for a problem, as far as this program knows.
    """
    in_use: dict[tuple[Key, bool], ScheduleInUse] = {}
    newest: dict[tuple[MachineKey, str], str] = {}
    for promotion in store.stream(Promotion):
        standing_key = (_key_of(promotion), promotion.origin.verified)
        in_use[standing_key] = in_use_after(in_use.get(standing_key), promotion, is_default)
        machine, family = promotion.origin.machine, _kernels_of(promotion.kernel_abi)
        newest[machine, family] = promotion.kernel_abi
    groups: dict[_Group, list[MeasuredRatio]] = defaultdict(list)
    for count in store.key_counts():
        key = count.key
        family = _kernels_of(key.kernel_abi)
        if newest.setdefault((key.machine, family), key.kernel_abi) != key.kernel_abi:
            continue
        verified = count.verified > 0
        standing = in_use.get((key, verified))
        gain = MeasuredRatio() if standing is None else standing.gain
        problem = key.problem
        group = _Group(key.machine, not verified, family, problem.format, _rows_of(problem.m))
        groups[group].append(gain)
    speeds = list(_speeds(store.stream(StepTime)))
    ordered = sorted(groups.items(), key=lambda item: repr(item[0]))
    return Worth([_gains_of(group, gains) for group, gains in ordered], speeds, _unmeasured(speeds))


class _Group(NamedTuple):
    """Products that are told together, in the order in which they are."""

    machine: MachineKey
    is_imported: bool
    kernels: str
    format: str
    rows: int
    """Place in ROWS."""


def _key_of(promotion: Promotion) -> Key:
    return Key(promotion.problem, promotion.origin.machine, promotion.kernel_abi)


def _kernels_of(kernel_abi: str) -> str:
    """`gemm-avx2` of `gemm-avx2-5f1c9e2b7a04`."""
    return kernel_abi.rpartition("-")[0] or kernel_abi


def _rows_of(m: int) -> int:
    return next(index for index, (_, last) in enumerate(ROWS) if last is None or m <= last)


def _gains_of(group: _Group, gains: Sequence[MeasuredRatio]) -> ProductGains:
    mean = mean_of(gains)
    return ProductGains(
        machine=group.machine,
        kernels=group.kernels,
        format=group.format,
        rows=ROWS[group.rows],
        products=len(gains),
        tuned=sum(gain != MeasuredRatio() for gain in gains),
        gain=mean.gain,
        gain_low=mean.low,
        gain_high=mean.high,
        most=max((gain.gain for gain in gains if gain.low > 1), default=None),
        verified=not group.is_imported,
    )


def _speeds(rows: Iterable[StepTime]) -> Iterator[ModelSpeed]:
    """Steps timed in pairs, which have one instant, by both kinds of schedules: decode of SEQUENCES after the
    shortest context, and prompts.
    """
    pairs: dict[tuple[object, ...], dict[str, StepTime]] = defaultdict(dict)
    for row in rows:
        step = row.step
        is_alone = step.sequences == 1
        if is_alone if step.phase == "prefill" else step.sequences in SEQUENCES:
            origin = (row.origin.machine, row.origin.created_at_ms, row.origin.verified)
            pairs[row.model_key, row.configuration_key, step, origin][row.kernels] = row
    chosen: dict[tuple[object, ...], tuple[tuple[int, ...], ModelSpeed]] = {}
    for pair in pairs.values():
        if pair.keys() < {"default", "tuned"}:
            continue
        before, after = pair["default"], pair["tuned"]
        if len(before.samples_ns) == len(after.samples_ns):
            speed = _speed_of(before, after)
            rank = (speed.comparison.gain_low > 0, *_rank_of(after))  # a few pairs prove nothing
            step = speed.step
            kind = (speed.machine, speed.model_key, step.phase, step.sequences, speed.verified)
            if kind not in chosen or rank > chosen[kind][0]:
                chosen[kind] = (rank, speed)
    yield from (speed for _, speed in sorted(chosen.values(), key=lambda ranked: _place_of(ranked[1])))


def _rank_of(row: StepTime) -> tuple[int, ...]:
    """The longest prompt and the shortest context, then the newest."""
    return (row.step.tokens, -row.step.context, row.origin.created_at_ms)


def _speed_of(before: StepTime, after: StepTime) -> ModelSpeed:
    tokens = before.step.tokens * before.step.sequences
    return ModelSpeed(
        before.origin.machine,
        before.model_key,
        before.step,
        tokens * 1e9 / before.estimate_ns,
        tokens * 1e9 / after.estimate_ns,
        timing.compare([((a,), (b,)) for a, b in zip(before.samples_ns, after.samples_ns, strict=True)]),
        before.origin.verified,
    )


def _place_of(speed: ModelSpeed) -> str:
    step = speed.step
    return repr((speed.machine, speed.model_key, step.phase != "prefill", f"{step.sequences:9}"))


def _unmeasured(speeds: Sequence[ModelSpeed]) -> dict[tuple[MachineKey, str], list[int]]:
    measured: dict[tuple[MachineKey, str], set[int]] = defaultdict(set)
    for speed in speeds:
        measured[speed.machine, speed.model_key] |= (
            {speed.step.sequences} if speed.step.phase == "decode" else set()
        )
    return {
        key: [n for n in SEQUENCES if n not in counts]
        for key, counts in measured.items()
        if counts != set(SEQUENCES)
    }


class MachineWorth(NamedTuple):
    """The worth on one kind of machine, and what is to be said of it."""

    machine: MachineKey
    is_imported: bool
    products: list[ProductGains]
    models: list[ModelSpeed]
    remarks: list[str]


def worth_by_machine(worth: Worth) -> Iterator[MachineWorth]:
    """In the order of the database's machines, those measured here first."""
    groups: dict[tuple[MachineKey, bool], tuple[list[ProductGains], list[ModelSpeed]]] = {}
    for (machine, verified), products in groupby(
        worth.products, lambda gains: (gains.machine, gains.verified)
    ):
        groups.setdefault((machine, not verified), ([], []))[0].extend(products)
    for speed in worth.models:
        groups.setdefault((speed.machine, not speed.verified), ([], []))[1].append(speed)
    for (machine, is_imported), (products_of, models) in sorted(
        groups.items(), key=lambda item: (item[0][1], repr(item[0][0]))
    ):
        missing = {
            name: sequences
            for (other, name), sequences in worth.unmeasured.items()
            if other == machine and models
        }
        yield MachineWorth(
            machine,
            is_imported,
            products_of,
            models,
            [*_remarks(products_of, models, missing)],
        )


def _remarks(
    products: Sequence[ProductGains], models: Sequence[ModelSpeed], missing: dict[str, Sequence[int]]
) -> Iterator[str]:
    count, tuned = sum(gains.products for gains in products), sum(gains.tuned for gains in products)
    if count:
        ratios = [MeasuredRatio(gains.gain, gains.gain_low, gains.gain_high) for gains in products]
        mean = mean_of(
            ratio for gains, ratio in zip(products, ratios, strict=True) for _ in range(gains.products)
        )
        yield (
            f"{tuned} of {counted(count, 'product')} run by a tuned schedule, {count - tuned} by the default:"
            f" {proven(mean.gain, mean.low, mean.high, 3)} in the mean over all of them."
        )
    idle = [
        f"{gains.kernels} {gains.format}, rows {_rows_words(*gains.rows)}"
        for gains in products
        if not gains.tuned
    ]
    if idle:
        yield f"Nothing was gained: {'; '.join(idle)}."
    even = [
        f"{speed.model_key}, {_step_words(speed.step)}"
        for speed in models
        if not speed.comparison.proves_faster
    ]
    if even:
        yield f"No gain is shown for the whole model: {'; '.join(even)}."
    for model, sequences in missing.items():
        what = ", ".join(map(str, sequences))
        yield f"{model}: decode was not measured at {what} {plural(sequences[-1], 'sequence')}."
