"""The comparison of all-reduces: every system measured, processes that die, nothing left behind."""

from __future__ import annotations

import os
import sys

import pytest

from phasewise.workflows.bench.allreduce.compare import (
    AllReduceGrid,
    RankError,
    RankProcesses,
    all_reduce_rows,
    our_systems,
    size_text,
)

CORES = tuple(sorted(os.sched_getaffinity(0)))

ECHO = """
import json, sys
print("{}", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({"ns": [RANK * 10 + turn for turn in range(request["times"])]}), flush=True)
"""


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


@pytest.mark.parametrize(
    ("size", "text"),
    [(4, "4 B"), (1024, "1 KiB"), (1500, "1500 B"), (1 << 20, "1 MiB"), (3 << 19, "1536 KiB")],
)
def test_sizes_are_written_in_whole_units(size: int, text: str) -> None:
    assert size_text(size) == text
