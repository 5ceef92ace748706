"""Two phasewise commands that measure, started together: one waits, says for whom, and both end."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from phasewise.tuner.measurement_lock import LOCK_NAME, FileLock
from tests.cli import command
from tests.support.models.tiny_models import write_tiny_gguf
from tests.support.servers.rude_clients import until

PATIENCE_S = 120
DATABASE = "tuning.db"


def start(tmp_path: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    places = {"TMPDIR": str(tmp_path), "PHASEWISE_DB": str(tmp_path / DATABASE)}
    return command.start(*arguments, env=places)


def until_it_measures(lock: FileLock, process: subprocess.Popen[str]) -> None:
    until(
        lambda: lock.holder() == process.pid or process.poll() is not None, "it does not measure", PATIENCE_S
    )
    assert process.poll() is None, process.communicate()


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
    first = start(tmp_path, "bench", "run", model, "-p", "8", "-n", "8", "-r", "20")
    until_it_measures(FileLock(tmp_path / LOCK_NAME), first)
    first.send_signal(signal.SIGSTOP)
    waiting = start(tmp_path, *(str(model) if word == "MODEL" else word for word in second))
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
