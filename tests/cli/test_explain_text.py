"""The text of `--explain`: a table for each band of decode's plan, and where NUMA nodes have memory."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from phasewise.cli.explain_text import uses_text
from phasewise.tuner.plans import Phase
from phasewise.workflows.opening.memory_placement import MemoryPlacement
from phasewise.workflows.opening.tuned_schedules import ScheduleUse


def use(phase: Phase, from_sequences: int) -> ScheduleUse:
    return ScheduleUse(
        *(phase, "head", "int4", 64, 32, "fma", 1, 1, 8, "default: nothing tuned", None),
        from_sequences=from_sequences,
    )


def test_each_band_has_a_table() -> None:
    uses = [use("prefill", 1), use("decode", 1), use("decode", 8), use("decode", 32)]

    told = uses_text(uses).splitlines()

    titles = [line.partition("  ")[0] for line in told if "schedule" in line]
    assert titles == ["prefill", "decode", "decode from 8", "decode from 32"]
    assert sum(line.startswith("head") for line in told) == 4


def test_a_row_fits_eighty_columns_whatever_it_says_and_what_is_not_dense_is_told_below() -> None:
    schedule = {"mr": 32, "panels": 4, "threads_m": 1, "threads_n": 16, "threads_k": 1}
    stored = ScheduleUse(
        phase="decode",
        used_for="layers.*.shared_gate_up, layers.*.expert_gate_up",
        format="iq4_xs",
        n=151936,
        k=18944,
        compute_path="int8_block",
        k_parts=1,
        first_m=129,
        last_m=512,
        why="neighbour: measured for 512 rows",
        schedule=schedule,
        storage="sparse, 0.50 kept",
        storage_why="bytes: 0.56 of dense",
    )
    dense = replace(stored, n=64, storage="dense", storage_why="")

    *table, told, why = uses_text([stored, dense]).splitlines()

    assert max(map(len, table)) <= 80
    assert "expert_gate_up" in "\n".join(table)
    assert (told, why) == ("iq4_xs 151936 x 18944: sparse, 0.50 kept", "  bytes: 0.56 of dense")


def test_one_node_has_nothing_to_tell() -> None:
    assert uses_text([], None) == ""


def test_the_text_names_ranks_nodes_and_local_reads() -> None:
    placed = MemoryPlacement(
        {0: 1_000_000, 1: 1_000_000, 2: 2_500_000}, ((0, 1), (2,)), {"prefill": 0.25, "decode": 0.5}
    )
    copied = replace(placed, kv_factor=4 / 3)

    assert uses_text([], placed).splitlines() == [
        "weights on NUMA nodes:",
        "  rank 0 on nodes 0-1 by turns",
        "  rank 1 on node 2",
        "  node 0: 1.0 MB",
        "  node 1: 1.0 MB",
        "  node 2: 2.5 MB",
        "  reads that are local: prefill 25%, decode 50%",
    ]
    assert uses_text([], copied).splitlines()[7:] == [
        "  keys and values: 1.33 times those of one rank, as ranks share KV heads"
    ]
    assert asdict(placed) == {
        "bytes_by_node": {0: 1_000_000, 1: 1_000_000, 2: 2_500_000},
        "rank_nodes": ((0, 1), (2,)),
        "local_reads": {"prefill": 0.25, "decode": 0.5},
        "kv_factor": 1.0,
        "rank_shares": {},
    }


@pytest.mark.parametrize("by_node", [{}, {0: 5_000_000}], ids=["one-node", "nodes"])
def test_the_text_names_shares_of_ranks_that_go_by_what_cores_do(by_node: dict[int, int]) -> None:
    """Also where there are no nodes to tell of."""
    placed = MemoryPlacement(by_node, ((0,),), {}, rank_shares={"decode": (0.75, 0.25)})
    lines = uses_text([], placed).splitlines()

    assert lines[-2:] == ["shares of ranks, by what their cores were measured to do:", "  decode: 75%, 25%"]
    assert (len(lines) > 2) == bool(by_node)
