"""The NUMA nodes that `--explain` tells: every byte once, and the reads that stay on their node."""

from __future__ import annotations

import pytest

from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks.rank_layout import RankLayout
from phasewise.topology import MemoryNodes
from phasewise.tuner.plans import PHASES, Phase, RankCores, ServicePlan
from phasewise.workflows.opening.memory_placement import place
from tests.support.models.reference_forward import tiny_config, tiny_model

Cores = tuple[tuple[int, ...], ...]

FOUR = MemoryNodes({node: frozenset({2 * node, 2 * node + 1}) for node in range(4)}, (0, 1, 2, 3))
ALL = tuple(range(8))
HALVES: Cores = ((0, 1, 2, 3), (4, 5, 6, 7))
QUARTERS: Cores = ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.fixture(scope="module")
def model() -> PackedModel:
    """Every weight has a multiple of four panels."""
    return tiny_model(tiny_config(n_heads=8, n_kv_heads=4, hidden=128, ffn=192, vocab_size=256))


def _plans(prefill: Cores, decode: Cores) -> dict[Phase, ServicePlan]:
    return {
        phase: ServicePlan(phase, tuple(RankCores(own) for own in cores))
        for phase, cores in zip(PHASES, (prefill, decode), strict=True)
    }


@pytest.mark.parametrize(
    ("prefill", "decode", "local"),
    [
        ((ALL,), (ALL,), {"prefill": 0.25, "decode": 0.25}),
        (QUARTERS, QUARTERS, {"prefill": 1.0, "decode": 1.0}),
        (HALVES, HALVES, {"prefill": 0.5, "decode": 0.5}),
        ((ALL,), QUARTERS, {"prefill": 0.25, "decode": 1.0}),
        (((0, 1),), ((4, 5),), {"prefill": 0.0, "decode": 1.0}),
    ],
)
def test_every_byte_is_told_once_and_its_reads(
    model: PackedModel, prefill: Cores, decode: Cores, local: dict[Phase, float]
) -> None:
    told = place(model, RankLayout(_plans(prefill, decode), FOUR))

    assert told is not None
    assert sum(told.bytes_by_node.values()) == pytest.approx(model.weight_bytes, rel=1e-3)
    assert told.local_reads == pytest.approx(local, abs=0.02)
    nodes = sorted({cpu // 2 for cores in decode for cpu in cores})
    assert sorted(told.bytes_by_node) == nodes
    assert max(told.bytes_by_node.values()) <= 1.1 * min(told.bytes_by_node.values())


def test_cores_without_memory_read_all_from_afar(model: PackedModel) -> None:
    bare = MemoryNodes(FOUR.cpus, (0, 1, 2))
    told = place(model, RankLayout(_plans(((6, 7),), ((6, 7),)), bare))

    assert told is not None
    assert told.rank_nodes == ((0,),)
    assert told.local_reads == {"prefill": 0.0, "decode": 0.0}


@pytest.mark.parametrize(("n_kv_heads", "factor"), [(4, 1.0), (2, 2.0), (1, 4.0)])
def test_the_copies_of_heads_that_ranks_share_are_told(n_kv_heads: int, factor: float) -> None:
    sharing = tiny_model(tiny_config(n_heads=8, n_kv_heads=n_kv_heads, hidden=128, ffn=192, vocab_size=256))
    told = place(sharing, RankLayout(_plans((ALL,), QUARTERS), FOUR))

    assert told is not None
    assert told.kv_factor == factor


def test_one_node_has_nothing_to_tell(model: PackedModel) -> None:
    assert place(model, RankLayout(_plans((ALL,), (ALL,)))) is None


@pytest.mark.parametrize("memory", [FOUR, None], ids=["nodes", "one-node"])
def test_shares_by_what_cores_do_are_told(model: PackedModel, memory: MemoryNodes | None) -> None:
    """Decode's first rank weighs three of four; prefill's weigh what their threads are, which is no news."""
    layout = RankLayout(_plans(HALVES, HALVES), memory, ((4, 4), (60, 20)))
    told = place(model, layout)

    assert told is not None
    assert told.rank_shares == {"decode": (0.75, 0.25)}
    if memory is not None:
        first, second = sum(told.bytes_by_node[node] for node in (0, 1)), told.bytes_by_node[2] * 2
        assert first == pytest.approx(3 * second, rel=0.05)
    assert place(model, RankLayout(_plans(HALVES, HALVES), None, ((2, 2), (7, 7)))) is None
