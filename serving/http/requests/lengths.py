"""Predicts the lengths of answers from requests, and reports their true lengths for learning."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from phasewise.serving.engine.messages import Answer, DraftCounts, Failure, StepStats, Submit
from phasewise.serving.http.answers.client import Observer
from phasewise.serving.http.http_settings import RequestFacts, ServedModel
from phasewise.serving.http.requests.chat_schemas import SYSTEM_ROLES, ChatMessage
from phasewise.serving.pools.contract import Estimate
from phasewise.serving.processes.line_log import LineLog

_ID_BYTES = 8


class RealisedLength(NamedTuple):
    """An answer that ended by itself. `arrived_at_s`, `at_s`: Unix times of its request and its end."""

    facts: RequestFacts
    output_tokens: int
    finish_reason: str
    arrived_at_s: float
    at_s: float
    drafts: DraftCounts | None = None
    """None if drafts are off."""
    adapter: str = ""
    """Name of the LoRA adapter that answered; empty: the base model."""


class LengthObserver(Observer):
    """Calls `learn` for each answer of `model` that ends; failed and aborted answers are skipped. `model`:
    its id as in `Submit.model`."""

    def __init__(self, learn: Callable[[RealisedLength], None], model: str) -> None:
        self._learn = learn
        self._model = model
        self._sent: dict[str, tuple[Submit, float]] = {}
        """Unfinished requests with their arrival times (Unix), by request id."""

    def sent(self, request: Submit) -> None:
        if request.model == self._model:
            self._sent[request.request_id] = request, time.time()

    def delivered(self, outs: Sequence[Answer | Failure], stats: StepStats | None) -> None:
        for out in outs:
            if isinstance(out, Failure):
                self.forgotten(out.request_id)
                continue
            if out.finish_reason is not None and out.request_id in self._sent:
                request, arrived_at_s = self._sent.pop(out.request_id)
                ended = (out.n_generated, out.finish_reason, arrived_at_s, time.time())
                self._learn(RealisedLength(facts_of(request), *ended, out.drafts, request.adapter))

    def forgotten(self, request_id: str) -> None:
        self._sent.pop(request_id, None)


def facts_of(request: Submit) -> RequestFacts:
    """The facts that predict the answer's length."""
    temperature, system = request.sampling.temperature, request.system_prompt_id
    return RequestFacts(request.prompt_token_ids, temperature, request.max_tokens, request.n_messages, system)


def estimated(requests: Sequence[Submit], model: ServedModel) -> Sequence[Submit]:
    """The requests with predicted answer lengths, one prediction for each prompt, if there is a predictor."""
    if model.estimate is None:
        return requests
    estimates: dict[int, Estimate] = {}
    for request in requests:
        if id(request.prompt_token_ids) not in estimates:
            estimates[id(request.prompt_token_ids)] = model.estimate(facts_of(request))
    return [replace(request, estimate=estimates[id(request.prompt_token_ids)]) for request in requests]


def system_prompt_id(messages: Sequence[ChatMessage]) -> str | None:
    """Digest of a conversation's system prompt; None without one."""
    texts = [message.text for message in messages if message.role in SYSTEM_ROLES]
    digest = hashlib.blake2b("\n".join(texts).encode(), digest_size=_ID_BYTES)
    return digest.hexdigest() if texts else None


SCHEMA_VERSION = 3
"""Version of the log's lines. 2: adds `lookup`, `drafted_tokens`, `accepted_tokens`; 3: drops `lookup`."""


class LengthLog(LineLog):
    """Appends lines to the file `path`, of mode 0600. Raises ServingError if the file cannot be opened."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        super().__init__("length log", path, report, is_private=True)

    def put(self, model_name: str, length: RealisedLength) -> None:
        """Queue a line without blocking; may be called from any thread."""
        self.write(partial(_written, model_name, length))


def _written(model_name: str, length: RealisedLength) -> bytes:
    facts, drafts = length.facts, length.drafts
    fields = {
        "schema_version": SCHEMA_VERSION,
        "model": length.adapter or model_name,
        "prompt_token_ids": facts.token_ids,
        "temperature": facts.temperature,
        "max_tokens": facts.max_tokens,
        "n_messages": facts.n_messages,
        "system_prompt_id": facts.system_prompt_id,
        "output_tokens": length.output_tokens,
        "finish_reason": length.finish_reason,
        "arrived_at_s": round(length.arrived_at_s, 3),
        "at_s": round(length.at_s, 3),
    }
    if drafts is not None:
        fields |= {"drafted_tokens": drafts.drafted, "accepted_tokens": drafts.accepted}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
