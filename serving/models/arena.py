"""The arena of a step: where rows of activations lie, by the model's widths."""

from __future__ import annotations

from dataclasses import dataclass

from phasewise.serving.models.linears import Place
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.models.parts.mixer import MixingRows

_ROUND_FLOATS = 16  # one cache line: rows of the arena begin on their own


@dataclass(frozen=True, slots=True)
class ActivationArena:
    """Offsets and row strides, in floats. Attention and feed-forward take turns in one place."""

    hidden: int
    hidden_stride: int
    qkv: int
    qkv_stride: int
    mixed: int
    mixed_stride: int
    gate_up: int
    gate_up_stride: int
    given: int
    given_stride: int
    """The output of experts: of each row, a row for each of its experts."""
    router: int
    router_stride: int
    branch: int
    branch_stride: int
    """The output of a half of a layer, where it is normalised before it is added."""
    summed: int
    """The sum of what experts gave, where it is normalised before it is added."""
    tail: int
    """Hidden rows of the last layer that want logits, and its feed-forward rows (in place of `gate_up`)."""
    logits: int
    own: int
    own_stride: int
    """Rows of layers with a state between their products, and gates of attention."""
    gates: int
    gates_stride: int
    normed: int
    """Rows of the stream behind a LayerNorm."""
    inputs: int
    """Inputs of all layers."""
    inputs_stride: int
    aside: int
    """Rows that go round attention."""
    streams: int
    streams_stride: int
    last_streams: int
    """Streams behind the last layer, of rows that want logits."""
    merged: int
    """Their products, but the first one's."""
    fed: int
    """Rows for a head that drafts: behind the last norm, or of three layers one behind the other."""
    fed_stride: int
    taken: int
    """The rows that such a head reads, as far apart."""
    own_rows: int
    """The same: rows of its own, which stand in for what it makes of those."""
    embedded: int
    """The same: embeddings of its tokens."""

    @property
    def mixing(self) -> MixingRows[Place]:
        """The places of layers with latent attention or a state."""
        return MixingRows(
            products=(self.qkv, self.qkv_stride),
            own=(self.own, self.own_stride),
            gates=(self.gates, self.gates_stride),
            mixed=(self.mixed, self.mixed_stride),
        )


def rounded(floats: int) -> int:
    return -(-floats // _ROUND_FLOATS) * _ROUND_FLOATS


def lay_out(config: ModelConfig, tokens: int, logit_rows: int) -> ActivationArena:
    experts, layers = config.experts, config.layers
    rows, pairs = max(tokens, logit_rows), experts.chosen if experts else 1
    hidden_stride = rounded(config.hidden)
    widths = [mixer.widths for layer in layers for mixer in layer.mixers]
    plain = 0 if config.latent else config.q_rows
    own_stride = rounded(max(width.own for width in widths))
    gates_stride = rounded(max(width.gates for width in widths))
    qkv_stride = rounded(max(plain + 2 * config.kv_rows, *(width.products for width in widths)))
    mixed_stride = rounded(max(plain, *(width.mixed for width in widths)))
    n_inputs = config.layer_inputs.size if config.layer_inputs else 0
    streams = config.streams
    n_low = streams.laurel_rank if streams else 0
    dense = [layer.feed_forward for layer in layers if layer.feed_forward]
    widest = max((part.width for part in dense), default=0)
    inner = [layer.mixture.expert.inner for layer in layers if layer.mixture] or [
        part.inner for part in dense
    ]
    gate_up_stride = rounded(max(*inner, n_inputs, n_low))
    streams_stride = rounded(config.hidden * streams.count if streams else 0)
    inputs_stride = rounded(n_inputs * config.n_layers)
    router_stride = rounded(experts.count if experts else 0)
    shared = tokens * hidden_stride
    mixed = shared + tokens * qkv_stride
    given = shared + rows * max(pairs * gate_up_stride, rounded(2 * widest if experts else 0))
    router = given + (rows * pairs * hidden_stride if experts else 0)
    own = mixed + tokens * mixed_stride
    gates = own + tokens * own_stride
    normed = max(gates + tokens * gates_stride, router + rows * router_stride)
    branch = normed + (rows * hidden_stride if config.layer_norms else 0)
    has_branch = config.post_norms or config.out_bias or config.ffn_biases
    summed = branch + (rows * hidden_stride if has_branch else 0)
    inputs = summed + (rows * hidden_stride if experts and experts.own_norms else 0)
    aside = inputs + tokens * inputs_stride
    own_streams = aside + (tokens * hidden_stride if streams else 0)
    last_streams = own_streams + tokens * streams_stride
    merged = last_streams + logit_rows * streams_stride
    tail = merged + logit_rows * streams_stride
    logits = tail + logit_rows * hidden_stride
    fed_stride = rounded(3 * config.hidden)
    fed = rounded(logits + logit_rows * config.n_logits)
    return ActivationArena(
        hidden=0,
        hidden_stride=hidden_stride,
        qkv=shared,
        qkv_stride=qkv_stride,
        mixed=mixed,
        mixed_stride=mixed_stride,
        gate_up=shared,
        gate_up_stride=gate_up_stride,
        given=given,
        given_stride=hidden_stride,
        router=router,
        router_stride=router_stride,
        branch=branch,
        branch_stride=hidden_stride,
        summed=summed,
        tail=tail,
        logits=logits,
        own=own,
        own_stride=own_stride,
        gates=gates,
        gates_stride=gates_stride,
        normed=normed,
        inputs=inputs,
        inputs_stride=inputs_stride,
        aside=aside,
        streams=own_streams,
        streams_stride=streams_stride,
        last_streams=last_streams,
        merged=merged,
        fed=fed,
        fed_stride=fed_stride,
        taken=fed + rows * fed_stride,
        own_rows=fed + 2 * rows * fed_stride,
        embedded=fed + 2 * rows * fed_stride + rows * hidden_stride,
    )
