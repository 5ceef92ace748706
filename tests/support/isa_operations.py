"""Every operation whose numbers an answer passes through, on drawn inputs: the same call for every ISA."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels import _native, isa, packing
from phasewise.cython_kernels.blocks import BLOCKS
from tests.support.kernels.gemm_reference import FORMATS, make_weight, random_blocks

Array = npt.NDArray[Any]

_K, _N, _ROWS = 512, 48, 5
_WIDTH = 333  # no whole number of vectors
_EDGES = np.float32(
    [0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 1e-20, 1.0, -1.0, 87.3, -87.3, -103.9, 88.8, 1e20, 3.4e38, np.inf]
)
_GATES = ("silu", "gelu_tanh", "clamped_silu")
_ACTIVATIONS = ("gelu", "gelu_tanh", "relu")


def results() -> Iterator[tuple[str, Array]]:
    """Each operation's name, and its result by the instruction set in use."""
    rng = np.random.default_rng(41)
    normal = rng.standard_normal(_WIDTH).astype(np.float32)
    weight, bias = rng.standard_normal((2, _WIDTH)).astype(np.float32)
    for name, x in (("", normal * 3), (" of edges", np.resize(_EDGES, _WIDTH))):
        yield f"rmsnorm{name}", _native.rmsnorm(x, weight, 1e-5)
        yield f"layernorm{name}", _native.layernorm(x, bias, weight, bias, 1e-5)
        yield f"exponential{name}", _native.exponential(x)
        yield f"softmax{name}", _native.softmax(x)
        yield f"logsumexp{name}", np.float64([_native.logsumexp(x)])
        yield f"argmax{name}", np.int64([_native.argmax(x)])
        yield f"top 8{name}", np.concatenate([one.astype(np.float64) for one in _native.top_k(x, 8)])
        yield f"capped{name}", _native.capped(x, 30.0)
        for activation in _ACTIVATIONS:
            yield f"{activation}{name}", _native.activated(activation, x, bias)
        for gate in _GATES:
            yield f"gate of {gate}{name}", _native.gated(gate, x, weight)
    angles = rng.standard_normal(64).astype(np.float32)
    heads = rng.standard_normal((_ROWS, 128)).astype(np.float32)
    yield "rope", np.concatenate([_native.rope(row, np.cos(angles), np.sin(angles)) for row in heads])
    yield from _attention(rng)
    yield from _products(rng)


def _attention(rng: np.random.Generator) -> Iterator[tuple[str, Array]]:
    rows, dim, positions = 3, 64, 200
    q = rng.standard_normal((rows, dim)).astype(np.float32)
    keys, values = rng.standard_normal((2, positions, dim)).astype(np.float32)
    first, last = np.zeros(rows, np.int64), np.int64([positions - 3, positions - 2, positions - 1])
    table = list(range(0, positions, 64))
    for kv_format in _native.KV_FORMATS:
        found = _native.attend_one_head(q, keys, values, first, last, table, kv_format)
        yield f"attention over {kv_format}", found


def _products(rng: np.random.Generator) -> Iterator[tuple[str, Array]]:
    """By the default path of each instruction set, which is what a model without a tuned one runs."""
    x = rng.standard_normal((_ROWS, _K)).astype(np.float32)
    for fmt in FORMATS:
        yield f"product of {fmt}", _native.gemm(x, make_weight(fmt, _N, _K, rng))
    for kind in BLOCKS:
        yield f"product of {kind}", _native.gemm(x, packing.pack_blocks(random_blocks(kind, _N, _K, rng)))


def differences(one: str, other: str) -> list[str]:
    """The operations whose bits differ between two usable instruction sets; one NaN is as another."""
    found: list[dict[str, Array]] = []
    for name in (one, other):
        with isa.using(name):
            found.append({operation: result.copy() for operation, result in results()})
    return [name for name, result in found[0].items() if not _equal(result, found[1][name])]


def _equal(one: Array, other: Array) -> bool:
    """Equal in every bit, so that 0 is not -0."""
    nan = np.isnan(one)
    return bool((nan == np.isnan(other)).all()) and one[~nan].tobytes() == other[~nan].tobytes()


def main() -> None:
    """Print the operations that differ between every usable instruction set and the one below it."""
    names = isa.usable()
    for lower, upper in pairwise(names):
        print(f"{lower} and {upper}: {', '.join(differences(lower, upper)) or 'equal in every bit'}")


if __name__ == "__main__":
    main()
