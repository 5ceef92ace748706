"""Cost model: step times on a machine that is only described, by a roofline of every rank, and what ranks and
threads wait for.

A layer is two segments, attention and feed-forward, that each end in an all-reduce. A segment lasts as long
as its slowest rank: the longer of its multiplies at its cores' peak, and of its bytes at what its cores read
while all other ranks read too (`sharing`). Ranks hold whole KV heads, so shares may be unequal. On top come
the barriers inside a rank, which grow with its threads, and the all-reduces, which grow with the ranks; both
cost what a cache line costs between the two most distant cores that take part.

No clock and no randomness: the same step has the same time for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from phasewise._words import counted
from phasewise.topology import Machine
from phasewise.tuner.config.hidden import HiddenResource
from phasewise.tuner.config.rates import LineLatency, MachineRates, default_rates
from phasewise.tuner.config.sharing import Neighbourhood, ReadSharing
from phasewise.tuner.config.steps import EvaluatorKind, ModelShape, Step, StepTimer
from phasewise.tuner.errors import EvaluationError
from phasewise.tuner.plans import Phase, RankCores, list_cores

if TYPE_CHECKING:
    from phasewise.tuner.topotree import Configuration

BARRIERS_A_LAYER = 6  # norm, q/k/v, attention, o, gate/up, down
ALL_REDUCES_A_LAYER = 2  # after o and after down
FFN_PIECE = 32  # inputs of a group of scales: ranks divide the feed-forward between such pieces
VOCAB_PIECE = 16  # columns of a panel
FLOAT_BYTES = 4  # of an activation


class ModelledEvaluator:
    """Times steps of one model on one described machine; see the module. Keeps the `Evaluator` contract."""

    kind: EvaluatorKind = "modelled"

    def __init__(
        self,
        machine: Machine,
        shape: ModelShape,
        rates: MachineRates | None = None,
        hidden: Sequence[HiddenResource] = (),
    ) -> None:
        self._allowed = frozenset(machine.allowed_pus)
        self._source = machine.source
        self._shape = shape
        self._rates = rates or default_rates(machine)
        self._sharing = ReadSharing(machine, self._rates, hidden)

    @contextmanager
    def open(self, configuration: Configuration, phase: Phase) -> Iterator[StepTimer]:
        """EvaluationError if the machine lacks a core, or the model a KV head for each rank."""
        ranks = configuration.ranks
        if foreign := sorted({pu for rank in ranks for pu in rank.cores} - self._allowed):
            raise EvaluationError(f"{self._source} has no PU {list_cores(foreign[:8])} to run {phase} on")
        if len(ranks) > self._shape.n_kv_heads:
            heads = f"{self._shape.n_kv_heads} KV heads of {self._shape.name}"
            raise EvaluationError(
                f"{counted(len(ranks), 'rank')} cannot divide the {heads}: ask for fewer ranks"
            )
        yield _RankModel(self._shape, self._rank_limits(ranks), self._waits(ranks)).step_ns

    def _rank_limits(self, ranks: Sequence[RankCores]) -> list[_RankLimits]:
        shape, count = self._shape, len(ranks)
        shares = iter(self._sharing.where.core_shares([pu for rank in ranks for pu in rank.cores]))
        flops = [self._rates.flops_per_core * sum(next(shares) for _ in rank.cores) for rank in ranks]
        reads = self._sharing.rank_bytes_per_s(ranks)
        heads = _shares(shape.n_kv_heads, 1, count)
        ffn = _shares(shape.ffn, FFN_PIECE, count)
        vocab = _shares(shape.vocab, VOCAB_PIECE, count)
        return [_RankLimits(*of_rank) for of_rank in zip(flops, reads, heads, ffn, vocab, strict=True)]

    def _waits(self, ranks: Sequence[RankCores]) -> _Waits:
        where, rates = self._sharing.where, self._rates
        everyone = [pu for rank in ranks for pu in rank.cores]
        cores = sum(where.core_shares(everyone))
        reading = cores * rates.core_read_bytes_per_s * _exchange_share(where, rates, everyone)
        return _Waits(
            barrier_ns=max((len(rank.cores) - 1) * _line_ns(where, rates, rank.cores) for rank in ranks),
            all_reduce_ns=2 * (len(ranks) - 1) * _line_ns(where, rates, everyone),
            exchange_bytes_per_s=reading,
            ranks=len(ranks),
        )


@dataclass(frozen=True, slots=True)
class _RankLimits:
    """The limits of a rank, and the share of each part of a model that it computes."""

    flops_per_s: float
    read_bytes_per_s: float
    heads: float
    ffn: float
    vocab: float

    def time_ns(self, share: float, flops: float, read_bytes: float) -> float:
        return share * max(flops / self.flops_per_s, read_bytes / self.read_bytes_per_s) * 1e9


@dataclass(frozen=True, slots=True)
class _Waits:
    """The time that threads and ranks wait for each other."""

    barrier_ns: float
    all_reduce_ns: float
    exchange_bytes_per_s: float
    ranks: int

    def layer_ns(self, hidden_bytes: float) -> float:
        """Exchange time of one layer: each rank's partial sums are read once by the others, and the sum by
        all.
        """
        moved = 2 * hidden_bytes * (self.ranks - 1)
        exchange_ns = self.all_reduce_ns + moved / self.exchange_bytes_per_s * 1e9
        return BARRIERS_A_LAYER * self.barrier_ns + ALL_REDUCES_A_LAYER * exchange_ns


@dataclass(frozen=True, slots=True)
class _RankModel:
    shape: ModelShape
    ranks: Sequence[_RankLimits]
    waits: _Waits

    def step_ns(self, step: Step) -> float:
        """One step of all ranks."""
        shape, rows = self.shape, step.rows
        attention = shape.attention_weights
        feed_forward = shape.ffn_weights
        head = shape.hidden * shape.vocab
        of_weight = shape.weight_bytes / (shape.n_layers * (attention + feed_forward) + head)
        scores, kv_bytes = self._attention(step)
        attention_ns = max(
            rank.time_ns(rank.heads, 2 * rows * attention + scores, of_weight * attention + kv_bytes)
            for rank in self.ranks
        )
        feed_forward_ns = max(
            rank.time_ns(rank.ffn, 2 * rows * feed_forward, of_weight * feed_forward) for rank in self.ranks
        )
        head_ns = max(
            rank.time_ns(rank.vocab, 2 * step.sequences * head, of_weight * head) for rank in self.ranks
        )
        waits_ns = self.waits.layer_ns(FLOAT_BYTES * rows * shape.hidden)
        return shape.n_layers * (attention_ns + feed_forward_ns + waits_ns) + head_ns + self.waits.barrier_ns

    def _attention(self, step: Step) -> tuple[float, float]:
        """Operations and bytes of one layer's scores and values: each new token sees all before it."""
        seen = step.tokens * step.context + step.tokens * (step.tokens + 1) // 2
        flops = 4.0 * step.sequences * seen * self.shape.n_heads * self.shape.head_dim
        held = step.sequences * (step.context + step.tokens)
        return flops, held * self.shape.kv_bytes_per_slot / self.shape.n_layers


def _shares(size: int, piece: int, ranks: int) -> list[float]:
    """Each rank's share of `size`: contiguous, in whole pieces, as even as possible."""
    pieces = -(-size // piece)
    ends = [pieces * rank // ranks for rank in range(ranks + 1)]
    return [(end - start) / pieces for start, end in pairwise(ends)]


def _line_ns(where: Neighbourhood, rates: MachineRates, pus: Sequence[int]) -> float:
    """Between the most distant of these cores, at the pace of the slowest node among theirs."""
    slowest = min(rates.node_share.get(node, 1.0) for node in where.nodes_of(pus))
    return _even_line_ns(where, rates.latency, pus) / slowest


def _even_line_ns(where: Neighbourhood, latency: LineLatency, pus: Sequence[int]) -> float:
    if where.share_l3(pus):
        return latency.l3_ns
    if len(where.nodes_of(pus)) == 1:
        return latency.numa_ns
    return latency.package_ns if where.share_package(pus) else latency.machine_ns


def _exchange_share(where: Neighbourhood, rates: MachineRates, pus: Sequence[int]) -> float:
    """Share of its read rate that a core reaches on lines that other cores have written."""
    if len(where.nodes_of(pus)) == 1:
        return 1.0
    return rates.remote_node_share if where.share_package(pus) else rates.remote_package_share
