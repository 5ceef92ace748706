"""The storage of a model's weights on this machine: by the tuning database, where it knows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from phasewise.kerneldb.location import locate
from phasewise.serving.loaders.storage import StorageChoice, StorageDecision
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.serving.loaders.forms import WeightForm
    from phasewise.serving.models.sparse_mode import SparseMode
    from phasewise.topology import Machine
    from phasewise.tuner.plans import Phase, ServicePlan
    from phasewise.tuner.storage import StorageTable


def storage_choice(
    mode: SparseMode,
    db: str | os.PathLike[str] | None,
    machine: Machine,
    plans: Mapping[Phase, ServicePlan],
    report: Report = silent,
    sequences: int = 1,
) -> StorageChoice:
    """For `--sparse MODE`, where up to `sequences` decode together. Duels are those of the cores of `plans`;
    ranks of several share weights, so for them nothing was compared.
    """
    unmeasured = StorageChoice(mode, sequences=sequences)
    if mode != "auto" or locate(db).is_absent or any(len(plan.ranks) > 1 for plan in plans.values()):
        return unmeasured
    from phasewise.cython_kernels._native import kernel_abi
    from phasewise.kerneldb.start_reads import open_start_reads
    from phasewise.tuner.plans import machine_key
    from phasewise.tuner.storage import read_storage_table

    keys = [machine_key(machine, own.ranks[0].cores) for plan in plans.values() for own in plan.each]
    with open_start_reads(db, report) as reads:
        table = read_storage_table(reads, keys, kernel_abi("gemm"))
    return _measured_choice(table, sequences) if table else unmeasured


def _measured_choice(table: StorageTable, sequences: int) -> StorageChoice:
    from phasewise.tuner.weights import format_of_kind

    def measured(form: WeightForm, n: int, k: int, density: float) -> StorageDecision | None:
        name = format_of_kind(form.kind, form.group, form.has_mins)
        verdict = table.verdict(name, n, k, density, sequences)
        return None if verdict is None else StorageDecision(verdict.is_sparse, verdict.why)

    return StorageChoice("auto", measured, sequences)
