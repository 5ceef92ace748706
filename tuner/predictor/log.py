"""Facts of a request before and after its answer, and logs of them: JSON lines, one per answer, written by
`predict-len collect` or by the server.

{"schema_version": 3, "model": .., "prompt_token_ids": [..], "temperature": .., "max_tokens": ..,
"n_messages": .., "system_prompt_id": .., "output_tokens": .., "finish_reason": "stop" or "length",
"arrived_at_s": .., "at_s": .., "drafted_tokens": .., "accepted_tokens": ..}

A line may have "prompt", a text, instead of token ids; then a tokenizer is needed. Only "output_tokens" and
one of these two are required. The last two count the answer's drafted and accepted tokens; lines of version 1
have neither, and those of version 2 a "lookup" that nothing reads. Logs are not trusted: sizes and types are
checked, and an error names the file and the line."""

from __future__ import annotations

import hashlib
import io
import lzma
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from phasewise._files import open_input
from phasewise._json import read_json
from phasewise.tuner.errors import PredictorError

MAX_ANSWER_TOKENS = 1 << 20
"""The limit, in tokens, that an answer without a limit is given."""


class PromptFacts(NamedTuple):
    """The facts of a request before its answer. `n_messages`: of the conversation; 1 for a completion.
    `system_prompt_id`: equal for equal system prompts; None without one. `max_tokens`: None where only the
    context limits the answer."""

    token_ids: Sequence[int]
    temperature: float = 0.0
    max_tokens: int | None = None
    n_messages: int = 1
    system_prompt_id: str | None = None

    @property
    def limit(self) -> int:
        """The longest possible answer, in tokens."""
        return MAX_ANSWER_TOKENS if self.max_tokens is None else self.max_tokens


@dataclass(frozen=True)
class Example:
    """A request and the length of its answer. `was_cut`: the answer ended at its limit."""

    facts: PromptFacts
    output_tokens: int
    was_cut: bool

    @cached_property
    def prompt_key(self) -> bytes:
        """A digest of the prompt's tokens, without the request's other facts."""
        return hashlib.blake2b(
            np.asarray(self.facts.token_ids, dtype="<i8").tobytes(), digest_size=16
        ).digest()


def held_out(examples: Sequence[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """The examples kept and those held out: about `share` of the prompts, chosen by a hash of the prompt. So
    no prompt is in both, however often it was asked, and a prompt stays in its part as a log grows."""
    kept: list[Example] = []
    out: list[Example] = []
    for example in examples:
        (out if place_of(example, seed, b"held out") < share else kept).append(example)
    return kept, out


def part_of_folds(
    examples: Sequence[Example], fold: int, folds: int, seed: int
) -> tuple[list[Example], list[Example]]:
    """The examples outside and inside one of `folds` parts, chosen by a hash of the prompt."""
    kept: list[Example] = []
    out: list[Example] = []
    for example in examples:
        (out if int(place_of(example, seed, b"folds") * folds) == fold else kept).append(example)
    return kept, out


def place_of(example: Example, seed: int, purpose: bytes) -> float:
    """A hash of the prompt, from 0 to below 1, uniform over prompts, independent between purposes."""
    salt = seed.to_bytes(8, "little")
    drawn = hashlib.blake2b(example.prompt_key, digest_size=6, salt=salt, person=purpose).digest()
    return int.from_bytes(drawn, "little") / (1 << 48)


MAX_LINE_CHARS = 16 << 20
MAX_LINES = 2_000_000
MAX_CHARS = 256 << 20
"""The most characters of all decompressed lines together; in memory they take at most ten times that."""
MAX_TOKEN_ID = 1 << 31

Encode = Callable[[str, str | None], Sequence[int]]
"""A function from a user's message, and the model named by its line or None, to the prompt's tokens."""


class Log(NamedTuple):
    """The answers in a log. `model_names`: the models that its lines name."""

    examples: list[Example]
    model_names: frozenset[str]


def read_log(path: str | os.PathLike[str], encode: Encode | None = None) -> Log:
    """Every answer of a log that ended by itself or at its limit. PredictorError for invalid lines."""
    name = os.fspath(path)
    examples: list[Example] = []
    model_names: set[str] = set()
    for number, line in lines_of(path):
        try:
            row = _row(line)
            example = _example(row, encode)
        except PredictorError as error:
            raise PredictorError(f"{name}, line {number}: {error}") from None
        if example is not None:
            examples.append(example)
            model_names |= {row["model"]} if isinstance(row.get("model"), str) else set()
    if not examples:
        raise PredictorError(f"{name} holds no answer")
    return Log(examples, frozenset(model_names))


def lines_of(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """The lines of a log with their numbers, without blank lines; a file whose name ends in .xz is
    decompressed."""
    name = os.fspath(path)
    try:
        with _opened(Path(path)) as file:
            number = n_chars = 0
            while line := file.readline(MAX_LINE_CHARS + 1):
                number, n_chars = number + 1, n_chars + len(line)
                if len(line) > MAX_LINE_CHARS:
                    raise PredictorError(f"{name}, line {number}: longer than {MAX_LINE_CHARS} characters")
                if number > MAX_LINES:
                    raise PredictorError(f"{name} has more than {MAX_LINES} lines: cut a part of it out")
                if n_chars > MAX_CHARS:
                    raise PredictorError(f"{name} has more than {MAX_CHARS} characters: cut a part of it out")
                if line.strip():
                    yield number, line
    except (lzma.LZMAError, EOFError):
        raise PredictorError(f"{name} is not whole, or no xz file") from None
    except UnicodeDecodeError:
        raise PredictorError(f"{name} is not UTF-8 text") from None
    except OSError as error:
        raise PredictorError(f"{name} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise PredictorError(f"{name!r:.80} names no file: {error}") from None


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    with open_input(path) as file:
        unpacked = lzma.open(file) if path.suffix == ".xz" else file  # noqa: SIM115 (`text` closes it)
        with io.TextIOWrapper(unpacked, encoding="utf-8") as text:
            yield text


def _row(line: str) -> dict[str, Any]:
    try:
        row = read_json(line)
    except ValueError:
        raise PredictorError("not JSON") from None
    if not isinstance(row, dict):
        raise PredictorError("a JSON object is expected")
    return row


def _example(row: dict[str, Any], encode: Encode | None) -> Example | None:
    """The example that a line states; None for an answer that was broken off, whose length is not known."""
    output_tokens = _whole(row, "output_tokens", 0, MAX_ANSWER_TOKENS)
    if not output_tokens or row.get("finish_reason", "stop") not in ("stop", "length"):
        return None
    limited = row.get("max_tokens") is not None
    max_tokens = _whole(row, "max_tokens", 1, MAX_ANSWER_TOKENS) if limited else None
    n_messages = _whole(row, "n_messages", 1, 1 << 20) if row.get("n_messages") is not None else 1
    system = row.get("system_prompt_id")
    if system is not None and not isinstance(system, str):
        raise PredictorError(f"system_prompt_id must be a text, not {system!r:.40}")
    facts = PromptFacts(_token_ids(row, encode), _temperature(row), max_tokens, n_messages, system)
    return Example(facts, min(output_tokens, facts.limit), row.get("finish_reason") == "length")


def _token_ids(row: dict[str, Any], encode: Encode | None) -> tuple[int, ...]:
    ids = row.get("prompt_token_ids")
    if ids is None and isinstance(row.get("prompt"), str):
        if encode is None:
            raise PredictorError("it has the prompt's text: say with --model whose tokens it becomes")
        named = row.get("model")
        return tuple(encode(row["prompt"], named if isinstance(named, str) else None))
    if not isinstance(ids, list) or not all(
        type(token_id) is int and 0 <= token_id < MAX_TOKEN_ID for token_id in ids
    ):
        raise PredictorError("neither prompt_token_ids, a list of token ids, nor prompt, a text")
    return tuple(ids)


def _whole(row: dict[str, Any], name: str, least: int, most: int) -> int:
    value = row.get(name)
    if type(value) is not int or not least <= value <= most:
        raise PredictorError(f"{name} must be a number from {least} to {most}, not {value!r:.40}")
    return value


def _temperature(row: dict[str, Any]) -> float:
    value = row.get("temperature", 0.0)
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise PredictorError(f"temperature must be a number from 0 on, not {value!r:.40}")
    return float(value)
