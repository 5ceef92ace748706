"""Output of results to a person or a script: data on stdout, everything else on stderr."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

if TYPE_CHECKING:
    from phasewise.tuner.plans import Phase, ServicePlan

from phasewise._files import check_writable, write_file
from phasewise._version import SCHEMA_VERSION

EXIT_FAILURE, EXIT_USAGE = 1, 2
EXIT_REFUSED = 3
"""Exit code where a command did its work, and refused some of what it was given."""
EXIT_INTERRUPTED = 130
"""128 + SIGINT, which shells report for Ctrl-C."""
EXIT_READER_LEFT = 141
"""Exit code after the reader of stdout has gone, as shells report a program that SIGPIPE ended."""
ERROR = "phasewise:"
"""The first word of a failure's line, red on a terminal."""


_STEERS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb]"
)
"""Control characters but tab and newline, and invisible characters that reorder text or break lines."""
_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""The characters of `_STEERS` that no language needs."""


def _as_json(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def printable(text: str) -> str:
    """Escape each character of `text` that would steer a terminal, as JSON writes it: names in models,
    databases and error messages come from outside, and a terminal obeys escape sequences in them."""
    return _STEERS.sub(_as_json, text)


def on_one_line(name: object) -> str:
    """Escape a name from outside for a part of a line: its line breaks and tabs too, as JSON writes them."""
    return re.sub(r"[\n\t]", _as_json, printable(str(name)))


def say(text: object = "", end: str = "\n") -> None:
    """Print a line of results on stdout."""
    print(printable(str(text)), end=end)


def say_words(text: str) -> None:
    """Print a line of results in words on stdout; on a terminal it is broken between words."""
    text = printable(text)
    print(_fold(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text)


def write_text(text: str) -> None:
    """Write a model's text to stdout at once, in UTF-8 whatever the terminal's encoding is.

    A pipe gets the text unchanged. A terminal gets no escape sequences and nothing that reorders what it
    shows; characters that join others stay, since scripts and emoji need them.
    """
    if sys.stdout.isatty():
        text = _COMMANDS.sub(_as_json, text)
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()


def print_json(fields: Mapping[str, Any]) -> None:
    """Print a JSON object on stdout, led by its schema's version. Records become objects of their fields."""
    whole = {"schema_version": SCHEMA_VERSION, **fields}
    say(json.dumps(whole, indent=2, ensure_ascii=False, default=_as_value))


def _as_value(value: Any) -> Any:
    """Convert a value without a JSON form to one that has a form."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    match value:
        case Mapping():
            return dict(value)
        case Path():
            return str(value)
    raise TypeError(f"{type(value).__name__} is not written as JSON")


def has_colours(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def note(message: str) -> None:
    """Print a progress line or remark on stderr, broken between words on a terminal; dropped if closed."""
    text = printable(message)
    try:
        if sys.stderr.isatty():
            columns = shutil.get_terminal_size().columns
            text = "\n".join(_fold(line, columns) for line in text.split("\n"))
            if text.startswith(ERROR) and has_colours(sys.stderr):
                text = f"\x1b[31m{ERROR}\x1b[0m{text.removeprefix(ERROR)}"
        print(text, file=sys.stderr, flush=True)
    except OSError:  # the terminal has gone: a server ends in order all the same
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for as long as the process)


def _fold(line: str, columns: int) -> str:
    if len(line) <= columns:
        return line
    return textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)


def note_plans(plans: Mapping[Phase, ServicePlan]) -> None:
    """Print on stderr the cores that each phase runs on, and the source of each plan."""
    for plan in plans.values():
        note(plan.describe())


def goes_on(resume: bool) -> str:
    """The sentence on how to go on after a run that ended early, whose measurements are all kept."""
    if resume:
        return "The same command goes on from here."
    return "Without --no-resume the command goes on from here; with it, it begins anew."


def fail(message: str, exit_code: int) -> NoReturn:
    """Print one line on stderr and end the process."""
    note(f"{ERROR} {' '.join(message.split())}")
    sys.exit(exit_code)


def read_stdin() -> str:
    """Read the prompt from stdin; ends the command where it is not UTF-8."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        fail(f"the prompt on stdin is not UTF-8: {error.reason} at byte {error.start}", 1)


def owns_stdout(path: Path | None, as_json: bool = False) -> bool:
    """True if a path is `-`, which is stdout, so that nothing else may be printed there. Ends the command as
    wrong usage if JSON would be printed there too."""
    is_stdout = path is not None and str(path) == "-"
    if is_stdout and as_json:
        fail("--json and the file - both mean stdout: name a file", exit_code=2)
    return is_stdout


def check_target(path: Path | None) -> None:
    """End the command, as wrong usage, if the file that its results are for surely cannot be written."""
    if path is None:
        return
    try:
        check_writable(path)
    except OSError as error:
        _fail_to_write(path, error, exit_code=2)


def write_target(path: Path, data: str) -> None:
    """Write a file that the user named, whole or not at all (`phasewise._files`); `-` is stdout."""
    try:
        if owns_stdout(path) and sys.stdout.isatty():
            write_text(data)  # a terminal must not obey it
        else:
            write_file(path, data)
    except BrokenPipeError:
        fail(f"{path} cannot be written: its reader has gone", exit_code=1)
    except OSError as error:
        _fail_to_write(path, error, exit_code=1)


def _fail_to_write(path: Path, error: OSError, exit_code: int) -> NoReturn:
    fail(f"{path} cannot be written: {error.strerror or error}", exit_code)
