"""`phasewise chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise._words import counted
from phasewise.cli.commands.chat.answer_lines import WordWrap, speed_line
from phasewise.cli.commands.chat.prompt_bar import PromptBar
from phasewise.cli.commands.chat.slash_commands import (
    HELP,
    ChatCommandError,
    applied_setting,
    save_conversation,
)
from phasewise.cli.option_sets import spread
from phasewise.cli.options import (
    SAMPLING,
    DbOption,
    FormatOption,
    KvFormatOption,
    ModelArgument,
    OneLoraOption,
    ThreadsOption,
)
from phasewise.cli.present import note, write_text
from phasewise.workflows.generate.answer_settings import SamplingChoice

if TYPE_CHECKING:
    from phasewise.workflows.chat.session import ChatSession

FENCE = '"""'


@spread(sampling=SAMPLING)
def chat(
    model: ModelArgument,
    sampling: SamplingChoice,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="system message")] = None,
    n_tokens: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--n-tokens",
            min=1,
            metavar="N",
            help="most tokens of an answer [default: 4096, or until it only repeats itself]",
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=32, metavar="N", help="most tokens of the conversation")
    ] = None,
    weight_format: FormatOption = "native",
    kv_format: KvFormatOption = "auto",
    threads: ThreadsOption = None,
    lora: OneLoraOption = None,
    db: DbOption = None,
) -> None:
    """Talk to MODEL. /help lists the commands; Ctrl-C ends an answer, Ctrl-D the conversation.

    $ phasewise chat smollm2-135m-instruct
    $ echo 'Why is the sky blue?' | phasewise chat model.gguf --temperature 0

    Answers are sampled as the model's files say. A message of several lines
    stands between two lines of three quotes. Where stdin is no terminal, each
    of its lines is a message and only the answers go to stdout.
    """
    from phasewise.workflows.chat.session import ChatSession

    with ChatSession(
        model,
        context_tokens=context,
        weight_format=weight_format,
        kv_format=kv_format,
        threads=threads,
        lora=lora,
        db=db,
        report=note,
    ) as session:
        if system is not None:
            session.set_system(system)
        if sys.stdin.isatty():
            note(f"{session.model_name}, context {session.context_tokens} tokens. /help lists the commands.")
        for message in _messages():
            if message.startswith("/"):
                if message.split()[0] in ("/bye", "/exit", "/quit"):
                    return
                sampling = _obey(message, session, sampling)
            else:
                _answer(session, message, sampling, n_tokens)


def _messages() -> Iterator[str]:
    """Messages that the user types: a line, or the lines between two fences."""
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
    """Stream one answer; Ctrl-C ends it between two tokens and keeps what there is."""
    from phasewise.serving.errors import RequestError

    wrap = WordWrap(shutil.get_terminal_size().columns - 1) if sys.stdout.isatty() else None
    try:
        with _until_interrupted() as is_interrupted, PromptBar() as bar:
            for piece in session.answer(message, sampling, n_tokens, is_interrupted):
                bar.show(session.progress)
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
    """A step of the engine must not be torn apart: within this, Ctrl-C only sets a flag."""
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
    """Do what a line that begins with / says; the sampling that holds from now on."""
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
