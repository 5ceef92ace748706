"""Ollama's API, as far as its clients need it to list models and to generate text. A suffix or template in a
request is refused by name. `num_ctx` is ignored, and `keep_alive` for models that are never unloaded."""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phasewise.serving.http.answers.openai_objects import (
    JSON_LINES,
    SPACE,
    AnswerReading,
    Json,
    PartWriter,
    Reply,
    encode,
)
from phasewise.serving.http.errors import ApiError, naming
from phasewise.serving.http.http_settings import ModelFacts, ServedModel
from phasewise.serving.http.models.served_models import ListedModel
from phasewise.serving.http.monitoring.access_log import record_of
from phasewise.serving.http.requests.chat_schemas import (
    MOST_CALLS,
    MOST_TOOLS,
    ChatRequest,
    Effort,
    FunctionName,
    Role,
    Tool,
    joined,
)
from phasewise.serving.http.requests.schemas import (
    MOST_INT,
    MOST_MESSAGES,
    MOST_PARTS,
    AnswerRequest,
    CompletionRequest,
    MinP,
    OpenRequest,
    Penalty,
    RepetitionPenalty,
    StopTexts,
    Strict,
    Temperature,
    TopP,
)
from phasewise.serving.http.routes.generation_service import GenerationService
from phasewise.serving.http.routes.openapi import Routes
from phasewise.serving.tools.parts import Begun, Call, Part, Piece, Reasoning, Text
from phasewise.serving.tools.values import parsed


class OllamaOptions(OpenRequest):
    """The options that change an answer; others are ignored."""

    without_effect = frozenset(
        {"num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "numa"}
    )

    temperature: Temperature | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST_INT)] | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    seed: int | None = None
    num_predict: Annotated[int, Field(ge=-2, le=MOST_INT)] | None = None
    """Limit on the answer's tokens; 0 and below: limited only by the context."""
    stop: StopTexts | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


_SAME_NAMES = set(OllamaOptions.model_fields) - {"num_predict", "repeat_penalty"}
"""Options that have the same name in a chat request."""


class OllamaFunction(Strict):
    name: FunctionName
    arguments: Any = None


class OllamaCall(Strict):
    function: OllamaFunction


class OllamaMessage(Strict):
    model_config = ConfigDict(extra="allow")

    role: Role
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True, max_length=MOST_CALLS)] | None = None
    images: Annotated[list[str], Field(fail_fast=True, max_length=MOST_PARTS)] | None = None


def _seconds(text: str | float) -> float:
    """Seconds of a duration such as `1h30m`; infinite if negative. Raises ValueError."""
    if isinstance(text, str) and not (_DURATION.fullmatch(text) or _NUMBER.fullmatch(text)):
        raise ValueError("it is a number of seconds, or a time such as 30s, 5m or 1h30m")
    if isinstance(text, str) and not _NUMBER.fullmatch(text):
        sign = -1 if text.startswith("-") else 1
        parts = re.findall(r"([0-9.]+)(ms|[hms])", text)
        seconds = sign * sum(float(amount) * _UNITS_S[unit] for amount, unit in parts)
    else:
        seconds = float(text)
    return math.inf if seconds < 0 else seconds


KeepAlive = Annotated[str | float, AfterValidator(_seconds)]
_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_DURATION = re.compile(r"-?(?:[0-9]{1,9}(?:\.[0-9]{1,9})?(?:ms|[hms]))+")
_NUMBER = re.compile(r"-?[0-9]{1,12}(?:\.[0-9]{1,9})?")


class _Asked(AnswerRequest):
    not_offered = ("images", "suffix", "template", "receipt")

    model: str
    stream: bool | None = Field(None, description="true unless stated")
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description="json, or a schema")
    options: OllamaOptions | None = None
    think: bool | Effort | None = None
    keep_alive: KeepAlive | None = Field(
        None,
        description="with --models: how long the model stays unused, in seconds or as 5m; 0: not at all, "
        "negative: until others need its room",
    )

    @property
    def keep_alive_s(self) -> float | None:
        """Seconds that the model stays unused; infinite if negative; None if the request leaves it out."""
        return None if self.keep_alive is None else float(self.keep_alive)

    @model_validator(mode="after")
    def _without_options(self) -> Self:
        self.leave_out(f"options.{name}" for name in (self.options.ignored() if self.options else ()))
        return self

    def common(self) -> Json:
        """The fields that chat and completion requests share."""
        options = self.options or OllamaOptions()
        return {
            "model": self.model,
            "stream": self.stream is not False,
            **options.model_dump(include=_SAME_NAMES, exclude_none=True),
            "repetition_penalty": options.repeat_penalty,
            "response_format": _format(self.format),
            "max_tokens": options.num_predict if (options.num_predict or 0) > 0 else MOST_INT,
        }


class OllamaChatRequest(_Asked):
    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=MOST_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None


class OllamaGenerateRequest(_Asked):
    prompt: str = ""
    system: str | None = None
    raw: bool = Field(False, description="the prompt as it is, without the model's template")


class OllamaShowRequest(OpenRequest):
    model: str = Field(description="or `name`, as older clients have it")

    @model_validator(mode="before")
    @classmethod
    def _old_name(cls, given: Any) -> Any:
        return {"model": given["name"]} if isinstance(given, dict) and "name" in given else given


def chat_of(body: OllamaChatRequest) -> ChatRequest:
    """Convert to a chat request. Raises ApiError if the request has no chat equivalent."""
    body.refuse_unsupported()
    out = {**body.common(), **_thinking(body.think), "messages": list(_messages(body.messages or ()))}
    return ChatRequest.of({**out, "tools": body.tools or None})


def prompt_of(body: OllamaGenerateRequest, *, has_template: bool) -> ChatRequest | CompletionRequest:
    """A chat request, or a completion request if raw or without a template. Raises ApiError."""
    body.refuse_unsupported()
    if body.raw or not has_template:
        return CompletionRequest.of({**body.common(), "prompt": f"{body.system or ''}{body.prompt}"})
    messages = [{"role": "user", "content": body.prompt}]
    if body.system is not None:
        messages.insert(0, {"role": "system", "content": body.system})
    return ChatRequest.of({**body.common(), **_thinking(body.think), "messages": messages})


def _messages(messages: Sequence[OllamaMessage]) -> Iterator[Json]:
    """Messages of a chat request. Ollama's calls have no ids, so results are matched by their order."""
    open_calls: deque[str] = deque()
    for number, message in enumerate(messages):
        images = [{"type": "image"} for _ in message.images or ()]
        content = joined([{"type": "text", "text": message.content or ""}, *images])
        out: Json = {"role": message.role, "content": content}
        if message.thinking:
            out["reasoning_content"] = message.thinking
        if message.role == "tool" and open_calls:
            out["tool_call_id"] = open_calls.popleft()
        if message.tool_calls:
            ids = [f"call_{number}_{index}" for index in range(len(message.tool_calls))]
            open_calls = deque(ids)
            out["tool_calls"] = [
                {
                    "id": call_id,
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call_id, call in zip(ids, message.tool_calls, strict=True)
            ]
        yield out


def _thinking(think: bool | str | None) -> Json:
    if think is None:
        return {}
    out: Json = {"chat_template_kwargs": dict.fromkeys(("enable_thinking", "thinking"), bool(think))}
    return {**out, "reasoning_effort": think} if isinstance(think, str) else out


def _format(wanted: str | Json | None) -> Json | None:
    if not wanted:
        return None
    if isinstance(wanted, str):
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": closed(wanted)}}


_APPLICATORS = frozenset({"allOf", "anyOf", "oneOf", "if", "then", "else", "$ref", "dependentSchemas"})
_OPENS = _APPLICATORS | {"additionalProperties", "unevaluatedProperties", "patternProperties"}


def closed(schema: Any) -> Any:
    """A schema whose objects forbid properties that it does not name, unless it says otherwise: small models
    add properties until the answer is truncated. Objects that several schemas describe together stay open,
    because each schema would forbid the properties of the others."""
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    for name in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(name), dict):
            out[name] = {key: closed(each) for key, each in schema[name].items()}
    for name in ("prefixItems", *(() if "properties" in schema else ("anyOf", "oneOf"))):
        if isinstance(schema.get(name), list):
            out[name] = [closed(each) for each in schema[name]]
    if "items" in schema:
        out["items"] = closed(schema["items"])
    if schema.get("properties") and not _OPENS & schema.keys():
        out["additionalProperties"] = False
    return out


class OllamaWriter(PartWriter):
    """Writes an answer in lines of JSON, or as the last of them. Ollama's client fails on empty lines: the
    keep-alive is a space. `began_ns`: when the request came. `is_chat`: True for `/api/chat`."""

    media_type, sign_of_life = JSON_LINES, SPACE

    def __init__(
        self, reply: Reply, reading: AnswerReading | None, began_ns: int = 0, *, is_chat: bool = True
    ) -> None:
        super().__init__(reply, reading)
        self._began_ns, self._is_chat = began_ns, is_chat
        self._name: str | None = None
        """Function of the call that has begun: a call is given out once it is whole."""
        self._arguments = ""
        self._whole: Json = {}
        """Fields of the whole answer so far, for one that is not streamed."""

    def failed(self, error: ApiError) -> str:
        return f"{encode(error.ollama_body())}\n"

    def closing(self) -> str:
        return f"{encode(self._object())}\n"

    def _said(self, parts: Sequence[Part]) -> Iterator[str]:
        for said in self._fields(parts):
            if self._reply.streamed:
                yield f"{encode(self._line(said))}\n"
            else:
                self._whole |= {
                    name: self._whole.get(name, type(value)()) + value for name, value in said.items()
                }

    def _fields(self, parts: Sequence[Part]) -> Iterator[Json]:
        """The parts in Ollama's fields."""
        for part in parts:
            if isinstance(part, Piece):
                self._arguments += part.text
                continue
            yield from self._ended()
            match part:
                case Call(name=name, arguments=arguments):
                    yield _call(name, arguments)
                case Begun(name=name):
                    self._name = name
                case Reasoning(text=text):
                    yield {"thinking": text}
                case Text(text=text):
                    yield {"content": text}
        if self._last.finish_reason is not None:
            yield from self._ended()

    def _ended(self) -> Iterator[Json]:
        """The open call, if there is one."""
        if self._name is not None:
            yield _call(self._name, self._arguments)
        self._name, self._arguments = None, ""

    def _line(self, said: Json, *, done: bool = False) -> Json:
        """A line of the answer with the fields `content`, `thinking` and `tool_calls` that are in `said`."""
        head: Json = {"model": self._reply.model.model_id, "created_at": _now()}
        if self._is_chat:
            return {**head, "message": {"role": "assistant", "content": "", **said}, "done": done}
        text = said.pop("content", "")
        return {**head, "response": text, **said, "done": done}

    def _object(self) -> Json:
        """The last line of the answer, with token counts and times in nanoseconds."""
        last = self._last
        return {
            **self._line(self._whole, done=True),
            "done_reason": last.finish_reason,
            "total_duration": last.at_ns - self._began_ns,
            "load_duration": 0,
            "prompt_eval_count": self._reply.n_prompt,
            "prompt_eval_duration": self._first_ns - self._began_ns,
            "eval_count": last.n_generated,
            "eval_duration": last.at_ns - self._first_ns,
        }


def _call(name: str, arguments: str) -> Json:
    return {"tool_calls": [{"function": {"name": name, "arguments": parsed(arguments) or {}}}]}


OLLAMA_API = "0.14.0"
"""The version of Ollama's API reported here: the first one with /v1/responses and /v1/messages."""
_IN_CHAT = {"prompt": "messages", "response_format": "format", "max_tokens": "options"}
_IN_GENERATE = {"messages": "prompt", "response_format": "format", "max_tokens": "options"}
"""Field renames for error messages: name in the converted request, to name in Ollama's request."""


def add_ollama(routes: Routes, service: GenerationService) -> None:
    """Add the routes of Ollama's API."""

    @routes.add("/api/version", "GET")
    async def show_version(_request: Request) -> Json:
        """The version of Ollama's API that this one is, and that of this server."""
        return {"version": OLLAMA_API, "phasewise": version("phasewise")}

    @routes.add("/api/tags", "GET")
    async def tags(_request: Request) -> Json:
        """The models that are served."""
        return {"models": [await _listed(service, model) for model in await service.models.listed()]}

    @routes.add("/api/ps", "GET")
    async def ps(_request: Request) -> Json:
        """Those of them that are loaded."""
        loaded = [model for model in await service.models.listed() if model.served is not None]
        return {"models": [{**await _listed(service, model), **_running(model)} for model in loaded]}

    @routes.add("/api/show", "POST", OllamaShowRequest)
    async def show(request: Request) -> Json:
        """The kind of a model, and what it can do."""
        model = await _hold(service, request, (await service.read(request, OllamaShowRequest)).model)
        can = ["completion", *(["tools"] if model.dialect.knows_tools else [])]
        return {
            "details": _details(model.facts),
            "model_info": {
                "general.architecture": model.facts.family,
                "general.parameter_count": model.facts.n_parameters,
                f"{model.facts.family}.context_length": model.context_length,
            },
            "capabilities": [*can, "thinking"] if model.dialect.thinks else can,
            "modified_at": _time(model.created_s),
        }

    @routes.add("/api/chat", "POST", OllamaChatRequest)
    async def ollama_chat(request: Request) -> Response:
        """Answer a conversation."""
        began_ns = time.perf_counter_ns()
        body = await service.read(request, OllamaChatRequest)
        model = await _hold(service, request, body.model, body.keep_alive_s)
        if not body.messages:
            return _loaded(model, body, {"message": {"role": "assistant", "content": ""}})
        with naming(_IN_CHAT):
            chat = await service.bodies.convert(request, lambda: chat_of(body))
            return await service.answer(request, chat, model, partial(OllamaWriter, began_ns=began_ns))

    @routes.add("/api/generate", "POST", OllamaGenerateRequest)
    async def ollama_generate(request: Request) -> Response:
        """Continue a text, or answer one."""
        began_ns = time.perf_counter_ns()
        body = await service.read(request, OllamaGenerateRequest)
        model = await _hold(service, request, body.model, body.keep_alive_s)
        if not body.prompt:
            return _loaded(model, body, {"response": ""})
        has_template = model.encode_chat is not None
        with naming({} if body.raw or not has_template else _IN_GENERATE):
            prompt = prompt_of(body, has_template=has_template)
            write = partial(OllamaWriter, began_ns=began_ns, is_chat=False)
            return await service.answer(request, prompt, model, write)


async def _hold(
    service: GenerationService, request: Request, name: str, keep_s: float | None = None
) -> ServedModel:
    """Hold a model by its name, which may have the tag `latest`. `keep_s`: how long it stays unused then."""
    record_of(request.scope).keep_s = keep_s
    return await service.models.hold(request, name.removesuffix(":latest"))


def _loaded(model: ServedModel, body: OllamaChatRequest | OllamaGenerateRequest, said: Json) -> Response:
    """The answer to an empty prompt, by which clients load or unload a model."""
    head = {"model": model.model_id, "created_at": _now()}
    reason = "unload" if body.keep_alive_s == 0 else "load"
    return JSONResponse({**head, **said, "done": True, "done_reason": reason})


async def _listed(service: GenerationService, model: ListedModel) -> Json:
    fingerprint = model.served.system_fingerprint if model.served else None
    return {
        "name": model.model_id,
        "model": model.model_id,
        "modified_at": _time(model.created_s),
        "size": model.n_bytes,
        "digest": fingerprint or "",
        "details": _details(await service.models.facts(model)),
    }


def _details(facts: ModelFacts) -> Json:
    """The `details` of a model that Ollama's clients expect."""
    n = facts.n_parameters
    size = f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.1f}M"
    return {
        "format": "phasewise",
        "parent_model": "",
        "family": facts.family,
        "families": [facts.family] if facts.family else [],
        "parameter_size": size if n else "",
        "quantization_level": facts.format,
    }


def _running(model: ListedModel) -> Json:
    expires = {} if model.ends_s is None else {"expires_at": _time(model.ends_s)}
    context = model.served.context_length if model.served else 0
    return {**expires, "size_vram": 0, "context_length": context}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat()
