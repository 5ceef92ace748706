"""Tuned schedules for an opened model: the lookup that serving is given, and what `--explain` says of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from phasewise.cli.present import note
from phasewise.cython_kernels.division import columns, share
from phasewise.kerneldb.location import locate
from phasewise.serving.forward import attention_problem
from phasewise.serving.schedules import RowRange
from phasewise.topology import Machine
from phasewise.tuner.lookup import Choice, PhaseSchedules, ScheduleTable
from phasewise.tuner.plans import Phase, ServicePlan, machine_key
from phasewise.tuner.weights import format_name

if TYPE_CHECKING:
    from phasewise.cython_kernels.packing import PackedWeight
    from phasewise.serving.model import PackedModel

Plans = Mapping[Phase, ServicePlan]


@dataclass(frozen=True)
class KernelSchedules:
    """A phase's table in the kernels' numbers; serving's ScheduleLookup."""

    found: PhaseSchedules
    _known: dict[tuple[str, int, int, int], list[RowRange]] = field(default_factory=dict)

    def arithmetic(self, weight: PackedWeight) -> tuple[str | None, int]:
        return self.found.arithmetic(weight)

    def products(self, weight: PackedWeight, max_m: int) -> list[RowRange]:
        """Worked out once for each shape: a model has hundreds of weights and few shapes."""
        key = (format_name(weight), weight.n, weight.k, max_m)
        if key not in self._known:
            self._known[key] = _row_ranges(self.found.products(weight, max_m))
        return self._known[key]

    def attention(self, kv_format: str, n: int, k: int, max_m: int) -> list[RowRange]:
        return _row_ranges(self.found.attention(kv_format, n, k, max_m))


def _row_ranges(choices: Sequence[Choice]) -> list[RowRange]:
    ranges = []
    for choice in choices:
        fields = None
        if choice.schedule is not None:
            from phasewise.tuner.native import kernel_fields  # loads SQLAlchemy, as the row's store has done

            fields = kernel_fields(choice.schedule)
        ranges.append(RowRange(choice.last_m, fields, choice.why))
    return ranges


def schedules_for(
    db: str | os.PathLike[str] | None, machine: Machine, plans: Plans
) -> Mapping[Phase, KernelSchedules]:
    """What is in use on each plan's cores with this build of the kernels; nothing without a database."""
    absent = locate(db).is_absent
    tables = {phase: ScheduleTable([]) for phase in plans} if absent else _tables(db, machine, plans)
    return {phase: KernelSchedules(PhaseSchedules(table)) for phase, table in tables.items()}


def _tables(db: str | os.PathLike[str] | None, machine: Machine, plans: Plans) -> dict[Phase, ScheduleTable]:
    from phasewise.cython_kernels._native import kernel_abi
    from phasewise.kerneldb.store import open_store
    from phasewise.tuner.lookup import read_table
    from phasewise.tuner.native import is_default_for

    with open_store(db, note) as store:
        return {
            phase: read_table(
                store,
                machine_key(machine, plan.ranks[0].cores),
                kernel_abi,
                is_default_for(len(plan.ranks[0].cores)),
            )
            for phase, plan in plans.items()
        }


# ---- explain ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScheduleUse:
    """By which schedule products of one shape, or attention, run in one phase for a range of rows."""

    phase: Phase
    used_for: str
    """Names of weights, e.g. `layers.*.qkv`, or `attention`."""
    format: str
    n: int
    k: int
    compute_path: str
    k_parts: int
    first_m: int
    last_m: int
    why: str
    schedule: Mapping[str, int] | None
    """None: attention's default, which looks at the whole step."""


def explain(
    model: PackedModel,
    plans: Plans,
    lookups: Mapping[Phase, KernelSchedules],
    most_rows: Mapping[Phase, int],
    kv_format: str,
) -> list[ScheduleUse]:
    """Every distinct shape of `model` and its attention, up to `most_rows` of each phase.

    Of several ranks, what the first one computes: its columns, its heads.
    """
    uses: list[ScheduleUse] = []
    for phase, plan in plans.items():
        threads = tuple(len(rank.cores) for rank in plan.ranks)
        for names, whole in _shapes(model):
            arithmetic = lookups["prefill"].arithmetic(whole)
            weight = columns(whole, *share(whole.values.shape[0], threads, 0))
            if weight is None:
                continue  # fewer panels than threads
            ranges = lookups[phase].products(weight, max(most_rows.values()))
            cut = _cut(ranges, most_rows[phase])
            uses += [_product_use(phase, names, weight, arithmetic, threads[0], rows) for rows in cut]
        heads = share(model.config.n_kv_heads, threads, 0)[1]
        if heads:
            problem = attention_problem(model, heads, kv_format)
            ranges = lookups[phase].attention(*problem, max(most_rows.values()))
            uses += [_attention_use(phase, problem, rows) for rows in _cut(ranges, most_rows[phase])]
    return uses


def _shapes(model: PackedModel) -> Iterator[tuple[str, PackedWeight]]:
    """One weight of each shape, and the names of all that have it: `layers.*.qkv`."""
    names: dict[tuple[str, int, int], dict[str, None]] = {}
    first: dict[tuple[str, int, int], PackedWeight] = {}
    for name, weight in model.weights.items():
        if name == "embed" and not model.config.tied_embeddings:
            continue  # rows are looked up in it; nothing is multiplied
        key = (format_name(weight), weight.n, weight.k)
        in_any_layer = ".".join("*" if part.isdigit() else part for part in name.split("."))
        names.setdefault(key, {})[in_any_layer] = None
        first.setdefault(key, weight)
    for key, weight in first.items():
        yield " ".join(names[key]), weight


def _cut(ranges: Sequence[RowRange], most_rows: int) -> Iterator[tuple[int, RowRange]]:
    """The ranges up to `most_rows`, each with its first number of rows."""
    first_m = 1
    for rows in ranges:
        if first_m > most_rows:
            return
        yield first_m, replace(rows, last_m=min(rows.last_m, most_rows))
        first_m = rows.last_m + 1


def _product_use(
    phase: Phase,
    names: str,
    weight: PackedWeight,
    arithmetic: tuple[str | None, int],
    threads: int,
    found: tuple[int, RowRange],
) -> ScheduleUse:
    from phasewise.cython_kernels._native import compute_paths, default_schedule

    (path, k_parts), (first_m, rows), paths = arithmetic, found, compute_paths(weight.kind, weight.group)
    return ScheduleUse(
        phase,
        names,
        format_name(weight),
        weight.n,
        weight.k,
        path if path is not None and path in paths else paths[0],
        k_parts,
        first_m,
        rows.last_m,
        rows.why,
        rows.schedule or default_schedule(weight, rows.last_m, threads, path, k_parts),
    )


def _attention_use(phase: Phase, problem: tuple[str, int, int], found: tuple[int, RowRange]) -> ScheduleUse:
    first_m, rows = found
    kv_format, n, k = problem
    return ScheduleUse(
        phase, "attention", kv_format, n, k, "fma", 1, first_m, rows.last_m, rows.why, rows.schedule
    )


def uses_fields(uses: Iterable[ScheduleUse]) -> list[dict[str, Any]]:
    """As JSON values."""
    return [asdict(use) for use in uses]


def uses_text(uses: Sequence[ScheduleUse]) -> str:
    """As a table for people."""
    from tabulate import tabulate

    rows = [
        (
            use.phase,
            use.used_for,
            _problem(use),
            _arithmetic(use),
            _rows(use),
            use.why,
            describe(use.schedule),
        )
        for use in uses
    ]
    return tabulate(
        rows,
        headers=("phase", "used for", "format n x k", "computed by", "rows", "why", "schedule"),
        tablefmt="plain",
    )


def _problem(use: ScheduleUse) -> str:
    return f"{use.format} {use.n} x {use.k}"


def _arithmetic(use: ScheduleUse) -> str:
    return use.compute_path + (f" in {use.k_parts} parts" if use.k_parts > 1 else "")


def _rows(use: ScheduleUse) -> str:
    return str(use.first_m) if use.first_m == use.last_m else f"{use.first_m}-{use.last_m}"


def describe(schedule: Mapping[str, int] | None) -> str:
    """A kernel's schedule in a line: tile and block as rows x columns, grid as threads over m, n and k."""
    if schedule is None:
        return "by the step"
    s = schedule
    return (
        f"tile {s['mr']}x{16 * s['panels']}, block {s['block_m']}x{16 * s['block_n']}x{s['block_k']}, "
        f"grid {s['grid_m']}x{s['grid_n']}x{s['grid_k']}, {'mn' if s['rows_outside'] else 'nm'}, "
        f"prefetch {s['prefetch_bytes']}"
    )
