"""OpenAI's completion and chat objects, whole and streamed, made of the pieces of an answer."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phasewise.serving.engine.messages import Answer, Evidence, Progress, Submit
from phasewise.serving.engine.receipts import FinishReason
from phasewise.serving.http.errors import ApiError
from phasewise.serving.http.http_settings import ServedModel
from phasewise.serving.http.requests.chat_schemas import INPUT
from phasewise.serving.http.requests.schemas import CompletionRequest
from phasewise.serving.sampling.sampling import PromptToken, SampledToken
from phasewise.serving.tools.parts import (
    Begun,
    Call,
    Part,
    Piece,
    PlainReader,
    Reader,
    Reasoning,
    Text,
    parsed,
)


class CustomCall(Call):
    """A whole call of a custom tool. `arguments`: the text that the tool is given."""


class AsAsked:
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


NOTHING_YET = Answer("", "", (), 0, 0)
"""Stands for the last piece of an answer of which no piece has come."""


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


class EventWriter(ABC):
    """Base of the writers of one event stream."""

    sign_of_life = COMMENT
    """Keep-alive bytes, which the readers of the stream skip."""

    def opening(self) -> bytes:
        """Bytes to send before the first piece."""
        return b""

    @abstractmethod
    def of(self, pieces: Iterable[tuple[int, Answer | Progress]]) -> bytes:
        """Bytes for some pieces, each with the index of its request."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Bytes that end the stream with an error."""

    @abstractmethod
    def closing(self) -> bytes:
        """Bytes to send after the last piece."""


class Form(NamedTuple):
    """A way of writing out a reply: as one object or as events."""

    whole: Callable[[Sequence[Choice]], bytes]
    events: Callable[[], EventWriter]
    media_type: str = EVENT_STREAM
    """Media type of the event stream."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP answer to be made: `n_choices_per_prompt` requests for each prompt, and the answer's form."""

    requests: Sequence[Submit]
    n_choices_per_prompt: int
    rendering: Rendering | Form
    streamed: bool
    include_usage: bool
    tells_progress: bool = False
    """True if events report how much of each prompt is computed."""
    receipt: Callable[[Submit, Evidence, FinishReason], Json] | None = None
    """Makes and stores the receipt of a choice that has ended; None where none is asked for."""
    clamped: int | None = None
    """The limit on tokens if fewer fit into the context than were asked for; None: unchanged."""

    def with_receipt(self, index: int, said: Json, ended: Answer) -> Json:
        """The choice `said`, with a receipt if the choice has ended and receipts are asked for."""
        if self.receipt is None or ended.evidence is None or ended.finish_reason is None:
            return said
        return {**said, "receipt": self.receipt(self.requests[index], ended.evidence, ended.finish_reason)}

    def usage(self, said: Sequence[Answer]) -> Json:
        """OpenAI's `usage` object, each prompt counted once. `said`: the last piece of each choice."""
        firsts = self.requests[:: self.n_choices_per_prompt]
        n_prompt = sum(len(request.prompt_token_ids) for request in firsts)
        n_generated = sum(piece.n_generated for piece in said)
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


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """Parser factory for the answers of one request. `call_id`: makes the id of a tool call."""

    open: Callable[[], Reader]
    call_id: Callable[[], str]


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


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that a text begins with. `n_top`: likeliest tokens for each position; None: no logprobs."""

    text: str
    n_top: int | None

    @property
    def has_logprobs(self) -> bool:
        return self.n_top is not None


@dataclass(frozen=True, slots=True)
class Scoring:
    """Log-probabilities of prompts in a response. `n_top`: number of likeliest tokens for each position in
    `prompt_logprobs`; None: no such field. `echoes`: the echoed prompt of each choice, if any."""

    n_top: int | None = None
    echoes: tuple[Echo, ...] = ()

    def echo(self, index: int) -> Echo | None:
        return self.echoes[index] if self.echoes else None


NOT_SCORED = Scoring()


def echoes_of(body: CompletionRequest, requests: Sequence[Submit], model: ServedModel) -> tuple[Echo, ...]:
    """The prompt of each choice, token ids spelled as text. Empty without `echo`."""
    if not body.echo:
        return ()
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    n_choices = body.n or 1
    if not isinstance(texts[0], str):
        firsts = requests[::n_choices]
        texts = [
            b"".join(map(model.piece, request.prompt_token_ids)).decode("utf-8", "replace")
            for request in firsts
        ]
    return tuple(Echo(str(text), body.logprobs) for text in texts for _ in range(n_choices))


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


class Rendering(ABC):
    """Base of the response forms: the fields of every object, and how tokens are written out."""

    def __init__(self, response_id: str, model: ServedModel, scoring: Scoring = NOT_SCORED) -> None:
        self._fixed = {
            "id": response_id,
            "created": int(time.time()),
            "model": model.model_id,
            "system_fingerprint": model.system_fingerprint,
        }
        self._model = model
        self._scoring = scoring

    @abstractmethod
    def head(self, *, streamed: bool) -> Json:
        """The fields that every object of the response repeats."""

    @abstractmethod
    def opening(self, index: int) -> Json | None:
        """The choice that opens a stream, before any text."""

    @abstractmethod
    def delta(self, index: int, piece: Answer) -> Json | None:
        """The choice for a new piece; None: nothing to send yet."""

    @abstractmethod
    def waiting(self, index: int) -> Json:
        """The choice of an event that reports the progress of a prompt, without text."""

    @abstractmethod
    def whole(self, index: int, choice: Choice) -> Json:
        """The choice of a response that is sent whole."""

    def rest(self, choices: Sequence[Choice]) -> Json:
        """The fields of a whole response beside `choices`."""
        return {}

    def _prompt_logprobs(self, tokens: Sequence[PromptToken]) -> list[Json | None]:
        """Log-probabilities in vLLM's form: each token's own and the likeliest ones; None for the first."""
        return [None if token.logprob is None else self._at_place(token) for token in tokens]

    def _at_place(self, token: PromptToken) -> Json:
        likeliest = enumerate(token.top[: self._scoring.n_top], 1)
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


class CompletionRendering(Rendering):
    """Response form of `/v1/completions`."""

    def head(self, *, streamed: bool) -> Json:
        return {**self._fixed, "object": "text_completion"}

    def opening(self, index: int) -> Json | None:
        """The echoed prompt, unless its log-probabilities are asked for: they must be computed first."""
        echo = self._scoring.echo(index)
        return None if echo is None or echo.has_logprobs else self._choice(index, echo.text, None, None)

    def delta(self, index: int, piece: Answer) -> Json:
        echo = self._scoring.echo(index)
        said, text = [self._generated(index, piece.tokens, piece.finish_reason)], piece.text
        if echo is not None and echo.has_logprobs and piece.prompt is not None:
            said.insert(0, self._echoed(echo, piece.prompt))
            text = echo.text + text
        return self._choice(index, text, _joined(said), piece.finish_reason)

    def waiting(self, index: int) -> Json:
        return self._choice(index, "", None, None)

    def whole(self, index: int, choice: Choice) -> Json:
        echo = self._scoring.echo(index)
        said, text = [self._generated(index, choice.tokens, choice.last.finish_reason)], choice.text
        if echo is not None:
            text = echo.text + text
            if echo.has_logprobs and choice.prompt is not None:
                said.insert(0, self._echoed(echo, choice.prompt))
        whole = self._choice(index, text, _joined(said), choice.last.finish_reason)
        if self._scoring.n_top is not None and choice.prompt is not None:
            whole["prompt_logprobs"] = self._prompt_logprobs(choice.prompt)
        return whole

    def _choice(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _generated(self, index: int, tokens: Sequence[SampledToken], reason: str | None) -> Json | None:
        """Log-probabilities of the answer. With an echo the end token counts, as scoring clients expect."""
        echo = self._scoring.echo(index)
        scored = self._scored(tokens, None if echo is not None else reason)
        if not scored:
            return None
        n_echoed = len(echo.text) if echo is not None else 0
        return {
            "tokens": [self._text(token.token_id) for token in scored],
            "token_logprobs": [token.logprob for token in scored],
            "top_logprobs": [self._top(token.top) for token in scored],
            "text_offset": [n_echoed + token.begin for token in scored],
        }

    def _echoed(self, echo: Echo, tokens: Sequence[PromptToken]) -> Json:
        pieces = [self._model.piece(token.token_id) for token in tokens]
        tops = [None if token.logprob is None else self._top(token.top[: echo.n_top]) for token in tokens]
        return {
            "tokens": [piece.decode("utf-8", "replace") for piece in pieces],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops,
            "text_offset": text_offsets(echo.text, pieces),
        }

    def _top(self, top: Sequence[tuple[int, float]]) -> Json:
        return {self._text(token_id): value for token_id, value in top}


def _joined(parts: Sequence[Json | None]) -> Json | None:
    """Concatenate the log-probabilities of the prompt and of the answer; None if there are none."""
    given = [part for part in parts if part is not None]
    return {name: [item for part in given for item in part[name]] for name in given[0]} if given else None


class ChatRendering(Rendering):
    """Response form of `/v1/chat/completions`. `reading`: parser of calls and thoughts; None: plain text."""

    def __init__(
        self,
        response_id: str,
        model: ServedModel,
        reading: AnswerReading | None = None,
        scoring: Scoring = NOT_SCORED,
    ) -> None:
        super().__init__(response_id, model, scoring)
        self._reading = reading
        self._streamed: dict[int, _ReadChoice] = {}

    def head(self, *, streamed: bool) -> Json:
        return {**self._fixed, "object": "chat.completion.chunk" if streamed else "chat.completion"}

    def opening(self, index: int) -> Json | None:
        return _chat_choice(index, "delta", {"role": "assistant", "content": ""}, None, None)

    def delta(self, index: int, piece: Answer) -> Json | None:
        content: Json = {"content": piece.text} if piece.text else {}
        reason: str | None = piece.finish_reason
        logprobs = self._logprobs(self._scored(piece.tokens, reason))
        if self._reading is not None:
            if index not in self._streamed:
                self._streamed[index] = _ReadChoice(self._reading)
            read = self._streamed[index]
            content = read.delta(piece.text, is_last=reason is not None)
            reason = read.reason(reason)
            if not content and not logprobs and reason is None:
                return None
        return _chat_choice(index, "delta", content, logprobs, reason)

    def waiting(self, index: int) -> Json:
        return _chat_choice(index, "delta", {"role": "assistant", "content": None}, None, None)

    def whole(self, index: int, choice: Choice) -> Json:
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
        reason: str | None = choice.last.finish_reason
        logprobs = self._logprobs(self._scored(choice.tokens, reason))
        if self._reading is not None:
            read = _ReadChoice(self._reading)
            said = read.delta(choice.text, is_last=True)
            calls = [
                {key: value for key, value in call.items() if key != "index"}
                for call in said.pop("tool_calls", ())
            ]
            message |= {"content": None if calls else "", **said}
            if calls:
                message["tool_calls"] = calls
            reason = read.reason(reason)
        return _chat_choice(index, "message", message, logprobs, reason)

    def rest(self, choices: Sequence[Choice]) -> Json:
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


def _chat_choice(index: int, key: str, content: Json, logprobs: Json | None, reason: str | None) -> Json:
    return {"index": index, key: content, "logprobs": logprobs, "finish_reason": reason}


@dataclass(frozen=True)
class KnownBefore:
    """The parts of an answer that are known before it is generated."""

    model_id: str
    n_prompt: int
    reading: AnswerReading | None

    def open(self) -> Reader:
        return self.reading.open() if self.reading else PlainReader()

    def parts(self, choice: Choice) -> list[Part]:
        reader = self.open()
        return [*reader.feed(choice.text), *reader.finish()]


class PartEvents(EventWriter):
    """The events of one answer, written from its parts as its text is read."""

    def __init__(self, facts: KnownBefore) -> None:
        self._reader = facts.open()
        self._choice = Choice()

    def of(self, pieces: Iterable[tuple[int, Answer | Progress]]) -> bytes:
        """Events for pieces of the single request (index 0); progress of the prompt is skipped."""
        out: list[str] = []
        for _, piece in pieces:
            if isinstance(piece, Progress):
                continue
            self._choice.add(piece)
            self._choice.text = ""  # it has been said
            self._choice.tokens.clear()
            parts = self._reader.feed(piece.text)
            if piece.finish_reason is not None:
                parts += self._reader.finish()
            out += self._written(piece, parts)
        return "".join(out).encode()

    @abstractmethod
    def _written(self, piece: Answer, parts: Sequence[Part]) -> Iterable[str]: ...
