"""The requests of Ollama's API (`/api/chat`, `/api/generate`, `/api/show`), and the requests that they mean.

Suffixes and templates of a request's own are refused by name; `num_ctx` says nothing here, nor `keep_alive`
of models that stay.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

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
    Json,
    MinP,
    OpenRequest,
    Penalty,
    RepetitionPenalty,
    StopTexts,
    Strict,
    Temperature,
    TopP,
    few_names,
)


class OllamaOptions(OpenRequest):
    """Those that change an answer here; others are ignored."""

    without_effect = frozenset(
        {"num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "numa"}
    )

    temperature: Temperature | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST_INT)] | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    seed: int | None = None
    num_predict: Annotated[int, Field(ge=-2, le=MOST_INT)] | None = None
    """0 and below: no limit but the context."""
    stop: StopTexts | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


_SAME_NAMES = set(OllamaOptions.model_fields) - {"num_predict", "repeat_penalty"}
"""Options that a chat request has under the same names."""


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
    """ValueError where it is no time."""
    if isinstance(text, str) and not (_DURATION.fullmatch(text) or _NUMBER.fullmatch(text)):
        raise ValueError("it is a number of seconds, or a time such as 30s, 5m or 1h30m")
    if isinstance(text, str) and not _NUMBER.fullmatch(text):
        sign = -1 if text.startswith("-") else 1
        parts = re.findall(r"([0-9.]+)(ms|[hms])", text)
        seconds = sign * sum(float(amount) * _UNITS_S[unit] for amount, unit in parts)
    else:
        seconds = float(text)
    return math.inf if seconds < 0 else seconds


def _checked(given: str | float) -> str | float:
    _seconds(given)
    return given


KeepAlive = Annotated[str | float, AfterValidator(_checked)]
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
        """Seconds; infinite for a negative time, None where nothing is said."""
        return None if self.keep_alive is None else _seconds(self.keep_alive)

    @property
    def streams(self) -> bool:
        """True if the answer is a stream."""
        return self.stream is not False

    def ignored(self) -> tuple[str, ...]:
        """With options: `options.NAME`."""
        options = self.options.ignored() if self.options else ()
        return few_names((*super().ignored(), *(f"options.{name}" for name in options)))

    def common(self) -> Json:
        """The fields that chats and completions share."""
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
    """The chat request that a request means. ApiError where there is none."""
    body.refuse_unsupported()
    out = {**body.common(), **_thinking(body.think), "messages": list(_messages(body.messages or ()))}
    return ChatRequest.of({**out, "tools": body.tools or None})


def prompt_of(body: OllamaGenerateRequest, *, has_template: bool) -> ChatRequest | CompletionRequest:
    """The request that a prompt means: a chat where the model has a template. ApiError if there is none."""
    body.refuse_unsupported()
    if body.raw or not has_template:
        return CompletionRequest.of({**body.common(), "prompt": f"{body.system or ''}{body.prompt}"})
    messages = [{"role": "user", "content": body.prompt}]
    if body.system is not None:
        messages.insert(0, {"role": "system", "content": body.system})
    return ChatRequest.of({**body.common(), **_thinking(body.think), "messages": messages})


def _messages(messages: Sequence[OllamaMessage]) -> Iterator[Json]:
    """Calls have no ids in this API: results belong to them in their order."""
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
    """A schema whose objects have the properties that it names alone, where it says nothing of others.

    Small models go on with properties of their own until the answer is cut. What several schemas describe
    together stays open: each would forbid what another asks for.
    """
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
