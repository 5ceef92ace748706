"""A round of `tune-kernels` as JSON values: what `--json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from phasewise.tuner.ledger import mean_of

if TYPE_CHECKING:
    from phasewise.kerneldb.records import StorageDuel
    from phasewise.tuner.ledger import MeasuredRatio
    from phasewise.tuner.task_division import Task
    from phasewise.tuner.tuning_run import Gain
    from phasewise.workflows.tune_kernels.rounds import Shape, TunedRound


def plan_fields(shape: Shape, task: Task) -> dict[str, Any]:
    """A weight of a dry run."""
    paths = dict.fromkeys(arithmetic.compute_path for arithmetic in task.group.arithmetics)
    return {
        "weight": task_name(task),
        "uses": shape.uses,
        "products": len(task.ms),
        "m up to": task.ms[-1],
        "tiles": sum(len(task.group.kernels[path]) for path in paths),
        "paths": ", ".join(paths),
    }


def mean_gain(gains: Sequence[Gain]) -> MeasuredRatio:
    """The geometric mean, of untouched ones too."""
    return mean_of(gain.over_default for gain in gains)


def tuned_fields(tuned: TunedRound) -> dict[str, Any]:
    """One round as JSON values."""
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
        "mean_gain": asdict(mean_gain(outcome.gains)) if outcome.gains else None,
        "gains": [_gain_fields(tuned, gain) for gain in outcome.gains],
        "storage": [storage_fields(duel) for duel in tuned.storage],
        "attention": [_verdict_fields(gain) for gain in tuned.attention.gains] if tuned.attention else [],
    }


def _gain_fields(tuned: TunedRound, gain: Gain) -> dict[str, Any]:
    return {
        "uses": tuned.round.uses(gain.problem),
        "roofline_fraction": tuned.roofline_share(gain),
        **_verdict_fields(gain),
    }


def _verdict_fields(gain: Gain) -> dict[str, Any]:
    return {
        **asdict(gain.problem),
        "default_ns": gain.default_ns,
        "tuned_ns": gain.tuned_ns,
        "gain": gain.over_default.gain,
        "gain_low": gain.over_default.low,
        "gain_high": gain.over_default.high,
        "is_default": gain.is_default,
        "schedule": asdict(gain.schedule),
        "last_duel": asdict(gain.comparison),
    }


def storage_fields(duel: StorageDuel) -> dict[str, Any]:
    """A duel between storages; its gain is dense's time / sparse's time."""
    schedules = {"schedule": asdict(duel.schedule), "dense_schedule": asdict(duel.dense_schedule)}
    return {**asdict(duel.problem), **asdict(duel.comparison), **schedules}


def task_name(task: Task) -> str:
    return f"{task.group.format} {task.group.n}x{task.group.k}"
