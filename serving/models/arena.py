"""Layout of a step's activation arena: the places of its rows, by the widths that layers' parts need."""

from __future__ import annotations

from dataclasses import dataclass

from phasewise.serving.models.linears import Place
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.models.parts.site import ActivationArena, MixingRows

_ROUND_FLOATS = 16  # one cache line: rows of the arena begin on their own


def rounded(floats: int) -> int:
    return -(-floats // _ROUND_FLOATS) * _ROUND_FLOATS


@dataclass(slots=True)
class _Room:
    """Gives places one behind the other, from `end` on."""

    end: int

    def take(self, n_rows: int, stride: int) -> Place:
        place, self.end = (self.end, stride), self.end + n_rows * stride
        return place


def lay_out(
    config: ModelConfig, tokens: int, logit_rows: int, n_outputs: int | None = None
) -> ActivationArena:
    """Lay out the places of a step with at most `tokens` tokens and `logit_rows` rows of logits. `n_outputs`:
    numbers of an output row; None: a logit of every token of the vocabulary."""
    experts, streams, layers = config.experts, config.streams, config.layers
    rows, n_chosen = max(tokens, logit_rows), experts.chosen if experts else 1
    stride, n_inputs = rounded(config.hidden), config.layer_inputs.size if config.layer_inputs else 0
    n_streams = streams.count if streams else 0
    widths = [mixer.widths for layer in layers for mixer in layer.mixers]
    dense = [layer.feed_forward for layer in layers if layer.feed_forward]
    of_experts = [layer.mixture.expert.inner for layer in layers if layer.mixture]
    inner = of_experts or [part.inner for part in dense]
    tasks = config.encoder.tasks if config.encoder else None
    ranks = streams.laurel_rank if streams else 0, tasks.numbers if tasks else 0
    gate_up = rounded(max(*inner, n_inputs, *ranks, *config.dense[:-1]))
    of_row = max(n_chosen * gate_up, 2 * max((part.width for part in dense if experts), default=0))

    stream = _Room(0)
    hidden = stream.take(tokens, stride)
    mixing, feeding = _Room(stream.end), _Room(stream.end + rows * rounded(of_row))
    mixed = MixingRows(
        products=mixing.take(tokens, rounded(max(width.products for width in widths))),
        mixed=mixing.take(tokens, rounded(max(width.mixed for width in widths))),
        own=mixing.take(tokens, rounded(max(width.own for width in widths))),
        gates=mixing.take(tokens, rounded(max(width.gates for width in widths))),
    )
    given = feeding.take(rows * n_chosen if experts else 0, stride)
    router = feeding.take(rows, rounded(experts.count if experts else 0))
    room = _Room(max(mixing.end, feeding.end))
    has_branch = config.post_norms or (not config.norms_sums and (config.out_bias or config.ffn_biases))
    normed = room.take(rows if config.has_layer_norms and not config.norms_sums else 0, stride)
    branch = room.take(rows if has_branch else 0, stride)
    summed = room.take(rows if experts and (experts.own_norms or experts.latent) else 0, stride)
    inputs = room.take(tokens, rounded(n_inputs * config.n_layers))
    aside = room.take(tokens if streams else 0, stride)
    all_streams, (last_streams, merged) = (
        room.take(tokens, rounded(config.hidden * n_streams)),
        (room.take(logit_rows, rounded(config.hidden * n_streams)) for _ in range(2)),
    )
    tail, logits = room.take(logit_rows, stride), room.take(logit_rows, n_outputs or config.vocab_size)
    room.end = rounded(room.end)
    fed, taken, embedded = (room.take(0 if config.encoder else rows, stride) for _ in range(3))
    return ActivationArena(
        hidden, mixed, (stream.end, gate_up), given, router, normed, branch, summed, inputs, aside,
        all_streams, last_streams, merged, tail, logits, fed, taken, embedded,
    )  # fmt: skip
