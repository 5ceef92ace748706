"""The image says when it is ready, and those who stop it are told to wait for its answers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from phasewise.workflows.serve_settings import Accepting
from tests.support.fake_server import FakeServer, fake_server

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()


def is_healthy(server: FakeServer) -> bool:
    """By the image's own check, asked of this server."""
    (line,) = (one for one in LINES if one.startswith("HEALTHCHECK"))
    program, *arguments = json.loads(line.partition("CMD ")[2])
    assert program == "python"
    port = str(urlsplit(server.url).port)
    given = [one.replace("8000", port) for one in arguments]
    return subprocess.run([sys.executable, *given], capture_output=True, check=False).returncode == 0


def test_it_is_healthy_while_it_is_ready() -> None:
    with fake_server() as server:
        assert is_healthy(server)
        server.life.drain(30)
        assert not is_healthy(server)


def test_it_is_stopped_by_the_signal_that_drains() -> None:
    assert "STOPSIGNAL SIGTERM" in LINES


@pytest.mark.parametrize(
    "page", ["Containerfile", "docs/guide/installing.md", "docs/guide/running-as-a-service.md"]
)
def test_every_stop_is_told_to_wait_longer_than_the_drain(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    waits = re.findall(
        r"(?:--stop-timeout|TimeoutStopSec=|stop_grace_period:|terminationGracePeriodSeconds:) ?(\d+)", text
    )
    runs = re.findall(r"podman run .*", text)
    assert all("--stop-timeout" in run for run in runs)
    assert waits
    assert all(int(seconds) > Accepting().drain_s for seconds in waits)
