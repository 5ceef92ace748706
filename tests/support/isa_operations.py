"""Every operation whose numbers an answer passes through, on drawn inputs: the same call for every ISA."""

from __future__ import annotations

from collections import defaultdict
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
_CHUNK = 128
_WIDTHS = (1, 7, 16, 40, 64, 333, 1100)  # whole numbers of vectors, and none
_EDGES = np.float32(
    [0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 1e-20, 1.0, -1.0, 87.3, -87.3, -103.9, 88.8, 1e20, 3.4e38, np.inf]
)
_GATES = ("silu", "gelu_tanh", "clamped_silu", "gelu")
_ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")


def results() -> Iterator[tuple[str, Array]]:
    """Each operation's name, and its results by the instruction set in use. A name may come several times."""
    rng = np.random.default_rng(41)
    for width in _WIDTHS:
        normal, weight, bias = rng.standard_normal((3, width)).astype(np.float32)
        yield from _rows(f" of {width}", normal * 3, weight, bias)
        yield from _rows(f" of {width} edges", np.resize(_EDGES, width), weight, bias)
    heads = rng.standard_normal((200, 128)).astype(np.float32)
    angles = rng.standard_normal(64).astype(np.float32)
    yield "rope", np.concatenate([_native.rope(row, np.cos(angles), np.sin(angles)) for row in heads])
    yield from _attention(rng)
    yield from _products(rng)


def _rows(name: str, x: Array, weight: Array, bias: Array) -> Iterator[tuple[str, Array]]:
    yield f"rmsnorm{name}", _native.rmsnorm(x, weight, 1e-5)
    yield f"layernorm{name}", _native.layernorm(x, bias, weight, bias, 1e-5)
    yield f"exponential{name}", _native.exponential(x)
    yield f"softmax{name}", _native.softmax(x)
    yield f"logsumexp{name}", np.float64([_native.logsumexp(x)])
    yield f"argmax{name}", np.int64([_native.argmax(x)])
    yield f"top 8{name}", np.concatenate([array.astype(np.float64) for array in _native.top_k(x, 8)])
    yield f"capped{name}", _native.capped(x, 30.0)
    for activation in _ACTIVATIONS:
        yield f"{activation}{name}", _native.activated(activation, x, bias)
    yield f"xielu{name}", _native.activated("xielu", x, np.float32([0.8, 0.8, 0.5, -1e-6]))
    for gate in _GATES:
        yield f"gate of {gate}{name}", _native.gated(gate, x, weight)


def _attention(rng: np.random.Generator) -> Iterator[tuple[str, Array]]:
    """Over two chunks, of which rows see all, an end or a window; slots begin inside a panel of 16."""
    for rows, dim, cap in ((1, 64, 0.0), (3, 64, 30.0), (14, 80, 0.0), (7, 128, 0.0)):
        positions = 200
        q = rng.standard_normal((rows, dim)).astype(np.float32)
        keys, values = rng.standard_normal((2, positions, dim)).astype(np.float32)
        last = positions - rows + np.arange(rows)
        first, table = np.maximum(0, last - rng.integers(1, 2 * positions, rows)), [5, 5 + _CHUNK]
        for kv_format in _native.KV_FORMATS:
            attended = _native.attend_one_head(q, keys, values, first, last, table, kv_format, cap)
            yield f"attention over {kv_format}, {rows} rows of {dim}", attended
            falls = 2.0 ** -np.arange(1, rows + 1, dtype=np.float32)
            attended = _native.attend_one_head(
                q, keys, values, first, last, table, kv_format, cap, slopes=falls, positions=last
            )
            yield f"attention over {kv_format} that falls with the distance, {rows} rows of {dim}", attended


def _products(rng: np.random.Generator) -> Iterator[tuple[str, Array]]:
    """By every path that an instruction set has; names tell it where it is not the default of all."""
    sizes = 2.0 ** rng.integers(-8, 9, (_ROWS, 1))
    x = (rng.standard_normal((_ROWS, _K)) * sizes).astype(np.float32)
    weights = {fmt: make_weight(fmt, _N, _K, rng) for fmt in FORMATS}
    weights |= {kind: packing.pack_blocks(random_blocks(kind, _N, _K, rng)) for kind in BLOCKS}
    for name, weight in weights.items():
        yield f"product of {name}", _native.gemm(x, weight)
        for path in _native.compute_paths(weight.kind, weight.group):
            yield f"product of {name} by {path}", _native.gemm(x, weight, path=path)
            yield f"product of {name} by {path}", _native.gemm(x, weight, path=path, k_parts=2)


def differences(first: str, other: str) -> list[str]:
    """The operations whose bits differ between two usable instruction sets, of those that both have.

    One NaN is as another.
    """
    recorded: list[dict[str, list[Array]]] = []
    for name in (first, other):
        with isa.using(name):
            recorded.append(defaultdict(list))
            for operation, result in results():
                recorded[-1][operation].append(result.copy())
    return [
        name
        for name in recorded[0]
        if name in recorded[1]
        and not all(_equal(a, b) for a, b in zip(recorded[0][name], recorded[1][name], strict=True))
    ]


def _equal(first: Array, other: Array) -> bool:
    """Equal in every bit, so that 0 is not -0."""
    nan = np.isnan(first)
    return bool((nan == np.isnan(other)).all()) and first[~nan].tobytes() == other[~nan].tobytes()


def main() -> None:
    """Print the operations that differ between every usable instruction set and the one below it."""
    names = isa.usable()
    for lower, upper in pairwise(names):
        print(f"{lower} and {upper}: {', '.join(differences(lower, upper)) or 'equal in every bit'}")


if __name__ == "__main__":
    main()
