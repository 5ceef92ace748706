"""Writers of answers: what all APIs share, and OpenAI's completions and chats, whole and streamed."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phasewise.serving.engine.messages import Answer, Evidence, Progress, Submit
from phasewise.serving.engine.receipts import FinishReason
from phasewise.serving.http.answers.client import NOTHING_YET
from phasewise.serving.http.errors import ApiError
from phasewise.serving.http.http_settings import ServedModel
from phasewise.serving.http.requests.chat_schemas import INPUT
from phasewise.serving.http.requests.schemas import CompletionRequest
from phasewise.serving.sampling.sampling import PromptToken, SampledToken
from phasewise.serving.tools.parts import Begun, Call, Part, Piece, Reader, Reasoning, Text
from phasewise.serving.tools.values import parsed


class CustomCall(Call):
    """A whole call of a custom tool. `arguments`: the text that the tool is given."""


class AsAsked(Reader):
    """A reader that gives functions of another reader their names in the request; emits `CustomCall`."""

    def __init__(self, inner: Reader, names: Mapping[str, str], customs: frozenset[str]) -> None:
        self._inner = inner
        self._names = names
        self._customs = customs
        self._custom: str | None = None
        """Name of the custom tool whose call has begun."""
        self._arguments = ""

    def feed(self, text: str) -> list[Part]:
        return list(self._asked(self._inner.feed(text)))

    def finish(self) -> list[Part]:
        return [*self._asked(self._inner.finish()), *self._ended()]

    def _asked(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, Piece) and self._custom is not None:
                self._arguments += part.text
                continue
            yield from self._ended()
            if isinstance(part, Begun | Call):
                name = self._names.get(part.name, part.name)
                if part.name in self._customs:
                    self._custom, self._arguments = name, part.arguments if isinstance(part, Call) else ""
                    continue
                part = part._replace(name=name)
            yield part

    def _ended(self) -> Iterator[Part]:
        if self._custom is not None:
            value = parsed(self._arguments)
            text = value.get(INPUT) if isinstance(value, dict) else None
            yield CustomCall(self._custom, text if isinstance(text, str) else self._arguments)
        self._custom = None


Json = dict[str, Any]
EVENT_STREAM = "text/event-stream"
JSON_LINES = "application/x-ndjson"
COMMENT, PING, SPACE = b": keep-alive\n\n", b'event: ping\ndata: {"type":"ping"}\n\n', b" "
"""Keep-alive bytes for streams of events, of Anthropic's events, and of JSON lines."""
encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(slots=True)
class Choice:
    """The part of one choice that has arrived."""

    text: str = ""
    tokens: list[SampledToken] = field(default_factory=list)
    last: Answer = NOTHING_YET
    """The counts and the finish reason of the newest piece."""
    first_ns: int = 0
    """Time at which the choice's first token was sampled, in nanoseconds."""
    prompt: tuple[PromptToken, ...] | None = None

    def add(self, piece: Answer) -> None:
        self.text += piece.text
        self.tokens.extend(piece.tokens)
        self.last = piece.counts
        self.first_ns = self.first_ns or piece.at_ns
        self.prompt = self.prompt or piece.prompt


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP answer to be made: `n_choices_per_prompt` requests for each prompt, and how it is sent."""

    requests: Sequence[Submit]
    model: ServedModel
    n_choices_per_prompt: int = 1
    streamed: bool = False
    include_usage: bool = False
    tells_progress: bool = False
    """True if events report how much of each prompt is computed."""
    receipt: Callable[[Submit, Evidence, FinishReason], Json] | None = None
    """Makes and stores the receipt of a choice that has ended; None where none is asked for."""
    clamped: int | None = None
    """The limit on tokens if fewer fit into the context than were asked for; None: unchanged."""

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompts, each counted once."""
        return sum(len(request.prompt_token_ids) for request in self.requests[:: self.n_choices_per_prompt])

    @property
    def serial(self) -> str:
        """The answer's id without a prefix: `HEX` of the request ids `cmpl-HEX-0-0`."""
        return self.requests[0].request_id.split("-")[1]

    def with_receipt(self, index: int, said: Json, ended: Answer) -> Json:
        """The choice `said`, with a receipt if the choice has ended and receipts are asked for."""
        if self.receipt is None or ended.evidence is None or ended.finish_reason is None:
            return said
        return {**said, "receipt": self.receipt(self.requests[index], ended.evidence, ended.finish_reason)}

    def usage(self, said: Sequence[Answer]) -> Json:
        """OpenAI's `usage` object, each prompt counted once. `said`: the last piece of each choice."""
        n_prompt, n_generated = self.n_prompt, sum(piece.n_generated for piece in said)
        usage: Json = {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_generated,
            "total_tokens": n_prompt + n_generated,
            "prompt_tokens_details": {
                "cached_tokens": sum(piece.n_cached for piece in said[:: self.n_choices_per_prompt])
            },
        }
        drafts = [piece.drafts for piece in said if piece.drafts is not None]
        if drafts:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": sum(each.accepted for each in drafts),
                "rejected_prediction_tokens": sum(each.rejected for each in drafts),
            }
        return usage


class AnswerReading(NamedTuple):
    """Parser factory for the answers of one request. `call_id`: makes the id of a tool call."""

    open: Callable[[], Reader]
    call_id: Callable[[], str]


class AnswerWriter(ABC):
    """Base of the writers of one HTTP answer: whole, or as the parts of a stream."""

    media_type = EVENT_STREAM
    sign_of_life = COMMENT
    """Keep-alive bytes, which the readers of the stream skip."""

    def opening(self) -> str:
        """Text to send before the first piece."""
        return ""

    @abstractmethod
    def piece(self, index: int, piece: Answer) -> str:
        """Text for a piece of the request of this index."""

    def progress(self, index: int, progress: Progress) -> str:
        """Text for the progress of a prompt."""
        return ""

    @abstractmethod
    def failed(self, error: ApiError) -> str:
        """Text that ends the stream with an error."""

    @abstractmethod
    def closing(self) -> str:
        """Text to send after the last piece."""

    @abstractmethod
    def whole(self, choices: Sequence[Choice]) -> bytes:
        """The answer as one object."""

    def of(self, pieces: Iterable[tuple[int, Answer | Progress]]) -> str:
        """Text for some pieces, each with the index of its request."""
        return "".join(
            [
                self.piece(index, piece) if isinstance(piece, Answer) else self.progress(index, piece)
                for index, piece in pieces
            ]
        )


class PartWriter(AnswerWriter):
    """Base of the writers that make an answer of one choice from its parts: thoughts, text and calls."""

    def __init__(self, reply: Reply, reading: AnswerReading | None) -> None:
        self._reply, self._reading = reply, reading
        self._reader = reading.open() if reading else Reader()
        self._last = NOTHING_YET
        """The counts and the finish reason of the newest piece."""
        self._first_ns = 0
        """Time at which the first token was sampled, in nanoseconds."""

    def piece(self, index: int, piece: Answer) -> str:
        self._first_ns, self._last = self._first_ns or piece.at_ns, piece.counts
        parts = self._reader.feed(piece.text)
        if piece.finish_reason is not None:
            parts += self._reader.finish()
        return "".join(self._said(parts))

    def whole(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        self._first_ns = choice.first_ns
        self.piece(0, choice.last._replace(text=choice.text))
        return encode(self._object()).encode()

    def _event(self, name: str, /, **fields: Any) -> str:
        """An event; none of an answer that is sent whole."""
        return f"event: {name}\ndata: {encode({'type': name, **fields})}\n\n" if self._reply.streamed else ""

    @abstractmethod
    def _said(self, parts: Sequence[Part]) -> Iterable[str]:
        """Note the new parts, and give their events if the answer is streamed."""

    @abstractmethod
    def _object(self) -> Json:
        """The whole answer, after its only piece."""


def text_offsets(text: str, pieces: Sequence[bytes]) -> list[int]:
    """The character offset in `text` at which each token begins. A token that `text` does not spell, such as
    the BOS token, has no width. The first token may begin with a space that `text` lacks."""
    spelled, byte_index, n_characters, offsets = text.encode(), 0, 0, []
    for piece in pieces:
        is_inside = byte_index < len(spelled) and spelled[byte_index] & 0xC0 == 0x80
        offsets.append(n_characters - is_inside)
        if byte_index == 0 and piece[:1] == b" " and not spelled.startswith(piece):
            piece = piece[1:]
        if spelled.startswith(piece, byte_index):
            byte_index += len(piece)
            n_characters += sum(byte & 0xC0 != 0x80 for byte in piece)
    return offsets


DONE = "data: [DONE]\n\n"


class OpenAiWriter(AnswerWriter):
    """Base of OpenAI's forms. `n_top`: likeliest tokens of a position in `prompt_logprobs`, if any."""

    objects = "", ""
    """Names of the objects: of a whole answer, and of an event."""

    def __init__(self, reply: Reply, n_top: int | None = None) -> None:
        self._reply, self._model, self._n_top = reply, reply.model, n_top
        fixed = {
            "id": "-".join(reply.requests[0].request_id.split("-")[:2]),
            "created": int(time.time()),
            "model": self._model.model_id,
            "system_fingerprint": self._model.system_fingerprint,
            "object": self.objects[reply.streamed],
        }
        self._head = encode(fixed)[:-1]
        self._last = [NOTHING_YET] * len(reply.requests)
        """Counts of each choice so far. Tokens are not kept: with log-probabilities they are megabytes."""

    @abstractmethod
    def _opened(self, index: int) -> Json | None:
        """The choice that opens a stream, before any text."""

    @abstractmethod
    def _delta(self, index: int, piece: Answer) -> Json | None:
        """The choice for a new piece; None: nothing to send yet."""

    @abstractmethod
    def _waiting(self, index: int) -> Json:
        """The choice of an event that reports the progress of a prompt, without text."""

    @abstractmethod
    def _choice(self, index: int, choice: Choice) -> Json:
        """The choice of a response that is sent whole."""

    def _beside(self, choices: Sequence[Choice]) -> Json:
        """The fields of a whole response beside `choices`."""
        return {}

    def opening(self) -> str:
        openings = map(self._opened, range(len(self._last)))
        return "".join([self._event(opening) for opening in openings if opening is not None])

    def piece(self, index: int, piece: Answer) -> str:
        self._last[index] = piece.counts
        is_empty = not (piece.text or piece.tokens or piece.finish_reason or piece.prompt)
        delta = None if is_empty else self._delta(index, piece)
        return "" if delta is None else self._event(self._reply.with_receipt(index, delta, piece))

    def progress(self, index: int, progress: Progress) -> str:
        """A prompt's progress in llama-server's form; empty except for the prompt's first choice."""
        if index % self._reply.n_choices_per_prompt:
            return ""
        said = {
            "total": progress.n_prompt,
            "cache": progress.n_cached,
            "processed": progress.n_computed,
            "time_ms": progress.took_ns // 1_000_000,
        }
        return self._event(self._waiting(index), f',"prompt_progress":{encode(said)}')

    def failed(self, error: ApiError) -> str:
        return f"data: {encode(error.body())}\n\n"

    def closing(self) -> str:
        """The `usage` event if requested, and `[DONE]`."""
        if not self._reply.include_usage:
            return DONE
        usage = encode(self._reply.usage(self._last))
        return f'data: {self._head},"choices":[],"usage":{usage}}}\n\n{DONE}'

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """The response, encoded by choice: encoding one long text blocks all other threads."""
        said = [
            encode(self._reply.with_receipt(index, self._choice(index, choice), choice.last))
            for index, choice in enumerate(choices)
        ]
        usage = self._reply.usage([choice.last for choice in choices])
        beside = encode({"usage": usage, **self._beside(choices)})
        return f'{self._head},"choices":[{",".join(said)}],{beside[1:]}'.encode()

    def _event(self, choice: Json, beside: str = "") -> str:
        return f'data: {self._head},"choices":[{encode(choice)}]{beside}}}\n\n'

    def _prompt_logprobs(self, tokens: Sequence[PromptToken]) -> list[Json | None]:
        """Log-probabilities in vLLM's form: each token's own and the likeliest ones; None for the first."""
        return [None if token.logprob is None else self._at_place(token) for token in tokens]

    def _at_place(self, token: PromptToken) -> Json:
        likeliest = enumerate(token.top[: self._n_top], 1)
        told = {token_id: (value, rank) for rank, (token_id, value) in likeliest}
        told.setdefault(token.token_id, (token.logprob or 0.0, token.rank or 0))
        return {
            str(token_id): {"logprob": value, "rank": rank, "decoded_token": self._text(token_id)}
            for token_id, (value, rank) in told.items()
        }

    def _text(self, token_id: int) -> str:
        return self._model.piece(token_id).decode("utf-8", "replace")

    def _scored(self, tokens: Sequence[SampledToken], reason: str | None) -> list[SampledToken]:
        """The tokens that have a log-probability, without the end token."""
        ends = self._model.end_token_ids | self._model.dialect.ends
        ended = reason == "stop" and tokens and tokens[-1].token_id in ends
        return [token for token in (tokens[:-1] if ended else tokens) if token.logprob is not None]


_LOGPROBS: Sequence[str] = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class CompletionWriter(OpenAiWriter):
    """Writes answers of `/v1/completions`."""

    objects = "text_completion", "text_completion"

    def __init__(self, reply: Reply, body: CompletionRequest) -> None:
        super().__init__(reply, body.prompt_logprobs)
        self._echoes = _echoes_of(body, reply) if body.echo else ()
        """The prompt that each choice's text begins with."""
        self._n_top_of_echo = body.logprobs

    def _opened(self, index: int) -> Json | None:
        """The echoed prompt, unless its log-probabilities are asked for: they must be computed first."""
        if not self._echoes or self._n_top_of_echo is not None:
            return None
        return _choice_of(index, "text", self._echoes[index])

    def _delta(self, index: int, piece: Answer) -> Json:
        has_echo = self._n_top_of_echo is not None and piece.prompt is not None
        return self._made(
            index, piece.text, piece.tokens, piece.finish_reason, piece.prompt, has_echo=has_echo
        )

    def _waiting(self, index: int) -> Json:
        return _choice_of(index, "text", "")

    def _choice(self, index: int, choice: Choice) -> Json:
        reason, prompt = choice.last.finish_reason, choice.prompt
        whole = self._made(index, choice.text, choice.tokens, reason, prompt, has_echo=True)
        if self._n_top is not None and prompt is not None:
            whole["prompt_logprobs"] = self._prompt_logprobs(prompt)
        return whole

    def _made(
        self,
        index: int,
        text: str,
        tokens: Sequence[SampledToken],
        reason: str | None,
        prompt: Sequence[PromptToken] | None,
        *,
        has_echo: bool,
    ) -> Json:
        """A choice. `has_echo`: the echo, if any, belongs to it."""
        echo = self._echoes[index] if self._echoes else None
        # With an echo the end token counts, as scoring clients expect.
        scored = self._scored(tokens, None if echo is not None else reason)
        begin = len(echo or "")
        rows = [self._row(token, begin + token.begin) for token in scored]
        if echo is not None and has_echo:
            text = echo + text
            if self._n_top_of_echo is not None and prompt is not None:
                offsets = text_offsets(echo, [self._model.piece(token.token_id) for token in prompt])
                rows = [*map(self._row, prompt, offsets), *rows]
        logprobs = dict(zip(_LOGPROBS, map(list, zip(*rows, strict=True)), strict=True)) if rows else None
        return _choice_of(index, "text", text, logprobs, reason)

    def _row(self, token: SampledToken | PromptToken, offset: int) -> tuple[Any, ...]:
        """The values of one token, as `_LOGPROBS` says, with as many likeliest ones as are asked for."""
        top = {self._text(token_id): value for token_id, value in token.top[: self._n_top_of_echo]}
        return self._text(token.token_id), token.logprob, None if token.logprob is None else top, offset


def _echoes_of(body: CompletionRequest, reply: Reply) -> list[str]:
    """The prompt of each choice, token ids spelled as text."""
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not isinstance(texts[0], str):
        prompts = [request.prompt_token_ids for request in reply.requests[:: reply.n_choices_per_prompt]]
        spelled = [b"".join(map(reply.model.piece, prompt)) for prompt in prompts]
        texts = [text.decode("utf-8", "replace") for text in spelled]
    return [str(text) for text in texts for _ in range(reply.n_choices_per_prompt)]


class ChatWriter(OpenAiWriter):
    """Writes answers of `/v1/chat/completions`. `reading`: parser of calls and thoughts; None: plain text."""

    objects = "chat.completion", "chat.completion.chunk"

    def __init__(self, reply: Reply, reading: AnswerReading | None = None, n_top: int | None = None) -> None:
        super().__init__(reply, n_top)
        self._read = [_ReadChoice(reading) for _ in reply.requests] if reading is not None else None

    def _opened(self, index: int) -> Json | None:
        return _choice_of(index, "delta", {"role": "assistant", "content": ""})

    def _delta(self, index: int, piece: Answer) -> Json | None:
        content: Json = {"content": piece.text} if piece.text else {}
        reason: str | None = piece.finish_reason
        logprobs = self._logprobs(self._scored(piece.tokens, reason))
        if self._read is not None:
            content = self._read[index].delta(piece.text, is_last=reason is not None)
            reason = self._read[index].reason(reason)
            if not content and not logprobs and reason is None:
                return None
        return _choice_of(index, "delta", content, logprobs, reason)

    def _waiting(self, index: int) -> Json:
        return _choice_of(index, "delta", {"role": "assistant", "content": None})

    def _choice(self, index: int, choice: Choice) -> Json:
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
        reason: str | None = choice.last.finish_reason
        logprobs = self._logprobs(self._scored(choice.tokens, reason))
        if self._read is not None:
            said = self._read[index].delta(choice.text, is_last=True)
            reason = self._read[index].reason(reason)
            message |= {"content": None if "tool_calls" in said else "", **said}
            for call in said.get("tool_calls", ()):
                del call["index"]
        return _choice_of(index, "message", message, logprobs, reason)

    def _beside(self, choices: Sequence[Choice]) -> Json:
        if choices[0].prompt is None:
            return {}
        return {"prompt_logprobs": self._prompt_logprobs(choices[0].prompt)}

    def _logprobs(self, tokens: Sequence[SampledToken]) -> Json | None:
        if not tokens:
            return None
        entries = [
            {
                **self._named(token.token_id, token.logprob),
                "top_logprobs": [self._named(token_id, value) for token_id, value in token.top],
            }
            for token in tokens
        ]
        return {"content": entries, "refusal": None}

    def _named(self, token_id: int, logprob: float | None) -> Json:
        return {"token": self._text(token_id), "logprob": logprob, "bytes": list(self._model.piece(token_id))}


def _choice_of(
    index: int, key: str, content: Json | str, logprobs: Json | None = None, reason: str | None = None
) -> Json:
    return {"index": index, key: content, "logprobs": logprobs, "finish_reason": reason}


class _ReadChoice:
    """The parser state of one choice."""

    def __init__(self, reading: AnswerReading) -> None:
        self._reader = reading.open()
        self._call_id = reading.call_id
        self._n_calls = 0

    def delta(self, text: str, *, is_last: bool) -> Json:
        """Parse more text into `content`, `reasoning_content` and `tool_calls`, each only if non-empty. A
        call's name and id come at once, its arguments with them or in later pieces of the same index."""
        parts = self._reader.feed(text)
        if is_last:
            parts += self._reader.finish()
        said: Json = {}
        for part in parts:
            match part:
                case Reasoning(text=thought):
                    said["reasoning_content"] = said.get("reasoning_content", "") + thought
                case Text(text=words):
                    said["content"] = said.get("content", "") + words
                case CustomCall(name=name, arguments=given):
                    custom = {"name": name, "input": given}
                    said.setdefault("tool_calls", []).append(self._called("custom", custom))
                case Call(name=name, arguments=arguments):
                    said.setdefault("tool_calls", []).append(self._function(name, arguments))
                case Begun(name=name):
                    said.setdefault("tool_calls", []).append(self._function(name, ""))
                case Piece(text=piece):
                    self._add_arguments(said.setdefault("tool_calls", []), piece)
        return said

    def reason(self, reason: str | None) -> str | None:
        """The finish reason: `tool_calls` in place of `stop` if there was a call."""
        return "tool_calls" if reason == "stop" and self._n_calls else reason

    def _function(self, name: str, arguments: str) -> Json:
        return self._called("function", {"name": name, "arguments": arguments})

    def _called(self, kind: str, called: Json) -> Json:
        self._n_calls += 1
        return {"index": self._n_calls - 1, "id": self._call_id(), "type": kind, kind: called}

    def _add_arguments(self, calls: list[Json], piece: str) -> None:
        """Append arguments to the newest call, which an earlier delta may have begun."""
        if not calls:
            calls.append({"index": self._n_calls - 1, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += piece
