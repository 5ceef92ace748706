"""Converts validated bodies to `Submit` messages for the engine; refuses requests invalid for the model."""

from __future__ import annotations

import hashlib
import secrets
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic_core import to_json

from phasewise.serving.engine.messages import Submit
from phasewise.serving.errors import ContextLengthExceeded, RequestError, ServingError
from phasewise.serving.grammar.grammar_limits import holdable, keywords_of
from phasewise.serving.grammar.guides import (
    ANY_OBJECT,
    CallMarks,
    Grammar,
    Guide,
    GuideCompiler,
    MatcherGuide,
    ThoughtMarks,
)
from phasewise.serving.grammar.late_guides import begun_guide
from phasewise.serving.http.errors import ApiError, bad_request
from phasewise.serving.http.http_settings import ServedModel
from phasewise.serving.http.requests.calls import called_by, check_tools, conversation_of, is_read, must_call
from phasewise.serving.http.requests.chat_schemas import (
    SYSTEM_ROLES,
    ChatMessage,
    ChatRequest,
    TokenizeRequest,
)
from phasewise.serving.http.requests.schemas import (
    CompletionRequest,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
)
from phasewise.serving.http.routes.middleware import ANYONE, ClientIdentity
from phasewise.serving.pools.contract import Estimate
from phasewise.serving.sampling.sampling import SamplingParams
from phasewise.serving.sampling.sampling_defaults import SamplingDefaults
from phasewise.serving.sandbox.confined import Abandoned, CancelToken
from phasewise.serving.tools.form_grammar import Function, Wanted, arguments_rule, json_rule

_MOST_CHOICES = 1024


def completion_requests(
    body: CompletionRequest, model: ServedModel, client: ClientIdentity = ANYONE
) -> list[Submit]:
    """One `Submit` for each choice: prompts in order, the `n` choices of a prompt together."""
    _refuse(body, model)
    _refuse_empty(body)
    texts = prompts_of(body.prompt)
    if len(texts) * (body.n or 1) > _MOST_CHOICES:
        raise bad_request(f"a request may ask for at most {_MOST_CHOICES} choices in all", "prompt")
    prompts = [_token_ids(prompt, model) for prompt in texts]
    sampling = _sampling(body, model.sampling, body.logprobs)
    wanted = (body.logprobs if body.echo else None, body.prompt_logprobs)
    n_top = max((number for number in wanted if number is not None), default=None)
    response_id = f"cmpl-{uuid.uuid4().hex}"
    return [
        request
        for index, prompt in enumerate(prompts)
        for request in _choices(
            body, f"{response_id}-{index}", prompt, sampling, model, client, prompt_logprobs=n_top
        )
    ]


def chat_requests(
    body: ChatRequest, model: ServedModel, client: ClientIdentity = ANYONE, cancel: CancelToken | None = None
) -> Sequence[Submit]:
    """One `Submit` for each of the `n` choices. `cancel`: ended when the client leaves."""
    _refuse(body, model)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    prompt = conversation_tokens(body, model, cancel or CancelToken())
    sampling = _sampling(body, model.sampling, (body.top_logprobs or 0) if body.logprobs else None)
    return _choices(
        body,
        f"chatcmpl-{uuid.uuid4().hex}",
        prompt,
        sampling,
        model,
        client,
        prompt_logprobs=body.prompt_logprobs,
        shown=model.dialect.shown if is_read(body, model) else frozenset(),
        turns=_turns(body, prompt, model),
        n_messages=len(body.messages),
        system_prompt_id=system_prompt_id(body.messages),
    )


def _turns(body: ChatRequest, prompt: tuple[int, ...], model: ServedModel) -> tuple[int, ...]:
    """Token positions where assistant turns begin: the next one, the one before, and the first one after the
    user's last message. Where a template drops old thoughts, the next prompt may differ from there on."""
    opening = tuple(model.encode(model.dialect.turn.opening, False)) if model.dialect.turn.opening else ()
    begins = (place for place, token in enumerate(prompt) if token in opening[:1])
    starts = [begin for begin in begins if prompt[begin : begin + len(opening)] == opening]
    roles = [message.role for message in reversed(body.messages)]
    n_since = roles[: roles.index("user")].count("assistant") if "user" in roles else 0
    return tuple(sorted({starts[-back] for back in (1, 2, n_since + 1) if back <= len(starts)}))


def _choices(
    body: GenerationRequest,
    request_id: str,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    model: ServedModel,
    client: ClientIdentity,
    **more: Any,
) -> Sequence[Submit]:
    """Make the `n` requests of one prompt. Only the first computes prompt log-probabilities, unless streamed.
    A `max_tokens` that exceeds the context becomes unlimited. `more`: further fields of `Submit`."""
    _refuse_too_long(prompt, model)
    max_tokens, salt = body.most_tokens, body.cache_salt
    if max_tokens is not None and max_tokens > model.context_length - len(prompt):
        max_tokens = None
    first = Submit(
        f"{request_id}-0",
        prompt,
        max_tokens,
        sampling,
        (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        body.ignore_eos,
        ends=model.dialect.ends,
        cache_space=client.cache_space if salt is None else f"{client.cache_space}/{salt}",
        client=client.name,
        model=model.engine_id,
        receipt=body.receipt,
        adapter=model.adapter,
        in_shadow=client.in_shadow,
        **more,
    )
    other = first if body.stream or max_tokens == 0 else replace(first, prompt_logprobs=None)
    return [first] + [
        replace(other, request_id=f"{request_id}-{choice}", sampling=_reseeded(sampling, choice))
        for choice in range(1, body.n or 1)
    ]


def _reseeded(sampling: SamplingParams, choice: int) -> SamplingParams:
    """The sampling of a choice: each choice of a seeded request has a different seed."""
    return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + choice)


def _refuse(body: CompletionRequest | ChatRequest, model: ServedModel) -> None:
    body.refuse_unsupported()
    if body.receipt and not model.gives_receipts:
        raise bad_request(
            "receipt is not supported by this server: start it with --receipts",
            "receipt",
            "unsupported_parameter",
        )
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs is not for streams: set stream to false", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is for streams only: set stream to true", "stream_options")


def _refuse_empty(body: CompletionRequest) -> None:
    """Raise ApiError for `max_tokens` 0 without `echo` or `prompt_logprobs`, or with a receipt."""
    if body.max_tokens != 0:
        return
    if not body.echo and body.prompt_logprobs is None:
        raise bad_request("max_tokens may be 0 only with echo or prompt_logprobs", "max_tokens")
    if body.receipt:
        raise bad_request("a receipt needs an answer: set max_tokens to 1 or more", "receipt")


def _refuse_too_long(prompt: tuple[int, ...], model: ServedModel) -> None:
    n_prompt, most, context = len(prompt), model.max_prompt_tokens, model.context_length
    if most is not None and n_prompt > most:
        asked = f", of which a prompt may take {most} (max_prompt), but this prompt has {n_prompt}"
        raise ContextLengthExceeded.beyond(context, asked, "prompt", (n_prompt, most))
    if n_prompt >= context:
        asked = (
            f". However, your messages resulted in {n_prompt} tokens, and an answer takes 1 or more. "
            "Please reduce the length of the messages."
        )
        raise ContextLengthExceeded.beyond(context, asked, "prompt", (n_prompt, context - 1))


def prompts_of(prompt: str | Sequence[Any]) -> Sequence[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [list(prompt)]
    return prompt


def _token_ids(prompt: str | list[int], model: ServedModel) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        check_token_ids(prompt, model, "prompt")
        return tuple(prompt)
    token_ids = tuple(model.encode(prompt, True))
    if not token_ids:
        raise bad_request("the prompt has no tokens", "prompt")
    return token_ids


def check_token_ids(ids: Sequence[int], model: ServedModel, param: str = "tokens") -> None:
    """Raise ApiError if an id is outside the model's vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= model.vocab_size):
        raise bad_request(f"token ids must be 0 to {model.vocab_size - 1}", param)


def tokenized(body: TokenizeRequest, model: ServedModel, cancel: CancelToken) -> bytes:
    """The answer of `/tokenize` as JSON. Raises Abandoned if `cancel` ends while the template is rendered."""
    if body.messages is None:
        ids: Sequence[int] = model.encode(body.prompt or "", body.add_special_tokens)
    else:
        chat = ChatRequest.model_construct(messages=body.messages, tools=body.tools).settle()
        ids = conversation_tokens(chat, model, cancel)
    out: dict[str, Any] = {"count": len(ids), "max_model_len": model.context_length, "tokens": ids}
    if body.return_token_strs:
        out["token_strs"] = [model.piece(token_id).decode("utf-8", "replace") for token_id in ids]
    return to_json(out)


def control_texts(model: ServedModel) -> dict[str, Any]:
    """Texts of the BOS and EOS tokens; None for a token that a prompt's text cannot spell."""
    opening = set(model.encode("", True)[:1])
    return {"bos_token": _spelled(opening, model), "eos_token": _spelled(model.end_token_ids, model)}


def _spelled(token_ids: Collection[int], model: ServedModel) -> str | None:
    """Text of the lowest of these tokens whose text is tokenized as that token alone."""
    for token_id in sorted(token_ids):
        text = model.piece(token_id).decode("utf-8", "replace")
        if model.encode(text, False) == [token_id]:
            return text
    return None


def conversation_tokens(body: ChatRequest, model: ServedModel, cancel: CancelToken) -> tuple[int, ...]:
    """Token ids of the conversation as the chat template renders it. Raises ApiError, or Abandoned."""
    check_tools(body)
    if model.encode_chat is None:
        raise bad_request(
            f"{model.model_id} has no chat template: use /v1/completions", "messages", "no_chat_template"
        )
    try:
        return tuple(model.encode_chat(conversation_of(body, model.dialect), cancel))
    except (ContextLengthExceeded, Abandoned):
        raise
    except ServingError as error:
        raise ApiError(400, str(error), param="messages") from error


def estimated(requests: Sequence[Submit], model: ServedModel) -> Sequence[Submit]:
    """The requests with predicted answer lengths, one prediction for each prompt, if there is a predictor."""
    if model.estimate is None:
        return requests
    estimates: dict[int, Estimate] = {}
    for request in requests:
        if id(request.prompt_token_ids) not in estimates:
            estimates[id(request.prompt_token_ids)] = model.estimate(request)
    return [replace(request, estimate=estimates[id(request.prompt_token_ids)]) for request in requests]


def system_prompt_id(messages: Sequence[ChatMessage]) -> str | None:
    """Digest of a conversation's system prompt; None without one."""
    texts = [message.text for message in messages if message.role in SYSTEM_ROLES]
    digest = hashlib.blake2b("\n".join(texts).encode(), digest_size=8)
    return digest.hexdigest() if texts else None


class RequiredGrammar(NamedTuple):
    """The grammar of an answer. `field`: the field that asks for it. `triggers`: texts from which on the
    grammar applies; empty: from the start. `is_needed`: refuse the request if the grammar cannot be compiled.
    `calls`: the calls in the grammar; None: it has none."""

    grammar: Grammar
    field: str
    triggers: tuple[str, ...] = ()
    is_needed: bool = True
    calls: Wanted | None = None


def held_to(body: GenerationRequest, model: ServedModel) -> RequiredGrammar | None:
    """The grammar that the request asks for; None if the answer is free. Raises ApiError."""
    field = "response_format" if body.structured_outputs is None else "structured_outputs"
    is_needed, calls = True, None
    try:
        if isinstance(body, ChatRequest) and body.tools and body.tool_choice != "none":
            field, is_needed = "tools", must_call(body) or body.response_format is not None
            schema = _schema_of(body)
            calls = called_by(body, "" if schema is None else json_rule(schema, lenient=False))
        grammar = _grammar(body) if calls is None else Grammar.of_lark(model.dialect.grammar(calls))
    except RequestError as error:
        if is_needed:
            raise bad_request(f"{field}: {error}", field) from error
        return None
    if grammar is None:
        return None
    if not is_needed and (body.ignore_eos or model.guides is None):
        return None
    if body.ignore_eos:
        raise bad_request(f"ignore_eos cannot be kept together with {field}", "ignore_eos")
    if model.guides is None:
        raise bad_request(f"{field} is not supported by this server", field, "unsupported_parameter")
    triggers = model.dialect.triggers(calls.functions) if calls is not None and not is_needed else ()
    return RequiredGrammar(grammar, field, triggers, is_needed, calls)


def _schema_of(body: GenerationRequest) -> Mapping[str, Any] | None:
    """The schema of answers that `response_format` describes; None if it does not."""
    match body.response_format:
        case JsonObjectFormat():
            return {"type": "object"}
        case JsonSchemaFormat(json_schema=named):
            return named.schema_
        case _:
            return None


def compiled(
    wanted: RequiredGrammar, model: ServedModel, cancel: CancelToken
) -> tuple[RequiredGrammar, MatcherGuide | None]:
    """Compile a grammar, or a looser one if its schemas cannot be held. Blocks; raises Abandoned once
    `cancel` ends, or ApiError. The guide is None if the grammar cannot be compiled and is not needed."""
    assert model.guides is not None, "held_to refuses"
    try:
        return wanted, model.guides.compile(wanted.grammar, cancel)
    except RequestError as error:
        with suppress(RequestError):
            loosened = _loosened(wanted, model, model.guides, cancel)
            if loosened is not None:
                return loosened, model.guides.compile(loosened.grammar, cancel)
        if not wanted.is_needed:
            return wanted, None
        raise bad_request(f"{wanted.field}: {error}", wanted.field) from error


def tell_unheld(
    body: GenerationRequest, wanted: RequiredGrammar | None, guide: MatcherGuide | None, model: ServedModel
) -> None:
    """Add to the answer's header the schema keywords of the functions that the guide does not enforce."""
    if not isinstance(body, ChatRequest) or body.tool_choice == "none":
        return
    held = {} if wanted is None or wanted.calls is None else {f.name: f for f in wanted.calls.functions}
    for tool in body.functions:
        schema, function = tool.parameters or {}, held.get(tool.name)
        if not schema or (held and function is None):
            continue
        if guide is None or function is None or not function.parameters:
            body.leave_out([f"tools.{tool.name}.parameters"])
            continue
        named = {*guide.unheld.intersection(keywords_of(schema)), *model.dialect.unheld_texts(schema)}
        if not function.is_strict and holdable(schema) != schema:
            named.add("pattern")
        body.leave_out(f"tools.{tool.name}.{keyword}" for keyword in named)


def _loosened(
    wanted: RequiredGrammar, model: ServedModel, guides: GuideCompiler, cancel: CancelToken
) -> RequiredGrammar | None:
    """The grammar, but with any arguments where a function's schema cannot be compiled; None if unchanged."""
    if wanted.calls is None:
        return None

    def loosened(function: Function) -> Function:
        try:
            guides.compile(
                Grammar.of_lark(f"%llguidance {{}}\nstart: a\na: {arguments_rule(function)}\n"), cancel
            )
        except RequestError:
            return function if function.is_strict else replace(function, parameters={})
        return function

    loose = wanted.calls._replace(functions=[*map(loosened, wanted.calls.functions)])
    if loose.functions == [*wanted.calls.functions]:
        return None
    return wanted._replace(grammar=Grammar.of_lark(model.dialect.grammar(loose)), calls=loose)


def delay_guide(
    guide: Guide, wanted: RequiredGrammar, body: GenerationRequest, prompt: Sequence[int], model: ServedModel
) -> Guide:
    """The guide of a whole answer: applies after thoughts, if any, and from a trigger on, if any."""
    assert model.guides is not None
    dialect, recipe = model.dialect, guide.recipe
    if wanted.triggers:
        triggers = tuple(text.encode() for text in wanted.triggers)
        recipe = replace(recipe, calls=CallMarks(triggers, dialect.only_first))
    if not isinstance(body, ChatRequest):
        return begun_guide(recipe, guide, model.guides.tokens)
    is_open = dialect.opens_thought(prompt, model.piece)
    if dialect.turn.is_channelled and wanted.field != "tools":
        recipe = replace(recipe, thoughts=ThoughtMarks(b"", dialect.turn.text[0].encode(), True, None))
    elif is_open or (dialect.thinks and not _is_without_thoughts(body, prompt, model)):
        opening, closing = (mark.encode() for mark in dialect.thought)
        recipe = replace(recipe, thoughts=ThoughtMarks(opening, closing, is_open, dialect.think_token))
    return begun_guide(recipe, guide, model.guides.tokens)


def _is_without_thoughts(body: ChatRequest, prompt: Sequence[int], model: ServedModel) -> bool:
    """True if the request or its prompt turns thoughts off."""
    switches = {"thinking": True, "enable_thinking": True} | (body.chat_template_kwargs or {})
    is_off = body.reasoning_effort == "none" or False in (switches["thinking"], switches["enable_thinking"])
    return is_off or model.dialect.closes_thought(prompt, model.piece)


def _grammar(body: GenerationRequest) -> Grammar | None:
    wanted, schema = body.structured_outputs, _schema_of(body)
    if wanted is None:
        return None if schema is None else Grammar.of_schema(schema)
    if body.response_format is not None:
        raise RequestError("response_format says the same thing; give one of the two")
    given = wanted.json_ is not None, bool(wanted.json_object), wanted.regex is not None, bool(wanted.choice)
    if sum(given) != 1:
        raise RequestError("give exactly one of json, json_object, regex and choice")
    if wanted.regex is not None:
        return Grammar.of_pattern(wanted.regex)
    if wanted.choice is not None:
        return Grammar.of_choices(wanted.choice)
    return ANY_OBJECT if wanted.json_ is None else Grammar.of_schema(wanted.json_)


def _sampling(
    body: GenerationRequest, defaults: SamplingDefaults, top_logprobs: int | None
) -> SamplingParams:
    """Sampling parameters: the request's fields, else `defaults`. With a receipt there is always a seed."""
    top_k = defaults.top_k if body.top_k is None else body.top_k
    return SamplingParams(
        temperature=_stated(body.temperature, defaults.temperature),
        top_k=top_k if top_k is not None and top_k > 0 else None,
        top_p=_stated(body.top_p, defaults.top_p),
        min_p=_stated(body.min_p, defaults.min_p),
        seed=secrets.randbits(63) if body.receipt and body.seed is None else body.seed,
        repetition_penalty=_stated(body.repetition_penalty, defaults.repetition_penalty),
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=body.logit_bias or {},
        top_logprobs=top_logprobs,
    )


def _stated(value: float | None, default: float) -> float:
    return default if value is None else value
