"""`phasewise chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from phasewise._files import write_file
from phasewise._version import SCHEMA_VERSION
from phasewise._words import counted, number
from phasewise.cli.options import ModelArgument
from phasewise.cli.present import note, write_text
from phasewise.cli.status_line import status_line
from phasewise.workflows.generate.answer_settings import ChatSettings, SamplingChoice

if TYPE_CHECKING:
    from phasewise.serving.engine.messages import Progress
    from phasewise.serving.engine.one_answer import OneAnswer
    from phasewise.workflows.chat.session import ChatSession


FENCE = '"""'


def chat(model: ModelArgument, sampling: SamplingChoice, settings: ChatSettings) -> None:
    """Talk to MODEL. /help lists the commands; Ctrl-C ends an answer, Ctrl-D the conversation.

    $ phasewise chat smollm2-135m-instruct
    $ echo 'Why is the sky blue?' | phasewise chat model.gguf --temperature 0

    Answers are sampled as the model's files say. A message of several lines
    stands between two lines of three quotes. Where stdin is no terminal, each
    of its lines is a message and only the answers go to stdout.
    """
    from phasewise.workflows.chat.session import ChatSession

    with ChatSession(model, settings, note) as session:
        if sys.stdin.isatty():
            note(f"{session.model_name}, context {session.context_tokens} tokens. /help lists the commands.")
        for message in _messages():
            if message.startswith("/"):
                if message.split()[0] in ("/bye", "/exit", "/quit"):
                    return
                sampling = _obey(message, session, sampling)
            else:
                _answer(session, message, sampling, settings.n_tokens)


def _messages() -> Iterator[str]:
    """Yield the messages that the user types: a line, or the lines between two fences."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (input() gets editing and a history)
    while True:
        try:
            line = input("> " if is_terminal else "")
            if line.strip() == FENCE:
                lines = []
                while (line := input(". " if is_terminal else "")).strip() != FENCE:
                    lines.append(line)
                line = "\n".join(lines)
        except EOFError:
            if is_terminal:
                write_text("\n")
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            note("\nCtrl-D or /bye ends the conversation")
            continue
        if line.strip():
            yield line


def _answer(session: ChatSession, message: str, sampling: SamplingChoice, n_tokens: int | None) -> None:
    """Stream one answer after its prompt's bar; Ctrl-C ends it between two tokens and keeps those so far."""
    from phasewise.serving.errors import RequestError

    wrap = WordWrap(shutil.get_terminal_size().columns - 1) if sys.stdout.isatty() else None
    try:
        with _until_interrupted() as is_interrupted, ExitStack() as bar:
            line = bar.enter_context(status_line(math.inf))
            for piece in session.answer(message, sampling, n_tokens, is_interrupted):
                progress = session.progress
                if progress is None:
                    bar.close()
                else:
                    line.show(partial(bar_text, progress))
                write_text(piece if wrap is None else wrap.shown(piece))
    except RequestError as error:
        note(f"{error}; /clear begins a new one")
        return
    write_text("\n" if wrap is None else wrap.rest() + "\n")
    if session.last.finish_reason == "length":
        note(f"cut at {counted(session.last.n_generated, 'token')}")
    elif session.last.finish_reason is None and not is_interrupted():
        note("ended, since it only repeats itself: -n N lets it go on for N tokens")
    if sys.stderr.isatty() and session.last.n_generated:
        note(speed_line(session.last))


@contextlib.contextmanager
def _until_interrupted() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C into a flag within this context, since a step of the engine must not be torn apart; yields
    a function that reads the flag."""
    interrupted = False

    def remember(*_signal: object) -> None:
        nonlocal interrupted
        interrupted = True

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _obey(line: str, session: ChatSession, sampling: SamplingChoice) -> SamplingChoice:
    """Run a command line that begins with /; returns the sampling for the next answers."""
    name, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    try:
        match name:
            case "/help" | "/?":
                note(HELP)
            case "/system":
                session.set_system(rest)
                note("system message set" if rest else "system message removed")
            case "/clear":
                session.forget()
                note("a new conversation begins")
            case "/save":
                save_conversation(Path(rest), session.model_name, session.messages)
                note(f"conversation written to {rest}")
            case "/set":
                changed = applied_setting(rest)
                sampling = replace(sampling, **changed)  # type: ignore[arg-type]
                note(", ".join(f"{key} = {value}" for key, value in changed.items()))
            case _:
                note(f"there is no command {name}; /help lists them")
    except ChatCommandError as error:
        note(str(error))
    return sampling


_FENCE = "```"


class WordWrap:
    """Word wrap of text that arrives in pieces. Code between fences keeps its lines.

    A word is held back until it has ended, so that it moves to the next line whole. A word wider than the
    terminal is shown as it arrives.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._column = 0
        self._spaces = ""
        self._word = ""
        self._line = ""
        """The line of the text so far, which may fill several lines of the terminal."""
        self._is_code = False
        self._is_wide = False
        """True within a word wider than the terminal."""

    def shown(self, piece: str) -> str:
        """Take the next piece of text; returns what can be shown now."""
        return "".join(map(self._after, piece))

    def _after(self, sign: str) -> str:
        if sign == "\n":
            placed = self.rest() + sign
            self._is_code ^= self._line.lstrip().startswith(_FENCE)
            self._column, self._spaces, self._line, self._is_wide = 0, "", "", False
            return placed
        self._line += sign
        if self._is_code:
            return sign
        if sign in " \t":
            placed = self.rest()
            self._spaces += sign
            self._is_wide = False
            return placed
        if self._is_wide:
            self._column += cell_len(sign)
            return sign
        self._word += sign
        self._is_wide = cell_len(self._word) >= self._columns
        return self.rest() if self._is_wide else ""

    def rest(self) -> str:
        """Release the held-back word, with the spaces or the line end before it."""
        word, spaces = self._word, self._spaces
        if not word:
            return ""
        self._word = self._spaces = ""
        width = cell_len(word)
        if self._column and self._column + len(spaces) + width > self._columns:
            self._column = width
            return f"\n{word}"
        self._column += len(spaces) + width
        return spaces + word


def speed_line(answer: OneAnswer) -> str:
    """Speed of an answer in words: `48 tokens, the first after 120 ms, then 31.2 tokens/s`."""
    line = f"{counted(answer.n_generated, 'token')}, the first after {number(round(answer.ttft_ms))} ms"
    rate = answer.tokens_per_second
    return line if rate is None else f"{line}, then {rate:.1f} tokens/s"


_WIDTH = 24


def bar_text(progress: Progress) -> str:
    """Text of the bar: the bar itself, tokens, and the time left at the rate so far."""
    n_full = _WIDTH * progress.n_computed // progress.n_prompt
    n_done, n_left = progress.n_computed - progress.n_cached, progress.n_prompt - progress.n_computed
    left_s = progress.took_ns / 1e9 * n_left / max(1, n_done)
    bar = "#" * n_full + "." * (_WIDTH - n_full)
    of_all = f"{progress.n_computed} of {counted(progress.n_prompt, 'token')}"
    return f"prompt [{bar}] {of_all}, {number(round(left_s))} s left"


HELP = """\
/system TEXT      set the system message; without TEXT remove it
/set NAME VALUE   temperature, top_k, top_p, min_p, repetition_penalty or seed; VALUE `default`: the model's
/clear            begin a new conversation; the system message stays
/save FILE        write the conversation as JSON
/bye              end (also Ctrl-D)
\"\"\"               begins and ends a message of several lines"""


class ChatCommandError(Exception):
    """A chat command cannot be followed; the message says what to write."""


def applied_setting(text: str) -> dict[str, float | int | None]:
    """Parse a setting such as `temperature 0.2` into a field of `SamplingChoice` and its value."""
    from phasewise.serving.errors import RequestError
    from phasewise.serving.sampling.sampling import SamplingParams

    name, _, written = text.partition(" ")
    name, written = name.replace("-", "_"), written.strip()
    names = [field.name for field in fields(SamplingChoice)]
    if name not in names or not written:
        raise ChatCommandError(f"write /set NAME VALUE, where NAME is one of {', '.join(names)}")
    if written == "default":
        return {name: None}
    try:
        value = int(written) if name in ("top_k", "seed") else float(written)
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    except RequestError as error:
        raise ChatCommandError(str(error)) from None
    except ValueError:
        raise ChatCommandError(f"{name} is a number, not {written!r:.40}") from None
    return {name: value}


def save_conversation(path: Path, model: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """Write the conversation as one JSON object. ChatCommandError where the file cannot be written."""
    if not path.name:
        raise ChatCommandError("write /save FILE")
    fields = {"schema_version": SCHEMA_VERSION, "model": model, "messages": list(messages)}
    try:
        write_file(path, json.dumps(fields, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ChatCommandError(f"{path} cannot be written: {error.strerror}") from None
