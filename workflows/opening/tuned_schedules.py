"""The tuned schedules of an opened model: tables for serving's look-ups, and a list of all uses.

`schedules_for` reads the database once. `explain` lists every lookup that a model's steps make.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phasewise._words import counted
from phasewise.cython_kernels import sparse
from phasewise.cython_kernels._native import compute_paths, default_schedule
from phasewise.cython_kernels.division import columns, head_share, share
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.cython_kernels.schedules import RowRange, ScheduleLookup
from phasewise.kerneldb.location import locate
from phasewise.kerneldb.start_reads import open_start_reads
from phasewise.serving.loaders.source import WeightForm
from phasewise.serving.loaders.storage import StorageChoice
from phasewise.serving.models.forward import attention_problem, tuned_attention
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks.core_weights import weights_here
from phasewise.topology import Machine
from phasewise.tuner.lookup import ScheduleStore, ScheduleTable, read_table
from phasewise.tuner.native import abi_of, is_default_for, obstacle
from phasewise.tuner.plans import Phase, ServicePlan, machine_key
from phasewise.tuner.weights import format_name
from phasewise.workflows.options import PATHS, ArithmeticChoice
from phasewise.workflows.report import Report, silent

Plans = Mapping[Phase, ServicePlan]


def schedules_for(
    db: str | os.PathLike[str] | None,
    machine: Machine,
    plans: Plans,
    report: Report = silent,
    *,
    arithmetic: ArithmeticChoice = "tuned",
) -> Mapping[Phase, ScheduleTable]:
    """The schedules in use on each plan's cores with this build of the kernels; none without a database.

    arithmetic: the choice for both phases.
    """
    cores = {own.ranks[0].cores: None for plan in plans.values() for own in plan.each}
    absent = locate(db).is_absent
    tables = dict.fromkeys(cores, ScheduleTable()) if absent else _tables(db, machine, cores, report)
    path = PATHS.get(arithmetic)

    def of_plan(plan: ServicePlan) -> ScheduleTable:
        first, *bands = (tables[own.ranks[0].cores].asked(arithmetic, path) for own in plan.each)
        return first.with_bands(bands) if bands else first

    return {phase: of_plan(plan) for phase, plan in plans.items()}


def _tables(
    db: str | os.PathLike[str] | None, machine: Machine, cores: Iterable[tuple[int, ...]], report: Report
) -> dict[tuple[int, ...], ScheduleTable]:
    """Schedule tables by rank's cores."""
    with open_start_reads(db, report) as reads:
        return {rank_cores: read_schedules(reads, machine, rank_cores, report) for rank_cores in cores}


def read_schedules(
    store: ScheduleStore, machine: Machine, cores: Sequence[int], report: Report
) -> ScheduleTable:
    """The schedules in use on such cores with this build of the kernels, of those that can run here."""
    key = machine_key(machine, cores)
    return read_table(store, key, abi_of, is_default_for(len(cores)), obstacle, report)


# ---- explain ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScheduleUse:
    """The schedule of products of one shape, or of attention, in one phase and for a range of rows."""

    phase: Phase
    used_for: str
    """Names of the weights, e.g. `layers.*.qkv`, or `attention`."""
    format: str
    n: int
    k: int
    compute_path: str
    k_parts: int
    first_m: int
    last_m: int
    why: str
    schedule: Mapping[str, Any] | None
    """The schedule; None: attention's default, which looks at the whole step."""
    storage: str = "dense"
    """`dense` or `sparse`, with the share of values that is kept where both were possible."""
    storage_why: str = ""
    from_sequences: int = 1
    """Decode: least number of sequences in the steps, which select a band of the plan."""


def explain(
    model: PackedModel,
    plans: Plans,
    lookups: Mapping[Phase, ScheduleTable],
    most_rows: Mapping[Phase, int],
    kv_format: str,
    storage: StorageChoice,
) -> list[ScheduleUse]:
    """One entry for every distinct shape of `model`, and for attention, up to `most_rows` of each phase.

    Where a plan has several ranks, the entries are for the columns and heads that rank 0 computes. Density is
    that of the first weight of a shape. storage: the choice by which the model's weights were stored.
    """
    uses: list[ScheduleUse] = []
    shapes = [(names, whole, _storage_of(whole, storage)) for names, whole in _shapes(model)]
    for phase, plan, lookup, sequences in _by_load(plans, lookups):
        own: list[ScheduleUse] = []
        threads, weights = len(plan.ranks[0].cores), weights_here(plan)
        for names, whole, stored in shapes:
            arithmetic = lookups["prefill"].arithmetic(whole)
            weight = columns(whole, *share(whole.panels, weights, 0))
            if weight is None:
                continue  # fewer panels than threads
            ranges: Sequence[RowRange] = lookup.products(weight, max(most_rows.values()))
            cut = _cut(ranges, most_rows[phase])
            product_uses = [_product_use(phase, names, weight, arithmetic, threads, rows) for rows in cut]
            own += [replace(use, storage=stored[0], storage_why=stored[1]) for use in product_uses]
        heads = head_share(model.config.n_heads, model.config.n_kv_heads, weights, 0)
        if heads.n_kv_heads and tuned_attention(model, kv_format) is not None:
            problem = attention_problem(model, heads, kv_format)
            ranges = lookup.attention(*problem, max(most_rows.values()))
            shared = "" if heads.n_sharers == 1 else f" of a KV head of {counted(heads.n_sharers, 'rank')}"
            name = f"attention{shared}"
            own += [
                ScheduleUse(phase, name, *problem, "fma", 1, first_m, rows.last_m, rows.why, rows.schedule)
                for first_m, rows in _cut(ranges, most_rows[phase])
            ]
        uses += own if sequences == 1 else [replace(use, from_sequences=sequences) for use in own]
    return uses


def _by_load(
    plans: Plans, lookups: Mapping[Phase, ScheduleTable]
) -> Iterator[tuple[Phase, ServicePlan, ScheduleLookup, int]]:
    """Each phase's plan and decode's bands: (phase, plan, lookup, least number of sequences)."""
    for phase, plan in plans.items():
        table = lookups[phase]
        own = (table, *table.bands, *[ScheduleLookup()] * len(plan.bands))
        for each, lookup, sequences in zip(plan.each, own, (1, *plan.starts), strict=False):
            yield phase, each, lookup, sequences


def _shapes(model: PackedModel) -> Iterator[tuple[str, PackedWeight]]:
    """One weight of each shape, and the names of all weights of that shape, e.g. `layers.*.qkv`."""
    names: dict[tuple[str, int, int], dict[str, None]] = {}
    first: dict[tuple[str, int, int], PackedWeight] = {}
    for name, weight in model.products().items():
        if name == "embed" and not model.config.tied_embeddings:
            continue  # rows are looked up in it; nothing is multiplied
        key = (format_name(weight), weight.n, weight.k)
        in_any_layer = ".".join("*" if part.isdigit() else part for part in name.split("."))
        names.setdefault(key, {})[in_any_layer] = None
        first.setdefault(key, weight)
    for key, weight in first.items():
        yield " ".join(names[key]), weight


def _storage_of(weight: PackedWeight, storage: StorageChoice) -> tuple[str, str]:
    """Storage and density of a weight, and the reason for the storage; reads the whole weight."""
    if not sparse.can_be_sparse(weight.kind, weight.mins is not None):
        return "dense", ""
    scale_dtype = None if weight.scales is None else str(weight.scales.dtype)
    form = WeightForm(weight.kind, weight.group, weight.zero_point, scale_dtype)
    kept = sparse.kept(weight)
    density = kept / (weight.n * weight.k)
    name = "sparse" if weight.is_sparse else "dense"
    return f"{name}, {density:.2f} kept", storage.decide(form, weight.n, weight.k, kept).why


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
    cut: tuple[int, RowRange],
) -> ScheduleUse:
    (path, k_parts), (first_m, rows), paths = arithmetic, cut, compute_paths(weight.kind, weight.group)
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
