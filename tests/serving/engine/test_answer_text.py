"""The text of an answer: nothing of a stop string gets out, nothing else is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.engine.live_request import AnswerText
from phasewise.serving.sampling.sampling import SampledToken
from tests.support.servers.fake_engine import END, ByteStream

SHORT = st.text(alphabet="ab€", min_size=1, max_size=4)


def feed(text: str, stop: tuple[str, ...]) -> tuple[list[str], list[int], bool]:
    """Byte by byte: the pieces given out, the tokens given out, and whether a stop string ended it."""
    answer, pieces, tokens = AnswerText(ByteStream(), stop), [], []
    for byte in text.encode():
        answer.push(SampledToken(byte))
        piece, begun = answer.take(finished=False)
        pieces.append(piece)
        tokens += [token.token_id for token in begun]
        if answer.stopped:
            return pieces, tokens, True
    piece, begun = answer.take(finished=True)
    return [*pieces, piece], tokens + [token.token_id for token in begun], answer.stopped


def first_stop(text: str, stop: tuple[str, ...]) -> int | None:
    """The place of the stop string that is complete first, at which the text ends; None: there is none."""
    ends = [
        (text.find(stop_string) + len(stop_string), text.find(stop_string))
        for stop_string in stop
        if stop_string in text
    ]
    return min(ends)[1] if ends else None


@given(text=st.text(alphabet="ab€", max_size=30), stop=st.lists(SHORT, max_size=3).map(tuple))
def test_text_ends_before_the_first_stop_string(text: str, stop: tuple[str, ...]) -> None:
    pieces, tokens, stopped = feed(text, stop)

    end = first_stop(text, stop)
    assert stopped == (end is not None)
    if not stopped:
        assert "".join(pieces) == text
        assert bytes(tokens).decode() == text
    else:
        assert not any(stop_string in "".join(pieces) for stop_string in stop)
        assert "".join(pieces) == text[: len("".join(pieces))]
        assert bytes(tokens).decode() == "".join(pieces)


class PieceStream:
    """Tokens that stand for pieces of a text."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return ""


@given(
    pieces=st.lists(st.text(alphabet="ab€", min_size=1, max_size=6), max_size=8),
    stop=st.lists(SHORT, max_size=3).map(tuple),
)
def test_text_and_the_stop_string_are_the_same_however_tokens_cut_it(
    pieces: list[str], stop: tuple[str, ...]
) -> None:
    outcomes = []
    for cut in (pieces, list("".join(pieces)), ["".join(pieces)]):
        answer, text, tokens = AnswerText(PieceStream(cut), stop), "", 0
        for number in range(len(cut)):
            answer.push(SampledToken(number))
            piece, begun = answer.take(finished=number + 1 == len(cut) or answer.stopped)
            text, tokens = text + piece, tokens + len(begun)
            if answer.stopped:
                break
        outcomes.append((text, answer.stop_text))
        given_out = "".join(cut[:tokens])
        assert given_out.startswith(text)
        assert answer.stopped or tokens == len(cut)
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    pieces, _, stopped = feed("xSTaSTOP", ("STOP",))

    assert stopped
    assert pieces == ["x", "", "", "STa", "", "", "", ""]


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    answer = AnswerText(ByteStream())
    answer.push(SampledToken(0xE2))
    answer.push_end(SampledToken(END))

    text, tokens = answer.take(finished=True)

    assert text == "\ufffd"
    assert [token.token_id for token in tokens] == [0xE2, END]
