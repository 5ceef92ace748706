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
from phasewise.cython_kernels.division import Division
from phasewise.cython_kernels.errors import KernelError
from phasewise.cython_kernels.kv_formats import kv_slot_bytes
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.cython_kernels.schedules import ScheduleLookup
from phasewise.serving.errors import ModelError
from phasewise.serving.models.arena import ActivationArena, lay_out, rounded
from phasewise.serving.models.experts import STACKS, Experts
from phasewise.serving.models.latent import LATENT_KV_FORMATS
from phasewise.serving.models.latent_program import LatentRows, add_latent_ops, latent_parts
from phasewise.serving.models.linears import Linears, Parts, Place, PlacedProduct, Rows, with_default_path
from phasewise.serving.models.norms import add_final_norm, add_layer_norm, stream_eps
from phasewise.serving.models.packed_model import LayerKind, ModelConfig, PackedModel, Vector
from phasewise.serving.models.state_program import StateRows, add_state_ops

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


EXACT_KINDS = ("f32", "f16")
"""Weights whose products round neither them nor the inputs."""


def resolve_kv_format(model: PackedModel, kv_format: str = AUTO) -> str:
    """`auto` is f32 where every weight of the layers is multiplied in f32, so that nothing is rounded; else
    int16, or f16 of latent vectors. ModelError for a format that those cannot have.
    """
    latent = model.config.latent is not None
    if latent and kv_format not in (AUTO, *LATENT_KV_FORMATS):
        raise ModelError(
            f"{model.name} keeps latent vectors, which cannot be {kv_format}: --kv-format"
            f" {', '.join(LATENT_KV_FORMATS[:-1])} or {LATENT_KV_FORMATS[-1]} can"
        )
    if kv_format != AUTO:
        return kv_format
    layers = (weight for name, weight in model.weights.items() if name.startswith("layers."))
    rounded_to = "f16" if latent else "int16"
    return "f32" if all(weight.kind in EXACT_KINDS for weight in layers) else rounded_to


def kv_bytes_per_slot(model: PackedModel, kv_format: str = AUTO) -> int:
    """Bytes of the keys and values of one position, all layers. ModelError for a format that there is not."""
    return sum(kv_bytes_by_reach(model, kv_format))


def kv_bytes_by_reach(model: PackedModel, kv_format: str = AUTO) -> tuple[int, int]:
    """The same of the layers that see every position, and of those with a window."""
    config = model.config
    try:
        per_head = kv_slot_bytes(
            resolve_kv_format(model, kv_format), config.head_dim, config.latent is not None
        )
    except KernelError as error:
        raise ModelError(f"{model.name}: {error}") from error
    layers = config.attention_layers
    n_windowed = sum(config.kind_of(layer).window is not None for layer in layers)
    per_layer = config.n_kv_heads * per_head
    return (len(layers) - n_windowed) * per_layer, n_windowed * per_layer


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
    lookup for each table that a run may name, at most two; the first one says how every weight is computed.
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
        program = open_program(model, capacity, division, patience_s, gives)
        most_rows = max(capacity.step_tokens, capacity.logit_rows)
        linears = Linears(
            program, schedules, most_rows, division, model.adapters, [] if placed is None else placed
        )
        arena = lay_out(model.config, capacity.step_tokens, capacity.logit_rows)
        embed_scale = config.embed_scale / config.residual_scale
        program.embed(weight_of(model, "embed"), arena.hidden, arena.hidden_stride, embed_scale)
        for layer in range(config.n_layers):
            n_before = layer - sum(config.keeps_state(before) for before in range(layer))
            _Layer(linears, model, layer, arena, n_before if gives == "logits" else 0).add()
        if gives == "logits":
            _add_logits(linears, model, arena)
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
    """Without ops; attention's kinds are those of the config, in their order."""
    config = model.config
    first, *others = [(kind.window or 0, *_rotation(kind, config)) for kind in config.kinds]
    shape = {**_shape(config), "window": first[0]}
    if gives == "rows":
        shape |= {"n_layers": 1, "outputs": config.hidden, "bidirectional": config.encoder is not None}
    program = Program(shape, room_of(model, capacity), first[1], division, patience_s, first[2])
    for window, inv_freq, magnitude in others:
        program.kind(inv_freq, window, magnitude)
    return program


def _rotation(kind: LayerKind, config: ModelConfig) -> tuple[npt.NDArray[np.float64], float]:
    """Radians per position, and what cosines and sines are multiplied by."""
    if kind.rope is None:
        return np.empty(0), 1.0
    return kind.rope.inv_freq(config.context_length), kind.rope.magnitude


def _shape(config: ModelConfig) -> dict[str, int | float]:
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

    def add(self) -> None:
        if self.config.keeps_state(self.layer):
            self._add_state()
        elif self.config.latent is not None:
            self._add_latent()
        else:
            self._add_attention()
        experts = self.config.experts_of(self.layer)
        if experts is None:
            self._add_feed_forward(self.config.ffn_of(self.layer))
        else:
            self._add_experts(experts)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def name(self) -> str:
        return f"layers.{self.layer}"

    @property
    def last(self) -> bool:
        return self.layer == self.config.n_layers - 1

    @property
    def stream(self) -> Place:
        return self.arena.hidden, self.arena.hidden_stride

    @property
    def after(self) -> Place:
        """The stream beyond attention."""
        return (self.arena.tail, self.arena.hidden_stride) if self.last else self.stream

    def _vector(self, name: str) -> Vector | None:
        return self.model.vectors.get(f"{self.name}.{name}")

    def _reads(self, norm: str) -> dict[str, Any]:
        """The input of a product: the stream, normalised where the model does so before its halves."""
        if not self.config.pre_norms or self.config.layer_norms:
            return {"source": "rows"}
        return {"source": "norm", "norm": self._vector(norm), "eps": stream_eps(self.config)}

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
        parts, reads = qkv_parts(self.model, self.name), self._reads("attn_norm")
        source = self._normed("attn_norm", self.stream, "every")
        self.linears.add(parts, reads, source, qkv, f"{self.name}.qkv")
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
            **self._growth(),
        )
        if config.gated_attention:
            gates = arena.own, arena.own_stride
            gate = [(weight_of(self.model, f"{self.name}.attn_gate"), 0)]
            self.linears.add(gate, self._reads("attn_norm"), self.stream, gates)
            program.gate_rows(config.q_rows, *mixed, *mixed, gates, gate="logistic")
        self._add_out("o_bias")

    def _growth(self) -> dict[str, Any]:
        growth = self.config.query_growth
        if growth is None:
            return {}
        return {"growth": growth.factors(self.config.context_length), "growth_span": growth.span}

    def _add_state(self) -> None:
        arena = self.arena
        rows = StateRows(
            (arena.qkv, arena.qkv_stride),
            (arena.own, arena.own_stride),
            (arena.gates, arena.gates_stride),
            (arena.mixed, arena.mixed_stride),
        )

        def add_product(parts: Parts, target: Place) -> None:
            self.linears.add(parts, self._reads("attn_norm"), self.stream, target)

        add_state_ops(self.linears.program, add_product, self.model, self.name, rows)
        self._add_out(None)

    def _add_latent(self) -> None:
        arena, kind = self.arena, self.config.kinds.index(self.config.kind_of(self.layer))
        values = arena.gates, arena.gates_stride
        places = LatentRows(
            (arena.qkv, arena.qkv_stride),
            (arena.own, arena.own_stride),
            values,
            (arena.mixed, arena.mixed_stride),
        )
        rows: Rows = "gathered" if self.last else "every"
        parts = latent_parts(self.model, self.name)
        self.linears.add(parts, self._reads("attn_norm"), self.stream, places.products)
        add_latent_ops(self.linears, self.model, self.name, places, self.kept_as, kind, rows)
        self._add_back("o", {"source": "rows"}, values, "attn_post_norm", None, rows)

    def _add_out(self, bias: str | None) -> None:
        """The product that leads from what the first half of a layer has mixed back to the stream."""
        mixed = self.arena.mixed, self.arena.mixed_stride
        rows: Rows = "gathered" if self.last else "every"
        self._add_back("o", {"source": "rows"}, mixed, "attn_post_norm", bias, rows)

    def _add_feed_forward(self, width: int) -> None:
        rows, gate_up = self._rows(), (self.arena.gate_up, rounded(self.config.n_into_ffn * width))
        parts = into_ffn_parts(self.model, self.name, width)
        reader = f"{self.name}.{'gate_up' if self.config.gated else 'up'}"
        source, taken = self._feed_forward_input(rows)
        self.linears.add(parts, self._reads("ffn_norm"), source, gate_up, reader, rows=taken)
        experts = self.config.experts_of(self.layer)
        if experts is not None and experts.shared_gate:
            self._gate_shared(width, (gate_up[0] + width, gate_up[1]), rows)
        source_kind = "gate" if self.config.gated else "activation"
        reads: dict[str, Any] = {"source": source_kind, "gate": self.config.activation}
        if self.config.ffn_biases:
            reads["bias"] = self._vector("up_bias")
        bias = "down_bias" if self.config.ffn_biases else None
        self._add_back("down", reads, gate_up, "ffn_post_norm", bias, rows)

    def _feed_forward_input(self, rows: Rows) -> tuple[Place, Rows]:
        """The rows that it reads: behind attention, or those of attention in a layer of parallel halves."""
        if not self.config.parallel:
            return self._normed("ffn_norm", self.after, rows), rows
        return (self.arena.normed, self.arena.hidden_stride), "gathered" if self.last else "every"

    def _gate_shared(self, width: int, up: Place, rows: Rows) -> None:
        """The shared expert's rows times the logistic of one number each, which its product then is."""
        gate = self.arena.router, self.arena.router_stride  # rows were routed by what was there
        part = [(weight_of(self.model, f"{self.name}.shared_gate"), 0)]
        self.linears.add(part, self._reads("ffn_norm"), self.after, gate, rows=rows)
        self.linears.program.gate_rows(width, *up, *up, gate, rows=rows, one_gate=True)

    def _rows(self) -> Rows:
        return "logits" if self.last else "every"

    def _add_back(
        self, weight: str, reads: dict[str, Any], place: Place, norm: str, bias: str | None, rows: Rows
    ) -> None:
        """Add the output of a half of a layer to the stream, after its norm and bias where there are
        such.
        """
        reader = f"{self.name}.{weight}"
        parts = [(weight_of(self.model, reader), 0)]
        own_bias = None if bias is None else self._vector(bias)
        residual = self.stream if rows == "gathered" else None
        if not self.config.post_norms and own_bias is None:
            self.linears.add(parts, reads, place, self.after, reader, add=True, rows=rows, residual=residual)
            return
        branch = self.arena.branch, self.arena.branch_stride
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
        )

    def _add_experts(self, experts: Experts) -> None:
        config, arena, rows = self.config, self.arena, self._rows()
        router, given = (arena.router, arena.router_stride), (arena.given, arena.given_stride)
        program, gate_up = self.linears.program, (arena.gate_up, arena.gate_up_stride)
        scores = [(weight_of(self.model, f"{self.name}.router"), 0)]
        self.linears.add(scores, self._reads("ffn_norm"), self.after, router, rows=rows)
        if experts.biases:
            bias = self._vector("router_bias")
            program.adjust(experts.count, *router, *router, bias=bias, rows=rows)
        program.route(experts, *router, rows=rows, choice_bias=self._vector("choice_bias"))
        up, down = (self._stack(f"{self.name}{part}") for part in STACKS)
        self.linears.add_experts(experts, *up, self._reads("ffn_norm"), self.after, gate_up, rows=rows)
        reads = {"source": "gate", "gate": config.activation, "bias": self._vector("gate_up_bias")}
        self.linears.add_experts(experts, *down, reads, gate_up, given, rows=rows)
        if experts.shared_ffn:  # before what experts give is added: both read the same stream
            self._add_feed_forward(experts.shared_ffn)
        program.combine(
            experts, config.hidden, *given, *self.after, bias=self._vector("down_bias"), rows=rows
        )

    def _stack(self, name: str) -> tuple[PackedWeight, PackedWeight]:
        """The weights of all experts, and of the first one."""
        stack, expert = weight_of(self.model, name), self.model.one_expert(name)
        assert expert is not None
        return stack, expert


def _add_logits(linears: Linears, model: PackedModel, arena: ActivationArena) -> None:
    config = model.config
    head = weight_of(model, "embed" if config.tied_embeddings else "lm_head")
    if head.n != config.vocab_size:
        raise ModelError(f"{model.name} gives {head.n} logits for a vocabulary of {config.vocab_size}")
    logits, tail = (arena.logits, config.vocab_size), (arena.tail, arena.hidden_stride)
    if config.layer_norms:
        normed = arena.normed, arena.hidden_stride
        add_final_norm(linears.program, model, tail, normed, config.logit_scale)
        tail = normed
        reads: dict[str, Any] = {"source": "rows"}
    else:
        norm = model.vectors["final_norm"] * np.float32(config.logit_scale)
        reads = {"source": "norm", "norm": norm, "eps": stream_eps(config)}
    linears.add([(head, 0)], reads, tail, logits, rows="logits")
    if config.logit_cap is not None:
        linears.program.adjust(config.vocab_size, *logits, *logits, cap=config.logit_cap, rows="logits")


def schedule_attention(
    program: Program,
    model: PackedModel,
    capacity: Capacity,
    lookups: Sequence[ScheduleLookup],
    division: Division | None,
) -> None:
    kv_heads = model.config.n_kv_heads
    if tuned_attention(model, capacity.kv_format) is None:
        return
    for table, lookup in enumerate(lookups):
        own = kv_heads if division is None else division.heads(kv_heads, table)
        if own:
            problem = attention_problem(model, own, capacity.kv_format)
            ranges = lookup.attention(*problem, capacity.step_tokens)
            program.set_attention_schedules([(rows.last_m, rows.schedule) for rows in ranges], table)


def attention_problem(
    model: PackedModel, kv_heads: int | None = None, kv_format: str = AUTO
) -> tuple[str, int, int]:
    """Under what attention's schedules are kept: KV format, dimensions of query and of KV heads.

    Those of all heads, or of some KV heads and the query heads that use them.
    """
    config = model.config
    own = config.n_kv_heads if kv_heads is None else kv_heads
    stored = resolve_kv_format(model, kv_format)
    return stored, config.q_rows // config.n_kv_heads * own, config.head_dim * own


def tuned_attention(model: PackedModel, kv_format: str = AUTO) -> tuple[str, int, int] | None:
    """The same where attention's schedules are tuned: not over latent vectors, whose default cut is kept."""
    return None if model.config.latent is not None else attention_problem(model, kv_format=kv_format)


def weight_of(model: PackedModel, name: str) -> PackedWeight:
    try:
        return model.weights[name]
    except KeyError:
        raise ModelError(f"{model.name} has no weight {name!r}") from None


def qkv_parts(model: PackedModel, name: str) -> Parts:
    config = model.config
    if f"{name}.qkv" in model.weights:
        return [(model.weights[f"{name}.qkv"], 0)]
    columns = {"q": 0, "k": config.q_rows, "v": config.q_rows + config.kv_rows}
    return [(weight_of(model, f"{name}.{part}"), column) for part, column in columns.items()]


def into_ffn_parts(model: PackedModel, name: str, width: int) -> Parts:
    """The weights of a feed-forward layer of this width that read the stream."""
    if not model.config.gated:
        return [(weight_of(model, f"{name}.up"), 0)]
    if f"{name}.gate_up" in model.weights:
        return [(model.weights[f"{name}.gate_up"], 0)]
    return [(weight_of(model, f"{name}.gate"), 0), (weight_of(model, f"{name}.up"), width)]
