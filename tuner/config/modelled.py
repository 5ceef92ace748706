"""The cost model: step times on a described machine, by a roofline of every rank and the waits of ranks and
threads.

A step is a row of ops, as the executor runs it: five in a layer (q/k/v, attention, o, gate/up, down), and the
head. No sum over inputs is cut: a rank computes columns of a product, or heads, in proportion to its threads,
and all ranks meet after each op. More ranks than KV heads divide the query heads of one, and each reads its
own copy of it. So an op lasts as long as its slowest rank: the longer of its multiplies at its cores' pace,
and of its bytes at the rate of its cores while all other ranks read too (`sharing`). Before a product rows
are prepared (normalised, rounded): a single row by every thread for itself, several divided between threads,
which then meet once more. Parts of a row that other cores computed come from their caches.

Cores may differ (`MachineRates.core_share`). Cores of several kinds divide what a rank reads by the rates of
their kinds, as `serving.ranks.core_weights` does, and ranks divide columns and heads by the sums of these
rates; cores of one kind get equal shares.

A meeting of a team is an arrival of each of its threads on one cache line; a meeting of ranks is an arrival
of each rank on its own line, which all others read. Both cost the time of a line between the two most distant
cores that take part.

There is no clock and no randomness: a step always has the same time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from phasewise._words import counted
from phasewise.cython_kernels import division
from phasewise.topology import Machine
from phasewise.tuner.config.rates import CoreShare, LineLatency, MachineRates, default_rates
from phasewise.tuner.config.sharing import HiddenResource, Neighbourhood, ReadSharing
from phasewise.tuner.config.steps import EvaluatorKind, ModelShape, Step, StepTimer
from phasewise.tuner.errors import EvaluationError
from phasewise.tuner.plans import Phase, RankCores, list_cores

if TYPE_CHECKING:
    from phasewise.tuner.topotree import Configuration

PANEL = 16  # columns of a weight that are computed together
OWN_ROWS = 8  # up to this many, each of several ranks prepares all rows for itself (PW_OWN_ROWS)
FLOAT_BYTES = 4  # of an activation


class ModelledEvaluator:
    """An evaluator that models the steps of one model on one described machine; see the module."""

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
        self._kind_of = {pu: number for number, kind in enumerate(machine.kinds) for pu in kind.cpus}
        self._shape = shape
        self._rates = rates or default_rates(machine)
        self._sharing = ReadSharing(machine, self._rates, hidden)

    @contextmanager
    def open(self, configuration: Configuration, phase: Phase) -> Iterator[StepTimer]:
        """A timer of modelled steps. EvaluationError: the machine lacks a core, or the model heads for all
        ranks."""
        ranks = configuration.ranks
        if foreign := sorted({pu for rank in ranks for pu in rank.cores} - self._allowed):
            raise EvaluationError(f"{self._source} has no PU {list_cores(foreign[:8])} to run {phase} on")
        if len(ranks) > self._shape.n_heads:
            heads = f"{counted(self._shape.n_heads, 'query head')} of {self._shape.name}"
            raise EvaluationError(
                f"{counted(len(ranks), 'rank')} cannot divide the {heads}: ask for fewer ranks"
            )
        yield _Steps(self._shape, self._rank_limits(ranks, phase), self._meetings(ranks)).step_ns

    def _rank_limits(self, ranks: Sequence[RankCores], phase: Phase) -> list[_Rank]:
        where, rates = self._sharing.where, self._rates
        everyone = [pu for rank in ranks for pu in rank.cores]
        active = iter(where.core_shares(everyone))
        cores = [sum(next(active) for _ in rank.cores) for rank in ranks]
        away = _exchange_share(where, rates, everyone)
        attention = rates.attention_flops_per_core or rates.flops_per_core
        return [
            _Rank(
                threads=len(rank.cores),
                weight=weight,
                flops_per_s=rates.flops_per_core * n_cores * unequal.pace,
                attention_flops_per_s=attention * n_cores * unequal.pace,
                read_bytes_per_s=read * unequal.evenness,
                rows_bytes_per_s=rates.row_bytes_per_s * n_cores * unequal.slowest,
                away_bytes_per_s=rates.core_read_bytes_per_s * away * n_cores * unequal.slowest,
            )
            for rank, weight, n_cores, read, unequal in zip(
                ranks,
                self._weights(ranks, phase),
                cores,
                self._sharing.rank_bytes_per_s(ranks),
                [self._unequal(rank) for rank in ranks],
                strict=True,
            )
        ]

    def _weights(self, ranks: Sequence[RankCores], phase: Phase) -> tuple[int, ...]:
        """The weights in proportion to which ranks divide columns and heads."""
        sizes = [len(rank.cores) for rank in ranks]
        if not self._rates.core_share:
            return tuple(sizes)
        everyone = [pu for rank in ranks for pu in rank.cores]
        shares = [self._rates.core_share.get(pu, CoreShare()) for pu in everyone]
        rates = [each.reading if phase == "decode" else each.computing for each in shares]
        of_kind = _medians(rates, [self._kind_of.get(pu, -1) for pu in everyone])
        return division.weights_of_ranks(sizes, of_kind)

    def _unequal(self, rank: RankCores) -> _Unequal:
        if not self._rates.core_share:
            return _ALIKE
        shares = [self._rates.core_share.get(pu, CoreShare()) for pu in rank.cores]
        computing, reading = [each.computing for each in shares], [each.reading for each in shares]
        weights = _medians(reading, [self._kind_of.get(pu, -1) for pu in rank.cores])
        slowest = min(share / weight for share, weight in zip(reading, weights, strict=True))
        return _Unequal(
            pace=sum(computing) / len(computing),
            slowest=min(computing),
            evenness=min(1.0, sum(weights) * slowest / sum(reading)),
        )

    def _meetings(self, ranks: Sequence[RankCores]) -> _Meetings:
        where, rates = self._sharing.where, self._rates
        everyone = [pu for rank in ranks for pu in rank.cores]
        team_ns = max(
            len(rank.cores) * _line_ns(where, rates, rank.cores) if len(rank.cores) > 1 else 0.0
            for rank in ranks
        )
        ranks_ns = len(ranks) * _line_ns(where, rates, everyone) if len(ranks) > 1 else 0.0
        return _Meetings(team_ns, team_ns + ranks_ns, rates.op_ns, rates.step_ns)


@dataclass(frozen=True, slots=True)
class _Op:
    """A product, or attention, of one layer. `of`: the panels that ranks divide; 0: they divide heads."""

    of: int
    flops: float
    read_bytes: float
    inputs: float = 0.0
    """Floats of a row that a product prepares; 0 for an op that is no product."""


@dataclass(frozen=True, slots=True)
class _Unequal:
    """Factors of a rank's rates for unlike cores; 1 where the cores are alike."""

    pace: float
    """Factor of the arithmetic rate, whose pieces cores take as they become free."""
    slowest: float
    """Factor of the rate of preparing rows, which are divided equally between the cores."""
    evenness: float
    """Factor of the joint reading rate: shares are by kind of core, and all wait for the last core."""


_ALIKE = _Unequal(1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class _Rank:
    """The threads and limits of a rank; rates are those of all its cores together."""

    threads: int
    weight: int
    flops_per_s: float
    attention_flops_per_s: float
    read_bytes_per_s: float
    rows_bytes_per_s: float
    """Bytes a second at which the rank prepares rows (float32)."""
    away_bytes_per_s: float
    """Bytes a second at which the rank reads other ranks' results."""

    def compute_ns(self, op: _Op, share: float, read_share: float) -> float:
        pace = self.flops_per_s if op.inputs else self.attention_flops_per_s
        return max(share * op.flops / pace, read_share * op.read_bytes / self.read_bytes_per_s) * 1e9


@dataclass(frozen=True, slots=True)
class _Meetings:
    """The waits of threads and ranks for each other, and the fixed times of an op and a step."""

    team_ns: float
    """Nanoseconds of a meeting of one rank's threads, for the largest team."""
    all_ns: float
    op_ns: float
    step_ns: float


@dataclass(frozen=True, slots=True)
class _Steps:
    shape: ModelShape
    ranks: Sequence[_Rank]
    meetings: _Meetings

    def step_ns(self, step: Step) -> float:
        """Nanoseconds of one step of all ranks."""
        layer_ns = sum(self._op_ns(op, step.rows) for op in self._layer(step))
        return self.shape.n_layers * layer_ns + self._op_ns(self._head(step), step.sequences) + self._ends_ns

    @property
    def _ends_ns(self) -> float:
        """Nanoseconds of the lookup of embeddings, and of work that belongs to no op."""
        return self.meetings.all_ns + self.meetings.op_ns + self.meetings.step_ns

    def _layer(self, step: Step) -> list[_Op]:
        shape, rows = self.shape, step.rows
        heads = shape.n_heads * shape.head_dim
        into_ffn = (shape.ffn_matrices - 1) * shape.ffn
        scores, kv_bytes = self._attention(step)
        return [
            self._product(shape.attention_weights // shape.hidden - heads, shape.hidden, rows),
            _Op(0, scores, kv_bytes),
            self._product(shape.hidden, heads, rows),
            self._product(into_ffn, shape.hidden, rows),
            self._product(shape.hidden, shape.ffn, rows),
        ]

    def _head(self, step: Step) -> _Op:
        return self._product(self.shape.vocab, self.shape.hidden, step.sequences)

    def _product(self, columns: int, inputs: int, rows: int) -> _Op:
        weights = columns * inputs
        return _Op(-(-columns // PANEL), 2.0 * rows * weights, self._bytes_of_weight * weights, inputs)

    @property
    def _bytes_of_weight(self) -> float:
        shape = self.shape
        layers = shape.n_layers * (shape.attention_weights + shape.ffn_weights)
        return shape.weight_bytes / (layers + shape.hidden * shape.vocab)

    def _op_ns(self, op: _Op, rows: int) -> float:
        """Nanoseconds of one op, including the meeting after it."""
        slowest_ns = max(
            rank.compute_ns(op, share, read_share) + self._prepared_ns(rank, op, rows, share)
            for rank, (share, read_share) in zip(self.ranks, self._shares(op), strict=True)
        )
        return slowest_ns + self._meets_before_ns(op, rows) + self.meetings.all_ns + self.meetings.op_ns

    def _prepared_ns(self, rank: _Rank, op: _Op, rows: int, share: float) -> float:
        """Nanoseconds in which a rank prepares a product's rows and reads other ranks' parts of them."""
        workers = rank.threads
        if rows > OWN_ROWS:
            workers = sum(each.threads for each in self.ranks)
        own_bytes = FLOAT_BYTES * op.inputs * -(-rows // workers)  # a row is one thread's
        own_ns = own_bytes / (rank.rows_bytes_per_s / rank.threads) * 1e9
        away_ns = own_bytes * (1 - share) / (rank.away_bytes_per_s / rank.threads) * 1e9
        return own_ns + (away_ns if len(self.ranks) > 1 else 0.0)

    def _meets_before_ns(self, op: _Op, rows: int) -> float:
        """Nanoseconds of the meeting after a product's rows are prepared."""
        if rows == 1 or not op.inputs:
            return 0.0
        is_for_all = len(self.ranks) > 1 and rows > OWN_ROWS
        return self.meetings.all_ns if is_for_all else self.meetings.team_ns

    def _shares(self, op: _Op) -> list[tuple[float, float]]:
        """Each rank's shares of an op's computing and of its reading."""
        shape, weights = self.shape, [rank.weight for rank in self.ranks]
        if op.of or shape.kv_vectors == 1:
            pieces = op.of or shape.n_heads
            ends = [division.share(pieces, weights, rank) for rank in range(len(weights))]
            shares = [(end - begin) / pieces for begin, end in ends]
            return list(zip(shares, shares, strict=True))
        heads = [
            division.head_share(shape.n_heads, shape.n_kv_heads, weights, rank)
            for rank in range(len(weights))
        ]
        return [(own.n_heads / shape.n_heads, own.n_kv_heads / shape.n_kv_heads) for own in heads]

    def _attention(self, step: Step) -> tuple[float, float]:
        """Operations and bytes of one layer's attention: each new token sees all before it."""
        seen = step.tokens * step.context + step.tokens * (step.tokens + 1) // 2
        flops = 4.0 * step.sequences * seen * self.shape.n_heads * self.shape.head_dim
        held = step.sequences * (step.context + step.tokens)
        return flops, held * self.shape.kv_bytes_per_slot / self.shape.n_layers


def _medians(values: Sequence[float], kinds: Sequence[int]) -> list[float]:
    """For each value the median of the values of its kind."""
    by_kind = {
        kind: median(v for v, k in zip(values, kinds, strict=True) if k == kind) for kind in set(kinds)
    }
    return [by_kind[kind] for kind in kinds]


def _line_ns(where: Neighbourhood, rates: MachineRates, pus: Sequence[int]) -> float:
    """Nanoseconds of a cache line between the most distant of these cores, by the slowest of their nodes."""
    slowest = min(rates.node_share.get(node, 1.0) for node in where.nodes_of(pus))
    return _even_line_ns(where, rates.latency, pus) / slowest


def _even_line_ns(where: Neighbourhood, latency: LineLatency, pus: Sequence[int]) -> float:
    if where.share_l3(pus):
        return latency.l3_ns
    if len(where.nodes_of(pus)) == 1:
        return latency.numa_ns
    return latency.package_ns if where.share_package(pus) else latency.machine_ns


def _exchange_share(where: Neighbourhood, rates: MachineRates, pus: Sequence[int]) -> float:
    """The share of its read rate that a core reaches on lines that other cores wrote."""
    if len(where.nodes_of(pus)) == 1:
        return 1.0
    return rates.remote_node_share if where.share_package(pus) else rates.remote_package_share
