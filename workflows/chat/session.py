"""A conversation with one model that stays open: `phasewise chat`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from phasewise._words import counted
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.messages import Progress, Submit
from phasewise.serving.engine.one_answer import OneAnswer
from phasewise.serving.engine.open_engine import ModelText, open_engine
from phasewise.serving.errors import ContextLengthExceeded
from phasewise.serving.ranks.rank_layout import teams_of
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.generate.answer_settings import ChatSettings, SamplingChoice
from phasewise.workflows.opening.kept_cores import KeptCores
from phasewise.workflows.opening.open_model import check_settings, hint_at_tuning, open_model
from phasewise.workflows.opening.settings import Weights
from phasewise.workflows.report import Report, silent

Message = dict[str, Any]

LEAST_ANSWER_TOKENS = 16
"""Least tokens that a conversation must leave for an answer; else the conversation is too long."""
MOST_ANSWER_TOKENS = 4096
"""Limit of an answer in tokens where no other limit is given."""
MOST_REPEATED_TOKENS, LONGEST_PERIOD = 256, 64
"""An answer whose last 256 tokens repeat the same 64 or fewer does not come to an end by itself."""


def repeats_itself(token_ids: Sequence[int]) -> bool:
    """True where the last MOST_REPEATED_TOKENS are copies of those before them, a short period apart."""
    if len(token_ids) < MOST_REPEATED_TOKENS + LONGEST_PERIOD:
        return False
    last = token_ids[-MOST_REPEATED_TOKENS:]
    ends = (len(token_ids) - period for period in range(1, LONGEST_PERIOD + 1))
    return any(token_ids[end - MOST_REPEATED_TOKENS : end] == last for end in ends)


class ChatSession:
    """One conversation. Close it, or use it in `with`. `messages`: role and content of every turn so far."""

    def __init__(self, model: str, settings: ChatSettings, report: Report = silent) -> None:
        """Open the model. ModelError, PlanError, KernelDbError; WorkflowError without a chat template."""
        kv_format, db = settings.kv_format, settings.db
        lora = None if settings.lora is None else [settings.lora]
        weights = Weights(settings.weight_format, pack=settings.pack, lora=lora)
        check_settings(model, weights, kv_format, report)
        loaded = open_model(model, weights, settings.threads, db, report)
        self._text = ModelText(loaded.model)
        if loaded.model.chat_template is None:
            raise WorkflowError(f"{loaded.model.name} has no chat template: use generate instead")
        hint_at_tuning(model, db, report)
        teams = teams_of(loaded.plans)
        size = EngineSize.for_many(loaded.model, 1, settings.context, None, kv_format, teams=teams)
        self._opened = open_engine(loaded.model, loaded.plans, size, self._text, loaded.schedules)
        self._cores = KeptCores(report)
        self._ids = map(str, itertools.count())
        self.model_name = loaded.model.name
        self._adapter = loaded.model.adapters[0].name if loaded.model.adapters else ""
        self.defaults = loaded.model.sampling
        self.context_tokens = size.limits.context_length
        self.messages: list[Message] = []
        if settings.system is not None:
            self.set_system(settings.system)
        self.progress: Progress | None = None
        """The state of the prompt that is being computed; None once its answer has begun."""

    def __enter__(self) -> ChatSession:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(*error)

    def set_system(self, text: str) -> None:
        """Replace the system message; an empty text removes it."""
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest

    def answer(
        self,
        text: str,
        sampling: SamplingChoice,
        max_tokens: int | None = None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> Iterator[str]:
        """Say `text` and stream the answer. `is_interrupted` ends it after a token; its beginning is kept.

        max_tokens: limit; None: MOST_ANSWER_TOKENS, or until the answer only repeats itself. An empty text
        comes after each step of the prompt, whose state `progress` tells. Raises ContextLengthExceeded, the
        conversation unchanged, where no room is left for an answer.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt_ids = tuple(self._text.conversation(asked))
        room = self.context_tokens - len(prompt_ids)
        if room < LEAST_ANSWER_TOKENS:
            raise ContextLengthExceeded(
                f"the conversation has {counted(len(prompt_ids), 'token')}, the context {self.context_tokens}"
            )
        most = min(room, MOST_ANSWER_TOKENS if max_tokens is None else max_tokens)
        params = sampling.params(self.defaults)
        request = Submit(next(self._ids), prompt_ids, most, params, adapter=self._adapter)
        answer = OneAnswer(request)
        self.messages = asked
        engine = self._opened.engine
        try:
            for piece in answer.pieces(engine, with_steps=True):
                self.progress = answer.progress
                yield piece
                if is_interrupted() or (max_tokens is None and repeats_itself(answer.token_ids)):
                    break
        finally:
            self.progress = None
            if answer.finish_reason is None:
                engine.abort(request.request_id)
            self.messages.append({"role": "assistant", "content": answer.text})
            self.last = answer
            self._cores.tell_changes()

    def forget(self) -> None:
        """Begin anew; the system message stays."""
        self.messages = [message for message in self.messages if message["role"] == "system"]
