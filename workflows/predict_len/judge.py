"""Hold predictions against logged answers, and predict one: `predict-len eval` and `predict-len predict`."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from phasewise._version import __version__
from phasewise._words import counted
from phasewise.kerneldb.errors import KernelDbError
from phasewise.kerneldb.records import Origin, PredictorScore
from phasewise.kerneldb.store import open_store
from phasewise.serving.pools.buckets import learnt
from phasewise.serving.pools.contract import PoolSettings
from phasewise.topology import read_machine
from phasewise.tuner.errors import PredictorError
from phasewise.tuner.plans import machine_key
from phasewise.tuner.predictor import default_file
from phasewise.tuner.predictor.evaluate import (
    Calibration,
    FixedBuckets,
    Given,
    LearntBuckets,
    Score,
    calibration,
    constant,
    score,
    told,
)
from phasewise.tuner.predictor.files import load_predictor
from phasewise.tuner.predictor.log import Example, PromptFacts, held_out, part_of_folds
from phasewise.tuner.predictor.model import LengthPredictor
from phasewise.tuner.predictor.train import TrainOptions, train
from phasewise.workflows.errors import UsageError
from phasewise.workflows.predict_len.inputs import ModelTokens, read_logs
from phasewise.workflows.predict_len.settings import EvalWish
from phasewise.workflows.report import Report, silent

OURS, S3, CONSTANT, STATIC = "ours", "S3", "constant", "static"
KEY_DIGITS = 32


@dataclass(frozen=True)
class Split:
    """The share of the prompts that is held out, and the seed by which they are chosen."""

    share: float
    seed: int

    def of(self, examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
        kept, out = held_out(examples, self.share, self.seed)
        if not kept or not out:
            raise PredictorError("a log does not divide into prompts to learn from and others: collect more")
        return kept, out


@dataclass(frozen=True)
class Rivals:
    """The methods that are compared, trained on the same answers."""

    ours: LearntBuckets
    s3: FixedBuckets
    usual_bucket: int
    """The fixed bucket that most answers of training fall into; the constant method predicts it."""
    hold: float

    def own_points(self, examples: Sequence[Example]) -> dict[str, Given]:
        """Predictions of each method in its usual setting."""
        longest = max(example.facts.limit for example in examples)
        return {
            OURS: self.ours.give(examples, self.hold),
            S3: self.s3.give(examples),
            CONSTANT: constant(examples, self.usual_bucket),
            STATIC: constant(examples, longest),
        }

    def at_s3(self, examples: Sequence[Example], s3: Given) -> dict[str, Given]:
        """Predictions of our method and of the constant with as much memory as S3 takes."""
        ours = self.ours.give_within(examples, s3.mean)
        return {OURS: ours, S3: s3, CONSTANT: constant(examples, s3.mean)}


@dataclass(frozen=True)
class Grounds:
    """How many answers our predictor learnt from (mean over folds), and a hash of those that judged it."""

    learnt_answers: int
    answers_key: str

    @staticmethod
    def of(folds: Sequence[Fold]) -> Grounds:
        predictors = [fold.rivals.ours.predictor for fold in folds]
        learnt = [predictor.trained_on.get("answers", 1) for predictor in predictors]
        examples = [example for fold in folds for example in fold.examples]
        return Grounds(round(sum(learnt) / len(learnt)), answers_key(examples))


def answers_key(examples: Sequence[Example]) -> str:
    """Hash of answers in any order; nothing of a prompt can be read from it."""
    answers = [
        example.prompt_key + repr((example.output_tokens, example.was_cut, example.facts.limit)).encode()
        for example in examples
    ]
    return hashlib.sha256(b"\n".join(sorted(answers))).hexdigest()[:KEY_DIGITS]


@dataclass(frozen=True)
class LogReport:
    """Results on one log's held-out answers. `scores`: by point of comparison, then by method."""

    name: str
    n_answers: int
    scores: Mapping[str, tuple[Score, ...]]
    grounds: Grounds
    calibration: Calibration

    def figures_of_ours(self) -> dict[str, float]:
        """Figures of our predictor: in its usual setting, and beside S3 with S3's memory."""
        own = next(scored for scored in next(iter(self.scores.values())) if scored.method == OURS)
        figures = {
            name: value
            for name, value in asdict(own).items()
            if isinstance(value, float) and name != "overflow"
        }
        figures["points_over_s3"] = self.points_gained([*self.scores][-1])
        shares = enumerate(self.calibration.coverage, 1)
        figures |= {f"coverage_{10 * tenth}": share for tenth, share in shares}
        figures["mean_error_tokens"] = self.calibration.mean_error_tokens
        figures["constant_error_tokens"] = self.calibration.constant_error_tokens
        return figures

    def points_gained(self, point: str) -> float:
        """Accuracy of our predictor over S3's, in percentage points."""
        accuracy = {scored.method: scored.accuracy for scored in self.scores[point]}
        return 100 * (accuracy[OURS] - accuracy[S3])

    def fields(self) -> dict[str, Any]:
        return {
            "log": self.name,
            "answers": self.n_answers,
            "points": {
                point: {
                    "points_gained_over_s3": self.points_gained(point),
                    "methods": [asdict(scored) for scored in scores],
                }
                for point, scores in self.scores.items()
            },
            "calibration": asdict(self.calibration),
        }


def rivals_of(
    kept: Sequence[Example], model_name: str, hold: float, seed: int, predictor: LengthPredictor | None
) -> Rivals:
    """Train all methods on `kept`; a given `predictor` is ours, as its file has it."""
    longest = max(example.facts.max_tokens or example.output_tokens for example in kept)
    options = TrainOptions(seed=seed)
    inner = FixedBuckets.inner_bounds(longest)
    ours = predictor or train(kept, model_name, options)
    classifier = train(kept, model_name, options, bounds=inner)
    lengths = [example.output_tokens for example in kept]
    bounds = [*inner, longest]
    usual = int(np.bincount(np.minimum(np.searchsorted(bounds, lengths), len(inner))).argmax())
    shuffled = random.Random(seed).sample(lengths, len(lengths))  # logs lie end to end; a window is a mixture
    learning = LearntBuckets(ours, shuffled, _learn)
    return Rivals(learning, FixedBuckets(classifier, longest), bounds[usual], hold)


def _learn(lengths: Sequence[int]) -> Sequence[int]:
    """Bucket sizes learnt from answer lengths as the KV pool learns them by default."""
    settings = PoolSettings(longest_request=max(lengths))
    return learnt(tuple(sorted(lengths)), settings.n_buckets, settings.top_level).buckets


class Fold(NamedTuple):
    """Answers of one log, and methods that learnt from none of their prompts."""

    examples: Sequence[Example]
    rivals: Rivals


def report_log(name: str, folds: Sequence[Fold]) -> LogReport:
    """Compare the methods at every point, on one log's answers of all folds together."""
    points = [_points(*fold) for fold in folds]
    examples = [example for fold in folds for example in fold.examples]
    scores = {
        point: tuple(
            score(method, examples, Given.together([fold_points[point][method] for fold_points in points]))
            for method in methods
        )
        for point, methods in points[0].items()
    }
    parts = [
        told(rivals.ours.predictor, own, rivals.hold, rivals.ours.first_lengths) for own, rivals in folds
    ]
    return LogReport(name, len(examples), scores, Grounds.of(folds), calibration(parts))


def _points(examples: Sequence[Example], rivals: Rivals) -> dict[str, dict[str, Given]]:
    own = rivals.own_points(examples)
    return {"own point": own, "memory of S3": rivals.at_s3(examples, own[S3])}


def strangers(kept: Sequence[Example], others: Sequence[Example]) -> list[Example]:
    """The examples of `others` whose prompts are not in `kept`."""
    learnt_keys = {example.prompt_key for example in kept}
    return [example for example in others if example.prompt_key not in learnt_keys]


def with_split(predictor: LengthPredictor, split: Split) -> LengthPredictor:
    """A copy of the predictor that records the split, so that held-out prompts are known."""
    facts = {**predictor.trained_on, "held_out_share": split.share, "held_out_seed": split.seed}
    return replace(predictor, trained_on=facts)


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
    """Train every method on the same answers, and judge it by others. Raises PredictorError, UsageError."""
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
    """Judge each answer once, by methods that learnt from the prompts of all other folds.

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
    estimator = load_predictor(predictor or default_file(tokens.model_name))
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
    """Append a score for each judged log, and return their number. Reports a database that takes none."""
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
