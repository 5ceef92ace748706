"""The tensors that an encoder's config calls for, by our names, beside those that `layout` knows of decoders.

Weights are a decoder's. Vectors: "embed_norm", "positions" [context, hidden] and "segments" [2, hidden] row
by row where the config has them, with `pre_norms` "final_norm"; per layer "attn_norm", "ffn_norm" and biases.
Of a cross-encoder's head: "score_dense" [hidden, hidden] row by row, "score_out" [hidden]. Every norm, dense
and out has a bias of the same name with "_bias" behind it, but for norms of `pre_norms`, and with `norm_head`
for dense and its norm, "score_norm".

Of tasks, of all of them one after the other: A and B of what is added to the embeddings, "task_embed_a"
[tasks, vocab, rank] and "task_embed_b" [tasks, rank, hidden], "task_segments_a" and "_b" alike; per layer
"task_qkv_a" [tasks, rank, inputs] and "task_qkv_b" [tasks, outputs, rank], and "task_o", "task_up" and
"task_down" alike.
"""

from __future__ import annotations

import math

from phasewise.serving.models.encoding import Encoder, EncoderTasks
from phasewise.serving.models.packed_model import ModelConfig

SEGMENTS = 2


def vector_lengths(config: ModelConfig, encoder: Encoder) -> dict[str, int]:
    """Every vector outside layers, before fusing."""
    endings = ("",) if encoder.pre_norms else ("", "_bias")
    outer = ("embed_norm", "final_norm") if encoder.pre_norms else ("embed_norm",)
    lengths = {f"{norm}{ending}": config.hidden for norm in outer for ending in endings}
    if encoder.positions:
        lengths["positions"] = config.context_length * config.hidden
    if encoder.segments:
        lengths["segments"] = SEGMENTS * config.hidden
    if encoder.scores:
        lengths["score_dense"] = config.hidden**2
        lengths["score_norm" if encoder.norm_head else "score_dense_bias"] = config.hidden
        lengths |= {"score_out": config.hidden, "score_out_bias": 1}
    if encoder.tasks is not None:
        lengths |= {name: math.prod(shape) for name, shape in task_shapes(config, encoder.tasks).items()}
    return lengths


def task_shapes(config: ModelConfig, tasks: EncoderTasks) -> dict[str, tuple[int, int, int]]:
    """A and B of what tasks add to embeddings and products, as files have them."""
    count, rank, hidden = len(tasks.names), tasks.rank, config.hidden
    shapes = {
        "task_embed_a": (count, config.vocab_size, rank),
        "task_embed_b": (count, rank, hidden),
        "task_segments_a": (count, 1, rank),
        "task_segments_b": (count, rank, hidden),
    }
    products = {
        "qkv": (config.q_rows + 2 * config.kv_rows, hidden),
        "o": (hidden, config.q_rows),
        "up": (config.ffn, hidden),
        "down": (hidden, config.ffn),
    }
    for layer in range(config.n_layers):
        for name, (outputs, inputs) in products.items():
            shapes[f"layers.{layer}.task_{name}_a"] = count, rank, inputs
            shapes[f"layers.{layer}.task_{name}_b"] = count, outputs, rank
    return shapes
