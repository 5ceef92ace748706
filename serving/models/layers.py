"""The layers of a model as lists of parts, from what its config states of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.models.heads.kinds import EAGLES
from phasewise.serving.models.parts.attention import Attention
from phasewise.serving.models.parts.feed_forward import FeedForward
from phasewise.serving.models.parts.latent import LatentMixer
from phasewise.serving.models.parts.layer_inputs import InputsOfLayer
from phasewise.serving.models.parts.mixer import Mixer
from phasewise.serving.models.parts.mixture import Mixture
from phasewise.serving.models.parts.part import Part, Product
from phasewise.serving.models.parts.states.delta import Delta, KimiDelta
from phasewise.serving.models.parts.states.mamba2 import Mamba2
from phasewise.serving.models.parts.states.recurrence import Convolving
from phasewise.serving.models.parts.states.short_conv import ShortConv
from phasewise.serving.models.parts.states.state_layers import DELTA, KDA, MAMBA2, SHORT_CONV, StateLayers
from phasewise.serving.models.parts.streams import StreamsOfLayer

if TYPE_CHECKING:
    from phasewise.serving.models.packed_model import ModelConfig

STATE_MIXERS: dict[str, type[Convolving]] = {
    SHORT_CONV: ShortConv, DELTA: Delta, MAMBA2: Mamba2, KDA: KimiDelta,
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One layer: h += A(norm(h)), h += F(norm(h)), A the sum of its mixers, F its feed-forward half."""

    hidden: int
    mixers: tuple[Mixer, ...]
    feed_forward: FeedForward | None
    """What computes every row, beside experts where there are any."""
    mixture: Mixture | None
    streams: StreamsOfLayer | None
    inputs: InputsOfLayer | None
    norms: tuple[str, ...]
    """Vectors of the stream's norms, their biases among them."""
    scaled: bool
    """True if the stream is multiplied by a number behind the layer."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """In the order in which a pass reads them."""
        all_parts = (self.streams, *self.mixers, self.feed_forward, self.inputs, self.mixture)
        return tuple(part for part in all_parts if part is not None)

    @property
    def products(self) -> Iterator[Product]:
        return (product for part in self.parts for product in part.products)

    @property
    def attention(self) -> Attention | LatentMixer | None:
        """What keeps keys and values, or reads those of another layer."""
        return next((part for part in self.mixers if isinstance(part, Attention | LatentMixer)), None)

    def vectors(self, has_bias: bool) -> dict[str, int]:
        """Lengths, before vectors are joined. has_bias: queries, keys and values have biases."""
        lengths = dict.fromkeys(self.norms, self.hidden)
        if self.scaled:
            lengths["out_scale"] = 1
        for part in self.parts:
            lengths |= part.vectors
            if has_bias and isinstance(part, Attention):
                lengths |= part.biases
        return lengths

    @property
    def joined(self) -> dict[str, tuple[str, ...]]:
        """Vectors that are packed one behind the other, by the name of the whole."""
        return {name: parts for part in self.parts for name, parts in part.joined.items()}


def layers_of(config: ModelConfig) -> tuple[Layer, ...]:
    """Every layer. ModelError for parts that cannot be, or not together."""
    _check_dense(config)
    alike: dict[tuple[object, ...], Layer] = {}
    layers = []
    for number in range(config.n_layers):
        mixers, feed_forward, mixture = _mixers(config, number), _dense(config, number), None
        if _has_experts(config, number):
            mixture = _mixture(config)
        streams = inputs = None
        if config.streams is not None:
            streams = StreamsOfLayer(config.streams, config.hidden, config.norm_eps)
        if config.layer_inputs is not None:
            inputs = InputsOfLayer(config.hidden, config.layer_inputs.size, config.activation)
        parts = (mixers, feed_forward, mixture, streams, inputs, _norms(config, number))
        if parts not in alike:
            alike[parts] = Layer(config.hidden, *parts, config.layer_scales)
        layers.append(alike[parts])
    return tuple(layers)


def _mixers(config: ModelConfig, number: int) -> tuple[Mixer, ...]:
    """What keeps a state before what keeps keys and values: both read the stream before either is added."""
    mixers: list[Mixer] = []
    if config.state is not None and number in config.state.layers:
        mixers.append(_state(config, config.state))
    if not config.attends(number):
        return tuple(mixers)
    kind, encoder = config.kinds.index(config.kind_of(number)), config.encoder
    if config.latent is not None:
        scale, cap = config.attention_scale, config.attention_cap
        mixers.append(LatentMixer(config.latent, config.hidden, config.n_heads, kind, scale, cap))
        return tuple(mixers)
    attention = Attention(
        config.hidden,
        config.n_heads,
        config.heads_of(number),
        kind,
        config.kept_by(number) != number,
        config.attention_scale,
        config.attention_cap,
        config.qk_norm,
        config.whole_qk_norm,
        config.value_norms,
        config.out_bias or (encoder is not None and encoder.out_bias),
        config.sinks,
        config.gated_attention,
        config.factors.qkv,
        config.query_growth,
        config.context_length if config.query_growth else 0,
        encoder is not None and encoder.distances,
        config.drafts in EAGLES,
    )
    return (*mixers, attention)


def _state(config: ModelConfig, state: StateLayers) -> Convolving:
    return STATE_MIXERS[state.kind](state, config.hidden, config.factors, config.norm_eps)


def _feed_forward(
    config: ModelConfig, width: int, sparsity: float = 0.0, weighed: bool = False
) -> FeedForward:
    biases = config.ffn_biases or (config.encoder is not None and config.encoder.ffn_biases)
    factors = config.factors.gate, config.factors.up
    return FeedForward(
        config.hidden, width, config.activation, config.gated, biases, factors, sparsity, weighed
    )


def _dense(config: ModelConfig, number: int) -> FeedForward | None:
    """What computes every row of a layer."""
    experts, sparsity = config.experts, config.streams.sparsity[number] if config.streams else 0.0
    if number in config.halves.mixing:
        return None
    if experts is None:
        return _feed_forward(config, config.ffn_widths[number] if config.ffn_widths else config.ffn, sparsity)
    if number in experts.dense_layers:
        return _feed_forward(config, experts.dense_ffn)
    return (
        _feed_forward(config, experts.shared_ffn, weighed=experts.shared_gate) if experts.shared_ffn else None
    )


def _has_experts(config: ModelConfig, number: int) -> bool:
    experts = config.experts
    return experts is not None and number not in (*experts.dense_layers, *config.halves.mixing)


def _mixture(config: ModelConfig) -> Mixture:
    assert config.experts is not None
    return Mixture(config.experts, _feed_forward(config, config.ffn))


def _check_dense(config: ModelConfig) -> None:
    if config.ffn_widths and (len(config.ffn_widths) != config.n_layers or config.experts is not None):
        raise ModelError(
            f"widths of {counted(len(config.ffn_widths), 'feed-forward layer')} of {config.n_layers}"
        )
    if config.experts is None:
        return
    dense, n_layers = config.experts.dense_layers, config.n_layers
    if list(dense) != sorted(set(dense)) or (dense and not 0 <= dense[0] <= dense[-1] < n_layers):
        raise ModelError(f"layers {dense!r:.80} of {n_layers} have no experts")
    if len(dense) >= n_layers:
        raise ModelError(f"a mixture of experts in none of {counted(n_layers, 'layer')}")


def _norms(config: ModelConfig, number: int) -> tuple[str, ...]:
    """Norms of the stream before a layer's halves and behind them, with their biases."""
    if config.encoder is not None:
        norms = ["attn_norm", "ffn_norm"]
        if config.encoder.pre_norms:  # the first layer's attention reads the stream as it is
            return tuple(norms if number else norms[1:])
        return tuple(f"{norm}{ending}" for norm in norms for ending in ("", "_bias"))
    norms = []
    if config.pre_norms:
        halves = config.halves
        is_single = config.parallel or number in (*halves.mixing, *halves.feed_forward)
        norms = ["attn_norm"] if is_single else ["attn_norm", "ffn_norm"]
    if config.norm_biases:
        norms += [f"{norm}_bias" for norm in norms]
    return (*norms, "attn_post_norm", "ffn_post_norm") if config.post_norms else tuple(norms)
