"""`phasewise serve` as a process that a test talks to."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from tests.support.servers.rude_clients import until
from tests.support.servers.warm import Forked

LONG = {"max_tokens": 50_000, "extra_body": {"ignore_eos": True}}


@dataclass
class Server:
    """A running `phasewise serve`."""

    process: Forked | subprocess.Popen[bytes]
    url: str
    lines: list[str]

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def api(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=60)

    def stream(self) -> Any:
        """A stream that goes on and on, its first piece read."""
        stream = self.api().completions.create(model="tiny", prompt="a", stream=True, **LONG)  # type: ignore[call-overload]
        next(iter(stream))
        return stream

    def wait_until_said(self, words: str) -> None:
        """Until one of its lines, since the start, has these words."""
        until(lambda: any(words in line for line in self.lines), f"{words!r} is not said")

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


def own_places(home: Path) -> dict[str, str]:
    """An environment with nothing of the user's, in which only what the server itself says is on stderr."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PHASEWISE_")}
    return inherited | {
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_DATA_HOME": str(home / "data"),
        "PHASEWISE_CONFIG": "/dev/null",
        "PHASEWISE_LOG_LEVEL": "off",
    }


@contextlib.contextmanager
def serving(
    model: Path | None,
    environment: dict[str, str],
    *arguments: object,
    exec_anew: bool = False,
    hangup: bool = True,
) -> Iterator[Server]:
    """model: None: `arguments` name a folder. exec_anew: a process whose command line and environment /proc
    shows. hangup: SIGHUP is not ignored. The port is a free one where none is named.
    """
    command = ("serve", *([] if model is None else [str(model)]), *map(str, arguments))
    surroundings = {"PHASEWISE_KV_BUDGET": "256M", "PHASEWISE_PORT": "0", **environment}
    said, stderr = os.pipe()
    process: Forked | subprocess.Popen[bytes]
    if exec_anew:
        whole = [sys.executable, "-m", "phasewise", *command]
        process = subprocess.Popen(whole, stderr=stderr, env=surroundings)
    else:
        process = Forked(command, surroundings, (0, 1, stderr), hangup=hangup)
    os.close(stderr)
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        with open(said, encoding="utf-8") as stderr:
            for line in stderr:
                lines.append(line.rstrip("\n"))
                if "listening on " in line:
                    ready.set()
        ready.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert ready.wait(120), lines
        listening = next(filter(None, (re.search(r'listening on ([^\s"]+)', line) for line in lines)), None)
        assert listening, lines
        yield Server(process, listening[1], lines)
    finally:
        process.kill()
        process.wait()
        reader.join()
