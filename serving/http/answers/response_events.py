"""The answers of `/v1/responses`: as one object, and as events while they are made."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phasewise.serving.engine.messages import Answer
from phasewise.serving.http.answers.openai_objects import Choice, CustomCall, Json, encode
from phasewise.serving.http.answers.part_events import KnownBefore, PartEvents
from phasewise.serving.http.errors import ApiError
from phasewise.serving.http.requests.chat_schemas import INPUT
from phasewise.serving.http.requests.response_schemas import ResponsesRequest, flat_name
from phasewise.serving.tools.parts import Begun, Call, Part, Piece, Reasoning, Text

_ARGUMENTS = "response.function_call_arguments"
_INPUT = "response.custom_tool_call_input"


@dataclass(frozen=True, kw_only=True)
class Responding(KnownBefore):
    """The parts of one response. `count`: tokens of a text. `keep`: is told the answer as a message, and
    the whole response as it is written.
    """

    response_id: str
    body: ResponsesRequest
    sampling: Json
    system_fingerprint: str | None
    count: Callable[[str], int]
    keep: Callable[[Json, str], None]
    namespaces: Mapping[str, tuple[str, str]]
    """The namespace and own name of each function that has one."""

    def call_id(self) -> str:
        return self.reading.call_id() if self.reading else f"call_{uuid.uuid4().hex[:24]}"


@dataclass
class _Item:
    """One item of the output. `kind`: what its text is. `called`: the fields that name what it calls."""

    kind: type[Part]
    item_id: str
    call_id: str = ""
    name: str = ""
    text: str = ""
    namespace: str | None = None

    @property
    def calls(self) -> bool:
        return issubclass(self.kind, Call)

    def to_json(self, status: str) -> Json:
        if self.kind is Reasoning:
            content = [{"type": "reasoning_text", "text": self.text}] if status != "in_progress" else []
            return {
                "id": self.item_id,
                "type": "reasoning",
                "summary": [],
                "content": content,
                "status": status,
            }
        if self.calls:
            is_custom, text = self.kind is CustomCall, "" if status == "in_progress" else self.text
            return {
                "id": self.item_id,
                "type": "custom_tool_call" if is_custom else "function_call",
                "call_id": self.call_id,
                "name": self.name,
                **({} if self.namespace is None else {"namespace": self.namespace}),
                "input" if is_custom else "arguments": text,
                "status": status,
            }
        content = [_text_part(self.text)] if status != "in_progress" else []
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "status": status,
        }

    def as_called(self) -> Json:
        """The call in a message of a chat."""
        name = flat_name(self.namespace, self.name)
        text = json.dumps({INPUT: self.text}) if self.kind is CustomCall else self.text
        return {"id": self.call_id, "type": "function", "function": {"name": name, "arguments": text}}


@dataclass
class _Output:
    """The output so far, of parts in their order; adjacent text is one item."""

    facts: Responding
    items: list[_Item] = field(default_factory=list)

    def add(self, part: Part) -> tuple[_Item, bool]:
        """The item that the part belongs to, and whether it is new."""
        if isinstance(part, Call):
            item = self._begin(type(part), part.name)
            item.text = part.arguments
            return item, True
        if isinstance(part, Begun):
            return self._begin(Call, part.name), True
        last = self.items[-1] if self.items else None
        if last is not None and (isinstance(part, Piece) or last.kind is type(part)):
            last.text += part.text
            return last, False
        prefix = "rs" if isinstance(part, Reasoning) else "msg"
        item = _Item(type(part), f"{prefix}_{uuid.uuid4().hex}", text=part.text)
        self.items.append(item)
        return item, True

    def _begin(self, kind: type[Call], name: str) -> _Item:
        prefix = "ctc" if kind is CustomCall else "fc"
        namespace, own = self.facts.namespaces.get(name, (None, name))
        item_id = f"{prefix}_{uuid.uuid4().hex}"
        item = _Item(kind, item_id, self.facts.call_id(), own, namespace=namespace)
        self.items.append(item)
        return item

    def as_message(self) -> Json:
        """For the conversation that the next response continues."""
        out: Json = {"role": "assistant", "content": self._joined(Text)}
        if thought := self._joined(Reasoning):
            out["reasoning_content"] = thought
        calls = [item.as_called() for item in self.items if item.calls]
        return {**out, "tool_calls": calls} if calls else out

    def reasoning(self) -> str:
        return self._joined(Reasoning)

    def _joined(self, kind: type[Part]) -> str:
        return "".join(item.text for item in self.items if item.kind is kind)


def whole(responding: Responding, choices: Sequence[Choice]) -> bytes:
    """The response as one object."""
    (choice,) = choices
    output = _Output(responding)
    for part in responding.parts(choice):
        output.add(part)
    written = encode(_Response(responding).ended(output, choice))
    responding.keep(output.as_message(), written)
    return written.encode()


class ResponseEvents(PartEvents):
    """The events of one response."""

    def __init__(self, responding: Responding) -> None:
        super().__init__(responding)
        self._responding = responding
        self._response = _Response(responding)
        self._output = _Output(responding)
        self._n_events = 0
        self._open: _Item | None = None

    def opening(self) -> bytes:
        """Before the first piece."""
        begun = self._response.begun()
        names = ("response.created", "response.in_progress")
        return "".join(self._event(name, response=begun) for name in names).encode()

    def failed(self, error: ApiError) -> bytes:
        """In place of the rest."""
        said = {"code": "server_error", "message": error.message}
        response = {**self._response.begun(), "status": "failed", "error": said}
        return self._event("response.failed", response=response).encode()

    def closing(self) -> bytes:
        """After the last piece."""
        out = self._close()
        response = self._response.ended(self._output, self._choice)
        self._responding.keep(self._output.as_message(), encode(response))
        return "".join([*out, self._event(f"response.{response['status']}", response=response)]).encode()

    def _written(self, piece: Answer, parts: Sequence[Part]) -> Iterator[str]:
        for part in parts:
            yield from self._of_part(part)

    def _of_part(self, part: Part) -> list[str]:
        item, is_new = self._output.add(part)
        out: list[str] = []
        if is_new:
            out += self._close()
            self._open = item
            place = len(self._output.items) - 1
            added = item.to_json("in_progress")
            out.append(self._event("response.output_item.added", output_index=place, item=added))
            if not item.calls:
                out.append(self._event("response.content_part.added", **self._place(), part=_part(item, "")))
        match part:
            case CustomCall(arguments=given):
                out.append(self._event(f"{_INPUT}.delta", **self._called_at(item), delta=given))
            case Call(arguments=piece) | Piece(text=piece):
                out.append(self._event(f"{_ARGUMENTS}.delta", **self._called_at(item), delta=piece))
            case Reasoning():
                out.append(self._event("response.reasoning_text.delta", **self._place(), delta=part.text))
            case Text():
                out.append(
                    self._event("response.output_text.delta", **self._place(), delta=part.text, logprobs=[])
                )
        return out

    def _close(self) -> list[str]:
        """The end of the item that is open."""
        item, out = self._open, []
        if item is None:
            return []
        if item.kind is Text:
            out.append(
                self._event("response.output_text.done", **self._place(item), text=item.text, logprobs=[])
            )
        if item.kind is CustomCall:
            out.append(self._event(f"{_INPUT}.done", **self._called_at(item), input=item.text))
        if item.kind is Call:
            where = self._called_at(item)
            out.append(self._event(f"{_ARGUMENTS}.done", **where, name=item.name, arguments=item.text))
        if item.kind is Reasoning:
            out.append(self._event("response.reasoning_text.done", **self._place(item), text=item.text))
        if not item.calls:
            out.append(
                self._event("response.content_part.done", **self._place(item), part=_part(item, item.text))
            )
        place, done = self._output.items.index(item), item.to_json("completed")
        out.append(self._event("response.output_item.done", output_index=place, item=done))
        self._open = None
        return out

    def _called_at(self, item: _Item) -> dict[str, Any]:
        return {"item_id": item.item_id, "output_index": self._output.items.index(item)}

    def _place(self, item: _Item | None = None) -> dict[str, Any]:
        return {**self._called_at(item or self._output.items[-1]), "content_index": 0}

    def _event(self, name: str, /, **fields: Any) -> str:
        said = encode({"type": name, "sequence_number": self._n_events, **fields})
        self._n_events += 1
        return f"event: {name}\ndata: {said}\n\n"


class _Response:
    """The response object."""

    def __init__(self, responding: Responding) -> None:
        body = responding.body
        self._responding = responding
        given = body.model_dump(by_alias=True, exclude_none=True, include={"tools", "tool_choice", "text"})
        self._fixed: Json = {
            "id": responding.response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": responding.model_id,
            "system_fingerprint": responding.system_fingerprint,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": body.store is not False,
            "temperature": responding.sampling["temperature"],
            "top_p": responding.sampling["top_p"],
            "text": {"format": {"type": "text"}} | given.get("text", {}),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": [
                {"parameters": None, "strict": False, **tool} if tool["type"] == "function" else tool
                for tool in given.get("tools", ())
            ],
            "truncation": body.truncation or "disabled",
            "error": None,
            "incomplete_details": None,
        }

    def begun(self) -> Json:
        """Before anything was said."""
        return {**self._fixed, "status": "in_progress", "output": [], "usage": None}

    def ended(self, output: _Output, choice: Choice) -> Json:
        """The whole of it."""
        cut = choice.finish_reason == "length"
        items = [item.to_json("completed") for item in output.items]
        if cut and items:
            items[-1]["status"] = "incomplete"
        n_prompt = self._responding.n_prompt
        n_reasoning = self._responding.count(output.reasoning()) if output.reasoning() else 0
        usage = {
            "input_tokens": n_prompt,
            "input_tokens_details": {
                "cached_tokens": choice.n_cached,
                "cache_write_tokens": n_prompt - choice.n_cached,
            },
            "output_tokens": choice.n_generated,
            "output_tokens_details": {"reasoning_tokens": min(n_reasoning, choice.n_generated)},
            "total_tokens": n_prompt + choice.n_generated,
        }
        return {
            **self._fixed,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items,
            "usage": usage,
        }


def _part(item: _Item, text: str) -> Json:
    return {"type": "reasoning_text", "text": text} if item.kind is Reasoning else _text_part(text)


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
