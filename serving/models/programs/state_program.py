"""The ops of a layer that keeps a state, between the norm before it and the product that leads back to the
stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from phasewise.cython_kernels._native import Program
from phasewise.serving.errors import ModelError
from phasewise.serving.models.factors import ProductFactors
from phasewise.serving.models.linears import Parts, Place
from phasewise.serving.models.packed_model import ModelConfig, PackedModel
from phasewise.serving.models.programs.mixing_rows import MixingRows
from phasewise.serving.models.state_layers import DELTA, KDA, KDA_TAPS, MAMBA2, SHORT_CONV, StateLayers

NORM_EPS = 1e-6
"""The epsilon of the 2-norms of queries and keys, as every family has it."""


def state_widths(config: ModelConfig) -> MixingRows[int]:
    gate = config.q_rows if config.gated_attention else 0
    state, hidden = config.state, config.hidden
    if state is None:
        return MixingRows(0, gate, 0, 0)
    if state.kind == SHORT_CONV:
        return MixingRows(3 * hidden, gate, 0, hidden)
    more = state.values + 2 * state.heads
    if state.kind == KDA:
        more = state.key_dim + state.value_dim + state.heads
    channels = state.channels(hidden)
    return MixingRows(channels + more, max(gate, channels), state.gates, state.values)


AddProduct = Callable[[Parts, Place, float, Place | None], None]
"""Adds the product of the normalised stream, times a factor, or of rows as they are, with weights, each from
a column of its own on, to rows of a place."""


def add_state_ops(
    program: Program, add_product: AddProduct, model: PackedModel, name: str, rows: MixingRows[Place]
) -> Place:
    """The ops of one layer; where its rows are that lead back to the stream. name: "layers.3"."""
    state, hidden = model.config.state, model.config.hidden
    factors = model.config.factors
    assert state is not None

    def vector(of: str) -> Any:
        return model.vectors[f"{name}.{of}"]

    own_taps = [vector(part) for part in (KDA_TAPS if state.kind == KDA else ("taps",))]
    taps = np.concatenate(own_taps).reshape(state.channels(hidden), state.taps)
    if state.kind == SHORT_CONV:
        add_product(_parts(model, name, [(("state_in",), (0,))]), rows.products, 1.0, None)
        program.convolve(taps, *rows.products, *rows.mixed, gates_rows=True)
        return rows.mixed
    of_kind = {DELTA: _delta, KDA: _kda, MAMBA2: _mamba2}[state.kind]
    wanted, (qkv, gate, time), columns = of_kind(state, hidden)
    for parts, factor in _by_factor(wanted, factors):
        add_product(_parts(model, name, parts), rows.products, factor, None)
    offset, stride = rows.products
    if state.kind == MAMBA2:
        of_parts = np.array((factors.state_values, factors.state_keys, factors.state_queries), np.float32)
        taps = taps * np.repeat(of_parts, (state.values, state.keys, state.keys))[:, None]
    bias = vector("taps_bias") if state.conv_bias else None
    program.convolve(taps, offset + qkv, stride, *rows.own, bias=bias, silu=True)
    factor_at = None
    if state.kind == KDA:  # where the convolution has read, what leads to both gates
        short = state.channels(hidden), state.channels(hidden) + state.key_dim
        for part, column, target in (("state_f_b", short[0], time), ("state_g_b", short[1], gate)):
            weights = _parts(model, name, [((part,), (0,))])
            add_product(weights, (offset + target, stride), 1.0, (offset + column, stride))
        factor_at = short[1] + state.value_dim
    program.state_gates(
        state,
        offset + time,
        stride,
        *rows.gates,
        rates=vector("rates"),
        offsets=vector("time_offsets"),
        normalised=(*rows.own, columns[0], columns[1]) if state.erases else None,
        eps=NORM_EPS,
        factor_at=factor_at,
    )
    skips = vector("skips") if state.kind == MAMBA2 else None
    program.recur(state, *rows.own, *rows.mixed, gates=rows.gates, columns=columns, skips=skips)
    read = rows.own if state.beside else rows.mixed  # where attention, which comes next, leaves it
    norm = vector("state_scale") * np.float32(factors.state_out) if state.norm_groups else None
    program.gate_rows(
        state.values,
        *rows.mixed,
        *read,
        (offset + gate, stride),
        norm=norm,
        gate="logistic" if state.kind == KDA else "silu",
        shape=state if state.erases else replace(state, groups=state.norm_groups or 1),
        norm_first=state.erases,
        eps=model.config.norm_eps,
        scale=1.0 if state.norm_groups else factors.state_out,
    )
    return read


def _by_factor(wanted: Wanted, factors: ProductFactors) -> list[tuple[Wanted, float]]:
    """The products that have one factor, in one op each."""
    of_names = {"state_gate": factors.state_gate, "state_time": factors.state_times}
    by_factor: dict[float, list[tuple[Sequence[str], Sequence[int]]]] = {}
    for entry in wanted:
        by_factor.setdefault(of_names.get(entry[0][0], 1.0), []).append(entry)
    return [(parts, factor) for factor, parts in by_factor.items()]


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


def _kda(state: StateLayers, hidden: int) -> tuple[Wanted, Columns, Columns]:
    """The same: numbers of which both gates are products come last, and these products where the convolution
    has read."""
    columns, first = (0, state.keys, 2 * state.keys), state.channels(hidden)
    second = first + state.key_dim
    wanted: Wanted = [
        (("state_qkv", "state_q", "state_k", "state_v"), (0, *columns)),
        (
            ("state_fgb", "state_f_a", "state_g_a", "state_b"),
            (first, first, second, second + state.value_dim),
        ),
    ]
    return wanted, (0, state.keys, 0), columns


def _mamba2(state: StateLayers, hidden: int) -> tuple[Wanted, Columns, Columns]:
    """The same: a gate, then values, keys and queries, then time steps; of one product, or of three."""
    values, keys = state.values, state.keys
    time = values + state.channels(hidden)
    wanted: Wanted = [(("state_in",), (0,))]
    if state.beside:
        wanted = [(("state_gate",), (0,)), (("state_in",), (values,)), (("state_time",), (time,))]
    return wanted, (values, 0, time), (values + keys, values, 0)


def _parts(model: PackedModel, name: str, wanted: Wanted) -> Parts:
    """The weights and their columns: of each entry the first name where it was fused, else the others."""
    parts = []
    for names, columns in wanted:
        fused, *apart = zip(names, columns, strict=True)
        chosen = [fused] if f"{name}.{fused[0]}" in model.weights else apart
        if not chosen:
            raise ModelError(f"{model.name} has no weight '{name}.{fused[0]}'")
        parts += [(model.weights[f"{name}.{part}"], column) for part, column in chosen]
    return parts
