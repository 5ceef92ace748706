"""Finds the source of draft tokens that `--draft` names: a head, a draft model, or lookup."""

from __future__ import annotations

from dataclasses import dataclass

from phasewise.kerneldb.location import locate as locate_database
from phasewise.kerneldb.records import StepTime
from phasewise.kerneldb.start_reads import open_start_reads
from phasewise.serving.drafts.contract import MOST_DRAFTED
from phasewise.serving.drafts.gain import LEAST_GAIN
from phasewise.serving.drafts.opening import DraftSource, check_vocabularies
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders import load_head, load_model
from phasewise.serving.loaders.fetching.resolve import cache_root, locate
from phasewise.serving.models.forward import check_generates
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.models.storage_modes import PackMode
from phasewise.topology import read_machine
from phasewise.tuner.plans import machine_key, model_key
from phasewise.workflows.opening.open_model import OpenModel
from phasewise.workflows.report import Report, silent

LOOKUP = "lookup"
HEAD = "mtp"
AUTO = "auto"
OFF = "off"
NOT_NAMED = (None, AUTO)
HEADS_READ = "those of Qwen 3 Next, Qwen 3.5, DeepSeek V3 and GLM 4.5 are"


@dataclass(frozen=True)
class DraftRule:
    """The source of drafts, and how many of them a step may check."""

    source: str
    """The kind of source: "mtp", "model" or "lookup"."""
    name: str | None
    """Name of the head or the draft model; None for lookup."""
    weight_bytes: int
    n_tokens: int | None
    """Drafts of each sequence in every step; None: as many as pay, up to `most`."""
    most: int
    least_gain: float
    """Least gain in tokens a second from which on drafts pay."""


def rule_of(drafts: DraftSource | None) -> DraftRule | None:
    """The rule of a source of drafts; None where nothing is drafted."""
    if drafts is None:
        return None
    draft, source = drafts.model, LOOKUP
    if draft is not None:
        source = HEAD if drafts.is_head else "model"
    return DraftRule(
        source,
        None if draft is None else draft.name,
        0 if draft is None else draft.weight_bytes,
        drafts.n_tokens,
        MOST_DRAFTED,
        LEAST_GAIN,
    )


def check_draft(name: str | None, report: Report = silent) -> None:
    """Raise ModelError early for an absent draft model. `name`: as for `find_drafts`."""
    if name in (*NOT_NAMED, LOOKUP, HEAD, OFF):
        return
    assert name is not None
    locate(name, cache_root(None), report)


def find_drafts(
    name: str | None,
    opened: OpenModel,
    db: str | None = None,
    report: Report = silent,
    n_tokens: int | None = None,
    *,
    with_head: bool = True,
) -> DraftSource | None:
    """Find the source of drafts for an open model; None where there is no source, or `name` is `off`.

    name: `lookup`, `mtp` (a head that the model's files have), `off`, or a model as `open_model` reads it;
    None or `auto`: the head of a model that has one, else `lookup`, as far as drafts pay. with_head: False
    where the head lacks rows of prompts: `lookup` drafts in its place. db: URL or file of the tuning
    database, whose step times say what rows cost. n_tokens: as `DraftSource.n_tokens`. ModelError where the
    draft model or the head cannot be read, is not there, or has another vocabulary.
    """
    if name == OFF:
        return None
    recorded = _recorded_ns(opened, db)
    if name in (*NOT_NAMED, HEAD, LOOKUP):
        if name == HEAD and not with_head:
            report(f"a head drafts where its engine computes the whole prompt: {LOOKUP} drafts instead")
        reads_head = name != LOOKUP and with_head
        head = _head_of(opened, report, is_named=name == HEAD) if reads_head else None
        return DraftSource(head, recorded, n_tokens)
    assert name is not None
    pack: PackMode = "memory" if opened.model.is_in_memory else "keep"
    draft = load_model(name, "native", report=report, pack=pack)
    check_generates(draft)
    if draft.config.state is not None:
        raise ModelError(
            f"{draft.name} has layers that keep a state, and cannot draft: name a model with attention"
            f" alone, or"
            f" {LOOKUP}"
        )
    check_vocabularies(draft, opened.model)
    return DraftSource(draft, recorded, n_tokens)


def _head_of(opened: OpenModel, report: Report, *, is_named: bool) -> PackedModel | None:
    """The head in a model's files, in the model's format. ModelError where it is named but unusable."""
    model = opened.model
    try:
        head = load_head(model, model.format, report=report)
    except ModelError as error:
        if is_named:
            raise
        report(f"the head of {model.name} drafts nothing: {error}")
        return None
    if head is None and is_named:
        raise ModelError(
            f"{model.name} has no head that drafts, or none that is read ({HEADS_READ}): name a model, or"
            f" {LOOKUP}"
        )
    if head is not None and not is_named:
        size = f"{head.weight_bytes / 1e6:.0f} MB"
        report(f"a head of {model.name} ({size}) drafts as far as that pays; --draft off: nothing does")
    return head


def _recorded_ns(opened: OpenModel, db: str | None) -> dict[int, float]:
    """Recorded nanoseconds of the plan's decode steps by number of rows, at the shortest context."""
    if locate_database(db).is_absent:
        return {}
    from phasewise.tuner.config.recorded import configurations
    from phasewise.tuner.topotree import Configuration

    machine, plan = read_machine(), opened.plans["decode"]
    with open_start_reads(db) as reads:
        key = model_key(opened.model.name, opened.model.format)
        rows = reads.rows(StepTime, machine=machine_key(machine), model_key=key, phase="decode")
    timed = [
        row
        for key, row in configurations(rows, machine)
        if row.step.tokens == 1 and key == Configuration(plan.at(row.step.sequences).ranks).key
    ]
    shortest = min((row.step.context for row in timed), default=0)
    return {row.step.sequences: float(row.estimate_ns) for row in timed if row.step.context == shortest}
