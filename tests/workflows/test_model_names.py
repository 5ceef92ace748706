"""Completion of a MODEL: names and files that begin with what was typed, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from phasewise.serving.loaders.fetching.registry import KNOWN, KNOWN_ON_HUB
from phasewise.workflows.opening.model_names import completions


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here" / "smaller").mkdir(parents=True)
    for name in ("small.gguf", "smell.txt", ".hidden.gguf", "smaller/one.gguf"):
        (tmp_path / "here" / name).touch()
    monkeypatch.chdir(tmp_path / "here")


def test_names_come_before_files_and_other_files_do_not_come() -> None:
    names = sorted(name for name in {*KNOWN, *KNOWN_ON_HUB} if name.startswith("sm"))

    assert completions("sm") == [*names, "small.gguf", "smaller/"]
    assert completions("smaller/") == ["smaller/one.gguf"]
    assert completions("./sma") == ["./small.gguf", "./smaller/"]
    assert completions(".h") == [".hidden.gguf"]
    assert set(completions("")) == {*KNOWN, *KNOWN_ON_HUB, "small.gguf", "smaller/"}


@pytest.mark.parametrize("begun", ["no-such-folder/", "no-such-model", "small.gguf/x", "\x00/"])
def test_what_nothing_begins_with_has_no_completion(begun: str) -> None:
    assert completions(begun) == []
