"""The differences between two databases: what each prefers, key by key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from phasewise.kerneldb.counts import Key
from phasewise.kerneldb.records import KINDS, MachineKey, PlanRecord, StepTime, StoredRow
from phasewise.kerneldb.store import Store
from phasewise.kerneldb.upkeep import AsShared, Preferred, order_of, preferred_of, standings


@dataclass(frozen=True)
class Difference:
    """A key whose preferred schedules differ between two databases, or their standing: in use, measured or
    imported. None for a database that has no row of the key."""

    key: Key
    here: Preferred | None
    there: Preferred | None


@dataclass(frozen=True)
class OtherDifference:
    """The differing verdicts of two databases on a plan, storage, predictor or user's kernel; None for a
    database that has none."""

    kind: str
    of: str
    """The subject of the verdicts, e.g. `gemm bf16s8 1536x576, m 8`, a model and a phase, a predictor and the
    answers that judged it, or a user's kernel and its shape."""
    machine: MachineKey
    kernel_abi: str
    here: str | None
    there: str | None


@dataclass(frozen=True)
class Diff:
    """The differences between the preferred rows of two databases."""

    same: int
    """Number of keys whose schedules, storages, scores or parameters are the same."""
    differences: tuple[Difference, ...]
    others: tuple[OtherDifference, ...] = ()
    steps_here: int = 0
    """Number of models' steps that were timed here alone: a search's choice of steps is no difference."""
    steps_there: int = 0


def diff(here: Store, there: Store, as_shared: AsShared = lambda plan: plan) -> Diff:
    """Compare two databases by key. Another schedule or plan is a difference, and so is a schedule in use in
    one database alone. Keys are compared one at a time: memory grows with keys and differences, not with
    timings."""
    mine, theirs = standings(here), standings(there)
    keys = sorted({*mine, *theirs}, key=order_of)
    differences, same = [], 0
    for key in keys:
        own = preferred_of(here, key, mine[key]) if key in mine else None
        other = preferred_of(there, key, theirs[key]) if key in theirs else None
        if own and other and (own.schedule, own.standing) == (other.schedule, other.standing):
            same += 1
        elif own or other:
            differences.append(Difference(key, own, other))
    own_others, other_others = others_in_use(here, as_shared), others_in_use(there, as_shared)
    others = []
    for thing in sorted({*own_others, *other_others}, key=repr):
        sides = own_others.get(thing), other_others.get(thing)
        if sides[0] == sides[1]:
            same += 1
        else:
            others.append(OtherDifference(*thing, *sides))
    steps, other_steps = _steps_timed(here), _steps_timed(there)
    alone = len(steps - other_steps), len(other_steps - steps)
    return Diff(same, tuple(differences), tuple(others), *alone)


def _steps_timed(store: Store) -> set[tuple[object, ...]]:
    return {
        (row.model_key, row.step, row.kernels, row.configuration_key, row.origin.machine, row.kernel_abi)
        for row in store.stream(StepTime)
    }


OtherKey: TypeAlias = tuple[str, str, MachineKey, str]


def others_in_use(store: Store, as_shared: AsShared) -> dict[OtherKey, str]:
    """The newest verdict on each plan, storage, predictor and user's kernel of a database. A row made in that
    database counts before an imported one; where imported rows of a kind are not used, the verdict says that
    it was imported."""
    said: dict[OtherKey, tuple[bool, str]] = {}
    for kind in KINDS.values():
        for stored in store.stream(kind) if kind.verdict is not StoredRow.verdict else ():
            row = as_shared(stored) if isinstance(stored, PlanRecord) else stored
            if row is None:
                continue
            thing, of, what = row.verdict or ("", "", "")
            key, verified = (thing, of, row.origin.machine, row.build), row.origin.verified
            if verified or not said.get(key, (False, ""))[0]:
                is_used = verified or kind.kind.is_used_imported
                said[key] = (verified, what if is_used else f"{what}, imported")
    return {key: what for key, (_, what) in said.items()}
