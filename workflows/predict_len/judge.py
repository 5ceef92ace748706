"""Hold predictions against logged answers, and predict one: `predict-len eval` and `predict-len predict`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasewise._version import __version__
from phasewise._words import counted
from phasewise.kerneldb.errors import KernelDbError
from phasewise.kerneldb.records import Origin, PredictorScore
from phasewise.kerneldb.store import open_store
from phasewise.topology import read_machine
from phasewise.tuner.errors import PredictorError
from phasewise.tuner.plans import machine_key
from phasewise.tuner.predictor.files import load_predictor
from phasewise.tuner.predictor.log import Example, PromptFacts, part_of_folds
from phasewise.tuner.predictor.model import LengthPredictor
from phasewise.workflows.errors import UsageError
from phasewise.workflows.predict_len.compare import (
    Fold,
    LogReport,
    Split,
    report_log,
    rivals_of,
    strangers,
)
from phasewise.workflows.predict_len.inputs import (
    ModelTokens,
    predictor_file,
    read_logs,
)
from phasewise.workflows.predict_len.settings import EvalWish
from phasewise.workflows.report import Report, silent

SHARES_TOLD = (0.5, 0.9, 0.99)
READS = "tokens"
"""The input of predictors, as a score names it."""


@dataclass(frozen=True)
class Judged:
    """The model of the logs, the split that was used, and a report for each log."""

    model_name: str
    split: Split
    reports: list[LogReport]


def judge_predictions(logs: Sequence[Path], wish: EvalWish, report: Report = silent) -> Judged:
    """Every method learnt from the same answers, judged by others. PredictorError, UsageError."""
    if wish.folds is not None and wish.predictor is not None:
        raise UsageError("--folds trains anew for each fold: leave --predictor out")
    answer_logs, name = read_logs(logs, wish.model, report)
    ours = None if wish.predictor is None else load_predictor(wish.predictor)
    if wish.folds is not None:
        examples = {str(path): log.examples for path, log in zip(logs, answer_logs, strict=True)}
        reports = judge_by_folds(examples, name, wish)
        return Judged(name, Split(1 / wish.folds, wish.seed), reports)
    chosen = Split(wish.split, wish.seed) if ours is None else _split_of(ours, wish, report)
    halves = [chosen.of(log.examples) for log in answer_logs]
    learnt = [example for kept, _ in halves for example in kept]
    rivals = rivals_of(learnt, name, 1 - wish.overflow, wish.seed, ours)
    outs = [strangers(learnt, out) for _, out in halves]
    reports = [report_log(str(path), [Fold(out, rivals)]) for path, out in zip(logs, outs, strict=True)]
    return Judged(name, chosen, reports)


def judge_by_folds(logs: Mapping[str, Sequence[Example]], model_name: str, wish: EvalWish) -> list[LogReport]:
    """Each answer is judged once, by methods that learnt from the prompts of all other folds.

    logs: answers by the name of their log.
    """
    assert wish.folds is not None
    folds: dict[str, list[Fold]] = {name: [] for name in logs}
    for fold_index in range(wish.folds):
        parts = {name: part_of_folds(own, fold_index, wish.folds, wish.seed) for name, own in logs.items()}
        if not all(kept and out for kept, out in parts.values()):
            raise PredictorError(
                f"a log does not divide into {counted(wish.folds, 'fold')} of prompts: collect more"
            )
        learnt = [example for kept, _ in parts.values() for example in kept]
        rivals = rivals_of(learnt, model_name, 1 - wish.overflow, wish.seed, None)
        for name, (_, out) in parts.items():
            folds[name].append(Fold(out, rivals))
    return [report_log(name, own) for name, own in folds.items()]


def _split_of(predictor: LengthPredictor, wish: EvalWish, report: Report) -> Split:
    """The predictor's own split, so that it is judged by prompts that it has not seen."""
    own = predictor.trained_on.get("held_out_share", 0)
    if not own:
        report(
            "the predictor learnt from all of its prompts: where these are among them, the figures flatter it"
        )
        return Split(wish.split, wish.seed)
    return Split(float(own), int(predictor.trained_on.get("held_out_seed", 0)))


def predict_length(
    model: str,
    message: str,
    max_tokens: int,
    temperature: float,
    predictor: Path | None,
    report: Report = silent,
) -> dict[str, Any]:
    """The length of `model`'s answer to a user's message, in tokens. ModelError, PredictorError."""
    tokens = ModelTokens(model, report)
    estimator = load_predictor(predictor_file(predictor, tokens.model_name))
    facts = PromptFacts(tokens.prompt(message), temperature, max_tokens)
    forecast, lengths = estimator.forecast(facts, estimator.price(0.5)), estimator.distribution(facts)
    return {
        "model": tokens.model_name,
        "prompt_tokens": len(facts.token_ids),
        "mean_tokens": round(forecast.mean_tokens, 1),
        "likely_tokens": forecast.likely_tokens,
        "uncertainty": round(forecast.uncertainty, 4),
        "at_most_tokens": {f"{share:g}": lengths.quantile(share) for share in SHARES_TOLD},
    }


def keep_scores(judged: Judged, wish: EvalWish, report: Report = silent) -> int:
    """Append a score for each log that was judged, and return their number. Where the database takes none,
    that is reported.
    """
    origin = Origin(machine_key(read_machine()), __version__, time.time_ns() // 1_000_000)
    judged_by = "held_out" if wish.folds is None else "folds"
    try:
        scores = [
            PredictorScore(
                judged.model_name,
                READS,
                log.grounds.answers_key,
                judged_by,
                log.grounds.learnt_answers,
                log.n_answers,
                1 - wish.overflow,
                origin,
                log.figures_of_ours(),
            )
            for log in judged.reports
        ]
        with open_store(wish.db, report) as store:
            store.add(scores)
    except KernelDbError as error:
        report(f"nothing is kept of it: {error}")
        return 0
    report(f"kept in the tuning database: {counted(len(scores), 'score')}")
    return len(scores)
