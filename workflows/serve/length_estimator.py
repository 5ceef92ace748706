"""Open the predictor of answer lengths that `serve` uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phasewise._words import counted
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.serving.model_table import Predictor
    from phasewise.tuner.predictor.live import LiveEstimator

AUTO, OFF = "auto", "off"


def estimator_from(
    text: str,
    model_name: str,
    report: Report = silent,
) -> LiveEstimator | None:
    """An estimator of answer lengths. Raises PredictorError where its file cannot be read.

    text: the predictor's file; `auto` for the model's own file, None where there is none; `off` for None.
    """
    if text == OFF:
        return None
    from phasewise.tuner.predictor.files import default_file, load_predictor
    from phasewise.tuner.predictor.live import LiveEstimator

    path = default_file(model_name) if text == AUTO else text
    if text == AUTO and not default_file(model_name).exists():
        report(f"there is no predictor of {model_name} at {path}: answers' lengths are not predicted")
        return None
    predictor = load_predictor(path)
    report(
        f"answers' lengths are predicted by {path}, "
        f"trained on {counted(int(predictor.trained_on.get('answers', 0)), 'answer')}"
    )
    if predictor.model_name != model_name:
        report(f"it was trained on answers of {predictor.model_name}, not of {model_name}")
    return LiveEstimator(predictor)


def open_predictor(
    text: str,
    model_name: str,
    report: Report = silent,
) -> Predictor | None:
    """The same for a server, which also tells it how long answers became."""
    estimator = estimator_from(text, model_name, report=report)
    if estimator is None:
        return None
    from phasewise.serving.model_table import Predictor
    from phasewise.serving.pools.contract import Estimate
    from phasewise.tuner.predictor.log import PromptFacts

    return Predictor(
        estimate=lambda facts: Estimate(*estimator(PromptFacts(*facts))),
        learn=lambda facts, output_tokens: estimator.observe(PromptFacts(*facts), output_tokens),
    )
