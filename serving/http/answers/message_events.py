"""The answers of `/v1/messages`: as one message, and as events while it is made."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from phasewise.serving.engine.messages import Answer
from phasewise.serving.http.answers.openai_objects import Choice, Json, encode
from phasewise.serving.http.answers.part_events import KnownBefore, PartEvents
from phasewise.serving.http.errors import ApiError
from phasewise.serving.tools.parts import Begun, Call, Part, Piece, Reasoning, Text, parsed


@dataclass(frozen=True, kw_only=True)
class Messaging(KnownBefore):
    """The parts of one message that are known before it is made.

    is_capped: True if the answer was given `max_tokens`, False if the rest of the model's context.
    """

    message_id: str
    is_capped: bool

    def call_id(self) -> str:
        return f"toolu_{uuid.uuid4().hex[:24]}"

    def message(self, content: list[Json], ending: Json, usage: Json) -> Json:
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "model": self.model_id,
            "content": content,
            **ending,
            "usage": usage,
        }

    def usage(self, n_cached: int, n_generated: int) -> Json:
        """Anthropic's `input_tokens` are those of the prompt that were not in the cache."""
        return {
            "input_tokens": self.n_prompt - n_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": n_cached,
            "output_tokens": n_generated,
        }

    def ending(self, choice: Choice, *, has_called: bool) -> Json:
        """The reason that the answer ended."""
        if choice.finish_reason == "length":
            reason = "max_tokens" if self.is_capped else "model_context_window_exceeded"
        elif choice.stop_text is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if has_called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": choice.stop_text}


_NOT_ENDED: Json = {"stop_reason": None, "stop_sequence": None}


def whole(messaging: Messaging, choices: Sequence[Choice]) -> bytes:
    """The message as one object."""
    (choice,) = choices
    content: list[Json] = []
    for part in messaging.parts(choice):
        _add(content, part, messaging.call_id)
    has_called = False
    for block in content:
        if block["type"] == "tool_use":
            has_called = True
            block["input"] = parsed(block["input"]) or {}
    ending = messaging.ending(choice, has_called=has_called)
    usage = messaging.usage(choice.n_cached, choice.n_generated)
    return encode(messaging.message(content, ending, usage)).encode()


def _add(content: list[Json], part: Part, call_id: Callable[[], str]) -> None:
    """Adjacent text is one block."""
    match part:
        case Call(name=name, arguments=arguments):
            content.append({**_opened(part, name, call_id), "input": arguments})
        case Begun(name=name):
            content.append({**_opened(part, name, call_id), "input": ""})
        case Piece(text=text):
            content[-1]["input"] += text
        case Reasoning() | Text():
            key = _key_of(part)
            if not content or content[-1]["type"] != key:
                content.append(_opened(part, "", call_id))
            content[-1][key] += part.text


def _key_of(part: Reasoning | Text) -> str:
    """The type of a block of such text, and of the field that holds it."""
    return "thinking" if isinstance(part, Reasoning) else "text"


def _opened(part: Part, name: str, call_id: Callable[[], str]) -> Json:
    """An empty block."""
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    if isinstance(part, Text):
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": call_id(), "name": name, "input": {}}


class MessageEvents(PartEvents):
    """The events of one message. The first waits for a token: only then is it known what was cached."""

    sign_of_life = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, messaging: Messaging) -> None:
        super().__init__(messaging)
        self._messaging = messaging
        self._has_begun = self._has_called = False
        self._index = -1
        self._open: str | None = None
        """The type of the block that is open."""

    def failed(self, error: ApiError) -> bytes:
        """In place of the rest."""
        return f"event: error\ndata: {encode(error.anthropic_body())}\n\n".encode()

    def closing(self) -> bytes:
        """After the last piece."""
        out = self._close()
        usage = self._messaging.usage(self._choice.n_cached, self._choice.n_generated)
        ending = self._messaging.ending(self._choice, has_called=self._has_called)
        out.append(_event("message_delta", delta=ending, usage=usage))
        return "".join([*out, _event("message_stop")]).encode()

    def _written(self, piece: Answer, parts: Sequence[Part]) -> Iterator[str]:
        if not self._has_begun:
            self._has_begun = True
            usage = self._messaging.usage(piece.n_cached, 0)
            yield _event("message_start", message=self._messaging.message([], _NOT_ENDED, usage))
        for part in parts:
            yield from self._of_part(part)

    def _of_part(self, part: Part) -> list[str]:
        match part:
            case Call(name=name, arguments=arguments):
                return [*self._begin(part, name), self._delta("input_json_delta", partial_json=arguments)]
            case Begun(name=name):
                return self._begin(part, name)
            case Piece(text=text):
                return [self._delta("input_json_delta", partial_json=text)]
            case Reasoning() | Text():
                key = _key_of(part)
                begun = [] if self._open == key else self._begin(part, "")
                return [*begun, self._delta(f"{key}_delta", **{key: part.text})]

    def _begin(self, part: Part, name: str) -> list[str]:
        out = self._close()
        block = _opened(part, name, self._messaging.call_id)
        self._index += 1
        self._open = block["type"]
        self._has_called = self._has_called or self._open == "tool_use"
        out.append(_event("content_block_start", index=self._index, content_block=block))
        return out

    def _close(self) -> list[str]:
        if self._open is None:
            return []
        self._open = None
        return [_event("content_block_stop", index=self._index)]

    def _delta(self, kind: str, **fields: str) -> str:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})


def _event(name: str, /, **fields: object) -> str:
    return f"event: {name}\ndata: {encode({'type': name, **fields})}\n\n"
