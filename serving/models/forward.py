"""Builds a model's program: the operations of a forward step around those of its layers, and all schedules.
The program itself, and why its results do not depend on the batch, is in cython_kernels/program/program.h."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels._native import Program
from phasewise.cython_kernels.division import Division, HeadShare, Teams
from phasewise.cython_kernels.errors import KernelError
from phasewise.cython_kernels.schedules import ScheduleLookup
from phasewise.serving.errors import ModelError
from phasewise.serving.models.arena import lay_out
from phasewise.serving.models.decoder_layer import DecoderLayer, add_logits, add_vectors
from phasewise.serving.models.draft_head import add_head_input, check_feeds
from phasewise.serving.models.linears import Linears, PlacedProduct, with_default_path
from phasewise.serving.models.packed_model import LayerKind, ModelConfig, PackedModel
from phasewise.serving.models.parts.attention import check_kv_format
from phasewise.serving.models.parts.site import ActivationArena
from phasewise.serving.models.parts.streams import add_layer_inputs, add_spread

Gives = Literal["logits", "rows"]

AUTO = "auto"

PATIENCE_S = 60.0
"""Seconds that a rank waits for another before it counts as dead. Ranks meet after every operation, which
takes milliseconds, or seconds while weights come from a slow disk."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizes that one program has room for."""

    kv_slots: int
    step_tokens: int
    sequences: int
    logit_rows: int
    threads: int
    """Threads of the largest team of this process."""
    kv_format: str = AUTO
    """The format of keys and values: `resolve_kv_format`."""
    ring_slots: int = 0
    """Slots of layers with windows, which keep a ring of each sequence; 0: all layers have `kv_slots`."""
    state_places: int = 0
    """Places of sequences' states, in layers that keep a state; copies of earlier states included."""
    touched: bool = False
    """True if all memory is to be there before the first step: `rank_teams.touch_memory`."""
    feeds: bool = False
    """True if a head that drafts reads rows of every step."""


EXACT_KINDS = ("f32", "f16")
"""Kinds of weights whose products round neither weights nor inputs."""


def resolve_kv_format(model: PackedModel, kv_format: str = AUTO) -> str:
    """Resolve `auto`: f32 where every weight of the layers is multiplied in f32, so that nothing is rounded;
    else int16, or f16 for latent vectors. Raises ModelError for a format that latent vectors cannot have."""
    if kv_format != AUTO:
        check_kv_format(model.config.latent, model.name, kv_format)
        return kv_format
    layers = (weight for name, weight in model.weights.items() if name.startswith("layers."))
    rounded_to = "int16" if model.config.latent is None else "f16"
    return "f32" if all(weight.kind in EXACT_KINDS for weight in layers) else rounded_to


def kv_bytes_per_slot(model: PackedModel, kv_format: str = AUTO, teams: Teams = ()) -> int:
    """Bytes of the keys and values of one position, all layers. Raises ModelError for an unknown format.
    `teams`: the ranks' teams (`Division.teams`), which keep copies of shared heads; (): one rank."""
    return sum(kv_bytes_by_reach(model, kv_format, teams))


def kv_bytes_by_reach(model: PackedModel, kv_format: str = AUTO, teams: Teams = ()) -> tuple[int, int]:
    """Bytes of one position's keys and values, in layers that see every position and in those with a
    window."""
    try:
        stored = resolve_kv_format(model, kv_format)
        by_layer = [(part.window, part.slot_bytes(stored, teams)) for part in model.config.keeping]
    except KernelError as error:
        raise ModelError(f"{model.name}: {error}") from error
    windowed = sum(n_bytes for window, n_bytes in by_layer if window is not None)
    return sum(n_bytes for _, n_bytes in by_layer) - windowed, windowed


def check_generates(model: PackedModel) -> None:
    """Raise ModelError for a model that makes vectors or scores of texts, and generates none."""
    if model.config.sees_ahead:
        raise ModelError(
            f"{model.name} is an encoder and generates no text: `phasewise embed` makes vectors of it"
        )
    if model.config.last_row_scores:
        raise ModelError(f"{model.name} scores pairs of texts and generates no text: serve it for /v1/rerank")


def build_program(
    model: PackedModel,
    capacity: Capacity,
    check_memory: Callable[[str, int, int], None] | None = None,
    schedules: Sequence[ScheduleLookup] = (),
    division: Division | None = None,
    memory: Callable[[int], memoryview] | None = None,
    kv_memory: Callable[[int], memoryview] | None = None,
    patience_s: float = PATIENCE_S,
    gives: Gives = "logits",
    placed: list[PlacedProduct] | None = None,
    embed: Callable[[Linears, ActivationArena], None] | None = None,
) -> Program:
    """Build a sealed program. Raises ModelError if the model does not fit the kernels or the memory.

    `gives`: "logits" of rows that want them, or all "rows" behind the final norm; for rows every slice is a
    whole sequence, and all layers keep keys and values in the same place.

    `check_memory(model name, bytes, KV slots)`: may refuse before anything large is allocated. `schedules`: a
    lookup for each table that a run may name; the first one says how every weight is computed. `division`:
    the division over ranks; None: one rank. `memory(bytes)`: allocates what several ranks share
    (Program.seal_shared). `kv_memory(bytes)`: allocates the keys and values of a single rank; None: beside
    its other memory. `patience_s`: seconds that a rank waits for another within a step. `placed`: receives
    the places of all schedules. `embed`: adds the operations before the first layer; None: a decoder's."""
    try:
        config = model.config
        if gives == "logits":
            check_generates(model)
        if gives == "rows" and config.state is not None:
            raise ModelError(f"{model.name} has layers that keep a state, which cannot make vectors of texts")
        shares = any(form.shares for form in config.forms)
        if gives == "rows" and (shares or config.has_mixed_heads or config.layer_inputs):
            raise ModelError(f"{model.name} has layers that differ, which cannot make vectors of texts")
        if capacity.feeds:
            check_feeds(config)
        program = open_program(model, capacity, division, patience_s, gives)
        most_rows = max(capacity.step_tokens, capacity.logit_rows)
        linears = Linears(
            program, schedules, most_rows, division, model.adapters, [] if placed is None else placed
        )
        n_outputs = config.vector_width if gives == "rows" else None
        arena = lay_out(model.config, capacity.step_tokens, capacity.logit_rows, n_outputs)
        if embed is not None:
            embed(linears, arena)
        elif config.drafts:
            add_head_input(linears, model, arena)
        else:
            embed_scale = config.embed_scale / config.residual_scale
            program.embed(model.weight("embed"), *arena.hidden, embed_scale)
        if config.layer_inputs is not None:
            eps = config.stream_eps * config.hidden
            add_layer_inputs(model.site(linears), config.layer_inputs, config.n_layers, eps, arena)
        if config.streams is not None:
            add_spread(model.site(linears), config.streams, config.hidden, arena)
        keeping = {layer: number for number, layer in enumerate(config.attention_layers)}
        for layer in range(config.n_layers):
            kept_as = keeping.get(config.kept_by(layer), 0) if gives == "logits" else 0
            DecoderLayer(linears, model, layer, arena, kept_as, capacity.feeds).add()
        if gives == "logits":
            add_logits(linears, model, arena, is_read=capacity.feeds)
        else:
            add_vectors(linears, model, arena)
        schedule_attention(program, model, capacity, schedules, division)
        if check_memory is not None:
            check_memory(model.name, program.bytes(), capacity.kv_slots)
        if memory is None:
            kv = None if kv_memory is None else kv_memory(program.whole_kv_bytes())
            program.seal(arena.logits[0], kv)
        else:
            program.seal_shared(arena.logits[0], memory(program.shared_bytes()))
    except KernelError as error:
        raise ModelError(f"{model.name}: {error}") from error
    return program


def open_program(
    model: PackedModel, capacity: Capacity, division: Division | None, patience_s: float, gives: Gives
) -> Program:
    """Open a program without operations; its kinds of attention are the config's, in their order."""
    config = model.config
    kinds = [(kind, *_rotation(kind, config)) for kind in config.kinds]
    first, inv_freq, magnitude = kinds[0]
    shape = {**_shape(config), "window": first.window or 0, "in_chunks": first.in_chunks}
    if gives == "rows":
        shape |= {"n_layers": 1, "outputs": config.vector_width, "bidirectional": config.sees_ahead}
    if first.heads is not None:
        shape["first_heads"] = _heads(first)
    program = Program(shape, room_of(model, capacity), inv_freq, division, patience_s, magnitude)
    for kind, inv_freq, magnitude in kinds[1:]:
        program.kind(inv_freq, kind.window or 0, magnitude, _heads(kind), kind.in_chunks)
    return program


def _rotation(kind: LayerKind, config: ModelConfig) -> tuple[npt.NDArray[np.float64], float]:
    """Radians per position, and the factor of cosines and sines."""
    if kind.rope is None:  # of latent vectors, whose last numbers are kept as they are turned, by nothing
        return np.zeros(0 if config.latent is None else config.latent.rope_dim // 2), 1.0
    return kind.rope.inv_freq(config.context_length), kind.rope.magnitude


def _heads(kind: LayerKind) -> tuple[int, int] | None:
    return None if kind.heads is None else (kind.heads.n_kv_heads, kind.heads.head_dim)


def _shape(config: ModelConfig) -> dict[str, Any]:
    indexer = None if config.latent is None else config.latent.indexer
    return {
        "n_layers": len(config.attention_layers),
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden": config.hidden,
        "ffn": config.ffn,
        "vocab": config.vocab_size,
        "norm_eps": config.norm_eps,
        "latent": 0 if config.latent is None else config.latent.kv_rank,
        "index": 0 if indexer is None else indexer.dim,
        "chosen": 0 if indexer is None else indexer.chosen,
    }


def room_of(model: PackedModel, capacity: Capacity) -> dict[str, int | str]:
    return {
        "kv_slots": capacity.kv_slots,
        "ring_slots": capacity.ring_slots,
        "state_places": capacity.state_places,
        "max_tokens": capacity.step_tokens,
        "max_slices": capacity.sequences,
        "max_logit_rows": capacity.logit_rows,
        "max_threads": capacity.threads,
        "kv_format": resolve_kv_format(model, capacity.kv_format),
    }


def reschedule(
    program: Program,
    model: PackedModel,
    capacity: Capacity,
    lookups: Sequence[ScheduleLookup],
    placed: Sequence[PlacedProduct],
) -> None:
    """Give a program of one rank other schedules, between two steps. Arithmetic, and so every bit, stays. A
    weight whose new schedules have another arithmetic keeps its old schedules."""
    most_rows = max(capacity.step_tokens, capacity.logit_rows)
    for product in placed:
        lookup, weight = lookups[product.table], product.weight
        if with_default_path(weight, lookup.arithmetic(weight)) == with_default_path(
            weight, product.arithmetic
        ):
            ranges = [(rows.last_m, rows.schedule) for rows in lookup.products(weight, most_rows)]
            program.set_schedules(product.op, product.part, ranges, product.table)
    schedule_attention(program, model, capacity, lookups, None)


def schedule_attention(
    program: Program,
    model: PackedModel,
    capacity: Capacity,
    lookups: Sequence[ScheduleLookup],
    division: Division | None,
) -> None:
    config = model.config
    if tuned_attention(model, capacity.kv_format) is None:
        return
    for table, lookup in enumerate(lookups):
        own = None if division is None else division.heads(config.n_heads, config.n_kv_heads, table)
        if own is None or own.n_kv_heads:
            problem = attention_problem(model, own, capacity.kv_format)
            ranges = lookup.attention(*problem, capacity.step_tokens)
            program.set_attention_schedules([(rows.last_m, rows.schedule) for rows in ranges], table)


def attention_problem(
    model: PackedModel, own: HeadShare | None = None, kv_format: str = AUTO
) -> tuple[str, int, int]:
    """The key of attention's schedules: KV format, and the summed dimensions of query heads and of KV heads,
    of all heads or of a rank's `own`."""
    config, stored = model.config, resolve_kv_format(model, kv_format)
    heads = config if own is None else own
    return stored, config.head_dim * heads.n_heads, config.head_dim * heads.n_kv_heads


def tuned_attention(model: PackedModel, kv_format: str = AUTO) -> tuple[str, int, int] | None:
    """`attention_problem` where attention is tuned; None over latent vectors and over heads that differ by
    layers, which keep the default cut."""
    untuned = model.config.latent is not None or model.config.has_mixed_heads
    return None if untuned else attention_problem(model, kv_format=kv_format)
