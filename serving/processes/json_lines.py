"""JSON lines on stderr: each line that a server, its ranks or its instances write becomes an object. A
separate process converts the lines, so that the last words of a process that crashes are kept too; it ends
after the last process that could write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from typing import BinaryIO

from phasewise._json import read_json

_MOST_BYTES = 64 * 1024
"""Most bytes of a line; a longer line is written as several."""


def make_stderr_json() -> None:
    """Convert stderr of this process and its children to JSON lines, unless it has no file descriptor."""
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
    """The JSON object of a line; a line that is an object already (of the access log) stays as it is."""
    try:
        if isinstance(read_json(line), dict):
            return line.rstrip(b"\n") + b"\n"
    except ValueError:
        pass
    message = line.decode("utf-8", "backslashreplace").rstrip("\r\n")
    level = "error" if message.startswith("phasewise: ") else "info"
    if message.lower().startswith("warning: "):
        level, message = "warning", message[len("warning: ") :]
    instant = now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"at": instant, "level": level, "message": message}).encode() + b"\n"


def copy_lines(lines: BinaryIO, to: BinaryIO) -> None:
    """Convert lines until no process can write any more; empty lines are dropped."""
    while line := lines.readline(_MOST_BYTES):
        if line.strip():
            to.write(as_json(line, datetime.now(UTC)))
            to.flush()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    copy_lines(sys.stdin.buffer, sys.stdout.buffer)
