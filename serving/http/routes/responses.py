"""`/v1/responses`: answers as one object or as events, and a store of the newest for continuation."""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from phasewise.serving.http.answers.openai_objects import (
    AnswerReading,
    CustomCall,
    Json,
    PartWriter,
    Reply,
    encode,
)
from phasewise.serving.http.errors import ApiError, naming
from phasewise.serving.http.requests.chat_schemas import INPUT
from phasewise.serving.http.requests.response_schemas import (
    ResponsesRequest,
    chat_of,
    flat_name,
    messages_of,
    namespaces_of,
)
from phasewise.serving.http.routes.generation_service import GenerationService
from phasewise.serving.http.routes.middleware import client_of
from phasewise.serving.http.routes.openapi import Routes
from phasewise.serving.tools.parts import Begun, Call, Part, Piece, Reasoning, Text

_EVENTS: Mapping[type[Part], str] = {
    Text: "response.output_text",
    Reasoning: "response.reasoning_text",
    Call: "response.function_call_arguments",
    CustomCall: "response.custom_tool_call_input",
}
_PREFIXES: Mapping[type[Part], str] = {Text: "msg", Reasoning: "rs", Call: "fc", CustomCall: "ctc"}
"""Events of items and prefixes of their ids, by the kind of their parts."""


@dataclass
class _Item:
    """One output item. `kind`: the type of its parts. For a call: `call_id`, `name` and `namespace`."""

    kind: type[Part]
    item_id: str
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    texts: list[str] = field(default_factory=list)
    """The text so far, or the call's arguments, in pieces."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def calls(self) -> bool:
        return issubclass(self.kind, Call)

    def to_json(self, status: str) -> Json:
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
        is_thought = self.kind is Reasoning
        return {
            "id": self.item_id,
            **(
                {"type": "reasoning", "summary": []}
                if is_thought
                else {"type": "message", "role": "assistant"}
            ),
            "content": [self.part(self.text)] if status != "in_progress" else [],
            "status": status,
        }

    def part(self, text: str) -> Json:
        """The content part of a text or of thoughts."""
        if self.kind is Reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def as_called(self) -> Json:
        """The call as in a chat message."""
        name = flat_name(self.namespace, self.name)
        text = json.dumps({INPUT: self.text}) if self.kind is CustomCall else self.text
        return {"id": self.call_id, "type": "function", "function": {"name": name, "arguments": text}}


class ResponseWriter(PartWriter):
    """Writes one response. `keep`: stores the answer, given as a chat message and as the encoded response."""

    def __init__(
        self,
        reply: Reply,
        reading: AnswerReading | None,
        body: ResponsesRequest,
        keep: Callable[[str, Json, str], None],
    ) -> None:
        super().__init__(reply, reading)
        self._keep = keep
        self._id = f"resp_{reply.serial}"
        self._namespaces = namespaces_of(body)
        """Namespace and own name of each function in a namespace, by its name in the chat."""
        self._items: list[_Item] = []
        """The output so far, in the order of its parts; adjacent text goes into one item."""
        self._open: _Item | None = None
        self._n_events = 0
        self._fixed = self._known_before(body)

    def opening(self) -> str:
        names = ("response.created", "response.in_progress")
        return "".join(self._event(name, response=self._begun()) for name in names)

    def failed(self, error: ApiError) -> str:
        said = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response={**self._begun(), "status": "failed", "error": said})

    def closing(self) -> str:
        end, response = self._close(), self._object()
        return end + self._event(f"response.{response['status']}", response=response)

    def _said(self, parts: Sequence[Part]) -> Iterator[str]:
        for part in parts:
            is_continued = self._open is not None and (
                isinstance(part, Piece) or (self._open.kind is type(part) and not self._open.calls)
            )
            if not is_continued:
                yield self._close()
                yield self._begin(part)
            item = self._open
            assert item is not None
            said = part.arguments if isinstance(part, Call) else "" if isinstance(part, Begun) else part.text
            item.texts.append(said)
            if not isinstance(part, Begun):
                more: Json = {"logprobs": []} if item.kind is Text else {}
                yield self._event(f"{_EVENTS[item.kind]}.delta", **self._place(), delta=said, **more)

    def _begin(self, part: Part) -> str:
        """Begin the item of a part."""
        kind = Call if isinstance(part, Begun) else type(part)
        self._open = item = _Item(kind, f"{_PREFIXES[kind]}_{uuid.uuid4().hex}")
        if isinstance(part, Call | Begun):
            item.call_id = self._reading.call_id() if self._reading else f"call_{uuid.uuid4().hex[:24]}"
            item.namespace, item.name = self._namespaces.get(part.name, (None, part.name))
        self._items.append(item)
        place, added = len(self._items) - 1, item.to_json("in_progress")
        begun = self._event("response.output_item.added", output_index=place, item=added)
        if item.calls:
            return begun
        return begun + self._event("response.content_part.added", **self._place(), part=item.part(""))

    def _close(self) -> str:
        """The events that end the open item."""
        item = self._open
        if item is None:
            return ""
        place, done = self._place(), f"{_EVENTS[item.kind]}.done"
        if item.kind is Text:
            end = self._event(done, **place, text=item.text, logprobs=[])
        elif item.kind is CustomCall:
            end = self._event(done, **place, input=item.text)
        elif item.kind is Call:
            end = self._event(done, **place, name=item.name, arguments=item.text)
        else:
            end = self._event(done, **place, text=item.text)
        if not item.calls:
            end += self._event("response.content_part.done", **place, part=item.part(item.text))
        self._open = None
        whole = item.to_json("completed")
        return end + self._event("response.output_item.done", output_index=place["output_index"], item=whole)

    def _place(self) -> Json:
        """The fields of events that say which item, the newest, they belong to."""
        item = self._items[-1]
        place: Json = {"item_id": item.item_id, "output_index": len(self._items) - 1}
        return place if item.calls else {**place, "content_index": 0}

    def _event(self, name: str, /, **fields: Any) -> str:
        self._n_events += 1
        return super()._event(name, sequence_number=self._n_events - 1, **fields)

    # ---- the response ------------------------------------------------------------------------------------

    def _known_before(self, body: ResponsesRequest) -> Json:
        """The fields of the response that are known before it is generated."""
        given = body.model_dump(by_alias=True, exclude_none=True, include={"tools", "tool_choice", "text"})
        model, sampling = self._reply.model, self._reply.requests[0].sampling
        return {
            "id": self._id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model.model_id,
            "system_fingerprint": model.system_fingerprint,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": body.store is not False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
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

    def _begun(self) -> Json:
        """The response object before any output."""
        return {**self._fixed, "status": "in_progress", "output": [], "usage": None}

    def _object(self) -> Json:
        """The response object after the last piece, which is also stored."""
        last, n_prompt, cut = self._last, self._reply.n_prompt, self._last.finish_reason == "length"
        items = [item.to_json("completed") for item in self._items]
        if cut and items:
            items[-1]["status"] = "incomplete"
        thoughts = "".join(item.text for item in self._items if item.kind is Reasoning)
        n_reasoning = len(self._reply.model.encode(thoughts, False)) if thoughts else 0
        usage = {
            "input_tokens": n_prompt,
            "input_tokens_details": {
                "cached_tokens": last.n_cached,
                "cache_write_tokens": n_prompt - last.n_cached,
            },
            "output_tokens": last.n_generated,
            "output_tokens_details": {"reasoning_tokens": min(n_reasoning, last.n_generated)},
            "total_tokens": n_prompt + last.n_generated,
        }
        response = {
            **self._fixed,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items,
            "usage": usage,
        }
        self._keep(self._id, self._as_message(thoughts), encode(response))
        return response

    def _as_message(self, thoughts: str) -> Json:
        """The answer as a chat message, for the conversation that the next response continues."""
        out: Json = {"role": "assistant"}
        out["content"] = "".join(item.text for item in self._items if item.kind is Text)
        if thoughts:
            out["reasoning_content"] = thoughts
        calls = [item.as_called() for item in self._items if item.calls]
        return {**out, "tool_calls": calls} if calls else out


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
        self._kept: OrderedDict[tuple[str, str], tuple[float, int, StoredResponse]] = OrderedDict()
        """By client and id, in order of age: time of storing, size in characters, and the response."""

    def put(self, client: str, response_id: str, messages: list[Json], written: str) -> None:
        """Store a response. If there is no room, drop the oldest of the client that holds most."""
        self._forget_old()
        n_characters = _ENTRY_CHARACTERS + len(written) + sum(map(_size, messages))
        self._kept[client, response_id] = time.monotonic(), n_characters, StoredResponse(messages, written)
        numbers, characters = Counter[str](), Counter[str]()
        for (owner, _), (_, n_held, _) in self._kept.items():
            numbers[owner] += 1
            characters[owner] += n_held
        for held, most in ((numbers, MOST_KEPT), (characters, MOST_KEPT_CHARACTERS)):
            while held.total() > most:
                largest = max(held, key=lambda owner: held[owner])
                _, n_held, _ = self._kept.pop(next(key for key in self._kept if key[0] == largest))
                numbers[largest] -= 1
                characters[largest] -= n_held

    def drop(self, client: str, response_id: str) -> None:
        """Remove a stored response."""
        del self._kept[client, response_id]

    def _forget_old(self) -> None:
        too_old_s = time.monotonic() - STORED_S
        while self._kept and next(iter(self._kept.values()))[0] < too_old_s:
            self._kept.popitem(last=False)

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
        kept = self._kept.get((client, response_id))
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

        def keep(response_id: str, answer: Json, written: str) -> None:
            if body.store is not False:
                store.put(client, response_id, [*before, *messages_of(body.input), answer], written)

        with naming(_NAMES):
            chat = await service.bodies.convert(request, lambda: chat_of(body, before))
            write = partial(ResponseWriter, body=body, keep=keep)
            return await service.answer(request, chat, model, write)

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
