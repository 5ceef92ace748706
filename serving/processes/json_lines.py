"""All that a server writes to stderr, as JSON: a line of its own, of a rank or of an instance is an object.

A process stands between them and stderr, so that also the last words of a process that crashes are told: it
ends after the last one that could write.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from typing import BinaryIO

_MOST_BYTES = 64 * 1024
"""The most bytes of a line; a longer one is written as several."""


def make_stderr_json() -> None:
    """From now on, for this process and those that it starts; where Python's stderr is a file of its own."""
    try:
        descriptor = sys.stderr.fileno()
    except OSError:
        return
    read_end, write_end = os.pipe()
    subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=read_end,
        stdout=descriptor,
        start_new_session=True,  # a terminal's Ctrl-C is for the server
    )
    os.close(read_end)
    os.dup2(write_end, descriptor)
    os.close(write_end)


def as_json(line: bytes, now: datetime) -> bytes:
    """The object of a line; a line of the access log is one already."""
    try:
        if isinstance(json.loads(line), dict):
            return line.rstrip(b"\n") + b"\n"
    except (ValueError, RecursionError):
        pass
    message = line.decode("utf-8", "backslashreplace").rstrip("\r\n")
    level = "error" if message.startswith("phasewise: ") else "info"
    if message.lower().startswith("warning: "):
        level, message = "warning", message[len("warning: ") :]
    instant = now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"at": instant, "level": level, "message": message}).encode() + b"\n"


def copy_lines(lines: BinaryIO, to: BinaryIO) -> None:
    """Until nobody can write any more. Empty lines say nothing."""
    while line := lines.readline(_MOST_BYTES):
        if line.strip():
            to.write(as_json(line, datetime.now(UTC)))
            to.flush()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    copy_lines(sys.stdin.buffer, sys.stdout.buffer)
