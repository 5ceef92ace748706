"""One entry for each token of an answer, streamed or whole, however tokens cut its text."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.engine.answer_text import AnswerText
from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.http.answers.openai_objects import (
    AnswerReading,
    ChatRendering,
    Choice,
    CompletionRendering,
    Reply,
)
from phasewise.serving.http.answers.sse_events import Events
from phasewise.serving.http.http_settings import ServedModel
from phasewise.serving.sampling.sampling import SampledToken, SamplingParams
from phasewise.serving.text.turn_form import TurnForm
from phasewise.serving.tools.dialect import dialect_of
from tests.support.tiers import examples

KINDS = ("completion", "chat", "thoughts")
DIALECT = dialect_of("", lambda _text: None, frozenset(), turn=TurnForm(thought=("<think>", "</think>")))
PARTS = [
    "<think>",
    "</think>",
    "</thi",
    "a",
    "b",
    "STOP",
    "STOPPED",
    "ST",
    "é",
    "€",
    "👩‍👩‍👧",
    "🏳️‍🌈",
    "😀",
    "\n",
    " ",
]


class Stream:
    """Tokens that are bytes of a text."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._tokens[token_id])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


def pieces_of(tokens: Sequence[bytes], stop: tuple[str, ...], n_at_once: int) -> list[Answer]:
    """The answer as an engine gives it out, some tokens at a time."""
    text, pieces = AnswerText(Stream(tokens), stop), []
    for begin in range(0, len(tokens), n_at_once):
        run = range(begin, min(begin + n_at_once, len(tokens)))
        for token_id in run:
            text.push(SampledToken(token_id, -float(token_id), ((token_id, -1.0),)))
            if text.stopped:
                break
        reason: Any = "stop" if text.stopped else "length" if run[-1] + 1 == len(tokens) else None
        said, begun = text.take(finished=reason is not None)
        pieces.append(Answer("0", said, begun, run[-1] + 1, 0, reason))
        if reason is not None:
            break
    return pieces


def streamed_and_whole(kind: str, tokens: Sequence[bytes], pieces: Sequence[Answer]) -> list[Any]:
    """(Text, thoughts, entries, offsets) of each."""
    model = ServedModel(
        ("m",), 0, 500, len(tokens), frozenset(), lambda _text, _special: [], lambda n: tokens[n], None
    )
    reading = AnswerReading(lambda: DIALECT.reader(None, in_thought=False), lambda: "c")

    def reply(*, streamed: bool) -> Reply:
        rendering = (
            CompletionRendering("id", model)
            if kind == "completion"
            else ChatRendering("id", model, reading if kind == "thoughts" else None)
        )
        request = Submit("0", (1,), sampling=SamplingParams(top_logprobs=1))
        return Reply([request], [], 1, rendering, streamed, include_usage=False)

    events = Events(reply(streamed=True))
    sent = b"".join(events.of([(0, piece)]) for piece in pieces).decode()
    choices = [json.loads(line[6:])["choices"][0] for line in sent.split("\n\n") if line]
    choice = Choice()
    for piece in pieces:
        choice.add(piece)
    return [_facts(choices), _facts([reply(streamed=False).rendering.whole(0, choice)])]


def _facts(choices: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    said = [
        choice.get("delta") or choice.get("message") or {"content": choice.get("text")} for choice in choices
    ]
    text = "".join(part.get("content") or "" for part in said)
    thoughts = "".join(part.get("reasoning_content") or "" for part in said)
    if "text" in choices[0]:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return (
            text,
            thoughts,
            [entry for part in told for entry in zip(*(part[name] for name in names), strict=True)],
        )
    return text, thoughts, [entry for part in told for entry in part["content"]]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@examples(150)
def test_streamed_and_whole_are_equal_and_every_token_has_its_entry(kind: str, data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.sampled_from(PARTS), min_size=1, max_size=12))
    whole_text = ("<think>" if data.draw(st.booleans()) else "") + "".join(parts)
    spelled = whole_text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(spelled) - 1)), max_size=len(spelled))))
    tokens = [spelled[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(spelled)], strict=True)]
    tokens = [token for token in tokens if token]
    stop = data.draw(
        st.sampled_from([(), ("STOP",), ("STOPPED", "STOP"), ("STOP", "STOPPED"), ("€",), ("👧", "ab")])
    )
    pieces = pieces_of(tokens, stop, data.draw(st.integers(1, 4)))
    streamed, whole = streamed_and_whole(kind, tokens, pieces)

    assert streamed == whole
    text, thoughts, entries = streamed
    given_out = "".join(piece.text for piece in pieces)
    if kind != "thoughts":
        assert text == given_out
    n_entries = sum(len(piece.tokens) for piece in pieces)
    assert len(entries) == n_entries
    if pieces[-1].finish_reason == "length":
        assert n_entries == len(tokens)
    begins = [len(b"".join(tokens[:number]).decode("utf-8", "ignore")) for number in range(n_entries)]
    for number, entry in enumerate(entries):
        if kind == "completion":
            assert (entry[1], entry[3]) == (-float(number), begins[number])
        else:
            assert (entry["bytes"], entry["logprob"]) == (list(tokens[number]), -float(number))
    assert all(begin < len(given_out) for begin in begins) or pieces[-1].finish_reason == "length"
    assert b"".join(tokens[:n_entries]).startswith(given_out.encode())

    by_byte = [bytes([byte]) for byte in spelled]
    alone, _ = streamed_and_whole(kind, by_byte, pieces_of(by_byte, stop, 1))
    assert alone[:2] == (text, thoughts)
