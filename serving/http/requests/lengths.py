"""Estimates an answer's length from the request, and reports its true length to the learner."""

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
from phasewise.serving.http.requests.chat_schemas import SYSTEM_ROLES, ChatRequest
from phasewise.serving.http.requests.schemas import GenerationRequest
from phasewise.serving.processes.line_log import LineLog

_ID_BYTES = 8


class RealisedLength(NamedTuple):
    """An answer that has ended by itself. `arrived_at_s`, `at_s`: Unix times of its request and its end."""

    facts: RequestFacts
    output_tokens: int
    finish_reason: str
    arrived_at_s: float
    at_s: float
    drafts: DraftCounts | None = None
    """None where drafts are off."""
    adapter: str = ""
    """The adapter that answered; empty: the model alone."""


class _Sent(NamedTuple):
    facts: RequestFacts
    arrived_at_s: float
    adapter: str


class LengthObserver(Observer):
    """Tells `learn` of each answer of `model` that ends by itself; of those that fail or are left, nothing is
    known. model: its id, as `Submit.model` has it.
    """

    def __init__(self, learn: Callable[[RealisedLength], None], model: str) -> None:
        self._learn = learn
        self._model = model
        self._sent: dict[str, _Sent] = {}

    def sent(self, request: Submit, facts: RequestFacts) -> None:
        if request.model == self._model:
            self._sent[request.request_id] = _Sent(facts, time.time(), request.adapter)

    def delivered(self, outs: Sequence[Answer | Failure], stats: StepStats | None) -> None:
        for out in outs:
            if isinstance(out, Failure):
                self.forgotten(out.request_id)
                continue
            sent = self._sent.get(out.request_id)
            if sent is None:
                continue
            if out.finish_reason is not None:
                del self._sent[out.request_id]
                ended = (out.n_generated, out.finish_reason, sent.arrived_at_s, time.time())
                self._learn(RealisedLength(sent.facts, *ended, out.drafts, sent.adapter))

    def forgotten(self, request_id: str) -> None:
        self._sent.pop(request_id, None)


def facts_of(requests: Sequence[Submit], body: GenerationRequest) -> list[RequestFacts]:
    """The facts of each request that `body` became. The choices of one prompt share theirs."""
    n_messages, system_prompt_id = _conversation(body)
    facts: list[RequestFacts] = []
    for request in requests:
        if not facts or facts[-1].token_ids is not request.prompt_token_ids:
            temperature = request.sampling.temperature
            fields = (request.prompt_token_ids, temperature, request.max_tokens, n_messages, system_prompt_id)
            facts.append(RequestFacts(*fields))
        else:
            facts.append(facts[-1])
    return facts


def estimated(requests: Sequence[Submit], facts: Sequence[RequestFacts], model: ServedModel) -> list[Submit]:
    """The requests with how long their answers will be, where the model can tell. A prompt is asked once."""
    if model.estimate is None:
        return list(requests)
    estimates = {
        id(request_facts): model.estimate(request_facts)
        for request_facts in {id(request_facts): request_facts for request_facts in facts}.values()
    }
    return [
        replace(request, estimate=estimates[id(request_facts)])
        for request, request_facts in zip(requests, facts, strict=True)
    ]


def _conversation(body: GenerationRequest) -> tuple[int, str | None]:
    if not isinstance(body, ChatRequest):
        return 1, None
    texts = [message.text for message in body.messages if message.role in SYSTEM_ROLES]
    if not texts:
        return len(body.messages), None
    digest = hashlib.blake2b("\n".join(texts).encode(), digest_size=_ID_BYTES)
    return len(body.messages), digest.hexdigest()


SCHEMA_VERSION = 3
"""2: `lookup`, and where drafts are on `drafted_tokens` and `accepted_tokens`; 3: `lookup` is gone."""


class LengthLog(LineLog):
    """Appends to `path`, of mode 0600. ServingError where it cannot be opened."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        super().__init__("length log", path, report, is_private=True)

    def put(self, model_name: str, length: RealisedLength) -> None:
        """From any thread; never waits."""
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
