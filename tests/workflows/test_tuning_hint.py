"""The hint at tuning: once for each machine, and only where no tuning database is."""

from __future__ import annotations

from pathlib import Path

import pytest

from phasewise.workflows.opening.open_model import hint_at_tuning


def hints(db: Path, times: int = 1) -> list[str]:
    said: list[str] = []
    for _ in range(times):
        hint_at_tuning("tiny", str(db), said.append)
    return said


def test_it_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    (said,) = hints(tmp_path / "none.db", times=3)

    assert "phasewise tune-kernels tiny" in said


def test_nothing_is_said_beside_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "tuned.db").touch()

    assert hints(tmp_path / "tuned.db") == []


def test_where_it_cannot_be_remembered_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")

    assert hints(tmp_path / "none.db", times=2) == []
