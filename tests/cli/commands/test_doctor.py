"""`phasewise doctor`: 80 columns, JSON, exit codes; this host and snapshots."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from phasewise.cli.commands.doctor.text import doctor_lines
from phasewise.tuner.doctor import CHECKS, examine
from tests.cli import command
from tests.support.machines.fake_host import CGROUP, CPU, Plant, clean_host, write_files

BAD = Plant(
    {
        f"{CGROUP}/cpu.max": "150000 100000",
        "proc/self/limits": "Max locked memory         65536                65536                bytes",
        f"{CPU}/cpufreq/boost": "0",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
    }
)


_text = partial(command.text_of, "doctor")


def test_findings_in_a_pipe_are_80_columns_of_plain_text(tmp_path: Path) -> None:
    write_files(tmp_path, BAD)

    done = command.run_process("doctor", "--root", tmp_path, env={"PYTHONIOENCODING": "ascii"})

    assert done.exit_code == 0, done.stderr
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    assert "1. high: a quota of 1.5 CPUs' time on 4 cores" in done.stdout
    assert "   seen in /sys/fs/cgroup/job/cpu.max: 150000 100000" in done.stdout
    assert "docker run --cpus 4" in done.stdout


@pytest.mark.parametrize("plant", [Plant(), BAD, Plant(shape=(8, 2, 2))])
def test_text_stays_within_80_columns(tmp_path: Path, plant: Plant) -> None:
    host = clean_host(tmp_path / ("deep/" * 12), plant)

    lines = doctor_lines(host, examine(host), "utf-8")

    assert max(map(len, lines)) <= 80


def test_json_has_every_finding_with_evidence_and_remedy(tmp_path: Path) -> None:
    write_files(tmp_path, BAD)

    fields = command.fields_of("doctor", "--root", tmp_path)

    assert fields["checks"] == list(CHECKS)
    assert [(finding["id"], finding["severity"]) for finding in fields["findings"]] == [
        ("cpu-quota", "high"),
        ("boost-off", "medium"),
        ("huge-pages-off", "medium"),
        ("memlock", "low"),
    ]
    assert fields["findings"][0]["evidence"] == [
        {"source": "/sys/fs/cgroup/job/cpu.max", "value": "150000 100000"}
    ]
    assert all(one["meaning"] and one["remedy"] and one["title"] for one in fields["findings"])


def test_only_strict_fails_on_findings(tmp_path: Path) -> None:
    write_files(tmp_path / "bad", BAD)
    write_files(tmp_path / "clean", Plant())

    assert _text("--root", tmp_path / "bad")
    assert _text("--root", tmp_path / "bad", "--strict", exit_code=1)
    assert "Nothing found" in _text("--root", tmp_path / "clean", "--strict")


def test_this_host_is_examined_and_left_alone(tmp_path: Path) -> None:
    database = tmp_path / "absent.db"

    fields = command.fields_of("doctor", "--db", database, env={"PHASEWISE_ISA": "portable"})

    found = {finding["id"]: finding for finding in fields["findings"]}
    assert "absent" in found["untuned"]["evidence"][0]["source"]
    assert not database.exists()


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_a_folder_that_is_no_snapshot_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()

    assert command.run("doctor", "--root", tmp_path / name).refusal
