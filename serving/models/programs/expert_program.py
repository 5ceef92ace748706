"""The ops of a mixture of experts: routes of rows, products of pairs, and what is added to the stream."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from phasewise.cython_kernels.packing import PackedWeight
from phasewise.serving.models.arena import ActivationArena
from phasewise.serving.models.experts import STACKS, Experts
from phasewise.serving.models.linears import Linears, Place, Rows
from phasewise.serving.models.model_parts import weight_of
from phasewise.serving.models.norms import stream_eps
from phasewise.serving.models.packed_model import ModelConfig, PackedModel, Vector


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The mixture of one layer. `stream`: the rows that it reads, and adds to at last."""

    linears: Linears
    model: PackedModel
    name: str
    arena: ActivationArena
    experts: Experts
    stream: Place
    rows: Rows

    def add_products(self, reads: dict[str, Any]) -> None:
        """Routes of rows, and what their experts give. reads: the norm before a layer's second half."""
        routed, own = reads, reads
        if self.experts.own_norms:
            routed = self._normed("router_norm", 1 / math.sqrt(self._config.hidden))
            own = self._normed("experts_norm")
        arena, experts, program, rows = self.arena, self.experts, self.linears.program, self.rows
        router, gate_up = (arena.router, arena.router_stride), (arena.gate_up, arena.gate_up_stride)
        scores = [(weight_of(self.model, f"{self.name}.router"), 0)]
        self.linears.add(scores, routed, self.stream, router, rows=rows)
        if experts.biases:
            program.adjust(experts.count, *router, *router, bias=self._vector("router_bias"), rows=rows)
        choice_bias, factors = self._vector("choice_bias"), self._vector("expert_factors")
        program.route(experts, *router, rows=rows, choice_bias=choice_bias, factors=factors)
        up, down = (self._stack(f"{self.name}{part}") for part in STACKS)
        self.linears.add_experts(experts, *up, own, self.stream, gate_up, rows=rows)
        source = "gate" if self._config.gated else "activation"
        bias = self._vector("gate_up_bias")
        gated = {"source": source, "gate": self._config.activation, "bias": bias}
        self.linears.add_experts(experts, *down, gated, gate_up, self._given, rows=rows)

    def add_sum(self) -> None:
        """The sum of what the experts gave is added to the stream."""
        bias = self._vector("down_bias")
        self.linears.program.combine(
            self.experts, self._config.hidden, *self._given, *self.stream, bias=bias, rows=self.rows
        )

    def add_normed_sum(self, shared: Place, scale: float) -> None:
        """The norm of two norms' sum is added to the stream, all of it times `scale`.

        shared: what the feed-forward layer gave, in place of which the sum comes.
        """
        hidden, program, rows = self._config.hidden, self.linears.program, self.rows
        summed = self.arena.summed, self.arena.hidden_stride
        program.combine(self.experts, hidden, *self._given, *summed, rows=rows, add=False)
        program.adjust(hidden, *shared, *shared, norm=self._vector("shared_post_norm"), rows=rows)
        norm = self._vector("experts_post_norm")
        program.adjust(hidden, *summed, *shared, norm=norm, add=True, rows=rows)
        norm = self._vector("ffn_post_norm")
        program.adjust(hidden, *shared, *self.stream, norm=norm, add=True, rows=rows, scale=scale)

    @property
    def _config(self) -> ModelConfig:
        return self.model.config

    @property
    def _given(self) -> Place:
        return self.arena.given, self.arena.given_stride

    def _normed(self, name: str, factor: float = 1.0) -> dict[str, Any]:
        """The stream behind a norm of these weights, times `factor`."""
        weights = self.model.vectors[f"{self.name}.{name}"]
        if factor != 1:
            weights = weights * np.float32(factor)
        return {"source": "norm", "norm": weights, "eps": stream_eps(self._config)}

    def _vector(self, name: str) -> Vector | None:
        return self.model.vectors.get(f"{self.name}.{name}")

    def _stack(self, name: str) -> tuple[PackedWeight, PackedWeight]:
        """The weights of all experts, and of the first one."""
        stack, expert = weight_of(self.model, name), self.model.one_expert(name)
        assert expert is not None
        return stack, expert
