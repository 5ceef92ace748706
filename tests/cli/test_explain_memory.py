"""The text of `--explain` about NUMA nodes."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from phasewise.cli.explain_text import uses_text
from phasewise.workflows.opening.memory_placement import MemoryPlacement


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
