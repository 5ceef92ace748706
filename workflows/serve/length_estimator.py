"""Open the predictor of answer lengths that `serve` uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from phasewise._words import counted
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.serving.model_table import Predictor
    from phasewise.tuner.predictor.live import LiveEstimator
    from phasewise.tuner.predictor.log import PromptFacts

AUTO, OFF = "auto", "off"
DEFAULT_ENCODER = "all-minilm-l6-v2"


def estimator_from(
    text: str,
    model_name: str,
    hold: float | None = None,
    report: Report = silent,
    text_of: Callable[[Sequence[int]], str] | None = None,
) -> LiveEstimator | None:
    """An estimator of answer lengths. Raises PredictorError where its file cannot be read.

    text: the predictor's file; `auto` for the model's own file, None where there is none; `off` for None.
    hold: the share of answers that must be no longer than estimated; None to estimate the mean, which is
    what ODMA's pool admits by. text_of: of token ids, for a predictor that reads texts.
    """
    if text == OFF:
        return None
    from phasewise.serving.errors import ServingError
    from phasewise.tuner.predictor.encoded import EncodedPredictor, learnt_too_little
    from phasewise.tuner.predictor.files import default_file, load_predictor
    from phasewise.tuner.predictor.live import LiveEstimator
    from phasewise.workflows.predict_len.inputs import AUTO as AUTO_ENCODER
    from phasewise.workflows.predict_len.inputs import find_encoder

    path = default_file(model_name) if text == AUTO else text
    if text == AUTO and not default_file(model_name).exists():
        report(f"there is no predictor of {model_name} at {path}: answers' lengths are not predicted")
        return None
    predictor = load_predictor(path)
    read: Callable[[PromptFacts], PromptFacts] | None = None
    if isinstance(predictor, EncodedPredictor):
        if not predictor.is_useful:
            report(f"{path}: {learnt_too_little(predictor)}")
            return None
        encoder = find_encoder(
            AUTO_ENCODER if predictor.encoder == DEFAULT_ENCODER else predictor.encoder, report, text_of
        )
        if encoder is None:
            report(
                f"{path} needs {predictor.encoder}, which is not here: phasewise models pull"
                f" {predictor.encoder}; answers' lengths are not predicted"
            )
            return None
        try:
            encoder.vectors(["is it well?"])  # before the first request waits for it
        except ServingError as error:
            report(f"{path} needs {predictor.encoder}: {error}; answers' lengths are not predicted")
            return None
        read = encoder.read
    report(
        f"answers' lengths are predicted by {path}, "
        f"trained on {counted(int(predictor.trained_on.get('answers', 0)), 'answer')}"
    )
    if predictor.model_name != model_name:
        report(f"it was trained on answers of {predictor.model_name}, not of {model_name}")
    return LiveEstimator(predictor, hold, read)


def open_predictor(
    text: str,
    model_name: str,
    report: Report = silent,
    text_of: Callable[[Sequence[int]], str] | None = None,
) -> Predictor | None:
    """The same for a server, which also tells it how long answers became."""
    estimator = estimator_from(text, model_name, report=report, text_of=text_of)
    if estimator is None:
        return None
    from phasewise.serving.model_table import Predictor
    from phasewise.serving.pools.contract import Estimate
    from phasewise.tuner.predictor.log import PromptFacts

    return Predictor(
        estimate=lambda facts: Estimate(*estimator(PromptFacts(*facts))),
        learn=lambda facts, output_tokens: estimator.observe(PromptFacts(*facts), output_tokens),
    )
