"""Schemas that others draw or publish: few here, a thousand by tests/soak/drawn_schemas.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.soak.drawn_schemas", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
def test_schemas_of_hypothesis_jsonschema_keep_the_bounds() -> None:
    done = run("--drawn", "20")

    assert done.returncode == 0, done.stdout + done.stderr
    if done.stdout.startswith("skip"):
        pytest.skip(done.stdout.strip())
    assert done.stdout.startswith("ok   schemas of hypothesis-jsonschema: ")


def test_a_suite_is_read_from_a_checkout(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "draft7"
    folder.mkdir(parents=True)
    (folder / "one.json").write_text('[{"schema": {"type": "string"}}, {"schema": {"type": "nothing"}}]')

    done = run("--suite", str(tmp_path))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "2, 1 answered, 1 refused" in done.stdout


def test_a_suite_that_is_not_there_is_skipped_with_the_reason(tmp_path: Path) -> None:
    done = run("--suite", str(tmp_path / "nowhere"))

    assert done.returncode == 0
    assert "is no checkout of it" in done.stdout
