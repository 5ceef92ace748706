"""A system without memory, threads or files is one line, from whatever thread and log it comes."""

from __future__ import annotations

import errno
import logging
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from phasewise.cli.main import _thread_ended, _ToStderr
from phasewise.serving.errors import shortage_of
from tests.support.models.tiny_models import write_tiny_gguf
from tests.support.servers.rude_clients import until

SHORTAGES = {
    "memory": MemoryError(),
    "files": OSError(errno.EMFILE, "Too many open files"),
    "thread": RuntimeError("can't start new thread"),
    "fork": BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    "library": ImportError("libx.so: failed to map segment from shared object"),
}
BUGS = {"value": ValueError("x"), "runtime": RuntimeError("x"), "missing": FileNotFoundError(2, "none")}


def chained(error: BaseException) -> BaseException:
    try:
        raise ValueError("on the way") from error
    except ValueError as outer:
        return outer


@pytest.mark.parametrize("name", SHORTAGES)
def test_a_shortage_is_known_by_itself_and_as_a_cause(name: str) -> None:
    for error in (SHORTAGES[name], chained(SHORTAGES[name])):
        line = shortage_of(error)
        assert line is not None
        assert "\n" not in line


@pytest.mark.parametrize("name", BUGS)
def test_nothing_else_is_taken_for_one(name: str) -> None:
    assert shortage_of(BUGS[name]) is None
    assert shortage_of(chained(BUGS[name])) is None


def test_any_error_is_one_where_no_memory_is_left() -> None:
    """Imports fail in words of their own then, such as "unknown encoding: idna"."""
    program = """
import re, resource, sys
from phasewise.serving.errors import shortage_of
error = LookupError("unknown encoding: idna")
before = shortage_of(error)
in_use = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (in_use + (2 << 20), resource.RLIM_INFINITY))
print(before, shortage_of(error), sep="; ")
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.startswith("None; there is not enough memory")


@pytest.mark.parametrize("name", [*SHORTAGES, *BUGS])
def test_logs_and_threads_keep_tracebacks_for_bugs_alone(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = {**SHORTAGES, **BUGS}[name]
    record = logging.LogRecord("asyncio", logging.ERROR, "", 0, "accept failed\nsocket: 7", (), None)
    record.exc_info = (type(error), error, error.__traceback__)
    _ToStderr().handle(record)
    logged = capsys.readouterr().err
    _thread_ended(
        threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
    )
    told = capsys.readouterr().err

    for said in (logged, told):
        assert (len(said.splitlines()) == 1) == (name in SHORTAGES)
    assert "accept failed" in logged


@pytest.mark.slow
@pytest.mark.parametrize("limit_mib", [60, 200, 260, 320, 360])
def test_a_server_that_is_given_too_little_memory_has_no_traceback(tmp_path: Path, limit_mib: int) -> None:
    """It serves, with less than usual, or ends; a library may still abort in its own words."""
    model, told = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "told"
    limit = limit_mib << 20
    command = [sys.executable, "-m", "phasewise", "serve", str(model), "--port", "0"]
    with told.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stderr=stderr,
            env={
                "PHASEWISE_CACHE": str(tmp_path),
                "HOME": str(tmp_path),
                "PATH": "",
                "PYTHONPATH": ":".join(sys.path),
            },
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        )
    until(lambda: process.poll() is not None or "listening on" in told.read_text(), "it does neither")
    process.terminate()
    process.wait(60)
    said = told.read_text()

    assert "Traceback" not in said
    assert said
