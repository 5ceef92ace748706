"""`make test-races` counts the runs in which a test falls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import races

FALLS_EVERY_OTHER_TIME = """
from pathlib import Path

def test_steady():
    pass

def test_racy():
    mark = Path(__file__).with_name("mark")
    if mark.exists():
        mark.unlink()
    else:
        mark.touch()
        raise AssertionError("the first is too early")
"""


@pytest.mark.slow
def test_a_test_that_falls_now_and_then_is_named_with_its_number_of_falls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(races, "KEPT", tmp_path / "kept")
    (tmp_path / "test_drawn.py").write_text(FALLS_EVERY_OTHER_TIME)
    run = ["--load", "1", "-p", "no:cacheprovider", str(tmp_path / "test_drawn.py")]

    assert races.main(["--times", "3", *run]) == 1
    assert capsys.readouterr().out == "2 of 3  test_drawn::test_racy\n"
    assert "the first is too early" in (tmp_path / "kept" / "1.txt").read_text()
    assert races.main(["--times", "1", *run]) == 0
    assert capsys.readouterr().out == "none fell in 1 runs\n"


def test_files_that_start_what_runs_beside_them_are_found() -> None:
    files = races.files_with_races()

    assert "tests/serving/http/transport/test_http_end.py" in files
    assert "tests/serving/test_sampling.py" not in files
