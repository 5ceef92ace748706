"""Open a model for running: its weights, one service plan for each phase, and the tuned schedules in use.

`generate`, `serve`, `bench run` and `predict-len collect` all begin here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from phasewise._places import user_folder
from phasewise.cython_kernels._native import kernel_abi
from phasewise.kerneldb.location import locate as locate_database
from phasewise.kerneldb.start_reads import open_start_reads
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders import config_of_model, load_model
from phasewise.serving.loaders.adapter_files import check_takes_adapters, named_paths, with_adapters
from phasewise.serving.loaders.fetching.resolve import cache_root, locate
from phasewise.serving.loaders.source import WeightForm
from phasewise.serving.loaders.storage import StorageChoice, StorageDecision
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.models.parts.attention import LATENT_KV_FORMATS, check_kv_format
from phasewise.serving.models.storage_modes import SparseMode
from phasewise.serving.ranks.rank_layout import RankLayout
from phasewise.topology import Machine, read_machine
from phasewise.tuner.config.rates import MachineRates, default_rates
from phasewise.tuner.config.suited import has_choice, suited_plan
from phasewise.tuner.core_shares import measured_shares
from phasewise.tuner.errors import EvaluationError
from phasewise.tuner.lookup import ScheduleTable
from phasewise.tuner.plans import (
    DefaultPlan,
    Phase,
    ServicePlan,
    default_plan,
    machine_key,
    model_key,
    plans_for,
)
from phasewise.tuner.storage import StorageTable, read_storage_table
from phasewise.tuner.weights import format_of_kind
from phasewise.workflows.opening.memory_placement import MemoryPlacement, place
from phasewise.workflows.opening.model_shape import shape_of_reference
from phasewise.workflows.opening.settings import NATIVE, Weights
from phasewise.workflows.opening.tuned_schedules import ScheduleUse, explain, schedules_for
from phasewise.workflows.options import check_arithmetic
from phasewise.workflows.report import Report, silent


@dataclass(frozen=True)
class OpenModel:
    """A model in memory, and how this machine runs it."""

    model: PackedModel
    plans: Mapping[Phase, ServicePlan]
    schedules: Mapping[Phase, ScheduleTable]
    storage: StorageChoice
    """The requested storage of the model's weights."""

    def memory(self) -> MemoryPlacement | None:
        """Placement of the weights on NUMA nodes, and ranks' unequal shares; None where there is neither."""
        return place(self.model, RankLayout.here(self.plans))

    def explain(self, prefill_rows: int, decode_rows: int, kv_format: str = "auto") -> list[ScheduleUse]:
        """The schedule of every product and of attention, for steps of up to this many rows in each phase."""
        most_rows: dict[Phase, int] = {"prefill": prefill_rows, "decode": decode_rows}
        return explain(self.model, self.plans, self.schedules, most_rows, kv_format, self.storage)


def open_model(
    ref: str,
    weights: Weights = NATIVE,
    threads: int | None = None,
    db: str | None = None,
    report: Report = silent,
    ranks: int | None = None,
) -> OpenModel:
    """Load a model, find its plans and the schedules in use on the plans' cores.

    ref: a known name, a GGUF file, a Hugging Face directory, a hub name or a packed file. threads: cores of
    each phase, ranks: how many divide them; both None for the stored plan, or the default one. db: URL or
    file of the tuning database; None for the user's own. Raises ModelError, PlanError, KernelDbError.
    """
    check_arithmetic(weights.arithmetic)
    machine = read_machine()
    name = locate(ref, cache_root(None), report).name
    key = model_key(name, weights.weight_format)
    default = suited_default(ref, weights.weight_format, report)
    plans = plans_for(db, machine, key, threads, report, ranks, default)
    return open_under(plans, ref, weights, db, machine, report)


def open_under(
    plans: Mapping[Phase, ServicePlan],
    ref: str,
    weights: Weights,
    db: str | None,
    machine: Machine,
    report: Report = silent,
) -> OpenModel:
    """Open a model under these plans, with the schedules in use on their cores. Otherwise as `open_model`."""
    check_arithmetic(weights.arithmetic)
    storage = storage_choice(weights.sparse, db, machine, plans, report, weights.sequences)
    model = load_model(ref, weights.weight_format, report=report, pack=weights.pack, storage=storage)
    if weights.lora:
        model = with_adapters(model, weights.lora)
    return OpenModel(model, plans, schedules_under(plans, weights, db, machine, report), storage)


def schedules_under(
    plans: Mapping[Phase, ServicePlan], weights: Weights, db: str | None, machine: Machine, report: Report
) -> Mapping[Phase, ScheduleTable]:
    """The schedules in use on the plans' cores, in the arithmetic of `weights`."""
    return schedules_for(db, machine, plans, report, arithmetic=weights.arithmetic)


def storage_choice(
    mode: SparseMode,
    db: str | os.PathLike[str] | None,
    machine: Machine,
    plans: Mapping[Phase, ServicePlan],
    report: Report = silent,
    sequences: int = 1,
) -> StorageChoice:
    """Storage of weights for `--sparse MODE`, where up to `sequences` decode together, by duels on the plans'
    cores. Ranks of several share weights, so that for them nothing was compared.
    """
    unmeasured = StorageChoice(mode, sequences=sequences)
    if mode != "auto" or locate_database(db).is_absent or any(len(plan.ranks) > 1 for plan in plans.values()):
        return unmeasured
    keys = [machine_key(machine, own.ranks[0].cores) for plan in plans.values() for own in plan.each]
    with open_start_reads(db, report) as reads:
        table = read_storage_table(reads, keys, kernel_abi("gemm"))
    return _measured_choice(table, sequences) if table else unmeasured


def _measured_choice(table: StorageTable, sequences: int) -> StorageChoice:
    def measured(form: WeightForm, n: int, k: int, density: float) -> StorageDecision | None:
        name = format_of_kind(form.kind, form.group, form.has_mins)
        verdict = table.verdict(name, n, k, density, sequences)
        return None if verdict is None else StorageDecision(verdict.is_sparse, verdict.why)

    return StorageChoice("auto", measured, sequences)


def suited_default(ref: str, weight_format: str, report: Report) -> DefaultPlan:
    """A default plan for `plans_for`, suited to the model `ref`; its choice and reason go to `report`."""

    def default(machine: Machine, phase: Phase) -> ServicePlan:
        if len(machine.allowed_pus) < 3 or not has_choice(machine):
            return default_plan(machine, phase)
        try:
            shape = shape_of_reference(ref, weight_format, report)
            suited = suited_plan(machine, phase, shape, _rates(machine))
        except (EvaluationError, ModelError):  # no model that generates text layer by layer
            return default_plan(machine, phase)
        if suited.line:
            report(suited.line)
        return suited.plan

    return default


def _rates(machine: Machine) -> MachineRates | None:
    """Measured rates of a running machine's kinds of cores; None: the stated rates apply."""
    if not (machine.kinds and machine.is_live):
        return None
    return default_rates(machine, measured_shares(machine))


def check_settings(ref: str, weights: Weights, kv_format: str = "auto", report: Report = silent) -> None:
    """Raise ModelError for a KV format, or for adapters, that the model `ref` cannot have.

    The model's config is read only where some models could not have these.
    """
    may_have = ("auto", *LATENT_KV_FORMATS)
    if kv_format in may_have and not weights.lora:
        return
    config = config_of_model(ref, weights.weight_format, report=report)
    if kv_format not in may_have:
        check_kv_format(config.latent, locate(ref, cache_root(None), report).name, kv_format)
    if weights.lora:
        for _, path in named_paths(weights.lora):
            check_takes_adapters(config, path)


def hint_at_tuning(model: str, db: str | None, report: Report) -> None:
    """Report how to tune where there is no tuning database yet and this was not said here before.

    A state file remembers that it was said; where the file cannot be written, nothing is said.
    """
    if not locate_database(db).is_absent:
        return
    said = user_folder("state") / "tuning-hint"
    try:
        said.parent.mkdir(parents=True, exist_ok=True)
        said.touch(exist_ok=False)
    except OSError:
        return
    report(f"not tuned for this machine: phasewise tune-kernels {model}, about 4 minutes")
