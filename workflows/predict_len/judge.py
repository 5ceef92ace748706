"""Hold predictions against logged answers, and predict one: `predict-len eval` and `predict-len predict`."""

from __future__ import annotations

import statistics
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
from phasewise.tuner.predictor.encoded import EncodedPredictor, learnt_too_little
from phasewise.tuner.predictor.files import AnyPredictor, load_predictor
from phasewise.tuner.predictor.log import Example, PromptFacts, part_of_folds
from phasewise.workflows.errors import UsageError
from phasewise.workflows.predict_len.compare import (
    Fold,
    LogReport,
    Rivals,
    Split,
    report_drift,
    report_log,
    rivals_of,
    strangers,
)
from phasewise.workflows.predict_len.inputs import (
    NONE,
    ModelTokens,
    PromptEncoder,
    find_encoder,
    find_encoder_to_learn,
    predictor_file,
    read_logs,
)
from phasewise.workflows.predict_len.settings import TIMED_CALLS, EvalWish
from phasewise.workflows.report import Report, silent

SHARES_TOLD = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Judged:
    """The model of the logs, the split that was used, and a report for each log."""

    model_name: str
    split: Split
    reports: list[LogReport]


def judge_predictions(logs: Sequence[Path], wish: EvalWish, report: Report = silent) -> Judged:
    """Every method learnt from the same answers, judged by others. PredictorError, UsageError."""
    if wish.folds is not None and (wish.predictor is not None or wish.drift):
        raise UsageError("--folds trains anew for each fold: leave --predictor and --drift out")
    if wish.drift and len(logs) < 2:
        raise UsageError("--drift needs two logs or more")
    answer_logs, name, tokens = read_logs(logs, wish.model, report)
    ours = None if wish.predictor is None else load_predictor(wish.predictor)
    encoder = _encoder_of(
        ours, [example for log in answer_logs for example in log.examples], wish, tokens, report
    )
    if encoder is not None:
        answer_logs = [log._replace(examples=encoder.read_all(log.examples)) for log in answer_logs]
    reads = None if encoder is None else encoder.ref
    if wish.folds is not None:
        examples = {str(path): log.examples for path, log in zip(logs, answer_logs, strict=True)}
        reports = judge_by_folds(examples, name, wish, reads, report)
        return Judged(name, Split(1 / wish.folds, wish.seed), reports)
    chosen = Split(wish.split, wish.seed) if ours is None else _split_of(ours, wish, report)
    halves = [chosen.of(log.examples) for log in answer_logs]
    learnt = halves[0][0] if wish.drift else [example for kept, _ in halves for example in kept]
    rivals = _rivals(learnt, name, wish, ours, reads, report)
    if wish.drift:
        after = strangers(learnt, [example for log in answer_logs[1:] for example in log.examples])
        title = f"{', '.join(map(str, logs[1:]))} after {logs[0]}"
        return Judged(name, chosen, [report_drift(title, halves[0][1], after, rivals)])
    outs = [strangers(learnt, out) for _, out in halves]
    reports = [report_log(str(path), [Fold(out, rivals)]) for path, out in zip(logs, outs, strict=True)]
    return Judged(name, chosen, reports)


def judge_by_folds(
    logs: Mapping[str, Sequence[Example]],
    model_name: str,
    wish: EvalWish,
    encoder: str | None,
    report: Report = silent,
) -> list[LogReport]:
    """Each answer is judged once, by methods that learnt from the prompts of all other folds.

    logs: answers by the name of their log, with the vectors of `encoder` where it is not None.
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
        rivals = _rivals(learnt, model_name, wish, None, encoder, report)
        for name, (_, out) in parts.items():
            folds[name].append(Fold(out, rivals))
    return [report_log(name, own) for name, own in folds.items()]


def _rivals(
    examples: Sequence[Example],
    model_name: str,
    wish: EvalWish,
    ours: AnyPredictor | None,
    encoder: str | None,
    report: Report,
) -> Rivals:
    rivals = rivals_of(examples, model_name, 1 - wish.overflow, wish.seed, ours, encoder)
    predictor = rivals.ours.predictor
    if isinstance(predictor, EncodedPredictor) and not predictor.is_useful:
        report(f"warning: {learnt_too_little(predictor)}")
    return rivals


def _encoder_of(
    ours: AnyPredictor | None,
    examples: Sequence[Example],
    wish: EvalWish,
    tokens: ModelTokens | None,
    report: Report,
) -> PromptEncoder | None:
    """The one that the predictor needs, or that a new one is to have."""
    text_of = None if tokens is None else tokens.text
    if ours is not None:
        return find_encoder(ours.encoder if isinstance(ours, EncodedPredictor) else NONE, report, text_of)
    held_out_share = wish.split if wish.folds is None else 1 / wish.folds
    n_learnt = int(len(examples) * (1 - held_out_share))
    return find_encoder_to_learn(wish.encoder, examples, n_learnt, text_of, report)


def _split_of(predictor: AnyPredictor, wish: EvalWish, report: Report) -> Split:
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
    *,
    timed: bool = False,
    report: Report = silent,
) -> dict[str, Any]:
    """The length of `model`'s answer to a user's message, in tokens. ModelError, PredictorError."""
    tokens = ModelTokens(model, report)
    estimator = load_predictor(predictor_file(predictor, tokens.model_name))
    if isinstance(estimator, EncodedPredictor) and not estimator.is_useful:
        report(f"warning: {learnt_too_little(estimator)}")
    facts = PromptFacts(tokens.prompt(message), temperature, max_tokens, text=message)
    encoder = find_encoder(estimator.encoder, report) if isinstance(estimator, EncodedPredictor) else None
    if encoder is not None:
        facts = encoder.read(facts)
    forecast, lengths = estimator.forecast(facts, estimator.price(0.5)), estimator.distribution(facts)
    fields: dict[str, Any] = {
        "model": tokens.model_name,
        "prompt_tokens": len(facts.token_ids),
        "mean_tokens": round(forecast.mean_tokens, 1),
        "likely_tokens": forecast.likely_tokens,
        "uncertainty": round(forecast.uncertainty, 4),
        "at_most_tokens": {f"{share:g}": lengths.quantile(share) for share in SHARES_TOLD},
    }
    if timed:
        fields["median_us"] = _median_us(estimator, facts, encoder)
    return fields


def _median_us(predictor: AnyPredictor, facts: PromptFacts, encoder: PromptEncoder | None) -> float:
    times = []
    for _ in range(TIMED_CALLS):
        started_ns = time.perf_counter_ns()
        predictor.forecast(facts if encoder is None else encoder.read(facts), 0.001)
        times.append((time.perf_counter_ns() - started_ns) / 1000)
    return round(statistics.median(times), 1)


def keep_scores(judged: Judged, wish: EvalWish, report: Report = silent) -> int:
    """Append a score for each log that was judged, and return their number. Where the database takes none,
    that is reported.
    """
    origin = Origin(machine_key(read_machine()), __version__, time.time_ns() // 1_000_000)
    judged_by = "drift" if wish.drift else "held_out" if wish.folds is None else "folds"
    try:
        scores = [
            PredictorScore(
                judged.model_name,
                name_of(log.grounds.reads),
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


def name_of(encoder: str) -> str:
    """A model's name; of a file or folder the last part, since a score names no path."""
    is_path = encoder.startswith(("/", "~", ".")) or Path(encoder).exists()
    return Path(encoder).name or "model" if is_path else encoder
