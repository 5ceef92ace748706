"""Operations of one decoder layer in a program, and the operations behind the last layer: the final norm,
logits, and the rows that a draft head reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phasewise.cython_kernels._native import Program
from phasewise.serving.errors import ModelError
from phasewise.serving.models.arena import rounded
from phasewise.serving.models.draft_head import add_normed_rows
from phasewise.serving.models.linears import Linears, Place, Rows
from phasewise.serving.models.packed_model import Layer, ModelConfig, PackedModel
from phasewise.serving.models.parts.feed_forward import FeedForward
from phasewise.serving.models.parts.mixture import Mixture
from phasewise.serving.models.parts.site import ActivationArena, Mixer, Product, ReadRows, Site, Vector
from phasewise.serving.models.parts.streams import add_merge


def add_layer_norm(
    program: Program,
    model: PackedModel,
    norm: str,
    source: Place,
    target: Place,
    rows: Rows,
    factor: float = 1.0,
    bias: Vector | None = None,
) -> None:
    """Add the LayerNorm with the weight `norm` of `source` plus `bias`, times `factor`, into `target`."""
    weight, own = model.vectors[norm] * np.float32(factor), model.vectors.get(f"{norm}_bias")
    norm_bias = np.zeros_like(weight) if own is None else own * np.float32(factor)
    eps = model.config.stream_eps
    program.layernorm(model.config.hidden, *source, *target, weight, norm_bias, bias=bias, rows=rows, eps=eps)


def add_final_norm(
    program: Program, model: PackedModel, source: Place, target: Place, factor: float = 1.0
) -> None:
    """Add the model's final norm of rows that want logits, times `factor`."""
    if model.config.has_layer_norms:
        add_layer_norm(program, model, "final_norm", source, target, "logits", factor)
        return
    norm, eps = model.vectors["final_norm"] * np.float32(factor), model.config.stream_eps
    program.adjust(model.config.hidden, *source, *target, norm=norm, rows="logits", eps=eps)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Adds the operations of one layer. Behind the last layer's keys and values only rows that want logits
    matter. With a residual scale r the stream is kept divided by r: halves of a layer are then added as they
    are, and norms of the stream use an epsilon divided by r^2."""

    linears: Linears
    model: PackedModel
    number: int
    arena: ActivationArena
    kept_as: int
    """Index, among layers that keep keys and values, of the layer whose keys and values are used."""
    is_read: bool
    """True if a draft head reads all rows behind the last layer."""

    def add(self) -> None:
        layer, arena, site = self.layer, self.arena, self.site
        if layer.streams is not None:
            layer.streams.add_before(site, arena, self.stream, self.last)
        if layer.mixers:
            self._add_mixers(layer.mixers)
        if layer.streams is not None:
            layer.streams.add_between(site, arena, self.after, self.last)
        if layer.mixture is not None:
            self._add_mixture(layer.mixture)
        elif layer.feed_forward is not None:
            self._add_feed_forward(layer.feed_forward)
        if layer.inputs is not None:
            targets = [self.after]
            if layer.streams is not None:
                targets = layer.streams.add_behind(site, arena, self.after, self.last)
            layer.inputs.add(site, arena, self.number, self.after, targets, self._rows(), self._out_scale())

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def layer(self) -> Layer:
        return self.config.layers[self.number]

    @property
    def site(self) -> Site:
        return self.model.site(self.linears, f"layers.{self.number}.")

    @property
    def last(self) -> bool:
        """True if no later layer mixes rows: behind its mixers only rows that want logits are computed."""
        return self.number >= self.config.last_mixing and not self.is_read

    @property
    def stream(self) -> Place:
        return self.arena.hidden

    @property
    def after(self) -> Place:
        """The place of the stream behind the layer's mixers."""
        return self.arena.tail if self.last else self.stream

    @property
    def _mixed_rows(self) -> Rows:
        return "gathered" if self.last else "every"

    def _rows(self) -> Rows:
        return "logits" if self.last else "every"

    def _out_scale(self) -> float:
        """The factor of the stream behind the layer."""
        vector = self.site.vector("out_scale")
        return 1.0 if vector is None else float(vector[0])

    def _scale_behind_halves(self) -> float:
        """`_out_scale`, or 1 where the inputs of the layer, which come later, apply the factor."""
        return 1.0 if self.layer.inputs is not None else self._out_scale()

    def _reading(self, norm: str, stream: Place, rows: Rows) -> ReadRows:
        """The stream as products read it, normalised where the model has a norm before its halves."""
        eps = self.config.stream_eps
        if self.config.norms_sums or self.site.vector(norm) is None:
            return ReadRows(stream, None, eps)
        if self.config.has_layer_norms:
            place = self.arena.normed
            add_layer_norm(self.linears.program, self.model, self.site.stem + norm, stream, place, rows)
            return ReadRows(place, None, eps)
        return ReadRows(stream, self.site.vector(norm), eps)

    def _add_mixers(self, mixers: tuple[Mixer, ...]) -> None:
        """Add all mixers; each reads the stream before any mixer's output is added."""
        reading, places, rows = (
            self._reading("attn_norm", self.stream, "every"),
            self.arena.mixing,
            self._mixed_rows,
        )
        *others, (back, mixed) = [
            (mixer.back, mixer.add(self.site, reading, places, self.kept_as, rows)) for mixer in mixers
        ]
        for product, place in others:
            self._add_product(product, ReadRows(place).options(), place, self.stream, add=True)
        self._add_back(back, ReadRows(mixed).options(), mixed, "attn", self.site.vector("o_bias"), rows)

    def _add_product(
        self, product: Product, reads: dict[str, Any], source: Place, target: Place, **options: Any
    ) -> None:
        reader = self.site.stem + product.reader
        self.linears.add(self.site.parts(product), reads, source, target, reader, **options)

    def _ffn_reading(self, rows: Rows) -> tuple[ReadRows, Rows]:
        """Input of the second half: the stream behind attention or, with one norm for both, attention's."""
        if self.config.parallel:
            normed = self.arena.normed
            return ReadRows(normed), "gathered" if self.last else "every"
        norm = "ffn_norm" if self.layer.mixers else "attn_norm"
        return self._reading(norm, self.after, rows), rows

    def _add_feed_forward(self, part: FeedForward) -> None:
        inner, between = self._add_into(part), part.between(self.site)
        bias = self.site.vector("down_bias") if part.form.ffn_biases else None
        scale = self._scale_behind_halves()
        self._add_back(part.down, between, inner, "ffn", bias, self._rows(), scale)

    def _add_into(self, part: FeedForward) -> Place:
        """Add the feed-forward products of the stream; returns the place of their rows."""
        inner = self.arena.gate_up[0], rounded(part.inner)
        reading, taken = self._ffn_reading(self._rows())
        part.add(self.site, reading, inner, taken)
        if part.weighed:
            gate = self.arena.router  # rows were routed by what was there
            part.add_weight(self.site, reading, inner, gate, taken)
        return inner

    def _add_mixture(self, mixture: Mixture) -> None:
        rows, arena, shared = self._rows(), self.arena, self.layer.feed_forward
        mixture.add(self.site, self._ffn_reading(rows)[0], arena, rows)
        if not mixture.experts.own_norms:
            if shared is not None:  # before what experts give is added: both read the same stream
                self._add_feed_forward(shared)
            mixture.add_sum(self.site, arena, self.after, rows)
            return
        assert shared is not None
        inner, summed = self._add_into(shared), arena.summed
        self._add_product(shared.down, shared.between(self.site), inner, self.arena.branch, rows=rows)
        scale = self._scale_behind_halves()
        mixture.add_normed_sum(self.site, arena.given, summed, self.arena.branch, self.after, rows, scale)

    def _add_back(
        self,
        product: Product,
        reads: dict[str, Any],
        source: Place,
        half: str,
        bias: Vector | None,
        rows: Rows,
        scale: float = 1.0,
    ) -> None:
        """Add the output of a half ("attn" or "ffn"), with its bias, to the stream, and the norm before or
        after it. `scale`: factor of the sum, for a half with a norm or bias of its output."""
        residual, config, site = self.stream if rows == "gathered" else None, self.config, self.site
        if config.norms_sums or (not config.post_norms and bias is None):
            self._add_product(product, reads, source, self.after, add=True, rows=rows, residual=residual)
            if config.norms_sums:
                is_end = self.last and half == "ffn" and not config.dense
                target = (self.arena.logits[0], config.hidden) if is_end else self.after
                norm, program = f"{site.stem}{half}_norm", self.linears.program
                add_layer_norm(program, self.model, norm, self.after, target, self._rows(), bias=bias)
            return
        self._add_product(product, reads, source, self.arena.branch, rows=rows)
        self.linears.program.adjust(
            self.config.hidden,
            *self.arena.branch,
            *self.after,
            norm=site.vector(f"{half}_post_norm") if config.post_norms else None,
            bias=bias,
            add=True,
            rows=rows,
            residual=residual,
            scale=scale,
        )


def add_vectors(linears: Linears, model: PackedModel, arena: ActivationArena) -> None:
    """Add the operations from the stream behind the last layer to rows of which vectors are made. A pooled
    row's products are the pooled products of rows."""
    config, source, last = model.config, arena.tail, (arena.logits[0], model.config.vector_width)
    if not config.norms_sums:
        add_final_norm(linears.program, model, source, source if config.dense else last)
    for number, width in enumerate(config.dense, start=1):
        target = last if number == len(config.dense) else (arena.gate_up[0], rounded(width))
        linears.add([(model.weight(f"dense.{number}"), 0)], {"source": "rows"}, source, target, rows="logits")
        source = target


def add_logits(linears: Linears, model: PackedModel, arena: ActivationArena, *, is_read: bool) -> None:
    """Add the operations from the stream behind the last layer to logits. `is_read`: True if a draft head
    reads all rows behind the final norm. A head itself gives out its rows that want logits."""
    config = model.config
    stream, tail = arena.hidden, arena.tail
    if is_read:
        add_normed_rows(linears, model, arena, stream, "every")
    elif config.drafts:
        add_normed_rows(linears, model, arena, tail, "logits")
    if config.streams is not None:
        add_merge(model.site(linears), config.streams, config.hidden, arena)
    head = model.weight("embed" if config.tied_embeddings else "lm_head")
    if head.n != config.vocab_size:
        raise ModelError(f"{model.name} gives {head.n} logits for a vocabulary of {config.vocab_size}")
    logits = arena.logits
    rows: Rows = "logits"
    if config.layer_norms:
        normed = arena.normed
        add_final_norm(linears.program, model, tail, normed, config.logit_scale)
        tail = normed
        reads: dict[str, Any] = {"source": "rows"}
    else:
        norm = model.vectors["final_norm"] * np.float32(config.logit_scale)
        reads = {"source": "norm", "norm": norm, "eps": config.stream_eps}
        if is_read:
            tail, rows = stream, "gathered"
    linears.add([(head, 0)], reads, tail, logits, rows=rows)
    if config.logit_cap is not None or config.logit_biases:
        bias, cap = model.vectors.get("lm_head_bias"), config.logit_cap or 0.0
        linears.program.adjust(config.vocab_size, *logits, *logits, bias=bias, cap=cap, rows="logits")
