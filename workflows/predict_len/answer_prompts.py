"""Let a model answer prompts and log how long its answers become: `predict-len collect`."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from phasewise._files import cut_broken_line, open_output
from phasewise._words import counted
from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.sampling.sampling import SamplingParams
from phasewise.tuner.errors import PredictorError
from phasewise.tuner.predictor.log import read_log
from phasewise.workflows.opening.kept_cores import KeptCores
from phasewise.workflows.predict_len.inputs import message_prompt, read_prompts
from phasewise.workflows.predict_len.settings import CollectWish
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.serving.engine.engine import Engine
    from phasewise.serving.engine.open_engine import OpenEngine


TELL_EVERY = 50


def collect_lengths(
    model: str, prompts: Sequence[Path], output: Path, wish: CollectWish, report: Report = silent
) -> dict[str, Any]:
    """Answer every prompt that the log `output` has no answer to; return counts of the work done. Raises
    ModelError, PlanError, PredictorError; KeyboardInterrupt with all ended answers in the log.
    """
    texts = read_prompts(prompts)[: wish.limit]
    with _engine(model, wish, report) as opened:
        log = AnswerLog(output, opened.model.name, wish)
        with closing(log):
            every = list(dict.fromkeys(tuple(message_prompt(opened.text, text)) for text in texts))
            lengths, n_left = _answer_all(opened, log, every, wish, report)
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
    from phasewise.workflows.opening.open_model import open_model
    from phasewise.workflows.opening.settings import Weights

    opened_model = open_model(ref, Weights(wish.weight_format), wish.threads, wish.db, report)
    for plan in opened_model.plans.values():
        report(plan.describe())
    teams = teams_of(opened_model.plans)
    size = EngineSize.for_many(opened_model.model, wish.sequences, None, None, teams=teams)
    return open_engine(opened_model.model, opened_model.plans, size, schedules=opened_model.schedules)


def _answer_all(
    opened: OpenEngine, log: AnswerLog, every: list[tuple[int, ...]], wish: CollectWish, report: Report
) -> tuple[list[int], int]:
    """Returns the answers' lengths, and the number of prompts that leave no room for an answer."""
    room = opened.size.limits.context_length - wish.max_tokens
    fitting = [ids for ids in every if 0 < len(ids) <= room and ids not in log.done]
    n_left = sum(not 0 < len(ids) <= room for ids in every)
    if log.had_broken_line:
        report("the log's last line was not whole and is dropped")
    lengths: list[int] = []
    try:
        for ended in KeptCores(report).between(answers(opened.engine, fitting, wish)):
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


SCHEMA_VERSION = 1


class Ended(NamedTuple):
    """A prompt's answer. `error`: the reason why there is none."""

    prompt_ids: tuple[int, ...]
    output_tokens: int
    finish_reason: str
    error: Exception | None = None


def answers(engine: Engine, prompts: Iterable[tuple[int, ...]], wish: CollectWish) -> Iterator[Ended]:
    """Yield each prompt's answer when it ends, in no order. Equal prompts are sampled with equal seeds."""
    waiting = deque(enumerate(prompts))
    asked: dict[str, tuple[int, ...]] = {}
    while waiting or engine.has_work:
        while waiting and len(asked) < wish.sequences:
            number, ids = waiting.popleft()
            asked[str(number)] = ids
            sampling = SamplingParams(temperature=wish.temperature, seed=_seed(ids))
            engine.submit(Submit(str(number), ids, wish.max_tokens, sampling))
        for out in engine.step().outs:
            if not isinstance(out, Answer):
                yield Ended(asked.pop(out.request_id), 0, "error", out.error)
            elif out.finish_reason is not None:
                yield Ended(asked.pop(out.request_id), out.n_generated, out.finish_reason)


def _seed(ids: tuple[int, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(ids).encode(), digest_size=4).digest(), "little")


class AnswerLog:
    """Log of answers that is appended to; prompts in the log are not answered again."""

    def __init__(self, path: Path, model_name: str, wish: CollectWish) -> None:
        self._path = path
        self._model_name = model_name
        self._wish = wish
        try:
            self.had_broken_line = cut_broken_line(path)
        except OSError as error:
            raise PredictorError(f"log {path} cannot be read and written: {error.strerror}") from None
        self.done = self._done()
        self._file = _opened(path)

    def write(self, ended: Ended) -> None:
        """Append one whole line, which the kernel has when this returns."""
        fields = {
            "schema_version": SCHEMA_VERSION,
            "model": self._model_name,
            "prompt_token_ids": ended.prompt_ids,
            "temperature": self._wish.temperature,
            "max_tokens": self._wish.max_tokens,
            "n_messages": 1,
            "system_prompt_id": None,
            "output_tokens": ended.output_tokens,
            "finish_reason": ended.finish_reason,
            "at_s": round(time.time(), 3),
        }
        line = (json.dumps(fields, separators=(",", ":")) + "\n").encode()
        try:
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            raise PredictorError(f"log {self._path} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        os.close(self._file)

    def _done(self) -> set[tuple[int, ...]]:
        """Prompts that the log has answers to, under the same settings."""
        if not self._path.is_file() or not self._path.stat().st_size:
            return set()
        log = read_log(self._path)
        if log.model_names != {self._model_name}:
            others = ", ".join(sorted(log.model_names)) or "an unknown model"
            raise PredictorError(
                f"log {self._path} holds answers of {others}, not of {self._model_name}: give another file"
            )
        wanted = (self._wish.temperature, self._wish.max_tokens)
        return {
            tuple(example.facts.token_ids)
            for example in log.examples
            if (example.facts.temperature, example.facts.max_tokens) == wanted
        }


def _opened(path: Path) -> int:
    if str(path) == "-":
        return os.dup(1)
    try:
        return open_output(path, os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise PredictorError(f"log {path} cannot be written: {error.strerror}") from None
