"""`phasewise` in processes forked from one that has imported it: all tests together pay for the imports once.

A forked process differs from `python -m phasewise` only in what it does not do again, and in its command line
and environment as /proc shows them. Tests of those, or of how a program begins, start it themselves.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from tests.support import ROOT

READ_AT_IMPORT = ("PHASEWISE_CORE", "PHASEWISE_ISA")
"""Variables that the kernels read while they are imported."""
_IMPORTED = (
    *("llguidance", "numpy.random", "pydantic.v1", "phasewise.cli.commands.chat"),
    *("phasewise.cli.commands.generate", "phasewise.cli.commands.serve", "phasewise.cli.main"),
    *("phasewise.kerneldb.store", "phasewise.serving.engine.engine_host"),
    *("phasewise.serving.loaders.encoders", "phasewise.serving.loaders.families"),
    *("phasewise.serving.loaders.fetching.registry", "phasewise.serving.service"),
    *("phasewise.tuner.predictor.live", "phasewise.workflows.generate.run"),
    *("phasewise.workflows.opening.drafts", "phasewise.workflows.opening.open_model"),
    *("phasewise.workflows.opening.tuned_schedules", "phasewise.workflows.serve.instance_process"),
    "phasewise.workflows.serve.run",
)


class Forked:
    """A running command, a session of its own: what tests use of subprocess.Popen.

    streams: descriptors of its stdin, stdout and stderr. hangup: SIGHUP is not ignored.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        streams: tuple[int, int, int],
        *,
        folder: Path | None = None,
        hangup: bool = True,
    ) -> None:
        assert not any(environment.get(name) for name in READ_AT_IMPORT)
        self._status, status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        asked = json.dumps([*arguments]), json.dumps({**environment}), str(folder or Path.cwd()), hangup
        with status:
            _ask(json.dumps(asked).encode(), [*streams, status.fileno()])
        self.pid = int(self._status.recv(16))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = int(self._status.recv(16))
            self._status.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("phasewise", timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _ask(asked: bytes, descriptors: list[int]) -> None:
    template = _template()
    template.sendall(len(asked).to_bytes(4, "little"))
    socket.send_fds(template, [asked[:1]], descriptors)
    template.sendall(asked[1:])


@cache
def _template() -> socket.socket:
    """A connection to the process that forks, which ends with this one."""
    ours, theirs = socket.socketpair()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PHASEWISE_")}
    command = [sys.executable, "-m", __name__, str(theirs.fileno())]
    null = subprocess.DEVNULL
    process = subprocess.Popen(
        command, env=clean, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=null, stdout=null
    )
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


def _fork_as_asked(template: socket.socket) -> None:
    """Returns in each process that is to run a command, with its streams and surroundings."""
    while length := int.from_bytes(template.recv(4, socket.MSG_WAITALL), "little"):
        first, descriptors, *_ = socket.recv_fds(template, 1, 4)
        asked = json.loads(first + template.recv(length - 1, socket.MSG_WAITALL))
        if os.fork() == 0:  # whoever waits for the command, and says how it ended
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            template.close()
            *streams, status = descriptors
            pid = os.fork()
            if pid == 0:
                os.close(status)
                return _become(streams, *asked)
            _close(streams)
            os.write(status, str(pid).encode())
            os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
            os._exit(0)
        _close(descriptors)
    os._exit(0)


def _become(streams: list[int], arguments: str, environment: str, folder: str, hangup: bool) -> None:
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    _close(streams)
    os.environ.clear()
    os.environ.update(json.loads(environment))
    os.chdir(folder)
    sys.argv = ["phasewise", *json.loads(arguments)]
    _open_streams(os.environ.get("PYTHONIOENCODING", "utf-8"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL if hangup else signal.SIG_IGN)


def _open_streams(encoding: str) -> None:
    """As Python does at its start."""
    stdout_buffering = 1 if os.isatty(1) else -1
    sys.stdin = open(0, encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", stdout_buffering, encoding, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding, "backslashreplace", closefd=False)  # noqa: SIM115


def _close(descriptors: list[int]) -> None:
    for descriptor in set(descriptors):
        os.close(descriptor)


if __name__ == "__main__":
    import gc
    from importlib import import_module

    for name in _IMPORTED:
        import_module(name)
    with import_module("phasewise.kerneldb.store").open_store(":memory:"):
        pass  # SQLAlchemy has seen the models
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the tests
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    _fork_as_asked(socket.socket(fileno=int(sys.argv[1])))
    from phasewise.__main__ import main

    main()
