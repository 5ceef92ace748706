"""Instructions of a rank's process, pickled in memory that it inherits as standard input: nothing of a model
or plan is on a command line, and nothing is left behind. Its standard output reports back: one line when it
is ready, or why it cannot be; end of file when it dies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from phasewise.cython_kernels.division import Division
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.cython_kernels.schedules import RowRange, ScheduleLookup
from phasewise.serving.models.forward import Capacity, attention_problem
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks.shared_weights import Holding


@dataclass(frozen=True)
class WrittenSchedules(ScheduleLookup):
    """A lookup of the answers that it was made with, and defaults for all else."""

    arithmetics: Mapping[tuple[object, ...], tuple[str | None, int]]
    by_weight: Mapping[tuple[object, ...], Sequence[RowRange]]
    by_attention: Mapping[tuple[str, int, int], Sequence[RowRange]]

    @classmethod
    def of(
        cls, lookup: ScheduleLookup, division: Division, table: int, model: PackedModel, capacity: Capacity
    ) -> WrittenSchedules:
        """All answers of a table's `lookup` for a model, and for a rank's part of it."""
        parts = [division.weight(weight, table) for weight in model.weights.values()]
        whole_and_parts = [*model.products().values(), *(part for part in parts if part is not None)]
        weights = {_weight_key(weight): weight for weight in whole_and_parts}
        max_m = max(capacity.step_tokens, capacity.logit_rows)
        own = division.heads(model.config.n_heads, model.config.n_kv_heads, table)
        heads = [None, own] if own.n_kv_heads else [None]  # all, and a rank's own
        shapes = {attention_problem(model, share, capacity.kv_format) for share in heads}
        return cls(
            {key: lookup.arithmetic(weight) for key, weight in weights.items()},
            {key: lookup.products(weight, max_m) for key, weight in weights.items()},
            {shape: lookup.attention(*shape, max_m) for shape in shapes},
        )

    def arithmetic(self, weight: PackedWeight) -> tuple[str | None, int]:
        return self.arithmetics.get(_weight_key(weight), (None, 1))

    def products(self, weight: PackedWeight, max_m: int) -> Sequence[RowRange]:
        return self.by_weight.get(_weight_key(weight), ())

    def attention(self, kv_format: str, n: int, k: int, max_m: int) -> Sequence[RowRange]:
        return self.by_attention.get((kv_format, n, k), ())


def _weight_key(weight: PackedWeight) -> tuple[object, ...]:
    """Format and shape of a weight: all that lookups know of it."""
    scales = None if weight.scales is None else weight.scales.dtype.str
    mins = weight.mins is not None
    return weight.kind, weight.group, weight.zero_point, scales, mins, weight.n, weight.k


@dataclass(frozen=True)
class Instructions:
    """All that one rank's process needs to know. File descriptors have the same numbers in both processes."""

    parent_pid: int
    model: PackedModel
    """The model without its arrays and texts."""
    isa: str
    """Instruction set that the parent uses, on which default compute paths depend."""
    capacity: Capacity
    division: Division
    cores: Mapping[int, tuple[int, ...]]
    """CPUs of this rank's threads, by schedule table that the rank takes part in."""
    pinned: bool
    nodes: tuple[int, ...]
    """NUMA nodes of the rank's memory; (): any."""
    step_fd: int
    step_bytes: int
    """Bytes of the memory that all ranks share: steps, rows, logits, keys and values."""
    weights: Holding
    weights_source: Holding | None
    """Source from which this rank copies its weight panels to `weights`; None: they are in place."""
    schedules: tuple[WrittenSchedules, ...]
    adapters: Holding | None = None
    """Weights of the adapters, which slices name by number; None: there are none."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that the process inherits."""
        holdings = (self.weights, self.weights_source, self.adapters)
        return self.step_fd, *(holding.fd for holding in holdings if holding is not None)


@dataclass(frozen=True, slots=True)
class Report:
    """The line that a rank's process writes. `error`: reason why it cannot run; None: it is ready."""

    error: str | None = None
    policy_errno: int = 0
    """The kernel's errno for the rank's memory policy; 0: granted, or none was asked for."""
    weights: Mapping[int, int] | None = None
    """Bytes of copied weights by NUMA node; None: nothing was copied, or the system does not tell."""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Report:
        values = json.loads(line)
        weights = values["weights"] and {int(node): n_bytes for node, n_bytes in values["weights"].items()}
        return cls(**{**values, "weights": weights})
