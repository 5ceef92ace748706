"""From the tensors of an adapter's file to an `Adapter`: every pair checked against the model's shapes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.layout import weight_shapes
from phasewise.serving.loaders.source import SourceTensor
from phasewise.serving.models.low_rank import Adapter, LowRank, Matrix, update_of
from phasewise.serving.models.packed_model import ModelConfig

MOST_RANK = 512
MOST_SCALE = 1e6


@dataclass(frozen=True)
class Pair:
    """A and B of one weight by our name, as a file has them; `theirs` is its name there."""

    theirs: str
    a: SourceTensor
    b: SourceTensor
    scale: float


def put(pairs: dict[str, Pair], ours: str, pair: Pair, what: str) -> None:
    """ModelError where the weight has a pair already."""
    if ours in pairs:
        raise ModelError(f"{what} has the adapter of {pair.theirs!r:.120} twice")
    pairs[ours] = pair


def checked(pair: Pair, shape: tuple[int, int], what: str) -> LowRank:
    """The numbers of a pair for a weight of this shape (outputs, inputs). ModelError, in one line."""
    (outputs, inputs), rank = shape, pair.a.shape[0]
    whose = f"{what}: {pair.theirs!r:.120}"
    if not 1 <= rank <= MOST_RANK:
        raise ModelError(f"{whose} has rank {rank}; 1 to {MOST_RANK} can run")
    if pair.a.shape != (rank, inputs) or pair.b.shape != (outputs, rank):
        raise ModelError(
            f"{whose} has A {list(pair.a.shape)} and B {list(pair.b.shape)} beside a weight of"
            f" {outputs} outputs and {inputs} inputs: it is another model's"
        )
    if not (math.isfinite(pair.scale) and abs(pair.scale) <= MOST_SCALE):
        raise ModelError(
            f"{whose} is scaled by {pair.scale!r:.40}: a number within {MOST_SCALE:.0e} expected"
        )
    return LowRank(_numbers(pair.a, whose), _numbers(pair.b, whose), float(np.float32(pair.scale)))


def _numbers(tensor: SourceTensor, whose: str) -> Matrix:
    if tensor.form.is_quantised:
        raise ModelError(f"{whose} is stored as {tensor.type_name}; F32, F16 and BF16 are read")
    rows = tensor.rows(0, tensor.shape[0])
    assert isinstance(rows, np.ndarray)
    numbers = np.ascontiguousarray(rows, np.float32)
    if not np.isfinite(numbers).all():
        raise ModelError(f"{whose} holds numbers that are not finite")
    return numbers


def parts_of(pairs: Mapping[str, Pair], config: ModelConfig, what: str) -> dict[str, LowRank]:
    """The numbers of these pairs, by our names of weights. what: their file, for errors. ModelError."""
    if not pairs:
        raise ModelError(f"{what} changes no weight")
    shapes = weight_shapes(config)
    adaptable = {weight for columns in _readers(config).values() for weight in columns}
    parts: dict[str, LowRank] = {}
    for ours, pair in pairs.items():
        if ours not in adaptable:
            raise ModelError(
                f"{what}: {pair.theirs!r:.120} is an adapter of something else than the projections of"
                " attention and of the feed-forward layer, which alone can run"
            )
        parts[ours] = checked(pair, shapes[ours], what)
    return parts


def adapter_of(name: str, parts: Mapping[str, LowRank], config: ModelConfig) -> Adapter:
    """The adapter of these weights, as a program reads it."""
    updates = {}
    for reader, columns in _readers(config).items():
        own = [(column, parts[weight]) for weight, column in columns.items() if weight in parts]
        if own:
            updates[reader] = update_of(own)
    return Adapter(name, _digest(parts), updates)


def _readers(config: ModelConfig) -> dict[str, dict[str, int]]:
    """Weights by what reads the same rows, each with the first column of its outputs there."""
    readers: dict[str, dict[str, int]] = {}
    for i, layer in enumerate(config.layers):
        widths: dict[str, int] = {}
        for product in layer.products:
            first = widths.get(product.reader, 0)
            if product.reader:
                widths[product.reader] = first + sum(product.outputs.values())
                columns = {f"layers.{i}.{part}": column for part, column in product.columns(first)}
                readers.setdefault(f"layers.{i}.{product.reader}", {}).update(columns)
    return readers


def _digest(parts: Mapping[str, LowRank]) -> str:
    digest = hashlib.sha256()
    for name in sorted(parts):
        part = parts[name]
        head = f"{name} {part.a.shape} {part.b.shape} {part.scale.hex()}\n"
        digest.update(head.encode())
        for matrix in (part.a, part.b):
            digest.update(matrix.astype("<f4", copy=False).tobytes())
    return digest.hexdigest()
