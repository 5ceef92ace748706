"""`phasewise serve` as a process of its own, and what the kernel and /metrics tell about it."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.soak import raw_http
from tests.support.servers.ports import reserved_port

DEFAULT_MODEL = "smollm2-135m-instruct"
TINY = "tiny"
PHASEWISE = (sys.executable, "-m", "phasewise")
START_LIMIT_S = 120.0
_LEAVE_AGAIN_S = 0.5
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


def model_reference(name: str, folder: Path) -> str:
    """The argument of `serve`: a name that it knows, or the file of a tiny model, written to `folder`."""
    if name != TINY:
        return name
    from tests.support.models.tiny_models import TinyShape, write_tiny_gguf

    shape = TinyShape(n_layers=4, hidden=128, ffn=256, n_heads=8, n_kv_heads=4, context_length=4096)
    path = folder / "tiny.gguf"
    return str(path if path.exists() else write_tiny_gguf(path, shape=shape))


def own_cache(name: str, folder: Path) -> dict[str, str]:
    """An environment in which a model that goes with `folder` is packed there, not among the user's own."""
    return {"PHASEWISE_CACHE": str(folder / "cache")} if name == TINY else {}


class ServerProcess:
    """A server on a free port of 127.0.0.1, ready when `with` has been entered; killed when it is left.

    before: what the command line begins with (`unshare` and the like, ending in `exec`).
    """

    def __init__(
        self,
        model: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> None:
        self.port = reserved_port()
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by __exit__)
        command = [*before, *PHASEWISE, "serve", model, "--port", str(self.port), *arguments]
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, env={**os.environ, **(environment or {})}
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def __enter__(self) -> ServerProcess:
        try:
            self.wait_until(lambda: self.status("/health") == 200, START_LIMIT_S, "does not become healthy")
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.log.close()

    # ---- what it says ------------------------------------------------------------------------------------

    def ask(self, method: str, path: str, body: object = None) -> raw_http.Reply:
        return asyncio.run(raw_http.ask(self.port, method, path, body))

    def status(self, path: str) -> int | None:
        """Status of a GET; None while the server does not answer."""
        try:
            return self.ask("GET", path).status
        except (ConnectionError, OSError):
            return None

    def metrics(self) -> dict[str, float]:
        """By name with labels, as /metrics writes them."""
        return read_metrics(self.ask("GET", "/metrics"))

    def said(self) -> str:
        """All that it has written so far."""
        self.log.seek(0)
        return self.log.read()

    # ---- what the kernel says ----------------------------------------------------------------------------

    def rank_pids(self) -> list[int]:
        """The processes of its other ranks."""
        tasks = Path(f"/proc/{self.pid}/task")
        children = [int(pid) for task in tasks.iterdir() for pid in _read(task / "children").split()]
        return [pid for pid in children if "rank_worker" in _read(Path(f"/proc/{pid}/cmdline"))]

    def n_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def n_shared_mappings(self) -> int:
        return _read(Path(f"/proc/{self.pid}/maps")).count("memfd:phasewise-")

    def rss_mib(self) -> float:
        """Resident memory of the server's own process."""
        return int(_read(Path(f"/proc/{self.pid}/statm")).split()[1]) * _PAGE_MIB

    # ---- what is done to it ------------------------------------------------------------------------------

    def wait_until(self, holds: Callable[[], bool], limit_s: float, otherwise: str) -> float:
        """Seconds until `holds`. RuntimeError saying `otherwise`, and the log, if that takes too long."""
        began = time.monotonic()
        while not holds():
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"the server ended with exit code {self.process.returncode}: {self.said()}"
                )
            if time.monotonic() - began > limit_s:
                raise RuntimeError(f"the server {otherwise} within {limit_s:g} s: {self.said()}")
            time.sleep(0.02)
        return time.monotonic() - began

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def exit_code(self, limit_s: float = 60.0) -> int:
        return self.process.wait(limit_s)

    def kill(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)  # no alarm interrupts what follows: `leave_no_server`
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def read_metrics(reply: raw_http.Reply) -> dict[str, float]:
    """By name with labels, as /metrics writes them."""
    lines = (line.rsplit(" ", 1) for line in reply.body.decode().splitlines() if line and line[0] != "#")
    return {name: float(value) for name, value in lines}


def leave_no_server() -> None:
    """SIGTERM ends this program as Ctrl-C does, so that its servers end too.

    Python forgets an exit that is asked for within a callback of its own (a weak reference's, a finalizer's):
    so it is asked for again and again, until a server is left or the program ends.
    """

    def leave(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, _LEAVE_AGAIN_S)
        sys.exit(128 + signal.SIGTERM)

    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, leave)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return ""
