"""The process of one device's worker, as the front's event loop sees it, from its start to the next one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from typing import Any

from phasewise._json import read_json
from phasewise.serving.embedding.protocol import (
    HEAD,
    PROTOCOL_VERSION,
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
from phasewise.serving.processes.children import END_S, end_children
from phasewise.serving.processes.secrets import environment_for_children

log = logging.getLogger(__name__)

COMMAND = ("-P", "-m", "phasewise.serving.embedding.worker")
START_S = 300.0
MOST_SAID_BYTES = 500


class WorkerProcess:
    """A process, started here. `wait_until_ready` blocks; all after `attach` is for one event loop."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        ours, theirs = socket.socketpair()
        with theirs:
            command = spec.command or (sys.executable, *COMMAND)
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), spec.to_json()],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment_for_children(),
            )
        if spec.kind != "cpu":  # whose own threads are pinned one by one
            with contextlib.suppress(OSError):  # it has ended, which the next read says
                os.sched_setaffinity(self._process.pid, spec.cores)
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
        """Wait for the worker's READY frame. RanksError, saying why, where the worker cannot start."""
        self._socket.settimeout(timeout_s)
        try:
            with self._socket.makefile("rb", buffering=0) as file:
                got = read_frame(lambda n: _exactly(file, n))
        except (OSError, ProtocolError) as error:
            got, reason = None, f"{error}"
        else:
            reason = "its process has ended"
        if got is None or got.kind is not WorkerFrameKind.READY:
            said = _printable(got.body) if got is not None else reason
            self.kill()
            raise RanksError(f"the embedding worker of {self.spec.device} cannot start: {said}")
        self._socket.setblocking(False)
        self.facts = self._facts_of(got.body)

    def _facts_of(self, body: bytes) -> dict[str, Any]:
        """Parse the READY frame's facts. RanksError for a worker that speaks another protocol."""
        try:
            facts = read_json(body)
            version = facts["protocol"]
        except (ValueError, KeyError, TypeError):
            facts, version = {}, None
        if version != PROTOCOL_VERSION:
            self.kill()
            raise RanksError(
                f"the embedding worker of {self.spec.device} cannot start: it speaks protocol"
                f" {version!r:.20}, and version {PROTOCOL_VERSION} is needed"
            )
        return dict(facts)

    async def attach(self) -> None:
        """Read the worker's answers on the running event loop from now on."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=1 << 20)
        self._reading = asyncio.ensure_future(self._read(reader))

    async def embed(self, body: bytes) -> Floats:
        """Vectors of a batch (`inputs_to_bytes`). RanksError: the worker is lost; StepFailed: it refuses."""
        if self._writer is None or self._reading is None or self._reading.done():
            raise RanksError(f"the embedding worker of {self.spec.device} is lost")
        batch, self._next_batch = self._next_batch, self._next_batch + 1
        answer: asyncio.Future[Floats] = asyncio.get_running_loop().create_future()
        self._answers[batch] = answer
        self._writer.write(frame(WorkerFrameKind.EMBED, batch, body))
        return await answer

    async def lost(self) -> None:
        """Return once the process can no longer be used."""
        if self._reading is not None:
            await asyncio.wait([self._reading])

    def end_now(self) -> None:
        """Kill the process without blocking; callers that wait for answers learn that from the socket."""
        if self._process.poll() is None:
            self._process.kill()

    def kill(self) -> None:
        """Close the socket and kill the process at once."""
        self._socket.close()
        self.end_now()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)

    def close(self) -> None:
        """End the process: close its socket, and kill it where it does not end by itself."""
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._writer.close()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        end_children([self._process])
        self._socket.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                n_bytes, kind, batch = head_of(await reader.readexactly(HEAD.size))
                self._deliver(WorkerFrame(kind, batch, await reader.readexactly(n_bytes)))
        except (asyncio.IncompleteReadError, OSError):
            pass
        except ProtocolError as error:
            log.error("the embedding worker of %s does not keep to the protocol: %s", self.spec.device, error)
        finally:
            if self._writer is not None:
                self._writer.close()  # or the loop would watch a socket that `kill` has closed
            loss = RanksError(f"the embedding worker of {self.spec.device} was lost")
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(loss)
            self._answers.clear()

    def _deliver(self, got: WorkerFrame) -> None:
        """Give a batch its vectors. ProtocolError, and the batch keeps waiting, for another width."""
        answer = self._answers.get(got.batch)
        if answer is None:
            return
        if not answer.done():
            if got.kind is WorkerFrameKind.VECTORS:
                vectors = vectors_from_bytes(got.body)
                if self.spec.width not in (None, vectors.shape[1]):
                    raise ProtocolError(f"vectors of {vectors.shape[1]} numbers for {self.spec.width}")
                answer.set_result(vectors)
            else:
                log.error("%s failed a batch: %s", self.spec.device, _printable(got.body))
                failed = f"the embedding worker of {self.spec.device} failed: the server's log says why"
                answer.set_exception(StepFailed(failed))
        del self._answers[got.batch]


def _printable(body: bytes) -> str:
    """A worker's message for a log: one line, with characters that cannot be printed replaced."""
    said = body[:MOST_SAID_BYTES].decode(errors="replace")
    return "".join(character if character.isprintable() else " " for character in said)


def _exactly(file: Any, n_bytes: int) -> bytes:
    data = b""
    while len(data) < n_bytes and (more := file.read(n_bytes - len(data))):
        data += more
    return data
