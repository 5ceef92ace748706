"""The transformation-tree rule within one trial: stop timing a configuration that cannot beat its rival.

A configuration is timed one slice of the trace after another. Its rival is the configuration at the same
cross-section of the tree from which one removal made its tree; at a root, the best one known. Both were timed
on the same slices in the same order, so their running means are compared slice by slice: slices differ far
more than configurations do."""

from __future__ import annotations

from collections.abc import Mapping

import optuna

from phasewise.tuner.config.trials import KEY, RIVAL

MIN_SLICES = 2
"""The fewest slices to time before giving up: with fewer, one disturbed timing would decide."""

HOPELESS = 1.1
"""The ratio to the rival's mean above which timing stops; a smaller one may be noise."""


def is_hopeless(own: Mapping[int, float], rival: Mapping[int, float]) -> bool:
    """True if the newest running mean of `own`, by slice number, is far above the rival's at that slice."""
    newest = max(own, default=-1)
    return len(own) >= MIN_SLICES and newest in rival and own[newest] > HOPELESS * rival[newest]


class TransformationTreePruner(optuna.pruners.BasePruner):
    """Optuna's pruner by `is_hopeless`. Each rival is looked up once, since reading trials takes longer than
    a modelled step."""

    def __init__(self) -> None:
        self._rivals: dict[str, optuna.trial.FrozenTrial] = {}

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        """True if the trial is hopeless beside its rival or, without one, beside the best trial."""
        if len(trial.intermediate_values) < MIN_SLICES:
            return False
        rival = self._rival(study, trial.user_attrs.get(RIVAL))
        return rival is not None and is_hopeless(trial.intermediate_values, rival.intermediate_values)

    def _rival(self, study: optuna.Study, key: str | None) -> optuna.trial.FrozenTrial | None:
        if key is not None and key in self._rivals:
            return self._rivals[key]
        states = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
        finished = study.get_trials(deepcopy=False, states=states)
        if key is None:
            complete = [trial for trial in finished if trial.state is optuna.trial.TrialState.COMPLETE]
            return min(complete, key=lambda trial: trial.value or 0.0, default=None)
        for trial in finished:
            if trial.user_attrs.get(KEY) == key:
                return self._rivals.setdefault(key, trial)
        return None
