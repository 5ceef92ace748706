"""Placement of a model's weights on NUMA nodes, the share of node-local reads, and ranks' shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from phasewise.cython_kernels.division import share
from phasewise.serving.models.forward import kv_bytes_per_slot
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks.rank_layout import RankLayout
from phasewise.serving.ranks.rank_teams import TABLES
from phasewise.topology import MemoryNodes
from phasewise.tuner.plans import PHASES, Phase


@dataclass(frozen=True)
class MemoryPlacement:
    """Weights on a machine of several NUMA nodes, or of several kinds of core. One node: rank_shares alone.

    rank_nodes: nodes of each rank's memory, interleaved where there are several. local_reads: by phase, the
    share of the weights' bytes that a step reads from the reading core's own node. kv_factor: bytes of keys
    and values over those of one rank; above 1 where ranks keep copies of shared heads. rank_shares: by phase,
    each rank's part of columns and heads, where it follows measured core speeds instead of core counts.
    """

    bytes_by_node: Mapping[int, int]
    rank_nodes: tuple[tuple[int, ...], ...]
    local_reads: Mapping[Phase, float]
    kv_factor: float = 1.0
    rank_shares: Mapping[Phase, tuple[float, ...]] = field(default_factory=dict)


def place(model: PackedModel, layout: RankLayout) -> MemoryPlacement | None:
    """The placement by `open_ranks` where every node has room; None: one node, even shares."""
    plans, memory, shares = layout.plans, layout.memory, _rank_shares(layout)
    if memory is None:
        return MemoryPlacement({}, (), {}, rank_shares=shares) if shares else None
    by_node: Counter[int] = Counter()
    local: dict[Phase, float] = dict.fromkeys(plans, 0.0)
    read = dict(local)
    for name, weight in model.weights.items():
        is_multiplied = name != "embed" or model.config.tied_embeddings
        for owner, begin, end in _owned(layout, weight.panels):
            nodes = layout.nodes(owner) or memory.usable
            for node in nodes:
                by_node[node] += weight.nbytes * (end - begin) // (weight.panels * len(nodes))
            for phase in plans if is_multiplied else ():
                for reader, first, last in _read(layout, phase, weight.panels):
                    panels = max(0, min(end, last) - max(begin, first))
                    n_bytes = weight.nbytes * panels / weight.panels
                    read[phase] += n_bytes
                    local[phase] += n_bytes * float(_meeting(layout, memory, phase, reader, nodes))
    return MemoryPlacement(
        dict(sorted(by_node.items())),
        tuple(layout.nodes(rank) for rank in range(layout.n_ranks)),
        {phase: local[phase] / read[phase] if read[phase] else 1.0 for phase in plans},
        kv_bytes_per_slot(model, teams=layout.teams) / kv_bytes_per_slot(model),
        shares,
    )


def _rank_shares(layout: RankLayout) -> dict[Phase, tuple[float, ...]]:
    """Shares of ranks by phase, where they are not in proportion to threads."""
    told: dict[Phase, tuple[float, ...]] = {}
    for phase in layout.plans:
        weights, threads = layout.division(0).shares(TABLES[phase]), layout.teams[TABLES[phase]]
        own = tuple(weight / sum(weights) for weight in weights)
        if own != tuple(n / sum(threads) for n in threads):
            told[phase] = own
    return told


def _owned(layout: RankLayout, panels: int) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, begin, end) of the panels in each rank's memory."""
    return _read(layout, next(phase for phase in reversed(PHASES) if phase in layout.plans), panels)


def _read(layout: RankLayout, phase: Phase, panels: int) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, begin, end) of the panels that each rank reads in a phase."""
    weights = layout.division(0).shares(TABLES[phase])
    for rank in range(len(weights)):
        yield rank, *share(panels, weights, rank)


def _meeting(
    layout: RankLayout, memory: MemoryNodes, phase: Phase, reader: int, nodes: tuple[int, ...]
) -> Fraction:
    """Share of a rank's reads that its cores make on their own node, of memory interleaved over `nodes`."""
    cores = layout.plans[phase].ranks[reader].cores
    at_home = sum(len(memory.cpus.get(node, frozenset()).intersection(cores)) for node in nodes)
    return Fraction(at_home, len(cores) * len(nodes))
