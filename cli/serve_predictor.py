"""The predictor that `serve` and `bench kv` are given by --predictor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phasewise.cli.present import note

if TYPE_CHECKING:
    from phasewise.serving.service import Predictor
    from phasewise.tuner.predictor.model import LiveEstimator

AUTO, OFF = "auto", "off"


def estimator_from(text: str, model_name: str, hold: float | None = None) -> LiveEstimator | None:
    """The estimator of a file; `auto`: of the model's own file, None where there is none; `off`: None.

    It is called with a prompt's facts and gives (length of the answer, uncertainty); `observe` tells it
    what became of one. hold: estimates are to hold that share of answers; None: they are means, which is
    what ODMA's pool admits by.
    """
    if text == OFF:
        return None
    from phasewise.tuner.predictor.files import default_file, load_predictor
    from phasewise.tuner.predictor.model import LiveEstimator

    path = default_file(model_name) if text == AUTO else text
    if text == AUTO and not default_file(model_name).exists():
        return None
    predictor = load_predictor(path)
    note(
        f"answers' lengths are predicted by {path}, "
        f"trained on {predictor.trained_on.get('answers', 0)} answers"
    )
    if predictor.model_name != model_name:
        note(f"it was trained on answers of {predictor.model_name}, not of {model_name}")
    return LiveEstimator(predictor, hold)


def open_predictor(text: str, model_name: str) -> Predictor | None:
    """The same for a server."""
    estimator = estimator_from(text, model_name)
    if estimator is None:
        return None
    from phasewise.serving.pools.contract import Estimate
    from phasewise.serving.service import Predictor
    from phasewise.tuner.predictor.facts import PromptFacts

    return Predictor(
        estimate=lambda facts: Estimate(*estimator(PromptFacts(*facts))),
        learn=lambda facts, output_tokens: estimator.observe(PromptFacts(*facts), output_tokens),
    )
