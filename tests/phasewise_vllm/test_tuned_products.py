"""The cores and schedules of a process of vLLM's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from phasewise.cython_kernels import _native, packing  # noqa: E402
from phasewise.kerneldb.records import Problem, Schedule  # noqa: E402
from phasewise.topology import read_machine  # noqa: E402
from phasewise.torch.shared_threads import torch_team  # noqa: E402
from phasewise.tuner.plans import machine_key  # noqa: E402
from phasewise.vllm import methods  # noqa: E402
from tests.support.tuned_here import keep_in_use, timed  # noqa: E402


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> Any:
    methods._lookup.cache_clear()
    yield
    methods._lookup.cache_clear()


def weight(n: int = 48, k: int = 64) -> Any:
    return packing.pack_dense(torch.ones(n, k).numpy(), "bf16")


def test_the_cores_are_those_that_the_threads_run_on() -> None:
    machine = read_machine()
    first = machine.allowed_cores()[0][0]

    assert methods.cores_of([5, 3], machine) == (3, 5)
    assert methods.cores_of([first, first][:1], machine) == (first,)
    assert methods.cores_of([-1], machine) == (first,)


def test_threads_that_move_have_as_many_cores() -> None:
    machine = read_machine()
    cores = tuple(core[0] for core in machine.allowed_cores())

    assert methods.cores_of([cores[0]] * len(cores), machine) == cores


def test_without_a_database_all_runs_by_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PHASEWISE_DB", str(tmp_path / "none.db"))

    assert methods.row_schedules(weight()) == (None, 1, [])
    assert not (tmp_path / "none.db").exists()


def test_a_database_that_cannot_be_read_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.db").write_text("no database")
    monkeypatch.setenv("PHASEWISE_DB", str(tmp_path / "broken.db"))

    assert methods.row_schedules(weight()) == (None, 1, [(methods.MOST_ROWS, None)])
    assert sum("goes on with default plans and schedules" in line for line in caplog.messages) == 1


def test_the_schedules_in_use_on_these_cores_are_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For the rows that they were tuned for; others run by the default."""
    packed, db = weight(), tmp_path / "tuned.db"
    machine = read_machine()
    cores = methods.cores_of(torch_team().observed_cpus(), machine)
    default = {**_native.default_schedule(packed, 4, len(cores)), "block_k": 32}
    schedule = Schedule(**default, compute_path=_native.compute_paths("bf16")[0], k_parts=1)
    row = timed(Problem("gemm", "bf16", 48, 64, 4), schedule, machine=machine_key(machine, cores))
    keep_in_use(db, [row])
    monkeypatch.setenv("PHASEWISE_DB", str(db))
    monkeypatch.setattr(methods, "cores_of", lambda *_: cores)

    path, k_parts, ranges = methods.row_schedules(packed)

    assert (path, k_parts) == (schedule.compute_path, 1)
    assert [last for last, walk in ranges if walk is not None and walk["block_k"] == 32] == [4]
