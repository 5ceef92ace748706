"""`/v1/responses`: answers as one object or as events, and a store of the newest for continuation."""

from __future__ import annotations

import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from phasewise.serving.engine.messages import Answer
from phasewise.serving.http.answers.openai_objects import (
    Choice,
    CustomCall,
    Form,
    Json,
    KnownBefore,
    PartEvents,
    encode,
)
from phasewise.serving.http.errors import ApiError, naming
from phasewise.serving.http.requests.calls import reading_of
from phasewise.serving.http.requests.chat_schemas import INPUT
from phasewise.serving.http.requests.request_to_messages import chat_requests
from phasewise.serving.http.requests.response_schemas import (
    ResponsesRequest,
    chat_of,
    flat_name,
    messages_of,
    namespaces_of,
)
from phasewise.serving.http.routes.generation_service import GenerationService, reply_of
from phasewise.serving.http.routes.middleware import client_of
from phasewise.serving.http.routes.openapi import Routes
from phasewise.serving.tools.parts import Begun, Call, Part, Piece, Reasoning, Text

_ARGUMENTS = "response.function_call_arguments"
_INPUT = "response.custom_tool_call_input"


@dataclass(frozen=True, kw_only=True)
class Responding(KnownBefore):
    """The parts of a response that are known before it is generated. `count`: counts the tokens of a text.
    `keep`: stores the answer, given as a chat message and as the encoded response."""

    response_id: str
    body: ResponsesRequest
    sampling: Json
    system_fingerprint: str | None
    count: Callable[[str], int]
    keep: Callable[[Json, str], None]
    namespaces: Mapping[str, tuple[str, str]]
    """Namespace and own name of each function in a namespace, by its name in the chat."""

    def call_id(self) -> str:
        return self.reading.call_id() if self.reading else f"call_{uuid.uuid4().hex[:24]}"


@dataclass
class _Item:
    """One output item. `kind`: the type of its parts. For a call: `call_id`, `name` and `namespace`."""

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
        """The call as in a chat message."""
        name = flat_name(self.namespace, self.name)
        text = json.dumps({INPUT: self.text}) if self.kind is CustomCall else self.text
        return {"id": self.call_id, "type": "function", "function": {"name": name, "arguments": text}}


@dataclass
class _Output:
    """The output items so far, in the order of their parts; adjacent text goes into one item."""

    facts: Responding
    items: list[_Item] = field(default_factory=list)

    def add(self, part: Part) -> tuple[_Item, bool]:
        """Add a part; return its item, and whether that is new."""
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
        """The answer as a chat message, for the conversation that the next response continues."""
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
    """The response as one JSON object, which is also stored."""
    (choice,) = choices
    output = _Output(responding)
    for part in responding.parts(choice):
        output.add(part)
    written = encode(_Response(responding).ended(output, choice))
    responding.keep(output.as_message(), written)
    return written.encode()


class ResponseEvents(PartEvents):
    """Writes the events of one response."""

    def __init__(self, responding: Responding) -> None:
        super().__init__(responding)
        self._responding = responding
        self._response = _Response(responding)
        self._output = _Output(responding)
        self._n_events = 0
        self._open: _Item | None = None

    def opening(self) -> bytes:
        begun = self._response.begun()
        names = ("response.created", "response.in_progress")
        return "".join(self._event(name, response=begun) for name in names).encode()

    def failed(self, error: ApiError) -> bytes:
        said = {"code": "server_error", "message": error.message}
        response = {**self._response.begun(), "status": "failed", "error": said}
        return self._event("response.failed", response=response).encode()

    def closing(self) -> bytes:
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
        """The events that end the open item."""
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
    """Builds the response object."""

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
        """The response object before any output."""
        return {**self._fixed, "status": "in_progress", "output": [], "usage": None}

    def ended(self, output: _Output, choice: Choice) -> Json:
        """The response object after the last piece."""
        cut = choice.last.finish_reason == "length"
        items = [item.to_json("completed") for item in output.items]
        if cut and items:
            items[-1]["status"] = "incomplete"
        n_prompt = self._responding.n_prompt
        n_reasoning = self._responding.count(output.reasoning()) if output.reasoning() else 0
        usage = {
            "input_tokens": n_prompt,
            "input_tokens_details": {
                "cached_tokens": choice.last.n_cached,
                "cache_write_tokens": n_prompt - choice.last.n_cached,
            },
            "output_tokens": choice.last.n_generated,
            "output_tokens_details": {"reasoning_tokens": min(n_reasoning, choice.last.n_generated)},
            "total_tokens": n_prompt + choice.last.n_generated,
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


MOST_KEPT = 1000
MOST_KEPT_CHARACTERS = 32 << 20
STORED_S = 3600.0
"""The limits of the store: number of responses, characters of all, and age."""
_ENTRY_CHARACTERS = 200
"""Approximate overhead in characters of a stored response, and of a message."""
_MOST_ID = 80  # characters of what is repeated


class StoredResponse(NamedTuple):
    """A response as it was sent, and the conversation up to and including it."""

    messages: list[Json]
    written: str


class ResponseStore:
    """The newest responses and their conversations, by client and response id."""

    def __init__(self) -> None:
        self._kept: dict[str, OrderedDict[str, tuple[float, int, StoredResponse]]] = {}
        """By client, its responses in order of age: time of storing, size in characters, and the response."""

    def put(self, client: str, response_id: str, messages: list[Json], written: str) -> None:
        """Store a response. If there is no room, drop the oldest of the client that holds most."""
        self._forget_old()
        kept = self._kept.setdefault(client, OrderedDict())
        n_characters = _ENTRY_CHARACTERS + len(written) + sum(map(_size, messages))
        kept[response_id] = time.monotonic(), n_characters, StoredResponse(messages, written)
        while sum(map(len, self._kept.values())) > MOST_KEPT:
            self._drop_oldest(max(self._kept, key=lambda owner: len(self._kept[owner])))
        while sum(map(self._characters_of, self._kept)) > MOST_KEPT_CHARACTERS:
            self._drop_oldest(max(self._kept, key=self._characters_of))

    def drop(self, client: str, response_id: str) -> None:
        """Remove a stored response."""
        kept = self._kept[client]
        del kept[response_id]
        if not kept:
            del self._kept[client]

    def _forget_old(self) -> None:
        too_old_s = time.monotonic() - STORED_S
        for client in list(self._kept):
            while client in self._kept and next(iter(self._kept[client].values()))[0] < too_old_s:
                self._drop_oldest(client)

    def _drop_oldest(self, client: str) -> None:
        self.drop(client, next(iter(self._kept[client])))

    def _characters_of(self, client: str) -> int:
        return sum(n_characters for _, n_characters, _ in self._kept[client].values())

    def stored(self, client: str, response_id: str) -> StoredResponse:
        """The stored response; raises ApiError 404 if there is none."""
        stored = self._find(client, response_id)
        if stored is None:
            message = f"there is no response {response_id[:_MOST_ID]!r} here, or no longer"
            raise ApiError(404, message, param="response_id", code="response_not_found")
        return stored

    def conversation(self, client: str, response_id: str) -> list[Json]:
        """The conversation up to and including a response; raises ApiError 400 if that is not stored."""
        stored = self._find(client, response_id)
        if stored is None:
            raise ApiError(
                400,
                "previous_response_id names a response that is not stored (any more); send the whole "
                "conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return stored.messages

    def _find(self, client: str, response_id: str) -> StoredResponse | None:
        self._forget_old()
        kept = self._kept[client].get(response_id) if client in self._kept else None
        return None if kept is None else kept[2]


def _size(message: Json) -> int:
    calls = message.get("tool_calls", ())
    texts = (str(message.get("content") or ""), message.get("reasoning_content") or "")
    return _ENTRY_CHARACTERS + sum(map(len, texts)) + sum(len(str(call)) for call in calls)


_NAMES = {
    "prompt": "input",
    "messages": "input",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}
"""Field renames for error messages: name in the chat request, to name in the Responses request."""


def add_responses(routes: Routes, service: GenerationService) -> None:
    """Add the routes of the Responses API."""
    store = ResponseStore()

    @routes.add("/v1/responses", "POST", ResponsesRequest)
    async def responses(request: Request) -> Response:
        """Answer a conversation, perhaps one that was stored here."""
        body = await service.read(request, ResponsesRequest)
        client = client_of(request.scope).name
        previous = body.previous_response_id
        before = [] if previous is None else store.conversation(client, previous)
        model = await service.models.hold(request, body.model)
        with naming(_NAMES):
            chat = await service.bodies.convert(request, lambda: chat_of(body, before))
            requests = await service.preparation.prepare(request, chat, chat_requests, model)
        (asked,) = requests
        response_id = f"resp_{asked.request_id.split('-')[1]}"

        def keep(answer: dict[str, Any], written: str) -> None:
            if body.store is not False:
                store.put(client, response_id, [*before, *messages_of(body.input), answer], written)

        responding = Responding(
            model_id=model.model_id,
            n_prompt=len(asked.prompt_token_ids),
            reading=reading_of(chat, model, asked),
            response_id=response_id,
            body=body,
            sampling={"temperature": asked.sampling.temperature, "top_p": asked.sampling.top_p},
            system_fingerprint=model.system_fingerprint,
            count=lambda text: len(model.encode(text, False)),
            keep=keep,
            namespaces=namespaces_of(body),
        )
        form = Form(partial(whole, responding), partial(ResponseEvents, responding))
        reply = reply_of(chat, requests, form, model)
        with naming(_NAMES):
            return await service.answer(reply, request)

    @routes.add("/v1/responses/{response_id}", "GET")
    async def show_response(request: Request, response_id: str) -> Response:
        """A response that is stored here."""
        written = store.stored(client_of(request.scope).name, response_id).written
        return Response(written, media_type="application/json")

    @routes.add("/v1/responses/{response_id}", "DELETE")
    async def forget_response(request: Request, response_id: str) -> Json:
        """Store it no longer."""
        client = client_of(request.scope).name
        store.stored(client, response_id)
        store.drop(client, response_id)
        return {"id": response_id, "object": "response", "deleted": True}
