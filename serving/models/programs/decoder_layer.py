"""The ops of one layer of a model that generates text, and where in the arena their rows lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phasewise.serving.models.arena import ActivationArena, rounded
from phasewise.serving.models.experts import Experts
from phasewise.serving.models.heads.draft_head import add_embedding_to_attention
from phasewise.serving.models.heads.kinds import EAGLES
from phasewise.serving.models.linears import Linears, Parts, Place, Rows
from phasewise.serving.models.model_parts import into_ffn_parts, own_attention, qkv_parts, weight_of
from phasewise.serving.models.norms import add_layer_norm, stream_eps
from phasewise.serving.models.packed_model import ModelConfig, PackedModel, Vector
from phasewise.serving.models.programs.expert_program import ExpertLayer
from phasewise.serving.models.programs.latent_program import add_latent_ops, latent_parts
from phasewise.serving.models.programs.layer_inputs import add_inputs_of_layer
from phasewise.serving.models.programs.state_program import add_state_ops
from phasewise.serving.models.programs.stream_program import StreamLayer


@dataclass(frozen=True, slots=True)
class DecoderLayer:
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
