"""Linear layers of `phasewise.torch` beside torch's own, over weights that are read anew for each call.

    TORCH_PYTHON benchmarks/torch_layers.py --layers q_proj --rows 1,8 --zeros 0.5

A gain over torch's bf16 says little where that does not read memory at its rate: so every row has its GB/s,
and a gain over torch's float32 as well. What a layer takes beside its product, on the same
threads: Python, and tensors of one type made into another.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import numpy as np
import torch
from typer import Option

from benchmarks.harness import Rounds, Threads, Yielded, commands, in_turns, listed, numbers, seconds_of
from benchmarks.peers.sparamx_layers import COLD_BYTES, SHAPES
from phasewise.cython_kernels._native import OpenMPProduct
from phasewise.torch import PackedLinear
from phasewise.torch.packed_linear import stored
from phasewise.torch.shared_threads import torch_team
from phasewise.tuner.weights import copies_of

LEAST_CALLS = 3


def torch_layers(
    layers: Annotated[str, Option(help=f"of Llama-3-8B: {', '.join(SHAPES)}")] = "q_proj",
    rows: Annotated[str, Option(help="of each product")] = "1,8",
    zeros: Annotated[float, Option(help="share of the weights")] = 0.5,
    rounds: Rounds = 5,
    threads: Threads = 2,
) -> Yielded:
    torch.set_num_threads(threads)
    for name, m in itertools.product(listed(layers), numbers(rows)):
        n, k = SHAPES[name]
        x = torch.randn(m, k)
        with torch.no_grad():
            contestants = {what: (turn(calls, x), n_bytes) for what, calls, n_bytes in all_of(n, k, zeros)}
            turns = {what: call for what, (call, _) in contestants.items()}
            medians = {what: float(np.median(taken)) for what, taken in in_turns(turns, rounds).items()}
        for what, seconds in medians.items():
            yield {
                "layer": name,
                "rows": m,
                "what": what,
                "us": 1e6 * seconds,
                "GB/s": contestants[what][1] / seconds / 1e9,
                "over torch float32": medians["torch float32"] / seconds,
                "over torch bf16": medians["torch bf16"] / seconds,
            }


def all_of(n: int, k: int, zeros: float) -> Iterator[tuple[str, list[Callable[[Any], Any]], int]]:
    """(what, a call for each copy of its weight, bytes of the weight)"""
    torch.manual_seed(0)
    linear = torch.nn.Linear(k, n, bias=False)
    with torch.no_grad():
        linear.weight[torch.rand(n, k) < zeros] = 0
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bf16")):
        n_bytes = n * k * dtype.itemsize
        copies = [copy.deepcopy(linear).to(dtype) for _ in range(max(2, -(-COLD_BYTES // n_bytes)))]
        yield f"torch {name}", [in_dtype(own, dtype) for own in copies], n_bytes
    for weight_format, storage in itertools.product(("bf16", "int8"), ("dense", "sparse")):
        packed = PackedLinear.from_linear(linear, "dense", weight_format)  # type: ignore[arg-type]
        weight = stored(packed._weight, storage)  # type: ignore[arg-type]
        copies_packed = copies_of(weight, COLD_BYTES)
        yield f"ours {weight_format}, {storage}", [PackedLinear(own) for own in copies_packed], weight.nbytes
        if (weight_format, storage) == ("bf16", "dense"):
            yield "its product alone", [product_of(own) for own in copies_packed], weight.nbytes


def in_dtype(linear: Any, dtype: Any) -> Callable[[Any], Any]:
    return lambda x: linear(x.to(dtype))


def product_of(weight: Any) -> Callable[[Any], Any]:
    product = OpenMPProduct(torch_team(), weight)

    def call(x: Any) -> None:
        y = torch.empty(len(x), product.n)
        product.multiply(x.data_ptr(), 0, y.data_ptr(), len(x), False)

    return call


def turn(calls: list[Callable[[Any], Any]], x: Any) -> Callable[[], float]:
    """Each copy once, and the median of their seconds."""
    return lambda: float(np.median([seconds_of(lambda call=call: call(x)) for call in calls]))  # type: ignore[misc]


app = commands(__doc__, torch_layers)

if __name__ == "__main__":
    app()
