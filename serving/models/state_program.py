"""The ops of a layer that keeps a state, between the norm before it and the product that leads back to the
stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phasewise.cython_kernels._native import Program
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.serving.errors import ModelError
from phasewise.serving.models.packed_model import ModelConfig, PackedModel
from phasewise.serving.models.state_layers import DELTA, MAMBA2, SHORT_CONV, StateLayers

Place = tuple[int, int]  # offset and row stride in the arena
NORM_EPS = 1e-6
"""The epsilon of the 2-norms of queries and keys, as every family has it."""


@dataclass(frozen=True, slots=True)
class StateRows:
    """The places in the arena: products of the stream, rows of the convolution, gates, and what is read of a
    state."""

    products: Place
    own: Place
    gates: Place
    mixed: Place


@dataclass(frozen=True, slots=True)
class StateWidths:
    """Numbers of a row in each place of `StateRows`; 0 where a model needs none."""

    products: int = 0
    own: int = 0
    gates: int = 0
    mixed: int = 0


def state_widths(config: ModelConfig) -> StateWidths:
    gate = config.q_rows if config.gated_attention else 0
    state, hidden = config.state, config.hidden
    if state is None:
        return StateWidths(own=gate)
    if state.kind == SHORT_CONV:
        return StateWidths(3 * hidden, gate, 0, hidden)
    products = state.channels(hidden) + state.values + 2 * state.heads
    return StateWidths(products, max(gate, state.channels(hidden)), 2 * state.heads, state.values)


AddProduct = Callable[[list[tuple[PackedWeight, int]], Place], None]
"""Adds the product of the normalised stream with weights, each from a column of its own on, to rows of a
place."""


def add_state_ops(
    program: Program, add_product: AddProduct, model: PackedModel, name: str, rows: StateRows
) -> None:
    """name: "layers.3"."""
    state, hidden = model.config.state, model.config.hidden
    assert state is not None

    def vector(of: str) -> Any:
        return model.vectors[f"{name}.{of}"]

    taps = vector("taps").reshape(state.channels(hidden), state.taps)
    if state.kind == SHORT_CONV:
        add_product(_parts(model, name, [(("state_in",), (0,))]), rows.products)
        program.convolve(taps, *rows.products, *rows.mixed, gates_rows=True)
        return
    of_kind = _delta if state.kind == DELTA else _mamba2
    wanted, (qkv, gate, time), columns = of_kind(state, hidden)
    add_product(_parts(model, name, wanted), rows.products)
    offset, stride = rows.products
    bias = vector("taps_bias") if state.conv_bias else None
    program.convolve(taps, offset + qkv, stride, *rows.own, bias=bias, silu=True)
    program.state_gates(
        state,
        offset + time,
        stride,
        *rows.gates,
        rates=vector("rates"),
        offsets=vector("time_offsets"),
        normalised=(*rows.own, columns[0], columns[1]) if state.erases else None,
        eps=NORM_EPS,
    )
    skips = vector("skips") if state.kind == MAMBA2 else None
    program.recur(state, *rows.own, *rows.mixed, gates=rows.gates, columns=columns, skips=skips)
    program.gate_rows(
        state.values,
        *rows.mixed,
        *rows.mixed,
        (offset + gate, stride),
        norm=vector("state_scale"),
        shape=state if state.kind == DELTA else replace(state, groups=1),  # one norm over all heads
        norm_first=state.kind == DELTA,
        eps=model.config.norm_eps,
    )


Wanted = Sequence[tuple[Sequence[str], Sequence[int]]]
Columns = tuple[int, int, int]


def _delta(state: StateLayers, hidden: int) -> tuple[Wanted, Columns, Columns]:
    """The products and their columns; where those of the convolution, gates and time steps begin; of a row
    of the convolution where queries, keys and values do.
    """
    gate, b = state.channels(hidden), state.channels(hidden) + state.values
    columns = (0, state.keys, 2 * state.keys)
    wanted: Wanted = [
        (("state_qkv", "state_q", "state_k", "state_v"), (0, *columns)),
        (("state_gate",), (gate,)),
        (("state_ba", "state_b", "state_a"), (b, b, b + state.heads)),
    ]
    return wanted, (0, gate, b), columns


def _mamba2(state: StateLayers, hidden: int) -> tuple[Wanted, Columns, Columns]:
    """The same: a gate, then values, keys and queries, then time steps, all of one product."""
    values, keys = state.values, state.keys
    places = (values, 0, values + state.channels(hidden))
    return [(("state_in",), (0,))], places, (values + keys, values, 0)


def _parts(model: PackedModel, name: str, wanted: Wanted) -> list[tuple[PackedWeight, int]]:
    """The weights and their columns: of each entry the first name where it was fused, else the others."""
    parts = []
    for names, columns in wanted:
        fused, *apart = zip(names, columns, strict=True)
        chosen = [fused] if f"{name}.{fused[0]}" in model.weights else apart
        if not chosen:
            raise ModelError(f"{model.name} has no weight '{name}.{fused[0]}'")
        parts += [(model.weights[f"{name}.{part}"], column) for part, column in chosen]
    return parts
