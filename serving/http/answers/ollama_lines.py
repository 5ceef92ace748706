"""The answers of `/api/chat` and `/api/generate`: as one object, and as lines of JSON while they are made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from phasewise.serving.engine.messages import Answer
from phasewise.serving.http.answers.openai_objects import Choice, Json, encode
from phasewise.serving.http.answers.part_events import KnownBefore, PartEvents
from phasewise.serving.http.errors import ApiError
from phasewise.serving.tools.parts import Begun, Call, Part, Piece, Reasoning, Text, parsed

MEDIA_TYPE = "application/x-ndjson"


@dataclass(frozen=True, kw_only=True)
class OllamaAnswering(KnownBefore):
    """The parts of one answer that are known before it is made. `is_chat`: its text is a message's."""

    began_ns: int
    """On `time.perf_counter_ns`."""
    is_chat: bool

    def line(self, said: Json, *, done: bool = False) -> Json:
        """A line with `content`, `thinking` and `tool_calls`, each where there is any."""
        head: Json = {"model": self.model_id, "created_at": _now()}
        if self.is_chat:
            return {**head, "message": {"role": "assistant", "content": "", **said}, "done": done}
        text = said.pop("content", "")
        return {**head, "response": text, **said, "done": done}

    def last(self, said: Json, choice: Choice) -> Json:
        """The line that ends the answer, with its counts, and its times in nanoseconds."""
        return {
            **self.line(said, done=True),
            "done_reason": choice.finish_reason,
            "total_duration": choice.last_ns - self.began_ns,
            "load_duration": 0,
            "prompt_eval_count": self.n_prompt,
            "prompt_eval_duration": choice.first_ns - self.began_ns,
            "eval_count": choice.n_generated,
            "eval_duration": choice.last_ns - choice.first_ns,
        }


class _Said:
    """Parts of an answer as this API has them: calls are given out whole."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._arguments = ""

    def of(self, parts: Iterable[Part], *, is_last: bool) -> Iterator[Json]:
        for part in parts:
            match part:
                case Piece(text=text):
                    self._arguments += text
                case Call(name=name, arguments=arguments):
                    yield from self._ended()
                    yield _call(name, arguments)
                case Begun(name=name):
                    yield from self._ended()
                    self._name = name
                case Reasoning(text=text):
                    yield from self._ended()
                    yield {"thinking": text}
                case Text(text=text):
                    yield from self._ended()
                    yield {"content": text}
        if is_last:
            yield from self._ended()

    def _ended(self) -> Iterator[Json]:
        """The call that was open."""
        if self._name is not None:
            yield _call(self._name, self._arguments)
        self._name, self._arguments = None, ""


def _call(name: str, arguments: str) -> Json:
    return {"tool_calls": [{"function": {"name": name, "arguments": parsed(arguments) or {}}}]}


class OllamaLines(PartEvents):
    """The lines of one answer. An empty line is an error to Ollama's client, a space before JSON is not."""

    sign_of_life = b" "

    def __init__(self, answering: OllamaAnswering) -> None:
        super().__init__(answering)
        self._answering = answering
        self._said = _Said()

    def failed(self, error: ApiError) -> bytes:
        """In place of the rest."""
        return f"{encode(error.ollama_body())}\n".encode()

    def closing(self) -> bytes:
        """After the last piece."""
        return f"{encode(self._answering.last({}, self._choice))}\n".encode()

    def _written(self, piece: Answer, parts: Sequence[Part]) -> Iterator[str]:
        for said in self._said.of(parts, is_last=piece.finish_reason is not None):
            yield f"{encode(self._answering.line(said))}\n"


def whole(answering: OllamaAnswering, choices: Sequence[Choice]) -> bytes:
    """The answer as one object."""
    (choice,) = choices
    said: Json = {}
    for fields in _Said().of(answering.parts(choice), is_last=True):
        for name, value in fields.items():
            said[name] = said[name] + value if name in said else value
    return encode(answering.last(said, choice)).encode()


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
