"""The OpenAPI document: what every route takes and gives, refusals included.

Bodies are read by hand, for the limits and for our errors, so the framework knows neither them nor the
answers; this says it. Its schemas of what is taken are those that check it.
"""

from __future__ import annotations

from functools import cache, partial
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from phasewise.serving.engine.receipts import SCHEMA_VERSION
from phasewise.serving.http.requests.batch_schemas import BatchRequest
from phasewise.serving.http.requests.chat_schemas import ChatRequest, TokenizeRequest
from phasewise.serving.http.requests.message_schemas import CountTokensRequest, MessagesRequest
from phasewise.serving.http.requests.ollama_schemas import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from phasewise.serving.http.requests.response_schemas import ResponsesRequest
from phasewise.serving.http.requests.schemas import CompletionRequest, DetokenizeRequest
from phasewise.serving.http.routes.batches_openapi import batch_answers, batch_paths
from phasewise.serving.http.routes.embedding_openapi import embedding_answers, embedding_paths
from phasewise.serving.http.routes.embeddings import BODIES as EMBEDDING_BODIES

Json = dict[str, Any]

_GENERATION: tuple[type[BaseModel], ...] = (
    CompletionRequest,
    ChatRequest,
    ResponsesRequest,
    BatchRequest,
    TokenizeRequest,
    DetokenizeRequest,
    MessagesRequest,
    CountTokensRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
_POST_REFUSALS = (400, 401, 404, 408, 413, 415, 429, 431, 500, 503)

REFUSALS = {
    400: "the request is not one that can be answered",
    401: "the key that this server asks for is missing or wrong",
    404: "there is no such path, model or response here",
    403: "a page of another origin may not do this",
    405: "the path does not take this method",
    408: "the request did not come in time",
    409: "what is asked for is in use, or over already",
    413: "the body is larger than this server takes",
    415: "the body's Content-Type is not JSON",
    421: "the request names a host that this server does not answer for",
    429: "too much is waiting already; Retry-After says when to come again",
    431: "the head of the request is too large",
    500: "the computation failed",
    503: "the server is starting, stopping or full, or has lost its engine; Retry-After says when",
    507: "files of batches take all the room that there is for them",
}


def describe(app: FastAPI, *, generates: bool = True, embeds: bool = False) -> None:
    """Make `app` answer /openapi.json with the document."""
    openapi = document(generates=generates, embeds=embeds)
    app.openapi = lambda: openapi  # type: ignore[method-assign]


@cache
def document(*, generates: bool, embeds: bool) -> Json:
    """The document of a server that answers, embeds, or both; not to be changed."""
    kinds = [*(_GENERATION if generates else ()), *(EMBEDDING_BODIES if embeds else ())]
    _, bodies = models_json_schema(
        [(kind, "validation") for kind in kinds],
        ref_template="#/components/schemas/{model}",
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "phasewise", "version": version("phasewise")},
        "paths": {
            "/health": _get("health", "Whether the engine can still answer", _answer(_ref("Status")), 503),
            "/ready": _get("ready", "Whether requests should be sent here", _answer(_ref("Ready")), 503),
            "/metrics": _get("metrics", "Metrics in Prometheus's text format", _text("text/plain")),
            "/v1/models": _get(
                "list_models", "All models and adapters that are served", _answer(_ref("ModelList"))
            ),
            "/v1/models/{name}": {
                **_get("show_model", "One of them, by its id or name", _answer(_ref("Model")), 404),
                "parameters": [_NAME],
            },
            **(_generation_paths() if generates else {}),
            **(embedding_paths(partial(_refusals, *_POST_REFUSALS)) if embeds else {}),
        },
        "components": {
            "schemas": {**bodies["$defs"], **_answers(), **(embedding_answers() if embeds else {})},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _generation_paths() -> Json:
    return {
        "/v1/responses": _post(
            "responses", "Answer a conversation, perhaps a stored one", "Response", "Responses"
        ),
        "/v1/responses/{response_id}": {
            **_get("show_response", "A response that is stored here", _answer(_ref("Response")), 404),
            **_delete("forget_response", "Store a response no longer", _answer(_ref("Forgotten"))),
            "parameters": [{**_NAME, "name": "response_id"}],
        },
        "/v1/receipts/{answer_id}": {
            **_get(
                "show_receipts",
                "The receipts of an answer that asked for them",
                _answer(_ref("Receipts")),
                404,
            ),
            "parameters": [{**_NAME, "name": "answer_id"}],
        },
        "/v1/messages": _post(
            "messages",
            "Answer a conversation, in Anthropic's form",
            "Message",
            "Messages",
            refusal="MessageRefusal",
        ),
        "/v1/messages/count_tokens": _post(
            "count_tokens", "The tokens of a conversation", "CountTokens", refusal="MessageRefusal"
        ),
        "/api/version": _get("ollama_version", "The version of this server", _answer(_ref("OllamaVersion"))),
        "/api/tags": _get("ollama_tags", "The models that are served", _answer(_ref("OllamaModels"))),
        "/api/ps": _get("ollama_ps", "The same: all are loaded", _answer(_ref("OllamaModels"))),
        "/api/show": _post_ollama("show", "The kind of a model"),
        "/api/chat": _post_ollama("chat", "Answer a conversation, in Ollama's form"),
        "/api/generate": _post_ollama("generate", "Answer a prompt, in Ollama's form"),
        "/tokenize": _post("tokenize", "The tokens of a text or a conversation", "Tokenize"),
        "/detokenize": _post("detokenize", "The text that tokens spell", "Detokenize"),
        "/tokenizer_info": _get(
            "tokenizer_info", "The control tokens that a text can spell", _answer(_ref("TokenizerInfo"))
        ),
        **batch_paths(_refusals),
        "/v1/completions": _post("completions", "Continue a text, or several", "Completion"),
        "/v1/chat/completions": _post("chat", "Answer a conversation", "ChatCompletion", "Chat"),
    }


_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _get(name: str, summary: str, answer: Json, *refusals: int) -> Json:
    responses = {"200": answer, **_refusals(401, *refusals)}
    if 503 in refusals:
        responses["503"] = {**answer, "description": REFUSALS[503]}
    return {"get": {"operationId": name, "summary": summary, "responses": responses}}


def _delete(name: str, summary: str, answer: Json) -> Json:
    return {
        "delete": {
            "operationId": name,
            "summary": summary,
            "responses": {"200": answer, **_refusals(401, 404)},
        }
    }


def _post_ollama(name: str, summary: str) -> Json:
    answer = f"Ollama{name.capitalize()}"
    return _post(f"ollama_{name}", summary, answer, refusal="OllamaRefusal", stream="application/x-ndjson")


def _post(
    name: str,
    summary: str,
    answer: str,
    body: str | None = None,
    *,
    refusal: str = "Refusal",
    stream: str = "text/event-stream",
) -> Json:
    content = {"application/json": {"schema": _ref(f"{body or answer}Request")}}
    whole = {
        "description": "the answer; as events or lines where it is streamed",
        "content": {
            "application/json": {"schema": _ref(answer)},
            stream: {},  # events, for which this version of OpenAPI has no schema
        },
    }
    refusals = _refusals(*_POST_REFUSALS, refusal=refusal)
    return {
        "post": {
            "operationId": name,
            "summary": summary,
            "requestBody": {"required": True, "content": content},
            "responses": {"200": whole, **refusals},
        }
    }


def _refusals(*statuses: int, refusal: str = "Refusal") -> Json:
    return {
        str(status): {"description": REFUSALS[status], **_content("application/json", _ref(refusal))}
        for status in (*statuses, 405, 421)
    }


def _answer(schema: Json) -> Json:
    return {"description": "the answer", **_content("application/json", schema)}


def _text(media_type: str) -> Json:
    return {"description": "the answer", **_content(media_type, {"type": "string"})}


def _content(media_type: str, schema: Json) -> Json:
    return {"content": {media_type: {"schema": schema}}}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(**properties: Json) -> Json:
    """All of these are there."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


_TEXT, _COUNT, _NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "number"}
_ANY, _FLAG = {"type": "object"}, {"type": "boolean"}
_REASON = {"enum": ["stop", "length", None]}
_CHAT_REASON = {"enum": ["stop", "length", "tool_calls", None]}


def _answers() -> Json:
    """Schemas of what is given."""
    refusal = _object(message=_TEXT, type=_TEXT, param=_or_null(_TEXT), code=_or_null(_TEXT))
    of_messages = _object(type=_TEXT, message=_TEXT)
    sampling = _object(
        temperature=_NUMBER,
        top_k=_or_null(_COUNT),
        top_p=_NUMBER,
        min_p=_NUMBER,
        repetition_penalty=_NUMBER,
        source={"enum": ["default", "model"]},
    )
    card = _object(
        id=_TEXT,
        object={"const": "model"},
        created=_COUNT,
        owned_by=_TEXT,
        max_model_len=_COUNT,
    )
    card["properties"] |= {  # of models that generate text
        "default_sampling": sampling,
        "turns": {"type": "object", "additionalProperties": _TEXT},
        "system_fingerprint": _or_null(_TEXT),
        "arithmetic": _or_null(_TEXT),
        "arithmetic_paths": _or_null(_TEXT),
        "parent": _TEXT,  # of adapters
    }
    usage = _object(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_object(cached_tokens=_COUNT),
    )
    usage["properties"]["completion_tokens_details"] = _object(
        accepted_prediction_tokens=_COUNT, rejected_prediction_tokens=_COUNT
    )  # there where drafts are on
    chat = _whole("chat.completion", _chat_choice())
    chat["properties"]["prompt_logprobs"] = _prompt_logprobs()
    return {
        "Refusal": _object(error=refusal),
        # What is refused before a path is known has OpenAI's shape everywhere.
        "MessageRefusal": {"anyOf": [_ref("Refusal"), _object(type={"const": "error"}, error=of_messages)]},
        "OllamaRefusal": {"anyOf": [_ref("Refusal"), _object(error=_TEXT)]},
        "Status": _object(status=_TEXT),
        "Ready": {
            **_object(status=_TEXT, threads=_object(prefill=_COUNT, decode=_COUNT)),
            "required": ["status"],
        },
        "Model": card,
        "ModelList": _object(object={"const": "list"}, data=_list(_ref("Model"))),
        "Usage": usage,
        "Tokenize": _object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT)),
        "Detokenize": _object(prompt=_TEXT),
        "TokenizerInfo": _object(bos_token=_or_null(_TEXT), eos_token=_or_null(_TEXT)),
        "Response": _response(),
        "Receipts": _object(object={"const": "list"}, data=_list(_receipt())),
        "Message": _message(),
        "CountTokens": _object(input_tokens=_COUNT),
        "OllamaVersion": _object(version=_TEXT),
        "OllamaModels": _object(models=_list(_ANY)),
        "OllamaShow": _object(
            details={"type": "object"}, model_info={"type": "object"}, capabilities=_list(_TEXT)
        ),
        "OllamaChat": _object(
            model=_TEXT, created_at=_TEXT, message={"type": "object"}, done={"type": "boolean"}
        ),
        "OllamaGenerate": _object(model=_TEXT, created_at=_TEXT, response=_TEXT, done={"type": "boolean"}),
        **batch_answers(),
        "Forgotten": _object(id=_TEXT, object={"const": "response"}, deleted={"const": True}),
        "Completion": _whole("text_completion", _completion_choice()),
        "ChatCompletion": chat,
    }


def _response() -> Json:
    details = {"type": "object", "additionalProperties": _COUNT}
    usage = _object(
        input_tokens=_COUNT,
        input_tokens_details=details,
        output_tokens=_COUNT,
        output_tokens_details=details,
        total_tokens=_COUNT,
    )
    item = {"type": "object", "properties": {"type": {"enum": ["message", "reasoning", "function_call"]}}}
    return _object(
        id=_TEXT,
        object={"const": "response"},
        created_at=_COUNT,
        model=_TEXT,
        system_fingerprint=_or_null(_TEXT),
        status={"enum": ["completed", "incomplete"]},
        output=_list(item),
        usage=usage,
    )


def _message() -> Json:
    block = {"type": "object", "properties": {"type": {"enum": ["text", "thinking", "tool_use"]}}}
    reasons = ["end_turn", "stop_sequence", "max_tokens", "model_context_window_exceeded", "tool_use"]
    usage = _object(
        input_tokens=_COUNT,
        cache_creation_input_tokens=_COUNT,
        cache_read_input_tokens=_COUNT,
        output_tokens=_COUNT,
    )
    return _object(
        id=_TEXT,
        type={"const": "message"},
        role={"const": "assistant"},
        model=_TEXT,
        content=_list(block),
        stop_reason={"enum": reasons},
        stop_sequence=_or_null(_TEXT),
        usage=usage,
    )


def _whole(kind: str, choice: Json) -> Json:
    return _object(
        id=_TEXT,
        object={"const": kind},
        created=_COUNT,
        model=_TEXT,
        system_fingerprint=_or_null(_TEXT),
        choices=_list(choice),
        usage=_ref("Usage"),
    )


def _completion_choice() -> Json:
    top = {"type": "object", "additionalProperties": _NUMBER}
    logprobs = _object(
        tokens=_list(_TEXT),
        token_logprobs=_list(_or_null(_NUMBER)),  # null: of the first token of a prompt that is echoed
        top_logprobs=_list(_or_null(top)),
        text_offset=_list(_COUNT),
    )
    choice = _choice(_REASON, text=_TEXT, logprobs=_or_null(logprobs))
    choice["properties"]["prompt_logprobs"] = _prompt_logprobs()
    return choice


def _prompt_logprobs() -> Json:
    """For each token of the prompt but the first, numbers by token id."""
    at_place = _object(logprob=_NUMBER, rank=_COUNT, decoded_token=_TEXT)
    return _list(_or_null({"type": "object", "additionalProperties": at_place}))


def _chat_choice() -> Json:
    token = {"token": _TEXT, "logprob": _NUMBER, "bytes": _list(_COUNT)}
    scored = _object(**token, top_logprobs=_list(_object(**token)))
    logprobs = _object(content=_list(scored), refusal={"type": "null"})
    message = _object(role={"const": "assistant"}, content=_or_null(_TEXT), refusal={"type": "null"})
    called = _object(name=_TEXT, arguments=_TEXT)
    call = _object(id=_TEXT, type={"const": "function"}, function=called)
    message["properties"] |= {"reasoning_content": _TEXT, "tool_calls": _list(call)}
    return _choice(_CHAT_REASON, message=message, logprobs=_or_null(logprobs))


def _choice(reason: Json, **said: Json) -> Json:
    """With a receipt where its request asked for one."""
    choice = _object(index=_COUNT, **said, finish_reason=reason)
    choice["properties"]["receipt"] = _receipt()
    return choice


def _receipt() -> Json:
    """The fields that a reader may want; `phasewise replay` reads them all."""
    return _object(
        schema_version={"const": SCHEMA_VERSION},
        request_id=_TEXT,
        model=_TEXT,
        system_fingerprint=_TEXT,
        fingerprint={"type": "object"},
        prompt_token_ids=_list(_COUNT),
        settings={"type": "object"},
        token_ids=_list(_COUNT),
        finish_reason=_REASON,
        logit_digests=_list(_TEXT),
        digest=_TEXT,
    )
