"""The pruner of a study decides as the pure rule does."""

from __future__ import annotations

import optuna
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import TrialState, create_trial

from phasewise.tuner.config.pruner import HOPELESS, MIN_SLICES, TransformationTreePruner, is_hopeless
from phasewise.tuner.config.trials import KEY, RIVAL

means = st.lists(st.floats(0.5, 2.0), min_size=1, max_size=5).map(lambda values: dict(enumerate(values)))


def finished(key: str, intermediate: dict[int, float]) -> optuna.trial.FrozenTrial:
    value = intermediate[max(intermediate)]
    return create_trial(value=value, user_attrs={KEY: key}, intermediate_values=intermediate)


def running(rival: str | None, intermediate: dict[int, float]) -> optuna.trial.FrozenTrial:
    attributes = {KEY: "own", RIVAL: rival}
    return create_trial(state=TrialState.RUNNING, user_attrs=attributes, intermediate_values=intermediate)


def study_of(*trials: optuna.trial.FrozenTrial) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    study = optuna.create_study()
    study.add_trials(trials)
    return study


@given(own=means, parent=means, other=means)
def test_against_its_parent_where_it_has_one(
    own: dict[int, float], parent: dict[int, float], other: dict[int, float]
) -> None:
    study = study_of(finished("parent", parent), finished("other", other))

    pruned = TransformationTreePruner().prune(study, running("parent", own))

    assert pruned == is_hopeless(own, parent)


@given(own=means, first=means, other=means)
def test_against_the_best_so_far_at_a_root(
    own: dict[int, float], first: dict[int, float], other: dict[int, float]
) -> None:
    best = min(first, other, key=lambda means: means[max(means)])
    study = study_of(finished("one", first), finished("other", other))

    pruned = TransformationTreePruner().prune(study, running(None, own))

    assert pruned == is_hopeless(own, best)


@given(own=means)
def test_never_without_anything_to_beat(own: dict[int, float]) -> None:
    assert not TransformationTreePruner().prune(study_of(), running(None, own))
    assert not TransformationTreePruner().prune(study_of(finished("one", own)), running("unknown", own))


@given(rival=means, slices=st.integers(1, 5))
def test_what_is_as_fast_is_never_hopeless_and_one_slice_never_decides(
    rival: dict[int, float], slices: int
) -> None:
    slow = {number: 2 * HOPELESS * mean for number, mean in rival.items()}
    first = {number: mean for number, mean in slow.items() if number < MIN_SLICES - 1}

    assert not is_hopeless(rival, rival)
    assert not is_hopeless(first, rival)
    assert is_hopeless(slow, rival) == (len(rival) >= MIN_SLICES)
