"""From pieces of answers to OpenAI's objects: completions and chat, whole and streamed."""

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
    """A whole call of a custom tool. `arguments`: the text that it is given."""


class AsAsked:
    """Another reader's parts, functions under the names of the request, custom tools with their text."""

    def __init__(self, inner: Reader, names: Mapping[str, str], customs: frozenset[str]) -> None:
        self._inner = inner
        self._names = names
        self._customs = customs
        self._custom: str | None = None
        """The custom tool whose call has begun."""
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
"""Signs of life: in a stream of events, of Anthropic's events, and of lines."""
encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


NOTHING_YET = Answer("", "", (), 0, 0)
"""The last piece of an answer that has none."""


@dataclass(slots=True)
class Choice:
    """The arrived part of one choice."""

    text: str = ""
    tokens: list[SampledToken] = field(default_factory=list)
    last: Answer = NOTHING_YET
    """The counts and ends of the newest piece."""
    first_ns: int = 0
    """The time at which its first token was chosen."""
    prompt: tuple[PromptToken, ...] | None = None

    def add(self, piece: Answer) -> None:
        self.text += piece.text
        self.tokens.extend(piece.tokens)
        self.last = piece.counts
        self.first_ns = self.first_ns or piece.at_ns
        self.prompt = self.prompt or piece.prompt


class EventWriter(ABC):
    """Writes the events of one stream."""

    sign_of_life = COMMENT
    """Bytes that its readers skip."""

    def opening(self) -> bytes:
        """Before the first piece."""
        return b""

    @abstractmethod
    def of(self, pieces: Iterable[tuple[int, Answer | Progress]]) -> bytes:
        """The answer's parts from pieces, each with the index of its request."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """In place of the rest."""

    @abstractmethod
    def closing(self) -> bytes:
        """After the last piece."""


class Form(NamedTuple):
    """A way of writing a reply out: as one object, or as events."""

    whole: Callable[[Sequence[Choice]], bytes]
    events: Callable[[], EventWriter]
    media_type: str = EVENT_STREAM
    """The type of a stream."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP answer to be: the messages it takes, `n` of them to a prompt, and how it looks."""

    requests: Sequence[Submit]
    n_choices_per_prompt: int
    rendering: Rendering | Form
    streamed: bool
    include_usage: bool
    tells_progress: bool = False
    """Events tell how much of each prompt is computed."""
    receipt: Callable[[Submit, Evidence, FinishReason], Json] | None = None
    """Makes and keeps the receipt of a choice that has ended; None where none is asked for."""
    clamped: int | None = None
    """The tokens that there is room for, where an answer of more was asked for."""

    def with_receipt(self, index: int, said: Json, ended: Answer) -> Json:
        """The choice as it is said, and its receipt where it has ended and shall have one."""
        if self.receipt is None or ended.evidence is None or ended.finish_reason is None:
            return said
        return {**said, "receipt": self.receipt(self.requests[index], ended.evidence, ended.finish_reason)}

    def usage(self, said: Sequence[Answer]) -> Json:
        """Tokens of all prompts, each once, and of all answers. said: the last piece of each choice."""
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
    """The reading of the answers of one request. `call_id`: a new id for a call."""

    open: Callable[[], Reader]
    call_id: Callable[[], str]


class _ReadChoice:
    """The part of one choice that has been read."""

    def __init__(self, reading: AnswerReading) -> None:
        self._reader = reading.open()
        self._call_id = reading.call_id
        self._n_calls = 0

    def delta(self, text: str, *, is_last: bool) -> Json:
        """The new part: `content`, `reasoning_content` and `tool_calls`, each where there is any. A call
        comes with its name and id at once, and its arguments with it or in pieces of the same index."""
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
        """The reason that the choice ended: with calls, where it ended by itself and has some."""
        return "tool_calls" if reason == "stop" and self._n_calls else reason

    def _function(self, name: str, arguments: str) -> Json:
        return self._called("function", {"name": name, "arguments": arguments})

    def _called(self, kind: str, called: Json) -> Json:
        self._n_calls += 1
        return {"index": self._n_calls - 1, "id": self._call_id(), "type": kind, kind: called}

    def _add_arguments(self, calls: list[Json], piece: str) -> None:
        """To the call that has begun last, which another delta may have begun."""
        if not calls:
            calls.append({"index": self._n_calls - 1, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += piece


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that an answer's text begins with. n_top: likeliest tokens of each place; None: no numbers."""

    text: str
    n_top: int | None

    @property
    def has_logprobs(self) -> bool:
        """True if it comes with log-probabilities, which are known once it is computed."""
        return self.n_top is not None


@dataclass(frozen=True, slots=True)
class Scoring:
    """The numbers of its prompts that a response tells. n_top: likeliest tokens of each place in
    `prompt_logprobs`; None: there is no such field. echoes: of each choice; none: nothing is echoed."""

    n_top: int | None = None
    echoes: tuple[Echo, ...] = ()

    def echo(self, index: int) -> Echo | None:
        """That of a choice."""
        return self.echoes[index] if self.echoes else None


NOT_SCORED = Scoring()
"""Nothing."""


def echoes_of(body: CompletionRequest, requests: Sequence[Submit], model: ServedModel) -> tuple[Echo, ...]:
    """For each choice its prompt: a text as it was sent, tokens as the text that they spell."""
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
    """The character of `text` at which each token begins. A token that the text does not spell, such as one
    that every prompt begins with, takes no place. The tokens of a sentence may begin with a space that it has
    not."""
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
    """The form of one kind of response: the fields of every object, and how tokens are written out."""

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
        """None: there is nothing to say yet."""

    @abstractmethod
    def waiting(self, index: int) -> Json:
        """The choice of an event that tells the progress of its prompt: no text yet."""

    @abstractmethod
    def whole(self, index: int, choice: Choice) -> Json:
        """The choice of a response that is sent whole."""

    def rest(self, choices: Sequence[Choice]) -> Json:
        """The fields of a whole response that stand beside its choices."""
        return {}

    def _prompt_logprobs(self, tokens: Sequence[PromptToken]) -> list[Json | None]:
        """As vLLM tells them: of each token its own and the likeliest ones, by id; of the first nothing."""
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
        """The tokens with a log-probability, without the end token: it is no part of the text."""
        ends = self._model.end_token_ids | self._model.dialect.ends
        ended = reason == "stop" and tokens and tokens[-1].token_id in ends
        return [token for token in (tokens[:-1] if ended else tokens) if token.logprob is not None]


class CompletionRendering(Rendering):
    """`/v1/completions`."""

    def head(self, *, streamed: bool) -> Json:
        return {**self._fixed, "object": "text_completion"}

    def opening(self, index: int) -> Json | None:
        """The prompt, where it is echoed without numbers that are not known yet."""
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
        """Beside an echo every token counts: who scores knows by their number which are the prompt's."""
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
    """Log-probabilities of the prompt and of the answer as one; None: there are none."""
    given = [part for part in parts if part is not None]
    return {name: [item for part in given for item in part[name]] for name in given[0]} if given else None


class ChatRendering(Rendering):
    """`/v1/chat/completions`. `reading`: how answers are read that may have calls or thoughts in them."""

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
        """All choices have one prompt, and so its numbers."""
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
    """The parts of an answer that are known before it is made."""

    model_id: str
    n_prompt: int
    reading: AnswerReading | None

    def open(self) -> Reader:
        return self.reading.open() if self.reading else PlainReader()

    def parts(self, choice: Choice) -> list[Part]:
        """Those of a whole answer."""
        reader = self.open()
        return [*reader.feed(choice.text), *reader.finish()]


class PartEvents(EventWriter):
    """The events of one answer, written from its parts as its text is read."""

    def __init__(self, facts: KnownBefore) -> None:
        self._reader = facts.open()
        self._choice = Choice()

    def of(self, pieces: Iterable[tuple[int, Answer | Progress]]) -> bytes:
        """(0, piece); these forms have no word for the progress of a prompt."""
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
    def _written(self, piece: Answer, parts: Sequence[Part]) -> Iterable[str]:
        """The events of a piece that has these parts."""
