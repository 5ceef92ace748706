"""From a model to a program: which ops a forward step is made of, and where in the arena their rows lie.

The program itself, and why its results do not depend on the batch, is in cython_kernels/program/program.h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels._native import Program
from phasewise.cython_kernels.division import Division, HeadShare, Teams
from phasewise.cython_kernels.errors import KernelError
from phasewise.cython_kernels.kv_formats import kv_slot_bytes
from phasewise.cython_kernels.schedules import ScheduleLookup
from phasewise.cython_kernels.user_slots.installed import use_installed
from phasewise.serving.errors import ModelError
from phasewise.serving.models.arena import ActivationArena, lay_out, rounded
from phasewise.serving.models.experts import Experts
from phasewise.serving.models.heads.draft_head import (
    add_embedding_to_attention,
    add_fed_rows,
    add_head_input,
    check_feeds,
    taps_of,
)
from phasewise.serving.models.heads.kinds import EAGLES, MTP
from phasewise.serving.models.last_rows import add_logits
from phasewise.serving.models.latent import check_kv_format
from phasewise.serving.models.linears import Linears, Parts, Place, PlacedProduct, Rows, with_default_path
from phasewise.serving.models.model_parts import into_ffn_parts, own_attention, qkv_parts, weight_of
from phasewise.serving.models.norms import add_final_norm, add_layer_norm, stream_eps
from phasewise.serving.models.packed_model import LayerKind, ModelConfig, PackedModel, Vector
from phasewise.serving.models.programs.expert_program import ExpertLayer
from phasewise.serving.models.programs.latent_program import add_latent_ops, latent_parts
from phasewise.serving.models.programs.layer_inputs import add_inputs_of_layer, add_layer_inputs
from phasewise.serving.models.programs.state_program import add_state_ops
from phasewise.serving.models.programs.stream_program import StreamLayer, add_spread

Gives = Literal["logits", "rows"]

AUTO = "auto"

PATIENCE_S = 60.0
"""Ranks meet after every op, which takes milliseconds, or seconds while weights come from a slow disk. One
that is so late hangs, and is as good as dead."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The room of one program."""

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
    """States of sequences that layers without keys and values keep, copies of earlier ones included."""
    touched: bool = False
    """True if all memory is to be there before the first step: `rank_teams.touch_memory`."""
    feeds: str = ""
    """The kind of the head that reads rows of every step, of `heads.kinds.KINDS`; "": none does."""


EXACT_KINDS = ("f32", "f16")
"""Weights whose products round neither them nor the inputs."""


def resolve_kv_format(model: PackedModel, kv_format: str = AUTO) -> str:
    """`auto` is f32 where every weight of the layers is multiplied in f32, so that nothing is rounded; else
    int16, or f16 of latent vectors. ModelError for a format that those cannot have.
    """
    if kv_format != AUTO:
        check_kv_format(model.config.latent, model.name, kv_format)
        return kv_format
    layers = (weight for name, weight in model.weights.items() if name.startswith("layers."))
    rounded_to = "int16" if model.config.latent is None else "f16"
    return "f32" if all(weight.kind in EXACT_KINDS for weight in layers) else rounded_to


def kv_bytes_per_slot(model: PackedModel, kv_format: str = AUTO, teams: Teams = ()) -> int:
    """Bytes of the keys and values of one position, all layers. ModelError for a format that there is not.

    teams: those of ranks (`Division.teams`), which keep copies of heads that they share; (): one rank.
    """
    return sum(kv_bytes_by_reach(model, kv_format, teams))


def kv_bytes_by_reach(model: PackedModel, kv_format: str = AUTO, teams: Teams = ()) -> tuple[int, int]:
    """The same of the layers that see every position, and of those with a window."""
    config = model.config
    try:
        stored, latent = resolve_kv_format(model, kv_format), config.latent is not None
        bytes_of = {
            layer: sum(config.copies_of_heads(layer, teams))
            * kv_slot_bytes(stored, config.heads_of(layer).head_dim, latent)
            for layer in config.attention_layers
        }
    except KernelError as error:
        raise ModelError(f"{model.name}: {error}") from error
    windowed = sum(n for layer, n in bytes_of.items() if config.kind_of(layer).window is not None)
    return sum(bytes_of.values()) - windowed, windowed


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
) -> Program:
    """A sealed program. ModelError if the model does not fit the kernels or the memory.

    gives: the logits of rows that want them, or what the last norm makes of these "rows". Then every slice
    is a whole sequence, and all layers keep keys and values in the same place.

    check_memory(model name, bytes, KV slots) may refuse before anything large is allocated. schedules: one
    lookup for each table that a run may name; the first one says how every weight is computed.
    division: over ranks, None for one. memory(bytes) gives what several ranks share (Program.seal_shared),
    kv_memory(bytes) the keys and values of a single rank; None: they are allocated as its other memory is.
    patience_s: how long a rank waits for another within a step. placed: is given the places of all schedules.
    """
    try:
        config = model.config
        if config.encoder is not None:
            raise ModelError(
                f"{model.name} is an encoder and generates no text: `phasewise embed` makes vectors of it"
            )
        if gives == "logits" and config.last_row_scores:
            raise ModelError(
                f"{model.name} scores pairs of texts and generates no text: serve it for /v1/rerank"
            )
        if gives == "rows" and config.state is not None:
            raise ModelError(f"{model.name} has layers that keep a state, which cannot make vectors of texts")
        if gives == "rows" and (config.shared_kv_layers or config.has_mixed_heads or config.layer_inputs):
            raise ModelError(f"{model.name} has layers that differ, which cannot make vectors of texts")
        if capacity.feeds:
            check_feeds(config, capacity.feeds)
        program = open_program(model, capacity, division, patience_s, gives)
        most_rows = max(capacity.step_tokens, capacity.logit_rows)
        linears = Linears(
            program, schedules, most_rows, division, model.adapters, [] if placed is None else placed
        )
        arena = lay_out(model.config, capacity.step_tokens, capacity.logit_rows)
        if config.drafts:
            add_head_input(linears, model, arena)
        else:
            embed_scale = config.embed_scale / config.residual_scale
            program.embed(weight_of(model, "embed"), arena.hidden, arena.hidden_stride, embed_scale)
        if config.layer_inputs is not None:
            add_layer_inputs(linears, model, arena)
        if config.streams is not None:
            add_spread(linears, model, arena)
        keeping = {layer: number for number, layer in enumerate(config.attention_layers)}
        is_read, taps = capacity.feeds == MTP, taps_of(config, capacity.feeds)
        for layer in range(config.n_layers):
            kept_as = keeping.get(config.kept_by(layer), 0) if gives == "logits" else 0
            for part in taps.get(layer, ()):
                add_fed_rows(linears, model, arena, (arena.hidden, arena.hidden_stride), "every", part)
            _Layer(linears, model, layer, arena, kept_as, is_read).add()
        if gives == "logits":
            add_logits(linears, model, arena, is_read=is_read)
        else:
            tail = arena.tail, arena.hidden_stride
            add_final_norm(program, model, tail, (arena.logits, config.hidden))
        schedule_attention(program, model, capacity, schedules, division)
        if check_memory is not None:
            check_memory(model.name, program.bytes(), capacity.kv_slots)
        if memory is None:
            kv = None if kv_memory is None else kv_memory(program.whole_kv_bytes())
            program.seal(arena.logits, kv)
        else:
            program.seal_shared(arena.logits, memory(program.shared_bytes()))
    except KernelError as error:
        raise ModelError(f"{model.name}: {error}") from error
    return program


def open_program(
    model: PackedModel, capacity: Capacity, division: Division | None, patience_s: float, gives: Gives
) -> Program:
    """Without ops; attention's kinds are those of the config, in their order. Users' functions are in their
    slots from now on.
    """
    use_installed()
    config = model.config
    kinds = [(kind, *_rotation(kind, config)) for kind in config.kinds]
    first, inv_freq, magnitude = kinds[0]
    shape = {**_shape(config), "window": first.window or 0}
    if config.n_drafted:
        shape["outputs"] = config.n_drafted
    if gives == "rows":
        shape |= {"n_layers": 1, "outputs": config.hidden, "bidirectional": config.encoder is not None}
    if first.heads is not None:
        shape["first_heads"] = _heads(first)
    program = Program(shape, room_of(model, capacity), inv_freq, division, patience_s, magnitude)
    for kind, inv_freq, magnitude in kinds[1:]:
        program.kind(inv_freq, kind.window or 0, magnitude, _heads(kind))
    return program


def _rotation(kind: LayerKind, config: ModelConfig) -> tuple[npt.NDArray[np.float64], float]:
    """Radians per position, and what cosines and sines are multiplied by."""
    if kind.rope is None:  # of latent vectors, whose last numbers are kept as they are turned, by nothing
        return np.zeros(0 if config.latent is None else config.latent.rope_dim // 2), 1.0
    return kind.rope.inv_freq(config.context_length), kind.rope.magnitude


def _heads(kind: LayerKind) -> tuple[int, int] | None:
    return None if kind.heads is None else (kind.heads.n_kv_heads, kind.heads.head_dim)


def _shape(config: ModelConfig) -> dict[str, Any]:
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
    """Give a program of one rank other schedules, between two steps. Its arithmetic stays, and so every bit.

    A weight whose schedules are now of another arithmetic keeps those it has.
    """
    most_rows = max(capacity.step_tokens, capacity.logit_rows)
    for product in placed:
        lookup, weight = lookups[product.table], product.weight
        if with_default_path(weight, lookup.arithmetic(weight)) == with_default_path(
            weight, product.arithmetic
        ):
            ranges = [(rows.last_m, rows.schedule) for rows in lookup.products(weight, most_rows)]
            program.set_schedules(product.op, product.part, ranges, product.table)
    schedule_attention(program, model, capacity, lookups, None)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Adds the ops of one layer. After the last one's keys and values, only rows that want logits matter.

    With a residual scale r the stream is kept divided by r: halves of a layer are then added as they are, and
    a norm of the stream is that of what is kept with its epsilon divided by r^2.
    """

    linears: Linears
    model: PackedModel
    layer: int
    arena: ActivationArena
    kept_as: int
    """The layer whose place keys and values have."""
    is_read: bool
    """True if a head reads the last layer's rows, all of them."""

    def add(self) -> None:
        config, layer, streams = self.config, self.layer, self._streams()
        if streams is not None:
            streams.add_before()
        if config.keeps_state(layer):
            self._add_state()
        elif config.attends(layer) and config.latent is not None:
            self._add_latent()
        elif config.attends(layer):
            self._add_attention()
            self._add_out("o_bias")
        if streams is not None:
            streams.add_between(self.after)
        experts = config.experts_of(layer)
        if experts is not None:
            self._add_experts(experts)
        elif width := config.ffn_of(layer):
            self._add_feed_forward(width)
        if config.layer_inputs is not None:
            targets = [self.after] if streams is None else streams.add_behind(self.after)
            add_inputs_of_layer(
                self.linears,
                self.model,
                self.layer,
                self.arena,
                self.after,
                targets,
                self._rows(),
                self._out_scale(),
            )

    def _streams(self) -> StreamLayer | None:
        streams, arena = self.config.streams, self.arena
        if streams is None:
            return None
        return StreamLayer(self.linears, self.model, self.name, arena, streams, self.stream, self.last)

    def _out_scale(self) -> float:
        """The factor of the stream behind the layer."""
        return float(self.model.vectors[f"{self.name}.out_scale"][0]) if self.config.layer_scales else 1.0

    def _scale_behind_halves(self) -> float:
        """The same where it is that of the second half's sum: no inputs of the layer come behind it."""
        return 1.0 if self.config.layer_inputs is not None else self._out_scale()

    @property
    def _branch(self) -> Place:
        return self.arena.branch, self.arena.branch_stride

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def name(self) -> str:
        return f"layers.{self.layer}"

    @property
    def last(self) -> bool:
        """True if no row reads another one beyond what mixes them here, or has before."""
        return self.layer >= self.config.last_mixing and not self.is_read

    @property
    def stream(self) -> Place:
        return self.arena.hidden, self.arena.hidden_stride

    @property
    def after(self) -> Place:
        """The stream beyond attention."""
        return (self.arena.tail, self.arena.hidden_stride) if self.last else self.stream

    def _vector(self, name: str) -> Vector | None:
        return self.model.vectors.get(f"{self.name}.{name}")

    def _reads(self, norm: str, factor: float = 1.0) -> dict[str, Any]:
        """The input of a product: the stream, normalised where the model does so before its halves."""
        if not self.config.pre_norms or self.config.layer_norms:
            return {"source": "rows"}
        weights = self.model.vectors[f"{self.name}.{norm}"]
        if factor != 1:
            weights = weights * np.float32(factor)
        return {"source": "norm", "norm": weights, "eps": stream_eps(self.config)}

    @property
    def _ffn_norm(self) -> str:
        return "attn_norm" if self.layer in self.config.halves.feed_forward else "ffn_norm"

    def _normed(self, norm: str, stream: Place, rows: Rows) -> Place:
        """The place of what `_reads` describes: the stream's own, or that of rows behind a LayerNorm."""
        if not self.config.layer_norms:
            return stream
        place = self.arena.normed, self.arena.hidden_stride
        add_layer_norm(self.linears.program, self.model, f"{self.name}.{norm}", stream, place, rows)
        return place

    def _add_attention(self) -> None:
        config, arena, program = self.config, self.arena, self.linears.program
        qkv, mixed = (arena.qkv, arena.qkv_stride), (arena.mixed, arena.mixed_stride)
        parts = qkv_parts(self.model, self.layer)
        reads = self._reads("attn_norm", config.factors.qkv)
        source, is_doubled = self._normed("attn_norm", self.stream, "every"), config.drafts in EAGLES
        if is_doubled:
            reads = add_embedding_to_attention(self.linears, self.model, arena, qkv)
        self.linears.add(parts, reads, source, qkv, f"{self.name}.qkv", add=is_doubled)
        if config.whole_qk_norm:
            keys = arena.qkv + config.q_rows, arena.qkv_stride
            program.adjust(config.q_rows, *qkv, *qkv, norm=self._vector("q_norm"))
            program.adjust(config.kv_rows, *keys, *keys, norm=self._vector("k_norm"))
        q_norm, k_norm = (None if config.whole_qk_norm else self._vector(f"{part}_norm") for part in "qk")
        program.attend(
            self.kept_as,
            *qkv,
            *mixed,
            bias=self._vector("qkv_bias"),
            rows="gathered" if self.last else "every",
            kind=config.kinds.index(config.kind_of(self.layer)),
            scale=config.attention_scale,
            cap=config.attention_cap or 0.0,
            sinks=self._vector("sinks"),
            q_norm=q_norm,
            k_norm=k_norm,
            **own_attention(config, self.layer),
        )
        if config.gated_attention:
            gates = arena.own, arena.own_stride
            gate = [(weight_of(self.model, f"{self.name}.attn_gate"), 0)]
            self.linears.add(gate, self._reads("attn_norm"), self.stream, gates)
            program.gate_rows(config.q_rows, *mixed, *mixed, gates, gate="logistic")

    def _add_state(self) -> None:
        def add_product(parts: Parts, target: Place, factor: float, source: Place | None) -> None:
            reads = {"source": "rows"} if source else self._reads("attn_norm", factor)
            self.linears.add(parts, reads, source or self.stream, target)

        read = add_state_ops(self.linears.program, add_product, self.model, self.name, self.arena.mixing)
        if self.config.attends(self.layer):  # both read the stream before either is added to it
            self._add_attention()
            reader = f"{self.name}.state_o"
            back = [(weight_of(self.model, reader), 0)]
            self.linears.add(back, {"source": "rows"}, read, self.stream, reader, add=True)
        self._add_out(None)

    def _add_latent(self) -> None:
        kind = self.config.kinds.index(self.config.kind_of(self.layer))
        places = self.arena.mixing
        rows: Rows = "gathered" if self.last else "every"
        parts = latent_parts(self.model, self.name)
        self.linears.add(parts, self._reads("attn_norm"), self.stream, places.products)
        add_latent_ops(self.linears, self.model, self.name, places, self.kept_as, kind, rows)
        self._add_back("o", {"source": "rows"}, places.gates, "attn_post_norm", None, rows)

    def _add_out(self, bias: str | None) -> None:
        """The product that leads from what the first half of a layer has mixed back to the stream."""
        mixed = self.arena.mixed, self.arena.mixed_stride
        rows: Rows = "gathered" if self.last else "every"
        self._add_back("o", {"source": "rows"}, mixed, "attn_post_norm", bias, rows)

    def _add_feed_forward(self, width: int) -> None:
        rows, gate_up = self._rows(), (self.arena.gate_up, rounded(self.config.n_into_ffn * width))
        reader = f"{self.name}.{'gate_up' if self.config.gated else 'up'}"
        source, taken = self._feed_forward_input(rows)
        for parts, factor in self._into_ffn(width):
            self.linears.add(parts, self._reads(self._ffn_norm, factor), source, gate_up, reader, rows=taken)
        experts = self.config.experts_of(self.layer)
        if experts is not None and experts.shared_gate:
            self._gate_shared(width, (gate_up[0] + width, gate_up[1]), rows)
        source_kind = "gate" if self.config.gated else "activation"
        reads: dict[str, Any] = {"source": source_kind, "gate": self.config.activation}
        if self.config.streams is not None:
            reads["sparsity"] = self.config.streams.sparsity[self.layer]
        if self.config.ffn_biases:
            reads["bias"] = self._vector("up_bias")
        if experts is not None and experts.own_norms:
            down = [(weight_of(self.model, f"{self.name}.down"), 0)]
            self.linears.add(down, reads, gate_up, self._branch, f"{self.name}.down", rows=rows)
            return
        bias = "down_bias" if self.config.ffn_biases else None
        self._add_back("down", reads, gate_up, "ffn_post_norm", bias, rows, self._scale_behind_halves())

    def _add_experts(self, experts: Experts) -> None:
        layer = ExpertLayer(
            self.linears, self.model, self.name, self.arena, experts, self.after, self._rows()
        )
        layer.add_products(self._reads(self._ffn_norm))
        if experts.shared_ffn:  # before what experts give is added: both read the same stream
            self._add_feed_forward(experts.shared_ffn)
        if experts.own_norms:
            layer.add_normed_sum(self._branch, self._scale_behind_halves())
        else:
            layer.add_sum()

    def _into_ffn(self, width: int) -> list[tuple[Parts, float]]:
        """The products of the stream, with what each is multiplied by."""
        factors, parts = self.config.factors, into_ffn_parts(self.model, self.name, width)
        if len(parts) == 1 or factors.gate == factors.up:
            return [(parts, factors.up)]
        return [(parts[:1], factors.gate), (parts[1:], factors.up)]

    def _feed_forward_input(self, rows: Rows) -> tuple[Place, Rows]:
        """The rows that it reads: behind attention, or those of attention in a layer of parallel halves."""
        if not self.config.parallel:
            return self._normed("ffn_norm", self.after, rows), rows
        return (self.arena.normed, self.arena.hidden_stride), "gathered" if self.last else "every"

    def _gate_shared(self, width: int, up: Place, rows: Rows) -> None:
        """The shared expert's rows times the logistic of one number each, which its product then is."""
        gate = self.arena.router, self.arena.router_stride  # rows were routed by what was there
        part = [(weight_of(self.model, f"{self.name}.shared_gate"), 0)]
        self.linears.add(part, self._reads(self._ffn_norm), self.after, gate, rows=rows)
        self.linears.program.gate_rows(width, *up, *up, gate, rows=rows, one_gate=True)

    def _rows(self) -> Rows:
        return "logits" if self.last else "every"

    def _add_back(
        self,
        weight: str,
        reads: dict[str, Any],
        place: Place,
        norm: str,
        bias: str | None,
        rows: Rows,
        scale: float = 1.0,
    ) -> None:
        """Add the output of a half of a layer to the stream, after its norm and bias where there are such.

        scale: of all of it, where there is a norm.
        """
        reader = f"{self.name}.{weight}"
        parts = [(weight_of(self.model, reader), 0)]
        own_bias = None if bias is None else self._vector(bias)
        residual = self.stream if rows == "gathered" else None
        if not self.config.post_norms and own_bias is None:
            self.linears.add(parts, reads, place, self.after, reader, add=True, rows=rows, residual=residual)
            return
        branch = self._branch
        self.linears.add(parts, reads, place, branch, reader, rows=rows)
        self.linears.program.adjust(
            self.config.hidden,
            *branch,
            *self.after,
            norm=self._vector(norm) if self.config.post_norms else None,
            bias=own_bias,
            add=True,
            rows=rows,
            residual=residual,
            scale=scale,
        )


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
    """Under what attention's schedules are kept: KV format, dimensions of query and of KV heads.

    Those of all heads, or of a rank's own.
    """
    config, stored = model.config, resolve_kv_format(model, kv_format)
    if own is None:
        return stored, config.q_rows, config.head_dim * config.n_kv_heads
    return stored, config.head_dim * own.n_heads, config.head_dim * own.n_kv_heads


def tuned_attention(model: PackedModel, kv_format: str = AUTO) -> tuple[str, int, int] | None:
    """The same where attention's schedules are tuned: not over latent vectors or heads that differ by
    layers, whose default cut is kept.
    """
    untuned = model.config.latent is not None or model.config.has_mixed_heads
    return None if untuned else attention_problem(model, kv_format=kv_format)
