"""Find what drafts tokens of answers, as `--draft` names it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.serving.drafts.opening import DraftSource
    from phasewise.workflows.opening.open_model import OpenModel

LOOKUP = "lookup"


def find_drafts(
    name: str | None,
    opened: OpenModel,
    db: str | None = None,
    report: Report = silent,
    n_tokens: int | None = None,
) -> DraftSource | None:
    """The source of drafts for a model that is open; None where `name` is None: no drafts.

    name: `lookup`, or a model as `open_model` reads it. db: URL or file of the tuning database, whose step
    times say what rows cost. n_tokens: as `DraftSource.n_tokens`. ModelError where the draft model cannot be
    read or has another vocabulary.
    """
    if name is None:
        return None
    from phasewise.serving.drafts.opening import DraftSource, check_vocabularies

    recorded = _recorded_ns(opened, db)
    if name == LOOKUP:
        return DraftSource(recorded_ns=recorded, n_tokens=n_tokens)
    from phasewise.serving.errors import ModelError
    from phasewise.serving.loaders import load_model

    draft = load_model(name, "native", report=report)
    if draft.config.state is not None:
        raise ModelError(
            f"{draft.name} has layers that keep a state, and cannot draft: name a model with attention"
            f" alone, or"
            f" {LOOKUP}"
        )
    check_vocabularies(draft, opened.model)
    return DraftSource(draft, recorded, n_tokens)


def _recorded_ns(opened: OpenModel, db: str | None) -> dict[int, float]:
    """Nanoseconds of decode steps by rows, of the plan in use, at the shortest context that was timed."""
    from phasewise.kerneldb.location import locate
    from phasewise.tuner.plans import machine_key, model_key

    location = locate(db)
    if location.is_absent:
        return {}
    from phasewise.kerneldb.store import open_store
    from phasewise.topology import read_machine
    from phasewise.tuner.config.recorded import configurations
    from phasewise.tuner.topotree import Configuration

    machine, wanted = read_machine(), Configuration(opened.plans["decode"].ranks).key
    with open_store(db) as store:
        rows = store.step_times(
            machine_key(machine), model_key(opened.model.name, opened.model.format), "decode"
        )
    timed = [row for key, row in configurations(rows, machine) if key == wanted and row.step.tokens == 1]
    shortest = min((row.step.context for row in timed), default=0)
    return {row.step.sequences: float(row.estimate_ns) for row in timed if row.step.context == shortest}
