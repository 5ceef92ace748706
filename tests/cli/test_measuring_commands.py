"""Two phasewise commands that measure, started together: one waits, says for whom, and both end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import command
from tests.support.models.tiny_models import write_tiny_gguf

PATIENCE_S = 120
DATABASE = "tuning.db"


STOPS_ITSELF = """
import os, signal
from phasewise import __main__
from phasewise.tuner.measurement_lock import FileLock

wait = FileLock._wait

def wait_and_stop(self, deadline_s):
    FileLock._wait = wait
    is_ours = wait(self, deadline_s)
    os.kill(os.getpid(), signal.SIGSTOP)
    return is_ours

FileLock._wait = wait_and_stop
__main__.main()
"""
"""`phasewise` that is stopped, as by another process, when its first turn to measure begins."""


def places_in(tmp_path: Path) -> dict[str, str]:
    return {"TMPDIR": str(tmp_path), "PHASEWISE_DB": str(tmp_path / DATABASE)}


def start_and_stop(tmp_path: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    """A command that measures and does not go on before SIGCONT."""
    (tmp_path / "phasewise").write_text(STOPS_ITSELF)
    words = [sys.executable, tmp_path / "phasewise", *arguments]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | places_in(tmp_path)
    )
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), process.communicate()
    return process


@pytest.mark.slow
@pytest.mark.parametrize(
    "second",
    [
        pytest.param(("bench", "run", "MODEL", "-p", "4", "-n", "", "-r", "1"), marks=pytest.mark.smoke),
        ("bench", "machine", "--threads", "1"),
        ("bench", "kernels", "--shape", "64,64", "--m", "1", "-r", "1"),
        ("tune-kernels", "--shapes", "64,64", "--format", "f32", "--max-m", "1", "--budget", "8s"),
        ("tune-config", "MODEL", "--lengths", "fixed:8/8", "--budget", "8s", "--cores", "0"),
    ],
    ids=lambda second: " ".join(second[:2]),
)
def test_the_second_waits_says_for_whom_and_both_end(tmp_path: Path, second: tuple[str, ...]) -> None:
    """The first is stopped while it measures, so that the second has to wait however fast the machine is."""
    model = tmp_path / "tiny.gguf"
    write_tiny_gguf(model)
    first = start_and_stop(tmp_path, "bench", "run", model, "-p", "8", "-n", "8", "-r", "20")
    words = [str(model) if word == "MODEL" else word for word in second]
    waiting = command.start(*words, env=places_in(tmp_path))
    try:
        assert waiting.stderr is not None
        told = next((line for line in waiting.stderr if line.startswith("waiting for")), "")
    finally:
        first.send_signal(signal.SIGCONT)
    ends = [process.communicate(timeout=PATIENCE_S) for process in (first, waiting)]

    assert told.startswith(f"waiting for process {first.pid} ("), ends
    assert "bench run" in told
    assert "waited " in ends[1][1]
    assert (first.returncode, waiting.returncode) == (0, 0), ends
