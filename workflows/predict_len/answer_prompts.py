"""Let a model answer prompts and log how long its answers become: `predict-len collect`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasewise._words import counted
from phasewise.workflows.opening.kept_cores import KeptCores
from phasewise.workflows.predict_len.collect import AnswerLog, Settings, answers
from phasewise.workflows.predict_len.inputs import message_prompt, read_prompts
from phasewise.workflows.predict_len.settings import CollectWish
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.serving.engine.open_engine import OpenEngine

TELL_EVERY = 50


def collect_lengths(
    model: str, prompts: Sequence[Path], output: Path, wish: CollectWish, report: Report = silent
) -> dict[str, Any]:
    """Answer every prompt that the log `output` has no answer to; counts of what was done.

    Raises ModelError, PlanError, PredictorError; KeyboardInterrupt with all ended answers in the log.
    """
    texts = read_prompts(prompts)[: wish.limit]
    settings = Settings(wish.max_tokens, wish.temperature, wish.sequences)
    with _engine(model, wish, report) as opened:
        log = AnswerLog(output, opened.model.name, settings)
        with closing(log):
            every = list(dict.fromkeys(tuple(message_prompt(opened.text, text)) for text in texts))
            lengths, n_left = _answer_all(opened, log, every, settings, report)
    n_cut = sum(length >= wish.max_tokens for length in lengths)
    return {
        "model": opened.model.name,
        "log": str(output),
        "prompts": len(every),
        "answered_before": sum(ids in log.done for ids in every),
        "answered_now": len(lengths),
        "too_long": n_left,
        "median_tokens": statistics.median(lengths) if lengths else None,
        "cut_share": n_cut / len(lengths) if lengths else None,
    }


def _engine(ref: str, wish: CollectWish, report: Report) -> OpenEngine:
    from phasewise.serving.engine.engine_size import EngineSize
    from phasewise.serving.engine.open_engine import open_engine
    from phasewise.serving.ranks.rank_layout import teams_of
    from phasewise.workflows.opening.open_model import Weights, open_model

    opened_model = open_model(ref, Weights(wish.weight_format), wish.threads, wish.db, report)
    for plan in opened_model.plans.values():
        report(plan.describe())
    teams = teams_of(opened_model.plans)
    size = EngineSize.for_many(opened_model.model, wish.sequences, None, None, teams=teams)
    return open_engine(opened_model.model, opened_model.plans, size, schedules=opened_model.schedules)


def _answer_all(
    opened: OpenEngine, log: AnswerLog, every: list[tuple[int, ...]], settings: Settings, report: Report
) -> tuple[list[int], int]:
    """Lengths of the answers computed now, and how many prompts leave no room for one."""
    room = opened.size.limits.context_length - settings.max_tokens
    fitting = [ids for ids in every if 0 < len(ids) <= room and ids not in log.done]
    n_left = sum(not 0 < len(ids) <= room for ids in every)
    if log.had_broken_line:
        report("the log's last line was not whole and is dropped")
    lengths: list[int] = []
    try:
        for ended in KeptCores(report).between(answers(opened.engine, fitting, settings)):
            if ended.error is not None:
                raise ended.error
            log.write(ended)
            lengths.append(ended.output_tokens)
            if len(lengths) % TELL_EVERY == 0:
                report(f"{len(lengths)} of {counted(len(fitting), 'answer')}")
    except KeyboardInterrupt:
        report(f"{counted(len(lengths), 'answer')} logged; the same command goes on from there")
        raise
    return lengths, n_left
