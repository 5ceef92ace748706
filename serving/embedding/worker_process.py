"""The process of one device's worker, as the front's event loop sees it: started, asked, lost, started
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from typing import Any

from phasewise.serving.embedding.protocol import (
    HEAD,
    Floats,
    ProtocolError,
    WorkerFrame,
    WorkerFrameKind,
    frame,
    head_of,
    read_frame,
    vectors_from_bytes,
)
from phasewise.serving.embedding.worker import WorkerSpec
from phasewise.serving.errors import RanksError, StepFailed
from phasewise.serving.processes.secrets import environment_for_children

COMMAND = ("-P", "-m", "phasewise.serving.embedding.worker")
START_S = 300.0
END_S = 3.0


class WorkerProcess:
    """Starts with the object; `wait_until_ready` blocks, everything after `attach` belongs to one event
    loop.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *COMMAND, str(theirs.fileno()), spec.to_json()],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment_for_children(),
            )
        self._socket = ours
        self._answers: dict[int, asyncio.Future[Floats]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._next_batch = 1
        self.facts: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, timeout_s: float = START_S) -> None:
        """RanksError, saying why, where it cannot start."""
        self._socket.settimeout(timeout_s)
        try:
            with self._socket.makefile("rb", buffering=0) as file:
                got = read_frame(lambda n: _exactly(file, n))
        except (OSError, ProtocolError) as error:
            got, reason = None, f"{error}"
        else:
            reason = "its process has ended"
        if got is None or got.kind is not WorkerFrameKind.READY:
            said = got.body.decode(errors="replace") if got is not None else reason
            self.kill()
            raise RanksError(f"the embedding worker of {self.spec.device} cannot start: {said}")
        self._socket.setblocking(False)
        self.facts = json.loads(got.body)

    async def attach(self) -> None:
        """Read its answers on this loop from now on."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=1 << 20)
        self._reading = asyncio.ensure_future(self._read(reader))

    async def embed(self, body: bytes) -> Floats:
        """Vectors of a batch (`protocol.inputs_to_bytes`). RanksError: the worker is lost; StepFailed: it
        says no.
        """
        if self._writer is None or self._reading is None or self._reading.done():
            raise RanksError(f"the embedding worker of {self.spec.device} is lost")
        batch, self._next_batch = self._next_batch, self._next_batch + 1
        answer: asyncio.Future[Floats] = asyncio.get_running_loop().create_future()
        self._answers[batch] = answer
        self._writer.write(frame(WorkerFrameKind.EMBED, batch, body))
        return await answer

    async def lost(self) -> None:
        """Returns once the process is of no more use."""
        if self._reading is not None:
            await asyncio.wait([self._reading])

    def kill(self) -> None:
        """End it, whatever it does."""
        self._socket.close()
        if self._process.poll() is None:
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)

    def close(self) -> None:
        """End it: closing the socket tells it so, and it is killed where it does not listen."""
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._writer.close()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + END_S
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        self.kill()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                n_bytes, kind, batch = head_of(await reader.readexactly(HEAD.size))
                self._deliver(WorkerFrame(kind, batch, await reader.readexactly(n_bytes)))
        except (asyncio.IncompleteReadError, OSError, ProtocolError):
            pass
        finally:
            loss = RanksError(f"the embedding worker of {self.spec.device} was lost")
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(loss)
            self._answers.clear()

    def _deliver(self, got: WorkerFrame) -> None:
        answer = self._answers.pop(got.batch, None)
        if answer is None or answer.done():
            return
        if got.kind is WorkerFrameKind.VECTORS:
            answer.set_result(vectors_from_bytes(got.body))
        else:
            answer.set_exception(StepFailed(f"{self.spec.device}: {got.body.decode(errors='replace')}"))


def _exactly(file: Any, n_bytes: int) -> bytes:
    data = b""
    while len(data) < n_bytes and (more := file.read(n_bytes - len(data))):
        data += more
    return data
