"""Schedules on their way to another process: every answer of a lookup that a program may ask for, as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phasewise.cython_kernels.division import Division, HeadShare
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.cython_kernels.schedules import RowRange, ScheduleLookup
from phasewise.serving.models.forward import Capacity, attention_problem
from phasewise.serving.models.packed_model import PackedModel


@dataclass(frozen=True)
class WrittenSchedules(ScheduleLookup):
    """A lookup that knows the answers it was written with, and the default for anything else."""

    arithmetics: Mapping[str, tuple[str | None, int]]
    by_weight: Mapping[str, Sequence[RowRange]]
    by_attention: Mapping[str, Sequence[RowRange]]

    @classmethod
    def of(
        cls, lookup: ScheduleLookup, division: Division, table: int, model: PackedModel, capacity: Capacity
    ) -> WrittenSchedules:
        """The schedules of a table's `lookup` for a whole model, and for a rank's part of it."""
        parts = [division.weight(weight, table) for weight in model.weights.values()]
        whole_and_parts = [*model.products().values(), *(part for part in parts if part is not None)]
        weights = {_weight_key(weight): weight for weight in whole_and_parts}
        max_m = max(capacity.step_tokens, capacity.logit_rows)
        heads = division.heads(model.config.n_heads, model.config.n_kv_heads, table)
        shapes = _attention_shapes(model, heads, capacity.kv_format)
        return cls(
            {key: lookup.arithmetic(weight) for key, weight in weights.items()},
            {key: lookup.products(weight, max_m) for key, weight in weights.items()},
            {_attention_key(*shape): lookup.attention(*shape, max_m) for shape in shapes},
        )

    def arithmetic(self, weight: PackedWeight) -> tuple[str | None, int]:
        return self.arithmetics.get(_weight_key(weight), (None, 1))

    def products(self, weight: PackedWeight, max_m: int) -> Sequence[RowRange]:
        return self.by_weight.get(_weight_key(weight), ())

    def attention(self, kv_format: str, n: int, k: int, max_m: int) -> Sequence[RowRange]:
        return self.by_attention.get(_attention_key(kv_format, n, k), ())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> WrittenSchedules:
        """The schedules that `to_json` wrote."""
        return cls(
            {key: (path, k_parts) for key, (path, k_parts) in fields["arithmetics"].items()},
            {key: _row_ranges(ranges) for key, ranges in fields["by_weight"].items()},
            {key: _row_ranges(ranges) for key, ranges in fields["by_attention"].items()},
        )


def _attention_shapes(model: PackedModel, own: HeadShare, kv_format: str) -> set[tuple[str, int, int]]:
    """KV format and dimensions of query and KV heads: of all, and of a rank's own."""
    shares = [None, own] if own.n_kv_heads else [None]
    return {attention_problem(model, heads, kv_format) for heads in shares}


def _row_ranges(fields: Sequence[Mapping[str, Any]]) -> tuple[RowRange, ...]:
    return tuple(RowRange(**row_range) for row_range in fields)


def _weight_key(weight: PackedWeight) -> str:
    """A weight's format and shape: all that lookups know of it."""
    scales = "" if weight.scales is None else weight.scales.dtype.str
    mins = weight.mins is not None
    return f"{weight.kind} {weight.group} {weight.zero_point} {scales} {mins} {weight.n} {weight.k}"


def _attention_key(kv_format: str, n: int, k: int) -> str:
    return f"{kv_format} {n} {k}"
