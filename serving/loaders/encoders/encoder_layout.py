"""The tensors that an encoder's config calls for, by our names, beside those that `layout` knows of decoders.

Weights are a decoder's. Vectors: "embed_norm", "positions" [context, hidden] and "segments" [2, hidden] row
by row where the config has them; per layer "attn_norm", "ffn_norm" and biases. Of a cross-encoder's head,
which gives out(tanh(dense(row))): "score_dense" [hidden, hidden] row by row, "score_out" [hidden]. Every
norm, dense and out has a bias of the same name with "_bias" behind it.
"""

from __future__ import annotations

from phasewise.serving.models.packed_model import Encoder, ModelConfig

SEGMENTS = 2


def vector_lengths(config: ModelConfig, encoder: Encoder, has_bias: bool) -> dict[str, int]:
    """Every vector, before fusing. has_bias: queries, keys and values have biases."""
    lengths = {"embed_norm": config.hidden, "embed_norm_bias": config.hidden}
    if encoder.positions:
        lengths["positions"] = config.context_length * config.hidden
    if encoder.segments:
        lengths["segments"] = SEGMENTS * config.hidden
    if encoder.scores:
        lengths |= {"score_dense": config.hidden**2, "score_dense_bias": config.hidden}
        lengths |= {"score_out": config.hidden, "score_out_bias": 1}
    norms = [f"{norm}{bias}" for norm in ("attn_norm", "ffn_norm") for bias in ("", "_bias")]
    layer = dict.fromkeys(norms, config.hidden)
    if has_bias:
        layer |= {"q_bias": config.q_rows, "k_bias": config.kv_rows, "v_bias": config.kv_rows}
    if encoder.out_bias:
        layer["o_bias"] = config.hidden
    if encoder.ffn_biases:
        layer |= {"up_bias": config.ffn, "down_bias": config.hidden}
    return lengths | {
        f"layers.{i}.{name}": length for i in range(config.n_layers) for name, length in layer.items()
    }
