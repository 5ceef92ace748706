"""The transformation-tree rule within one trial: stop timing what cannot beat the tree it came from.

A configuration is timed one slice of the trace after another. What it has to beat is the configuration at
the same cross-section of the tree that it came from by one removal; at a root, the best one known. Both were
timed on the same slices in the same order, so their running means are compared slice for slice: the slices
differ from each other far more than two configurations do.
"""

from __future__ import annotations

from collections.abc import Mapping

import optuna

from phasewise.tuner.config.trials import KEY, RIVAL

MIN_SLICES = 2
"""Slices that are timed before a configuration may be given up: by fewer, one disturbed timing would
decide."""

HOPELESS = 1.1
"""Ratio to its rival's mean above which a configuration is not timed to the end; less may be the machine's
noise."""


def is_hopeless(own: Mapping[int, float], rival: Mapping[int, float]) -> bool:
    """True if the newest running mean of `own`, by slice number, is far above the rival's at that slice."""
    newest = max(own, default=-1)
    return len(own) >= MIN_SLICES and newest in rival and own[newest] > HOPELESS * rival[newest]


class TransformationTreePruner(optuna.pruners.BasePruner):
    """`is_hopeless` over the trials of one study. Reading them takes longer than a modelled step, and a
    finished trial never changes, so each rival is looked for once."""

    def __init__(self) -> None:
        self._rivals: dict[str, optuna.trial.FrozenTrial] = {}

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        """True if the trial is hopeless beside the rival that it names, or, where it names none, beside the
        best trial."""
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
