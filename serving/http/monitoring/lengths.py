"""Reports the true lengths of answers for learning: to predictors, and in a log."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from phasewise.serving.http.answers.client import Observer, RequestLife
from phasewise.serving.processes.line_log import LineLog


class LengthObserver(Observer):
    """Calls `learn` for each answer of `model` that ends by itself; failed and aborted ones are skipped.
    `model`: its id as in `Submit.model`."""

    def __init__(self, learn: Callable[[RequestLife], None], model: str) -> None:
        self._learn = learn
        self._model = model

    def ended(self, life: RequestLife) -> None:
        if life.request.model == self._model and life.last.finish_reason is not None:
            self._learn(life)


SCHEMA_VERSION = 3
"""Version of the log's lines. 2: adds `lookup`, `drafted_tokens`, `accepted_tokens`; 3: drops `lookup`."""


class LengthLog(LineLog):
    """Appends lines to the file `path`, of mode 0600. Raises ServingError if the file cannot be opened."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        super().__init__("length log", path, report, is_private=True)

    def put(self, model_name: str, life: RequestLife) -> None:
        """Queue the line of an answer without blocking; may be called from any thread."""
        self.write(partial(_written, model_name, life))


def _written(model_name: str, life: RequestLife) -> bytes:
    request, drafts = life.request, life.last.drafts
    fields = {
        "schema_version": SCHEMA_VERSION,
        "model": request.adapter or model_name,
        "prompt_token_ids": request.prompt_token_ids,
        "temperature": request.sampling.temperature,
        "max_tokens": request.max_tokens,
        "n_messages": request.n_messages,
        "system_prompt_id": request.system_prompt_id,
        "output_tokens": life.last.n_generated,
        "finish_reason": life.last.finish_reason,
        "arrived_at_s": round(life.sent_at_s, 3),
        "at_s": round(life.ended_at_s, 3),
    }
    if drafts is not None:
        fields |= {"drafted_tokens": drafts.drafted, "accepted_tokens": drafts.accepted}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
