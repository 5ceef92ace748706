"""`phasewise bench allreduce`: rows that agree with themselves, and ranks that may die."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from phasewise.cli.main import app
from phasewise.cli.render.all_reduce_formats import FORMATS
from phasewise.workflows.bench.allreduce.compare import (
    AllReduceGrid,
    AllReduceRow,
    all_reduce_rows,
    size_text,
)
from phasewise.workflows.bench.allreduce.processes import RankError, RankProcesses, our_systems

CORES = tuple(sorted(os.sched_getaffinity(0)))

ECHO = """
import json, sys
print("{}", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({"ns": [RANK * 10 + turn for turn in range(request["times"])]}), flush=True)
"""


def row(system: str = "rank-shifted", median_ns: int = 1000) -> AllReduceRow:
    return AllReduceRow(
        ranks=2,
        message_bytes=4096,
        system=system,
        median_ns=median_ns,
        lowest_ns=900,
        highest_ns=1200,
        gbps=4.096,
        copy_fraction=0.5,
        cores=(0, 1),
        core_signature="core",
        placement_signature="placement",
        steal=0.0,
        samples_ns=[900, 1000, 1200],
    )


@pytest.mark.skipif(len(CORES) < 2, reason="two ranks need two cores")
def test_every_system_is_measured_at_every_point() -> None:
    grid = AllReduceGrid(
        CORES, rank_counts=[1, 2], message_bytes=[4, 4096], kinds=["ring", "rank-shifted"], rounds=2
    )

    rows = list(all_reduce_rows(grid))

    assert [(r.ranks, r.message_bytes, r.system) for r in rows] == [
        (ranks, size, system)
        for ranks in (1, 2)
        for size in (4, 4096)
        for system in ("ring", "rank-shifted", "copy")
    ]
    for r in rows:
        assert len(r.samples_ns) == 2
        assert r.lowest_ns <= r.median_ns <= r.highest_ns
        assert r.gbps == pytest.approx(r.message_bytes / r.median_ns, rel=0.05)
        assert len(r.cores) == r.ranks
    assert {r.copy_fraction for r in rows if r.system == "copy"} == {1.0}


def test_the_slowest_rank_counts() -> None:
    commands = [[sys.executable, "-c", ECHO.replace("RANK", str(rank))] for rank in range(3)]
    ranks = RankProcesses("echo", commands)

    assert ranks.system("any").time(16, 4) == [20, 21, 22, 23]

    ranks.close()


def test_a_rank_that_dies_is_named() -> None:
    script = "print('{}', flush=True); input(); raise SystemExit(3)"
    ranks = RankProcesses("peer", [[sys.executable, "-c", script]])

    with pytest.raises(RankError, match="rank 0 of peer ended with exit code 3"):
        ranks.system("any").time(16, 4)

    ranks.close()


def test_a_system_that_cannot_start_is_named() -> None:
    with pytest.raises(RankError, match="rank 0 of peer ended with exit code 5"):
        RankProcesses("peer", [[sys.executable, "-c", "raise SystemExit(5)"]])


def test_no_rank_and_no_memory_outlives_the_comparison() -> None:
    before = set(os.listdir("/dev/shm"))
    with our_systems(CORES[:1], ["ring"], most_floats=64) as systems:
        assert systems[0].time(64, 2)

    assert set(os.listdir("/dev/shm")) == before


def test_the_forms_hold_the_same_rows() -> None:
    rows = [row(), row("ring", 2500), row("copy", 500)]

    read = json.loads(FORMATS["json"](rows))
    assert [{**fields, "cores": tuple(fields["cores"])} for fields in read] == [
        {"schema_version": 1, **asdict(r)} for r in rows
    ]
    lines = list(csv.DictReader(io.StringIO(FORMATS["csv"](rows))))
    assert [(line["system"], int(line["median_ns"])) for line in lines] == [
        ("rank-shifted", 1000),
        ("ring", 2500),
        ("copy", 500),
    ]
    header, _, line = FORMATS["md"](rows).splitlines()
    assert "rank-shifted, us" in header
    assert [cell.strip() for cell in line.split("|")[1:-1]] == [
        "2",
        "4 KiB",
        "1.00",
        "15%",
        "4.10",
        "50%",
        "2.50x",
    ]


@pytest.mark.parametrize(
    ("size", "text"),
    [(4, "4 B"), (1024, "1 KiB"), (1500, "1500 B"), (1 << 20, "1 MiB"), (3 << 19, "1536 KiB")],
)
def test_sizes_are_written_in_whole_units(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--ranks", "99999"], "each rank has a core of its own"),
        (["--ranks", ""], "each rank has a core of its own"),
        (["--sizes", "1T"], "no multiple of 4 bytes"),
        (["--sizes", "6"], "no multiple of 4 bytes"),
        (["--sizes", "4K,,1M"], "no multiple of 4 bytes"),
        (["--sizes", "2048M"], "no multiple of 4 bytes"),
        (["--kinds", "tree"], "is not a list of rank-shifted, master-copies, ring"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["bench", "allreduce", *options])

    assert result.exit_code == 2
    assert says in " ".join(result.output.replace("│", " ").split())


def test_the_command_prints_one_document() -> None:
    result = CliRunner().invoke(
        app, ["bench", "allreduce", "--ranks", "1", "--sizes", "1K", "-r", "1", "-o", "json"]
    )

    assert result.exit_code == 0, result.output
    assert [r["system"] for r in json.loads(result.stdout)] == [
        "rank-shifted",
        "master-copies",
        "ring",
        "copy",
    ]
