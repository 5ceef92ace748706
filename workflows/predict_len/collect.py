"""Answers to many prompts, computed by an engine in this process, each logged as soon as it has ended."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from phasewise._files import cut_broken_line, open_output
from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.sampling.sampling import SamplingParams
from phasewise.tuner.errors import PredictorError
from phasewise.tuner.predictor.log import read_log

if TYPE_CHECKING:
    from phasewise.serving.engine.engine import Engine

SCHEMA_VERSION = 1


class Ended(NamedTuple):
    """One answer. `error`: why there is none."""

    prompt_ids: tuple[int, ...]
    output_tokens: int
    finish_reason: str
    error: Exception | None = None


@dataclass(frozen=True)
class Settings:
    """Settings of every prompt's answer."""

    max_tokens: int
    temperature: float
    sequences: int
    """Answers computed at a time."""


def answers(engine: Engine, prompts: Iterable[tuple[int, ...]], settings: Settings) -> Iterator[Ended]:
    """Each prompt's answer when it ends, in no order. The same prompt is always drawn from with the same
    seed."""
    waiting = deque(enumerate(prompts))
    asked: dict[str, tuple[int, ...]] = {}
    while waiting or engine.has_work:
        while waiting and len(asked) < settings.sequences:
            number, ids = waiting.popleft()
            asked[str(number)] = ids
            sampling = SamplingParams(temperature=settings.temperature, seed=_seed(ids))
            engine.submit(Submit(str(number), ids, settings.max_tokens, sampling))
        for out in engine.step().outs:
            if not isinstance(out, Answer):
                yield Ended(asked.pop(out.request_id), 0, "error", out.error)
            elif out.finish_reason is not None:
                yield Ended(asked.pop(out.request_id), out.n_generated, out.finish_reason)


def _seed(ids: tuple[int, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(ids).encode(), digest_size=4).digest(), "little")


class AnswerLog:
    """A log that is appended to; what it holds already need not be computed again."""

    def __init__(self, path: Path, model_name: str, settings: Settings) -> None:
        self._path = path
        self._model_name = model_name
        self._settings = settings
        self.had_broken_line = _drop_broken_line(path)
        self.done = self._done()
        self._file = _opened(path)

    def write(self, ended: Ended) -> None:
        """One whole line, on disk as far as the kernel is concerned when this returns."""
        fields = {
            "schema_version": SCHEMA_VERSION,
            "model": self._model_name,
            "prompt_token_ids": ended.prompt_ids,
            "temperature": self._settings.temperature,
            "max_tokens": self._settings.max_tokens,
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
        """Prompts asked with these settings."""
        if not self._path.is_file() or not self._path.stat().st_size:
            return set()
        log = read_log(self._path)
        if log.model_names != {self._model_name}:
            others = ", ".join(sorted(log.model_names)) or "an unknown model"
            raise PredictorError(
                f"log {self._path} holds answers of {others}, not of {self._model_name}: give another file"
            )
        wanted = (self._settings.temperature, self._settings.max_tokens)
        return {
            tuple(example.facts.token_ids)
            for example in log.examples
            if (example.facts.temperature, example.facts.max_tokens) == wanted
        }


def _drop_broken_line(path: Path) -> bool:
    """Cut off what a process that was killed has left of its last line; whether there was any."""
    try:
        return cut_broken_line(path)
    except OSError as error:
        raise PredictorError(f"log {path} cannot be read and written: {error.strerror}") from None


def _opened(path: Path) -> int:
    if str(path) == "-":
        return os.dup(1)
    try:
        return open_output(path, os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise PredictorError(f"log {path} cannot be written: {error.strerror}") from None
