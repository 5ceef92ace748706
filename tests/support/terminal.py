"""Commands of ours under a terminal of 80 columns, and what such a terminal shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.servers.warm import Forked

COLUMNS, LINES = 80, 24
_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)")


@dataclass(frozen=True)
class Place:
    """The folder and the environment in which commands run."""

    folder: Path
    environment: Mapping[str, str]

    def in_terminal(
        self, arguments: Sequence[str], *, until: str = "", no_color: bool = False, limit_s: float = 120.0
    ) -> tuple[int, str]:
        """Exit code, and all that the terminal got. `until`: the command is interrupted once this is said."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", LINES, COLUMNS, 0, 0))
        of_terminal = {"TERM": "xterm-256color"} | ({"NO_COLOR": "1"} if no_color else {})
        return self._run(arguments, of_terminal, (ours, theirs), until, limit_s)

    def in_pipe(self, arguments: Sequence[str], limit_s: float = 120.0) -> tuple[int, str]:
        """Exit code, and what came on stdout and stderr."""
        return self._run(arguments, {}, os.pipe(), "", limit_s)

    def _run(
        self,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        ends: tuple[int, int],
        until: str,
        limit_s: float,
    ) -> tuple[int, str]:
        """ends: descriptors that we read, and that the command writes."""
        ours, theirs = ends
        with open(os.devnull) as nothing:
            streams = (nothing.fileno(), theirs, theirs)
            process = Forked(arguments, {**self.environment, **variables}, streams, folder=self.folder)
        os.close(theirs)
        said, end_s = b"", time.monotonic() + limit_s
        try:
            while data := _read(ours, end_s):
                said += data
                if until and until.encode() in said:
                    process.send_signal(signal.SIGINT)
                    until = ""
            return process.wait(60), said.decode("utf-8", "replace")
        finally:
            process.kill()
            process.wait()
            os.close(ours)


def _read(descriptor: int, end_s: float) -> bytes:
    """The next bytes; none at the end, or at `end_s`, a time of the monotonic clock."""
    if not select.select([descriptor], [], [], max(0.0, end_s - time.monotonic()))[0]:
        return b""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # the other side is closed
        return b""


def too_wide(said: str) -> list[str]:
    """Lines that a terminal would have to wrap."""
    return [
        shown
        for line in _SEQUENCE.sub("", said).replace("\r", "\n").split("\n")
        if sum(map(_width, shown := line)) > COLUMNS
    ]


def _width(sign: str) -> int:
    if unicodedata.combining(sign) or unicodedata.category(sign) in ("Cf", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(sign) in "WF" else 1
