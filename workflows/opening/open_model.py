"""Open a model for running: its weights, one service plan for each phase, and the tuned schedules in use.

`generate`, `serve`, `bench run` and `predict-len collect` all begin here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phasewise.serving.models.sparse_mode import SparseMode
from phasewise.workflows.opening.arithmetic_choice import ArithmeticChoice, check_arithmetic
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.serving.loaders.storage import StorageChoice
    from phasewise.serving.models.packed_model import PackedModel
    from phasewise.topology import Machine
    from phasewise.tuner.lookup import ScheduleTable
    from phasewise.tuner.plans import Phase, ServicePlan
    from phasewise.workflows.opening.memory_placement import MemoryPlacement
    from phasewise.workflows.opening.tuned_schedules import ScheduleUse


@dataclass(frozen=True)
class Weights:
    """The storage and arithmetic of a model's weights, in every process that computes with them.

    weight_format: one of `serving.models.packed_model.FORMATS`. sparse: which weights are stored sparse.
    checksum: read the
    packed file whole, and make it anew where it is not as it was written. arithmetic: how weights are
    multiplied. lora: adapters that requests may have on top, NAME=PATH each. sequences: those that are
    expected to decode together, at most, by which `auto` chooses.
    """

    weight_format: str = "native"
    sparse: SparseMode = "auto"
    checksum: bool = False
    arithmetic: ArithmeticChoice = "tuned"
    lora: Sequence[str] | None = None
    sequences: int = field(default=1, kw_only=True)

    @property
    def is_canonical(self) -> bool:
        """True where products are to have the same bits on every CPU."""
        return self.arithmetic == "canonical"


NATIVE = Weights()


@dataclass(frozen=True)
class OpenModel:
    """A model in memory, and how this machine runs it."""

    model: PackedModel
    plans: Mapping[Phase, ServicePlan]
    schedules: Mapping[Phase, ScheduleTable]
    storage: StorageChoice
    """The requested storage of its weights."""

    def memory(self) -> MemoryPlacement | None:
        """The NUMA nodes of its weights, and unequal shares of ranks; None where there is nothing to tell."""
        from phasewise.serving.ranks.rank_layout import RankLayout
        from phasewise.workflows.opening.memory_placement import place

        return place(self.model, RankLayout.here(self.plans))

    def explain(self, prefill_rows: int, decode_rows: int, kv_format: str = "auto") -> list[ScheduleUse]:
        """The schedule of every product and of attention, for steps of up to this many rows in each phase."""
        from phasewise.workflows.opening.tuned_schedules import explain

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

    ref: a known name, a GGUF file, a Hugging Face directory or a hub name. threads: cores of each phase,
    ranks: how many divide them; both None for the stored plan, or the default one. db: URL or file of the
    tuning database; None for the user's own. Raises ModelError, PlanError, KernelDbError.
    """
    from phasewise.serving.loaders.fetching.resolve import cache_root, locate
    from phasewise.topology import read_machine
    from phasewise.tuner.plans import model_key, plans_for
    from phasewise.workflows.opening.suited_default import suited_default

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
    """A model that runs by these plans, with the schedules in use on their cores. As `open_model`."""
    from phasewise.serving.loaders import load_model
    from phasewise.workflows.opening.storage_choice import storage_choice

    check_arithmetic(weights.arithmetic)
    tell_of_own_kernels(report)
    storage = storage_choice(weights.sparse, db, machine, plans, report, weights.sequences)
    model = load_model(ref, weights.weight_format, report=report, checksum=weights.checksum, storage=storage)
    if weights.lora:
        from phasewise.serving.loaders.adapters.load_adapter import with_adapters

        model = with_adapters(model, weights.lora)
    return OpenModel(model, plans, schedules_under(plans, weights, db, machine, report), storage)


def tell_of_own_kernels(report: Report) -> None:
    """A line for each kernel that the user has installed, and why it is not used where it is not."""
    from phasewise.cython_kernels.user_slots.installed import use_installed

    for use in use_installed():
        report(use.describe())


def schedules_under(
    plans: Mapping[Phase, ServicePlan], weights: Weights, db: str | None, machine: Machine, report: Report
) -> Mapping[Phase, ScheduleTable]:
    """The schedules in use on the plans' cores, as `weights` are multiplied."""
    from phasewise.workflows.opening.tuned_schedules import schedules_for

    return schedules_for(
        db,
        machine,
        plans,
        report,
        arithmetic=weights.arithmetic,
    )
