"""Schedules for another process: every answer of a lookup that a program may ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phasewise.cython_kernels.division import Division
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.cython_kernels.schedules import RowRange, ScheduleLookup
from phasewise.serving.models.forward import Capacity, attention_problem
from phasewise.serving.models.packed_model import PackedModel


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
