"""Text of a tuning run: progress lines, and tables and JSON values at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from phasewise._rows import Row, column
from phasewise._words import LOW_LIMIT, NOTHING, clock, counted, percent, proven
from phasewise.cli.present import goes_on
from phasewise.cli.tables import RowTable, table_of_rows
from phasewise.tuner.ledger import mean_of

if TYPE_CHECKING:
    from phasewise.kerneldb.records import Comparison, Schedule
    from phasewise.tuner.ledger import MeasuredRatio
    from phasewise.tuner.task_division import Task
    from phasewise.tuner.tuning_run import Gain, TuningProgress
    from phasewise.workflows.tune_kernels.rounds import TunedRound

DISTURBED_LAPS = 0.1
"""Least share of disturbed timings for which the result carries a warning."""


def progress_line(progress: TuningProgress) -> str:
    """Progress in one line, e.g. `2/5 int8 3072x576 m=64: 512 timed in 1:23, about 4:10 left`."""
    left = "time left not known yet" if progress.left_s is None else f"about {clock(progress.left_s)} left"
    return f"{where_of(progress)} in {clock(progress.elapsed_s)}, {left}"


def where_of(progress: TuningProgress) -> str:
    """Progress without times, e.g. `2/5 int8 3072x576 m=64: 512 timed`."""
    return (
        f"{progress.task_number}/{progress.task_count} {task_name(progress.task)} m={progress.m}: "
        f"{progress.timed} timed"
    )


def tuned_text(tuned: TunedRound, *, resume: bool = True) -> Iterator[str | RowTable]:
    """Yield the tables of one round: each weight's products, then the sums. resume: the run's own option."""
    tables = [_task_table(tuned, task) for task in tuned.round.tasks if _gains_of(tuned, task)]
    if attention := attention_rows(tuned):
        title = f"attention {attention[0].format} {attention[0].n}x{attention[0].k}"
        tables.append(table_of_rows(attention, title=title))
    if storage := storage_rows(tuned):
        tables.append(table_of_rows(storage, title="speed stored sparse, as against dense"))
    yield tuned.round.describe()
    for part in (*tables, *_closing_lines(tuned, resume)):
        yield ""
        yield part


class GainRow(Row):
    """A computation by default and tuned."""

    family: str
    format: str
    n: int
    k: int
    m: int = column("m")
    default_ns: int = column("default us", ".1f", per=1e3)
    tuned_ns: int = column("tuned us", ".1f", per=1e3)
    gain: float = column("gain", of_row=lambda row: NOTHING if row.is_default else _ratio(row))
    gain_low: float
    gain_high: float
    is_default: bool
    last_duel: Comparison

    @classmethod
    def of_gain(cls, gain: Gain, **more: Any) -> Self:
        """Make the row of a gain. more: fields that a gain does not have."""
        ratio = gain.over_default
        own = {"gain": ratio.gain, "gain_low": ratio.low, "gain_high": ratio.high}
        return cls.made_of(gain, gain.problem, **own, last_duel=gain.comparison, **more)


class AttentionRow(GainRow):
    """Attention over some rows."""

    schedule: Schedule = column("schedule", of_row=lambda row: _schedule(row, attention_text), left=True)


class ProductRow(GainRow):
    """A product by a weight."""

    uses: int
    roofline_fraction: float | None = column("of limit", percent)
    schedule: Schedule = column("schedule", of_row=lambda row: _schedule(row, schedule_text), left=True)


class StorageRow(Row):
    """A product by a weight stored sparse, as against dense; its gain is dense's time / sparse's time."""

    family: str
    format: str = column("weight", of_row=lambda row: f"{row.format} {row.n}x{row.k}", left=True)
    n: int
    k: int
    m: int = column("m")
    gain: float = column("sparse", of_row=lambda row: _ratio(row))
    gain_low: float = column("between", of_row=lambda row: f"{row.gain_low:.2f} and {row.gain_high:.2f}")
    gain_high: float
    confidence: float
    pairs: int
    schedule: Schedule
    dense_schedule: Schedule


def _ratio(row: Any) -> str:
    return proven(row.gain, row.gain_low, row.gain_high)


def _schedule(row: Any, text: Callable[[Any], str]) -> str:
    return "the default" if row.is_default else text(row)


def attention_rows(tuned: TunedRound) -> list[AttentionRow]:
    """A row for each tuned number of rows of attention."""
    return [AttentionRow.of_gain(gain) for gain in tuned.attention.gains] if tuned.attention else []


def storage_rows(tuned: TunedRound) -> list[StorageRow]:
    """A row for each duel between storages."""
    return [StorageRow.made_of(duel, duel.problem, duel.comparison) for duel in tuned.storage]


def attention_text(row: AttentionRow) -> str:
    """A schedule of attention in words, e.g. `8 of 64 rows`."""
    if row.m == 1:
        return f"pieces of {row.schedule.block_k} positions"
    return f"{row.schedule.mr} of {counted(row.schedule.block_m, 'row')}"


def _task_table(tuned: TunedRound, task: Task) -> RowTable:
    gains = _gains_of(tuned, task)
    rows = [product_row(tuned, gain) for gain in gains]
    path, parts = gains[0].schedule.compute_path, gains[0].schedule.k_parts
    divided = "" if parts == 1 else f", k in {counted(parts, 'part')}"
    return table_of_rows(rows, title=f"{task_name(task)} ({path}{divided})")


def product_row(tuned: TunedRound, gain: Gain) -> ProductRow:
    share, uses = tuned.roofline_share(gain), tuned.round.uses(gain.problem)
    return ProductRow.of_gain(gain, uses=uses, roofline_fraction=share)


def _gains_of(tuned: TunedRound, task: Task) -> list[Gain]:
    return [gain for gain in tuned.outcome.gains if tuned.round.task(gain.problem) is task]


def _mean(gains: Sequence[Gain]) -> MeasuredRatio:
    """The geometric mean of gains, with 1 for products that keep the default."""
    return mean_of(gain.over_default for gain in gains)


def _told(gain: MeasuredRatio) -> str:
    return proven(gain.gain, gain.low, gain.high)


def schedule_text(gain: ProductRow) -> str:
    """A schedule in words, e.g. `8x32 64x128x576 nm 1x2x1`: tile, block, loop order, grid."""
    schedule = gain.schedule
    return (
        f"{schedule.mr}x{schedule.nr} {schedule.block_m}x{schedule.block_n}x{schedule.block_k} "
        f"{schedule.loop_order} {schedule.threads_m}x{schedule.threads_n}x{schedule.threads_k}"
    )


def _closing_lines(tuned: TunedRound, resume: bool) -> list[str | RowTable]:
    lines: list[str | RowTable] = []
    gains = tuned.outcome.gains
    if gains:
        lines += [_totals_table(tuned), _verdict_line(gains)]
    if any(tuned.roofline_share(gain) is None for gain in gains):
        lines.append(LOW_LIMIT)
    return [*lines, "\n".join(_run_lines(tuned, resume))]


def _totals_table(tuned: TunedRound) -> RowTable:
    rows = [
        {
            "weight": task_name(task),
            "tuned": f"{sum(not gain.is_default for gain in gains)} of {len(task.ms)}",
            "gain, mean": _told(_mean(gains)),
            "most": _told(max((gain.over_default for gain in gains), key=lambda each: each.low)),
            "of limit, m=1": _share_at(tuned, gains, 1),
            "most m": _share_at(tuned, gains, task.ms[-1]),
        }
        for task in tuned.round.tasks
        if (gains := _gains_of(tuned, task))
    ]
    return RowTable(rows, ("weight",))


def _share_at(tuned: TunedRound, gains: Sequence[Gain], m: int) -> str:
    shares = [tuned.roofline_share(gain) for gain in gains if gain.problem.m == m]
    return percent(shares[0]) if shares and shares[0] is not None else NOTHING


def _verdict_line(gains: Sequence[Gain]) -> str:
    faster = sum(not gain.is_default for gain in gains)
    if not faster:
        products = counted(len(gains), "product")
        return f"Tuning gained nothing: of {products}, none was proven faster than by the default."
    products = f"{faster} of {counted(len(gains), 'product')}"
    return f"Faster than by default: {products}; geometric mean of all: {_told(_mean(gains))}."


def _run_lines(tuned: TunedRound, resume: bool) -> Iterator[str]:
    outcome = tuned.outcome
    timed = f"{counted(outcome.timed, 'schedule')} timed"
    yield f"{timed}, {outcome.replayed} known before, {clock(outcome.elapsed_s)}."
    if outcome.end != "complete":
        why = "The budget is used up" if outcome.end == "budget" else "Interrupted"
        settled = len(outcome.gains)
        yield f"{why}: settled {settled} of {counted(outcome.products, 'product')}."
        yield goes_on(resume)
    if outcome.disturbed > DISTURBED_LAPS * outcome.laps:
        steal, others = (percent(outcome.conditions[name]) for name in ("steal", "others"))
        yield f"The machine was busy: {steal} went to other guests, {others} to other processes."


def tuned_fields(tuned: TunedRound) -> dict[str, Any]:
    """JSON fields of one round."""
    outcome = tuned.outcome
    return {
        "phases": list(tuned.round.phases),
        "cores": list(tuned.round.cores),
        "machine": {"core": tuned.machine.core_sig, "placement": tuned.machine.placement_sig},
        "kernel_abi": tuned.kernel_abi,
        "end": outcome.end,
        "products": outcome.products,
        "timed": outcome.timed,
        "replayed": outcome.replayed,
        "duels": outcome.duels,
        "elapsed_s": outcome.elapsed_s,
        "disturbed": outcome.disturbed,
        "conditions": dict(outcome.conditions),
        "limits": {
            "peak_flops": dict(tuned.roofline.peak_flops),
            "read_bytes_per_s": tuned.roofline.read_bytes_per_s,
        },
        "mean_gain": asdict(_mean(outcome.gains)) if outcome.gains else None,
        "gains": [product_row(tuned, gain) for gain in outcome.gains],
        "storage": storage_rows(tuned),
        "attention": attention_rows(tuned),
    }


def task_name(task: Task) -> str:
    return f"{task.group.format} {task.group.n}x{task.group.k}"
