"""`eval`, `replay` and the Python API keep the plans of their start, and say so where a cpuset changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)
import phasewise
from phasewise.workflows.evaluate.run import evaluate
from phasewise.workflows.evaluate.settings import EvalSettings
from phasewise.workflows.opening import kept_cores
from phasewise.workflows.options import ModelCores
from phasewise.workflows.replay.run import replay_files
from tests.support.models.tiny_models import TinyShape, write_calibration, write_tiny_gguf

LINE = "this process may use core 0 now: its plans stay those of its start"

Run = Callable[[str, str, Path, list[str]], object]


def evaluated(model: str, db: str, folder: Path, lines: list[str]) -> object:
    text = write_calibration(folder / "text.txt")
    return evaluate(model, EvalSettings(text, context=64, chunks=2), db, lines.append)


def replayed(model: str, db: str, folder: Path, lines: list[str]) -> object:
    receipts = folder / "receipts.json"
    receipts.write_text('[{"no": "receipt"}, {"nor": "this"}]')
    return replay_files([receipts], model, placement=ModelCores(db=db), report=lines.append)


def generated(model: str, db: str, folder: Path, lines: list[str]) -> object:
    opened = phasewise.open_model(model, db=db, report=lines.append)
    return [opened.generate("a", 2), opened.generate("a", 2)]


@pytest.mark.parametrize("run", [evaluated, replayed, generated])
def test_a_change_is_told_once(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, shape=TinyShape(context_length=256))
    masks, lines = itertools.chain([0b11], itertools.repeat(0b1)), list[str]()
    monkeypatch.setattr(kept_cores, "cgroup_cpuset", lambda _root: next(masks))
    monkeypatch.setattr(kept_cores, "cgroup_quota", lambda _root: None)

    run(str(path), str(tmp_path / "tuned.db"), tmp_path, lines)

    assert lines.count(LINE) == 1
