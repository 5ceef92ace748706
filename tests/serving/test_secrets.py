"""Keys on the command line: where /proc does not tell the memory of the arguments, nothing is overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from phasewise.serving.processes.secrets import hide_values_of


@pytest.mark.parametrize("stat", [b"", b"7 (phase) wise) S 0 0", b"7 (x) R " + b"x " * 60])
def test_an_unknown_proc_hides_nothing(monkeypatch: pytest.MonkeyPatch, stat: bytes) -> None:
    """The second is as short as that of an emulated process."""
    monkeypatch.setattr(Path, "read_bytes", lambda _path: stat)

    assert not hide_values_of("--api-key")
