"""`phasewise doctor`: 80 columns, JSON, exit codes; this host and snapshots."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from phasewise.cli.commands.doctor import decode_lines, doctor_lines
from phasewise.kerneldb.product_counts import ProductCounts
from phasewise.tuner.doctor import CHECKS, TunedCounts, examine
from phasewise.tuner.doctor.decode import DecodeFigures, PhaseFigures, explain_decode
from tests.cli import command
from tests.support.machines.fake_host import CGROUP, CPU, Plant, clean_host, write_files

BAD = Plant(
    {
        f"{CGROUP}/cpu.max": "150000 100000",
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


@pytest.mark.parametrize(
    ("shipped", "told"), [(0, "but none for such cores"), (31, "brings 31 schedules for")]
)
def test_the_kinds_that_the_package_knows_are_told_in_one_line(
    tmp_path: Path, shipped: int, told: str
) -> None:
    kinds = ("AuthenticAMD 25/97, 16 threads", "GenuineIntel 6/207, 2 threads")
    host = clean_host(
        tmp_path, Plant(told={"tuned": TunedCounts("a.db", 0, 0, ProductCounts(), shipped, kinds)})
    )

    lines = doctor_lines(host, [], "utf-8")

    text = " ".join(" ".join(lines).split())
    assert told in text
    assert all(kind in text for kind in kinds) == (not shipped)
    assert max(map(len, lines)) <= 80


def test_json_has_every_finding_with_evidence_and_remedy(tmp_path: Path) -> None:
    write_files(tmp_path, BAD)

    fields = command.fields_of("doctor", "--root", tmp_path)

    assert fields["checks"] == list(CHECKS)
    assert [(finding["id"], finding["severity"]) for finding in fields["findings"]] == [
        ("cpu-quota", "high"),
        ("boost-off", "medium"),
        ("huge-pages-off", "medium"),
    ]
    assert fields["findings"][0]["evidence"] == [
        {"source": "/sys/fs/cgroup/job/cpu.max", "value": "150000 100000"}
    ]
    assert all(
        finding["meaning"] and finding["remedy"] and finding["title"] for finding in fields["findings"]
    )


def test_only_strict_fails_on_findings(tmp_path: Path) -> None:
    write_files(tmp_path / "bad", BAD)
    write_files(tmp_path / "clean", Plant())

    assert _text("--root", tmp_path / "bad")
    assert _text("--root", tmp_path / "bad", "--strict", exit_code=1)
    assert "Nothing found" in _text("--root", tmp_path / "clean", "--strict")


def test_this_host_is_examined_and_left_alone(tmp_path: Path) -> None:
    database = tmp_path / "absent.db"

    fields = command.fields_of("doctor", "--db", database, env={"PHASEWISE_ISA": "portable"})

    findings = {finding["id"]: finding for finding in fields["findings"]}
    assert "absent" in findings["untuned"]["evidence"][0]["source"]
    assert not database.exists()


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_a_folder_that_is_no_snapshot_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()

    assert command.run("doctor", "--root", tmp_path / name).refusal


def test_the_speed_of_decoding_is_explained_for_a_model(tiny: Path) -> None:
    fields = command.fields_of("doctor", "--decode", tiny)

    assert fields["figures"]["decode"]["tokens_per_s"] > 0
    assert fields["findings"][0]["id"].startswith("decode-")
    assert set(fields["figures"]["products"].values()) == {0}  # of a database that is not there


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_reasons_stay_within_80_columns(share: float) -> None:
    phase = PhaseFigures(123.4, share)
    figures = DecodeFigures("a-model-with-a-long-name", 64, phase, phase, 1e10, 2e10)

    assert max(map(len, decode_lines(figures, [explain_decode(figures)], "ascii"))) <= 80


@pytest.mark.parametrize("option", ["--bits", "--strict", "--root=/"])
def test_explaining_decode_takes_the_place_of_all_else(option: str) -> None:
    assert "--decode" in command.run("doctor", "--decode", "a-model", option).usage_error
