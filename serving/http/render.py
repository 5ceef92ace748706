"""From pieces of answers to OpenAI's objects: completions and chat, whole and streamed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from phasewise.serving.http.served import ServedModel
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

    def delta(self, index: int, piece: Answer, so_far: Choice) -> Json: ...

    def whole(self, index: int, choice: Choice) -> Json: ...


def usage(requests: Sequence[Submit], choices: Sequence[Choice], n_choices_per_prompt: int) -> Json:
    """Tokens of all prompts, each once, and of all answers."""
    prompts = sum(len(request.prompt_token_ids) for request in requests[::n_choices_per_prompt])
    answers = sum(choice.n_generated for choice in choices)
    return {"prompt_tokens": prompts, "completion_tokens": answers, "total_tokens": prompts + answers}


class CompletionRendering:
    """`/v1/completions`."""

    def __init__(self, response_id: str, model: ServedModel) -> None:
        self._fixed = {"id": response_id, "created": int(time.time()), "model": model.model_id}
        self._decode = model.decode

    def head(self, *, streamed: bool) -> Json:
        return {**self._fixed, "object": "text_completion"}

    def opening(self, index: int) -> Json | None:
        return None

    def delta(self, index: int, piece: Answer, so_far: Choice) -> Json:
        return self._choice(index, piece.text, piece.tokens, piece.finish_reason, len(so_far.text))

    def whole(self, index: int, choice: Choice) -> Json:
        return self._choice(index, choice.text, choice.tokens, choice.finish_reason, 0)

    def _choice(
        self, index: int, text: str, tokens: Sequence[SampledToken], reason: str | None, offset: int
    ) -> Json:
        logprobs = _completion_logprobs(tokens, self._decode, offset)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


class ChatRendering:
    """`/v1/chat/completions`."""

    def __init__(self, response_id: str, model: ServedModel) -> None:
        self._fixed = {"id": response_id, "created": int(time.time()), "model": model.model_id}
        self._decode = model.decode

    def head(self, *, streamed: bool) -> Json:
        return {**self._fixed, "object": "chat.completion.chunk" if streamed else "chat.completion"}

    def opening(self, index: int) -> Json | None:
        return _chat_choice(index, "delta", {"role": "assistant", "content": ""}, None, None)

    def delta(self, index: int, piece: Answer, so_far: Choice) -> Json:
        content = {"content": piece.text} if piece.text else {}
        return _chat_choice(index, "delta", content, self._logprobs(piece.tokens), piece.finish_reason)

    def whole(self, index: int, choice: Choice) -> Json:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return _chat_choice(index, "message", message, self._logprobs(choice.tokens), choice.finish_reason)

    def _logprobs(self, tokens: Sequence[SampledToken]) -> Json | None:
        if not any(token.logprob is not None for token in tokens):
            return None
        return {"content": [self._entry(token) for token in tokens], "refusal": None}

    def _entry(self, token: SampledToken) -> Json:
        top = [_named(self._decode([one]), logprob) for one, logprob in token.top]
        return {**_named(self._decode([token.token_id]), token.logprob), "top_logprobs": top}


def _chat_choice(index: int, key: str, content: Json, logprobs: Json | None, reason: str | None) -> Json:
    return {"index": index, key: content, "logprobs": logprobs, "finish_reason": reason}


def _named(text: str, logprob: float | None) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}


def _completion_logprobs(
    tokens: Sequence[SampledToken], decode: Callable[[Sequence[int]], str], offset: int
) -> Json | None:
    if not any(token.logprob is not None for token in tokens):
        return None
    texts = [decode([token.token_id]) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{decode([one]): logprob for one, logprob in token.top} for token in tokens],
        "text_offset": offsets,
    }
