"""The trials of one study: the known answers, and the claims of processes that are timing configurations.

A trial is one configuration. A process claims a configuration by storing a running trial of it. Trials are
numbered in order of storing, so when two processes claim the same configuration, both see the lower number
and the other gives way.

A configuration that takes no time to answer is not claimed: its trial is a draft, stored in one piece at its
end.

A process that dies leaves a running trial behind, which is seen at once on the same machine and elsewhere by
its heartbeat. The process that sees it marks the trial as failed, and the configuration may be claimed
again."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from phasewise.kerneldb.guests import only_reading
from phasewise.tuner.config.storage import HEARTBEAT_S, clear_storage_errors, quiet

if TYPE_CHECKING:
    import optuna
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial, TrialState

KEY = "configuration"
RIVAL = "rival"
ERROR = "error"
_CLAIM = "claimed by"
_ABANDONED = "abandoned"
_ESTIMATE = "estimated ms"

MOST_PUS = 65_536
"""Upper end of parameter ranges told to Optuna, equal for all trials of a study."""

State = Literal["complete", "pruned", "failed"]


@dataclass(frozen=True, slots=True)
class Known:
    """The state of a configuration in the study."""

    state: State
    cost_ms: float | None
    """Milliseconds; an estimate for a pruned trial; None for a failed one."""
    reason: str | None = None
    """The reason, in one line, of a failure."""


@dataclass(frozen=True)
class TrialEntry:
    """A configuration as a trial: numeric parameters, and remarks for people."""

    key: str
    rival: str | None
    parameters: Mapping[str, int]
    remarks: Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """This process's claim to time a configuration."""

    key: str
    trial_id: int | None
    """The trial's number in the storage; None: a draft, stored when finished."""
    trial: FrozenTrial
    """The trial as stored, except for its number: reading the storage takes longer than a modelled step."""


class Trials:
    """The trials of one study, for one process. KernelDbError when the database fails."""

    def __init__(self, study: optuna.Study, storage: BaseStorage, location_name: str) -> None:
        self._study = study
        self._storage = storage
        self._location_name = location_name
        self._study_id = storage.get_study_id_from_name(study.study_name)
        self._first_own = len(self._all())
        self._last_beat = (-1, -math.inf)
        self._buried_s = -math.inf

    @property
    def study_name(self) -> str:
        return self._study.study_name

    @property
    def name(self) -> str:
        """The name of the study, with the place where it is kept."""
        return f"{self._location_name} {self.study_name}"

    def look(self) -> tuple[dict[str, Known], set[str]]:
        """The state of each configuration, and the configurations that live processes are timing. Failures
        from before this process began are left out. Trials of dead processes are first marked as failed."""
        trials = self._all()
        if any(map(_is_running, trials)):
            self._bury(trials)
            trials = self._all()
        answers: dict[str, Known] = {}
        for trial in trials:
            outcome = self._known(trial)
            if outcome is not None:
                answers.setdefault(trial.user_attrs[KEY], outcome)
        return answers, {
            trial.user_attrs[KEY] for trial in trials if KEY in trial.user_attrs and _is_running(trial)
        }

    def claim(self, entry: TrialEntry) -> Claim | None:
        """The right to time a configuration; None where another process has it or had it."""
        template = _running(entry)
        with clear_storage_errors(self._location_name):
            trial_id = self._storage.create_new_trial(self._study_id, template)
            claim = Claim(entry.key, trial_id, template)
            self._beat(trial_id)
        if self._is_late(entry.key):
            self._end(claim, "FAIL", None, {_ABANDONED: "another process was quicker"})
            return None
        return claim

    def draft(self, entry: TrialEntry) -> Claim:
        """A trial that is stored only when it is finished."""
        return Claim(entry.key, None, _running(entry))

    def _is_late(self, key: str) -> bool:
        """True if another trial of the configuration has a lower number than this process's."""
        first = next((trial for trial in self._all() if self._stands(trial, key)), None)
        return first is None or not _is_running(first) or first.user_attrs[_CLAIM] != _this_process()

    def report(self, claim: Claim, mean_ms: float, slice_number: int) -> bool:
        """Store the mean of the slices so far; True if the study's pruner calls the trial hopeless."""
        from optuna.exceptions import UpdateFinishedTrialError

        with clear_storage_errors(self._location_name):
            if claim.trial_id is not None:
                self._beat(claim.trial_id)
                with suppress(UpdateFinishedTrialError):
                    self._storage.set_trial_intermediate_value(claim.trial_id, slice_number, mean_ms)
            claim.trial.intermediate_values[slice_number] = mean_ms
            with only_reading():
                return self._study.pruner.prune(self._study, claim.trial)

    def complete(self, claim: Claim, cost_ms: float) -> None:
        """Store the cost of a configuration that was timed to the end."""
        self._end(claim, "COMPLETE", cost_ms)

    def prune(self, claim: Claim) -> None:
        """Store that a configuration was stopped early, with an estimate of its whole cost."""
        own = claim.trial.intermediate_values
        complete = [trial for trial in self._all() if trial.state.name == "COMPLETE"]
        self._end(claim, "PRUNED", own[max(own)], {_ESTIMATE: _extrapolated_ms(own, complete)})

    def fail(self, claim: Claim, reason: str) -> None:
        self._end(claim, "FAIL", None, {ERROR: reason})

    def give_back(self, claim: Claim) -> None:
        """Release a claim on a configuration that was not timed."""
        if claim.trial_id is not None:
            self._end(claim, "FAIL", None, {_ABANDONED: "interrupted"})

    def _end(
        self, claim: Claim, state: str, value: float | None, remarks: Mapping[str, Any] | None = None
    ) -> None:
        """Store the end of a trial. `state`: a name of Optuna's TrialState."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        remarks = remarks or {}
        # Finished already: another process held this one to be dead, or has marked the same trial.
        with clear_storage_errors(self._location_name), suppress(UpdateFinishedTrialError):
            if claim.trial_id is None:
                finished = _finished(claim.trial, TrialState[state], value, remarks)
                self._storage.create_new_trial(self._study_id, finished)
                return
            for name, remark in remarks.items():
                self._storage.set_trial_user_attr(claim.trial_id, name, remark)
            values = None if value is None else [value]
            self._storage.set_trial_state_values(claim.trial_id, TrialState[state], values)

    def _known(self, trial: FrozenTrial) -> Known | None:
        match trial.state.name:
            case _ if KEY not in trial.user_attrs:
                return None
            case "COMPLETE":
                return Known("complete", trial.value)
            case "PRUNED":
                return Known("pruned", trial.user_attrs.get(_ESTIMATE, trial.value))
            case "FAIL" if ERROR in trial.user_attrs and trial.number >= self._first_own:
                return Known("failed", None, str(trial.user_attrs[ERROR]))
            case _:
                return None

    def _stands(self, trial: FrozenTrial, key: str) -> bool:
        """True if a trial has, or will have, an answer for a configuration."""
        if trial.user_attrs.get(KEY) != key:
            return False
        return _is_running(trial) or self._known(trial) is not None

    def _bury(self, trials: Sequence[FrozenTrial]) -> None:
        import optuna

        for trial in trials:
            if _is_running(trial) and _is_gone(str(trial.user_attrs.get(_CLAIM))):
                trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, trial.number)
                claim = Claim(str(trial.user_attrs.get(KEY)), trial_id, trial)
                self._end(claim, "FAIL", None, {_ABANDONED: "its process died"})
        if time.monotonic() - self._buried_s < HEARTBEAT_S:
            return
        self._buried_s = time.monotonic()
        with clear_storage_errors(self._location_name), quiet():
            optuna.storages.fail_stale_trials(self._study)

    def _beat(self, trial_id: int) -> None:
        """Record a heartbeat of the trial, no oftener than others check it; in-memory storage needs none."""
        (last_id, beat_s), now_s = self._last_beat, time.monotonic()
        if trial_id == last_id and now_s - beat_s < HEARTBEAT_S:
            return
        record = getattr(self._storage, "record_heartbeat", None)
        if record is not None:
            record(trial_id)
            self._last_beat = (trial_id, now_s)

    def _all(self) -> list[FrozenTrial]:
        """All trials of the study, in the order of their numbers."""
        with clear_storage_errors(self._location_name), only_reading():
            return self._storage.get_all_trials(self._study_id, deepcopy=False)


def _running(entry: TrialEntry) -> FrozenTrial:
    import optuna

    distribution = optuna.distributions.IntDistribution(0, MOST_PUS)
    return optuna.trial.create_trial(
        state=optuna.trial.TrialState.RUNNING,
        params=dict(entry.parameters),
        distributions=dict.fromkeys(entry.parameters, distribution),
        user_attrs={KEY: entry.key, RIVAL: entry.rival, **entry.remarks, _CLAIM: _this_process()},
    )


def _finished(
    running: FrozenTrial, state: TrialState, value: float | None, remarks: Mapping[str, Any]
) -> FrozenTrial:
    import optuna

    finished = optuna.trial.create_trial(
        state=state,
        value=value,
        params=running.params,
        distributions=running.distributions,
        user_attrs={**running.user_attrs, **remarks},
        intermediate_values=running.intermediate_values,
    )
    finished.datetime_start = running.datetime_start
    return finished


def _extrapolated_ms(own: Mapping[int, float], complete: Sequence[FrozenTrial]) -> float:
    """A mean over the first slices scaled to all slices, in proportion to the best complete trial."""
    newest = max(own)
    best = min(complete, key=lambda trial: trial.value or 0.0, default=None)
    if best is None or best.value is None or newest not in best.intermediate_values:
        return own[newest]
    return own[newest] * best.value / best.intermediate_values[newest]


def _is_running(trial: FrozenTrial) -> bool:
    return not trial.state.is_finished()


@lru_cache(maxsize=1)
def _place() -> str:
    """A digest of this boot and of the process's namespace of process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return hashlib.blake2b(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode(), digest_size=8).hexdigest()


def _this_process() -> str:
    return f"{_place()} {os.getpid()} {_started(os.getpid())}"


def _started(pid: int) -> str | None:
    """The start time of a process, in ticks since boot; None if there is none, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except OSError:
        return None
    state, *rest = fields.split()
    return None if state in "ZX" else rest[18]


def _is_gone(claim: str) -> bool:
    """True if the claim's process ran on this machine and has ended."""
    place, _, process = str(claim).partition(" ")
    pid, _, started = process.partition(" ")
    return place == _place() and pid.isdigit() and _started(int(pid)) != started
