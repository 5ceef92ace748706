"""From pieces of answers to OpenAI's objects: completions and chat, whole and streamed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

from phasewise.serving.http.http_settings import PromptFacts, ServedModel
from phasewise.serving.messages import Answer, Submit
from phasewise.serving.sampling import SampledToken

Json = dict[str, Any]


@dataclass(slots=True)
class Choice:
    """What has arrived of one choice."""

    text: str = ""
    tokens: list[SampledToken] = field(default_factory=list)
    n_generated: int = 0
    finish_reason: str | None = None

    def add(self, piece: Answer) -> None:
        self.text += piece.text
        self.tokens.extend(piece.tokens)
        self.n_generated = piece.n_generated
        self.finish_reason = piece.finish_reason


class Rendering(Protocol):
    """How one kind of response looks. `head` is the part that every object of the response repeats."""

    def head(self, *, streamed: bool) -> Json: ...

    def opening(self, index: int) -> Json | None:
        """The choice that opens a stream, before any text."""
        ...

    def delta(self, index: int, piece: Answer, n_chars_before: int) -> Json: ...

    def whole(self, index: int, choice: Choice) -> Json: ...


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP answer to be: the messages it takes, `n` of them to a prompt, and how it looks."""

    requests: Sequence[Submit]
    facts: Sequence[PromptFacts]
    n_choices_per_prompt: int
    rendering: Rendering
    streamed: bool
    include_usage: bool
    continuous_usage: bool = False
    """The usage so far in every event."""

    def usage(self, n_generated: int) -> Json:
        """Tokens of all prompts, each once, and of all answers."""
        firsts = self.requests[:: self.n_choices_per_prompt]
        n_prompt = sum(len(request.prompt_token_ids) for request in firsts)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_generated,
            "total_tokens": n_prompt + n_generated,
        }


class _Fixed:
    """What both kinds share: the fields of every object, and how tokens are written out."""

    def __init__(self, response_id: str, model: ServedModel) -> None:
        self._fixed = {"id": response_id, "created": int(time.time()), "model": model.model_id}
        self._model = model

    def _text(self, token_id: int) -> str:
        return self._model.piece(token_id).decode("utf-8", "replace")

    def _scored(self, tokens: Sequence[SampledToken], reason: str | None) -> list[SampledToken]:
        """The tokens with a log-probability, without the end token: it is no part of the text."""
        ended = reason == "stop" and tokens and tokens[-1].token_id in self._model.end_token_ids
        return [token for token in (tokens[:-1] if ended else tokens) if token.logprob is not None]


class CompletionRendering(_Fixed):
    """`/v1/completions`."""

    def head(self, *, streamed: bool) -> Json:
        return {**self._fixed, "object": "text_completion"}

    def opening(self, index: int) -> Json | None:
        return None

    def delta(self, index: int, piece: Answer, n_chars_before: int) -> Json:
        logprobs = self._logprobs(self._scored(piece.tokens, piece.finish_reason), n_chars_before)
        return {
            "index": index,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }

    def whole(self, index: int, choice: Choice) -> Json:
        logprobs = self._logprobs(self._scored(choice.tokens, choice.finish_reason), 0)
        return {
            "index": index,
            "text": choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, tokens: Sequence[SampledToken], offset: int) -> Json | None:
        if not tokens:
            return None
        texts = [self._text(token.token_id) for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{self._text(one): value for one, value in token.top} for token in tokens],
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)),
        }


class ChatRendering(_Fixed):
    """`/v1/chat/completions`."""

    def head(self, *, streamed: bool) -> Json:
        return {**self._fixed, "object": "chat.completion.chunk" if streamed else "chat.completion"}

    def opening(self, index: int) -> Json | None:
        return _chat_choice(index, "delta", {"role": "assistant", "content": ""}, None, None)

    def delta(self, index: int, piece: Answer, n_chars_before: int) -> Json:
        content = {"content": piece.text} if piece.text else {}
        logprobs = self._logprobs(self._scored(piece.tokens, piece.finish_reason))
        return _chat_choice(index, "delta", content, logprobs, piece.finish_reason)

    def whole(self, index: int, choice: Choice) -> Json:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        logprobs = self._logprobs(self._scored(choice.tokens, choice.finish_reason))
        return _chat_choice(index, "message", message, logprobs, choice.finish_reason)

    def _logprobs(self, tokens: Sequence[SampledToken]) -> Json | None:
        if not tokens:
            return None
        entries = [
            {
                **self._named(token.token_id, token.logprob),
                "top_logprobs": [self._named(one, value) for one, value in token.top],
            }
            for token in tokens
        ]
        return {"content": entries, "refusal": None}

    def _named(self, token_id: int, logprob: float | None) -> Json:
        return {"token": self._text(token_id), "logprob": logprob, "bytes": list(self._model.piece(token_id))}


def _chat_choice(index: int, key: str, content: Json, logprobs: Json | None, reason: str | None) -> Json:
    return {"index": index, key: content, "logprobs": logprobs, "finish_reason": reason}
