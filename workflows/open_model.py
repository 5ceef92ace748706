"""Open a model for running: its weights, one service plan for each phase, and the tuned schedules in use.

`generate`, `serve`, `bench run` and `predict-len collect` all begin here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phasewise.workflows.arithmetic_choice import ArithmeticChoice
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.serving.loaders.storage import StorageChoice
    from phasewise.serving.model import PackedModel
    from phasewise.serving.sparse_mode import SparseMode
    from phasewise.tuner.plans import Phase, ServicePlan
    from phasewise.workflows.tuned_schedules import KernelSchedules, ScheduleUse


@dataclass(frozen=True)
class OpenModel:
    """A model in memory, and how this machine runs it."""

    model: PackedModel
    plans: Mapping[Phase, ServicePlan]
    schedules: Mapping[Phase, KernelSchedules]
    storage: StorageChoice
    """How its weights were to be stored."""

    def explain(self, prefill_rows: int, decode_rows: int, kv_format: str = "auto") -> list[ScheduleUse]:
        """The schedule of every product and of attention, for steps of up to this many rows in each phase."""
        from phasewise.workflows.tuned_schedules import explain

        most_rows: dict[Phase, int] = {"prefill": prefill_rows, "decode": decode_rows}
        return explain(self.model, self.plans, self.schedules, most_rows, kv_format, self.storage)


def open_model(
    ref: str,
    weight_format: str = "native",
    threads: int | None = None,
    db: str | None = None,
    report: Report = silent,
    *,
    checksum: bool = False,
    sparse: SparseMode = "auto",
    tile_prompts: bool = False,
    arithmetic: ArithmeticChoice = "tuned",
    ranks: int | None = None,
) -> OpenModel:
    """Load a model, find its plans and the schedules in use on the plans' cores.

    ref: a known name, a GGUF file, a Hugging Face directory or a hub name. weight_format: one of
    `serving.model.FORMATS`. threads: cores of each phase, ranks: how many divide them; both None for the
    stored plan, or the default one.
    db: URL or file of the tuning database; None for the user's own. checksum: read the packed file whole, and
    make it anew where it is not as it was written. sparse: which weights are stored sparse. tile_prompts:
    prefill multiplies quantised weights as bf16 on the tile unit, where there is one. arithmetic:
    of K-quants. Raises ModelError, PlanError, KernelDbError.
    """
    from phasewise.serving.loaders import load_model
    from phasewise.serving.loaders.resolve import cache_root, locate
    from phasewise.topology import read_machine
    from phasewise.tuner.plans import model_key, plans_for
    from phasewise.workflows.storage_choice import storage_choice
    from phasewise.workflows.tuned_schedules import schedules_for

    machine = read_machine()
    name = locate(ref, cache_root(None), report).name
    plans = plans_for(db, machine, model_key(name, weight_format), threads, report, ranks)
    storage = storage_choice(sparse, db, machine, plans, report)
    model = load_model(ref, weight_format, report=report, checksum=checksum, storage=storage)
    schedules = schedules_for(db, machine, plans, report, tile_prompts=tile_prompts, arithmetic=arithmetic)
    return OpenModel(model, plans, schedules, storage)
