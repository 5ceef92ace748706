"""The image says when it is ready, and those who stop it are told to wait for its answers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from phasewise.workflows.serve.settings import Accepting
from tests.support import ROOT
from tests.support.servers.fake_server import FakeServer, fake_server

LINES = (ROOT / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()


def is_healthy(server: FakeServer) -> bool:
    """By the image's own check, asked of this server."""
    (line,) = (line for line in LINES if line.startswith("HEALTHCHECK"))
    program, *arguments = json.loads(line.partition("CMD ")[2])
    assert program == "python"
    port = str(urlsplit(server.url).port)
    given = [argument.replace("8000", port) for argument in arguments]
    return subprocess.run([sys.executable, *given], capture_output=True, check=False).returncode == 0


def test_it_is_healthy_while_it_is_ready() -> None:
    with fake_server() as server:
        assert is_healthy(server)
        server.life.drain(30)
        assert not is_healthy(server)


def test_it_is_stopped_by_the_signal_that_drains() -> None:
    assert "STOPSIGNAL SIGTERM" in LINES


@pytest.mark.parametrize(
    "page",
    [
        "Containerfile",
        "docs/guide/installing.md",
        "docs/guide/running-as-a-service.md",
        "docs/guide/phasewise.service",
    ],
)
def test_every_stop_is_told_to_wait_longer_than_the_drain(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    waits = re.findall(
        r"(?:--stop-timeout|TimeoutStopSec=|stop_grace_period:|terminationGracePeriodSeconds:) ?(\d+)", text
    )
    runs = re.findall(r"podman run .*", text)
    assert all("--stop-timeout" in run and "-p 127.0.0.1:" in run for run in runs)
    assert waits
    assert all(int(seconds) > Accepting().drain_s for seconds in waits)


def _instructions() -> list[tuple[str, str]]:
    """Every instruction of the file with what follows it."""
    lines = [line.strip() for line in LINES if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines]


def test_what_runs_is_neither_root_nor_a_shell() -> None:
    instructions = _instructions()
    users = [rest for name, rest in instructions if name == "USER"]

    assert users
    assert all(user.isdecimal() and int(user) > 0 for user in users)
    assert all(json.loads(rest) for name, rest in instructions if name in ("ENTRYPOINT", "CMD"))


UNIT = ROOT / "docs" / "guide" / "phasewise.service"


def _unit() -> dict[str, dict[str, list[str]]]:
    """The settings of the unit, by section; one that is repeated has several values."""
    sections: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] = {}
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            section.setdefault(name, []).append(value)
    return sections


def test_the_unit_s_command_is_one_that_phasewise_has() -> None:
    (command,) = _unit()["Service"]["ExecStart"]
    program, *arguments = command.split()
    asked = [sys.executable, "-m", "phasewise", *arguments, "--help"]

    assert program.endswith("/phasewise")
    assert subprocess.run(asked, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_the_unit_s_exposure_is_as_the_guide_says() -> None:
    asked = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(UNIT)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if "Unknown" in done.stderr or "unrecognized" in done.stderr:
        pytest.skip("this systemd-analyze judges no file")

    assert done.returncode == 0, done.stdout[-300:]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_knows_every_line_of_the_unit(tmp_path: Path) -> None:
    """The program is another one, for systemd asks whether it can be run."""
    (command,) = _unit()["Service"]["ExecStart"]
    text = UNIT.read_text(encoding="utf-8").replace(command.split()[0], sys.executable)
    copy = tmp_path / UNIT.name
    copy.write_text(text, encoding="utf-8")
    asked = ["systemd-analyze", "verify", "--man=no", "--generators=no", "--recursive-errors=no", str(copy)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if "unrecognized" in done.stderr:
        pytest.skip("this systemd-analyze judges no file")

    assert (done.returncode, done.stderr) == (0, "")
