"""A first start with a remote: what fits is pulled, fought over, and used only where it is faster here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("phasewise.cython_kernels._native", reason="the kernels are not built")

from phasewise.cython_kernels._native import kernel_abi
from phasewise.kerneldb import shipped
from phasewise.kerneldb.portable import import_rows
from phasewise.kerneldb.records import (
    Comparison,
    MachineKey,
    Measurement,
    Origin,
    Problem,
    Promotion,
    Sample,
    Schedule,
)
from phasewise.kerneldb.remote_index import NAME
from phasewise.kerneldb.store import open_store
from phasewise.topology import Machine, read_machine
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.tuner.plans import machine_key
from phasewise.workflows.database.remote import push
from phasewise.workflows.database.settings import Leaving, Trust
from phasewise.workflows.errors import UsageError
from phasewise.workflows.opening import first_start
from phasewise.workflows.opening.first_start import fight_first, products_of, pull_what_fits
from phasewise.workflows.opening.open_model import OpenModel, open_model
from phasewise.workflows.opening.settings import NATIVE, Remote
from phasewise.workflows.serve import instance_process
from phasewise.workflows.serve.instance_process import InstanceSpec
from phasewise.workflows.tune_kernels.run import rounds_of_model
from tests.cli import command
from tests.support.engine_sizes import engine_size
from tests.support.models.tiny_models import tiny_gguf

MOST_S = 600.0


def check_won_here(verdicts: Sequence[Promotion], lies: Collection[tuple[Problem, Schedule]]) -> None:
    """Check that each lie came into use by a duel that proved it faster. The verdicts: this machine's own,
    oldest first. One that is in use already may stay by a duel that proves nothing."""
    in_use: dict[tuple[Problem, MachineKey], Schedule] = {}
    for row in verdicts:
        key = row.problem, row.origin.machine
        is_new = in_use.get(key) != row.schedule
        assert not is_new or (row.problem, row.schedule) not in lies or row.comparison.proves_faster
        in_use[key] = row.schedule


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STATE", "CACHE", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.setattr("phasewise.workflows.opening.first_start.user_lock", lambda *_: MeasurementLock())
    monkeypatch.setattr(shipped, "shipped_names", lambda: ())


@pytest.fixture
def model(tmp_path: Path) -> OpenModel:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf().to_bytes())
    return open_model(str(path), threads=1, db=str(tmp_path / "here.db"))


def lying_rows(opened: OpenModel, machine: Machine) -> list[Measurement | Promotion]:
    """For every product a schedule of the smallest blocks, which is slow, and a timing ten times too good."""
    rows: list[Measurement | Promotion] = []
    abi = kernel_abi("gemm")
    for tuning_round in rounds_of_model(opened, machine, [*opened.plans], 512):
        origin = Origin(machine_key(machine, tuning_round.cores), "0.1.0", 1_795_000_000_000)
        for task in tuning_round.tasks:
            for m in task.ms:
                default = task.group.default(m)
                slow: Schedule = replace(default, mr=1, panels=1, block_m=1, block_n=16, block_k=32)
                sample = Sample(slow, (10, 10, 10), 10, None, 100)
                gain = Comparison(10.0, 9.0, 11.0, 0.99, 15)
                rows.append(Measurement(task.problem(m), sample, abi, origin))
                rows.append(Promotion(task.problem(m), slow, None, gain, abi, origin))
    return rows


@pytest.fixture
def remote(tmp_path: Path, model: OpenModel) -> Remote:
    """A remote that lies, and is believed."""
    db = tmp_path / "theirs.db"
    with open_store(db) as store:
        import_rows(store, lying_rows(model, read_machine()))
    done = push(str(tmp_path / "remote"), str(db), Leaving(), Trust())
    return Remote(str(tmp_path / "remote"), done.digest)


def in_use(opened: OpenModel, db: str) -> Mapping[object, Schedule]:
    with open_store(db) as store:
        return {
            (row.problem, row.kernel_abi): row.sample.schedule
            for cores in {plan.ranks[0].cores for plan in opened.plans.values()}
            for row in store.promoted_measurements(machine_key(read_machine(), cores))
        }


@pytest.mark.slow
def test_a_lying_remote_leaves_no_slower_schedule(tmp_path: Path, model: OpenModel, remote: Remote) -> None:
    """Its claims are timed; what is in use afterwards was proven here, by duels that are on record."""
    db, said, machine = str(tmp_path / "here.db"), list[str](), read_machine()
    pull_what_fits(remote, db, MOST_S, said.append)
    assert in_use(model, db) == {}, "nothing is used unseen"
    started = fight_first(model, [model.plans], NATIVE, db, machine, MOST_S, said.append)

    assert any("timing schedules that won elsewhere" in line for line in said)
    with open_store(db) as store:
        verdicts = [row for row in store.stream(Promotion) if row.origin.verified]
        timed = {row.problem for row in store.stream(Measurement) if row.origin.verified}
    assert timed
    lies = {(row.problem, row.schedule) for row in lying_rows(model, machine) if isinstance(row, Promotion)}
    check_won_here(verdicts, lies)
    counts = products_of(started, [started.plans], db, machine)
    assert counts is not None
    assert counts.imported > 0
    assert counts.verified == counts.tuned == len({row.problem for row in verdicts})


@pytest.mark.slow
def test_no_time_is_no_duel(tmp_path: Path, model: OpenModel, remote: Remote) -> None:
    db = str(tmp_path / "here.db")
    pull_what_fits(remote, db, MOST_S, lambda _: None)
    fight_first(model, [model.plans], NATIVE, db, read_machine(), 0.0, lambda _: None)

    with open_store(db) as store:
        assert not any(row.origin.verified for row in store.stream(Measurement))


@pytest.mark.slow
def test_the_same_index_is_read_once(tmp_path: Path, model: OpenModel, remote: Remote) -> None:
    """Unless the database is another, or new."""
    db, said = str(tmp_path / "here.db"), list[str]()
    for _ in range(2):
        pull_what_fits(remote, db, MOST_S, said.append)
    assert len(said) == 1
    pull_what_fits(remote, str(tmp_path / "another.db"), MOST_S, said.append)
    Path(db).unlink()
    pull_what_fits(remote, db, MOST_S, said.append)
    assert len({line.partition(":")[2] for line in said}) == 1
    assert len(said) == 3


@pytest.mark.slow
def test_a_tuning_run_pulls_too(tmp_path: Path, model: OpenModel, remote: Remote) -> None:
    """Imported schedules are fought over first; none that lost is in use."""
    db, path = tmp_path / "here.db", tmp_path / "tiny.gguf"
    asked = [path, "--db", db, "--threads", 1, "--max-m", "1"]
    believed = ["--remote", remote.remote, "--remote-digest", remote.remote_digest]
    done = command.run("tune-kernels", *asked, *believed)
    assert done.exit_code == 0, done.stderr
    assert "rows added" in done.stderr
    assert "timing schedules that won elsewhere" in done.stderr
    with open_store(db) as store:
        rows = [*store.stream(Measurement)]
        lies = {(row.problem, row.sample.schedule) for row in rows if not row.origin.verified}
        check_won_here([row for row in store.stream(Promotion) if row.origin.verified], lies)
    assert lies
    assert any(row.origin.verified for row in rows)


@pytest.mark.many
@pytest.mark.parametrize("damage", ["absent", "not the pinned one", "a bundle changed", "no index at all"])
def test_a_remote_that_is_not_believed_costs_one_line(
    tmp_path: Path, model: OpenModel, remote: Remote, damage: str
) -> None:
    folder, db, said = Path(remote.remote or ""), tmp_path / "here.db", list[str]()
    match damage:
        case "absent":
            remote = replace(remote, remote=str(tmp_path / "nowhere"))
        case "not the pinned one":
            remote = replace(remote, remote_digest="0" * 64)
        case "a bundle changed":
            (bundle,) = (folder / "bundles").glob("*.jsonl")
            bundle.write_bytes(bundle.read_bytes()[:-2] + b"\n\n")
        case _:
            (folder / NAME).write_text(json.dumps([]))
            remote = replace(remote, remote_digest=hashlib.sha256(b"[]").hexdigest())
    pull_what_fits(remote, str(db), MOST_S, said.append)

    (line,) = said
    assert "\n" not in line
    assert "the start goes on" in line
    assert not db.exists()


def test_a_bundle_too_large_for_a_start_is_left(
    tmp_path: Path, model: OpenModel, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(first_start, "MOST_BYTES", 100)
    pull_what_fits(remote, str(tmp_path / "here.db"), MOST_S, said.append)

    assert [line for line in said if "too large for a start" in line] == said


def test_a_remote_needs_a_reason_to_be_believed() -> None:
    with pytest.raises(UsageError, match="--remote-digest"):
        Remote("folder").trust()


@pytest.mark.slow
def test_an_instance_on_a_node_of_a_cluster_learns_there(
    tmp_path: Path, model: OpenModel, remote: Remote
) -> None:
    db = str(tmp_path / "here.db")
    spec = InstanceSpec(
        str(tmp_path / "tiny.gguf"),
        NATIVE,
        engine_size(64, 64, 1),
        tuple(model.plans.values()),
        db,
        pinned=False,
        remote=remote,
    )
    with ExitStack() as stack:
        stack.enter_context(instance_process._open(spec, stack))

    with open_store(db) as store:
        rows = [*store.stream(Measurement)]
    assert any(row.origin.verified for row in rows)
    assert any(not row.origin.verified for row in rows)
