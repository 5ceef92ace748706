"""`phasewise chat`: a conversation on a tiny model of random weights."""

from __future__ import annotations

import itertools
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from phasewise.cli.commands.chat import (
    ChatCommandError,
    WordWrap,
    applied_setting,
    bar_text,
    save_conversation,
    speed_line,
)
from phasewise.serving.engine.messages import Progress, Submit
from tests.cli import command
from tests.support.tiers import examples

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

from phasewise.serving.engine.one_answer import OneAnswer
from phasewise.workflows.chat.session import LONGEST_PERIOD, MOST_REPEATED_TOKENS, repeats_itself

pytestmark = pytest.mark.usefixtures("own_places")


def chat(tiny: Path, *lines: str, options: tuple[str, ...] = ()) -> command.Done:
    stdin = "".join(f"{line}\n" for line in lines)
    return command.run("chat", tiny, "-n", 8, "--temperature", 0, *options, stdin=stdin)


def saved(tiny: Path, path: Path, *lines: str) -> list[dict[str, str]]:
    result = chat(tiny, *lines, f"/save {path}")
    assert result.exit_code == 0, result.output
    return list(json.loads(path.read_text(encoding="utf-8"))["messages"])


def test_a_conversation_keeps_every_turn(tiny: Path, tmp_path: Path) -> None:
    messages = saved(tiny, tmp_path / "talk.json", "/system be brief", "one", "two")

    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [message["content"] for message in messages if message["role"] == "user"] == ["one", "two"]


def test_only_answers_go_to_stdout(tiny: Path, tmp_path: Path) -> None:
    (_, answer) = saved(tiny, tmp_path / "talk.json", "one")

    assert chat(tiny, "one").stdout == answer["content"] + "\n"


def test_lines_between_quotes_are_one_message(tiny: Path, tmp_path: Path) -> None:
    messages = saved(tiny, tmp_path / "talk.json", '"""', "a", "b", '"""')

    assert messages[0] == {"role": "user", "content": "a\nb"}


def test_clear_begins_anew_but_for_the_system_message(tiny: Path, tmp_path: Path) -> None:
    messages = saved(tiny, tmp_path / "talk.json", "/system S", "one", "/clear", "two")

    assert [message["role"] for message in messages] == ["system", "user", "assistant"]


def test_a_conversation_that_fills_the_context_goes_on_after_clear(tiny: Path) -> None:
    result = chat(tiny, "x" * 400, "/clear", "y", options=("--context", "64"))

    assert result.exit_code == 0
    assert "/clear begins a new one" in result.stderr
    assert result.stdout.count("\n") == 1


def test_unknown_commands_and_values_are_told(tiny: Path) -> None:
    result = chat(tiny, "/dance", "/set top_p 7", "/set temperature 0.5")

    assert "no command /dance" in result.stderr
    assert "top_p must be above 0 and at most 1" in result.stderr
    assert "temperature = 0.5" in result.stderr


def shown(pieces: Sequence[str], columns: int) -> str:
    wrap = WordWrap(columns)
    return "".join(map(wrap.shown, pieces)) + wrap.rest()


TEXTS = st.text(alphabet="ab .\n\u754c`", max_size=120)


@given(TEXTS, st.integers(2, 30), st.lists(st.integers(0, 120), max_size=8))
@examples(200)
def test_an_answer_is_wrapped_between_words_however_it_is_cut(
    text: str, columns: int, cuts: list[int]
) -> None:
    """Nothing is lost but spaces at the ends of lines, no line that has a choice is too wide, and none of
    code is broken."""
    ends = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    wrapped = shown([text[begin:end] for begin, end in itertools.pairwise(ends)] or [text], columns)

    assert wrapped == shown(list(text), columns)
    assert wrapped.split() == text.split()
    is_code = False
    for line in wrapped.split("\n"):
        assert is_code or "```" in line or cell_len(line) <= columns or len(line.split()) == 1
        is_code ^= line.lstrip().startswith("```")


def test_code_keeps_its_lines_and_the_text_around_it_does_not() -> None:
    code = "```\nfor n in range(10): print(n, n * n)\n```"

    assert shown([f"one two three\n{code}\nfour five six"], 9) == f"one two\nthree\n{code}\nfour five\nsix"


@given(st.lists(st.integers(0, 9), max_size=40), st.lists(st.integers(0, 9), min_size=1, max_size=64))
@examples(50)
def test_an_answer_that_only_repeats_itself_is_seen(begins: list[int], period: list[int]) -> None:
    n_repeated = MOST_REPEATED_TOKENS + LONGEST_PERIOD + len(begins) % 7
    repeated = [*begins, *itertools.islice(itertools.cycle(period), n_repeated)]

    assert repeats_itself(repeated)
    assert not repeats_itself([*repeated, 10])
    assert not repeats_itself(repeated[:MOST_REPEATED_TOKENS])


def test_the_line_of_an_answer_s_speed() -> None:
    answer = OneAnswer(Submit("r", (1,)), n_generated=11, first_ns=120_000_000, last_ns=620_000_000)

    assert speed_line(answer) == "11 tokens, the first after 120 ms, then 20.0 tokens/s"
    assert speed_line(replace(answer, n_generated=1)) == "1 token, the first after 120 ms"


@pytest.mark.parametrize("text", ["", "temperature", "colour red", "top_k 0", "temperature nan", "seed x"])
def test_settings_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(ChatCommandError):
        applied_setting(text)


def test_a_setting_goes_back_to_the_models() -> None:
    assert applied_setting("top-p default") == {"top_p": None}


def test_a_conversation_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ChatCommandError, match="cannot be written"):
        save_conversation(tmp_path / "none" / "talk.json", "m", [])


@pytest.mark.slow
@pytest.mark.parametrize(("n_computed", "left"), [(100, "8"), (256, "2"), (300, "0")])
def test_the_bar_of_a_prompt_grows_and_tells_the_rest_of_the_time(n_computed: int, left: str) -> None:
    """At the rate since the tokens that were reused."""
    n_cached, token_ns = 50, 40_000_000
    text = bar_text(Progress("r", 300, n_cached, n_computed, (n_computed - n_cached) * token_ns))
    assert text.count("#") == 24 * n_computed // 300
    assert text.count("#") + text.count(".") == 24
    assert text.endswith(f"{n_computed} of 300 tokens, {left} s left")
    assert len(text) < 80


def test_ctrl_c_ends_the_answer_and_not_the_program(roomy: Path) -> None:
    """On a real terminal: an endless answer is interrupted, then the conversation goes on and ends."""
    parent, child = pty.openpty()
    words = [sys.executable, "-m", "phasewise", "chat", str(roomy), "--temperature", "0"]
    process = subprocess.Popen(words, stdin=child, stdout=child, stderr=child, start_new_session=True)
    os.close(child)
    seen = b""

    def read_until(mark: bytes, seconds: float = 60.0) -> None:
        nonlocal seen
        end_s = time.monotonic() + seconds
        while mark not in seen and time.monotonic() < end_s:
            if select.select([parent], [], [], 0.2)[0]:
                seen += os.read(parent, 1 << 16)
        assert mark in seen, seen[-500:]
        seen = seen[seen.index(mark) + len(mark) :]

    try:
        read_until(b"> ")
        os.write(parent, b"hello\n")
        read_until(b"hello\r\n")  # by the terminal
        assert select.select([parent], [], [], 60)[0]  # the answer has begun
        process.send_signal(signal.SIGINT)
        read_until(b", the first after ")
        read_until(b"> ")
        os.write(parent, b"/bye\n")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(parent)
