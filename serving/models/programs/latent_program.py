"""The ops of latent attention, between the norm before it and the product that leads back to the stream.

The absorbed form in every phase (decision 0112): queries go through a product by head to where the vectors
are, and what is read of these through another one to values.
"""

from __future__ import annotations

from phasewise.cython_kernels.packing import PackedWeight
from phasewise.serving.errors import ModelError
from phasewise.serving.models.linears import Linears, Parts, Place, Rows
from phasewise.serving.models.packed_model import ModelConfig, PackedModel
from phasewise.serving.models.programs.mixing_rows import MixingRows


def latent_widths(config: ModelConfig) -> MixingRows[int]:
    latent, heads = config.latent, config.n_heads
    if latent is None:
        return MixingRows(0, 0, 0, 0)
    queries = heads * latent.query
    return MixingRows(
        products=(latent.q_rank or queries) + latent.vector,
        own=queries if latent.q_rank else 0,
        gates=heads * max(latent.kv_rank, latent.value_dim),
        mixed=heads * latent.kv_rank,
    )


def latent_parts(model: PackedModel, name: str) -> Parts:
    """The weights that read the stream, and their columns."""
    latent = model.config.latent
    assert latent is not None
    first = "q_a" if latent.q_rank else "q"
    width = latent.q_rank or model.config.n_heads * latent.query
    if f"{name}.{first}_kv_a" in model.weights:
        return [(model.weights[f"{name}.{first}_kv_a"], 0)]
    return [(_weight(model, f"{name}.{first}"), 0), (_weight(model, f"{name}.kv_a"), width)]


def add_latent_ops(
    linears: Linears,
    model: PackedModel,
    name: str,
    places: MixingRows[Place],
    layer: int,
    kind: int,
    rows: Rows,
) -> None:
    """All that follows the products of the stream; values end in `places.gates`. name: "layers.3"; layer:
    whose place vectors have."""
    config, program = model.config, linears.program
    latent = config.latent
    assert latent is not None
    products, queries = places.products, places.own
    width = latent.q_rank or config.n_heads * latent.query
    if latent.q_rank:
        norm = model.vectors[f"{name}.q_a_norm"]
        reads = {"source": "norm", "norm": norm, "eps": latent.norm_eps}
        linears.add([(_weight(model, f"{name}.q_b"), 0)], reads, products, queries)
    else:
        queries = products
    linears.add_heads(config.n_heads, *_stack(model, f"{name}.k_b"), queries, places.gates, latent.query)
    scale = config.attention_scale
    program.attend_latent(
        layer,
        *places.gates,
        *places.mixed,
        (*queries, latent.query, latent.key_dim),
        (products[0] + width, products[1]),
        model.vectors[f"{name}.kv_a_norm"],
        latent.norm_eps,
        latent.query**-0.5 if scale is None else scale,
        rows=rows,
        kind=kind,
        cap=config.attention_cap or 0.0,
    )
    stack = _stack(model, f"{name}.v_b")  # of rows that want no logits, whatever is there
    linears.add_heads(config.n_heads, *stack, places.mixed, places.gates, latent.kv_rank)


def _stack(model: PackedModel, name: str) -> tuple[PackedWeight, PackedWeight]:
    """The weights of all heads, and of the first one."""
    stack, head = _weight(model, name), model.one_head(name)
    assert head is not None
    return stack, head


def _weight(model: PackedModel, name: str) -> PackedWeight:
    try:
        return model.weights[name]
    except KeyError:
        raise ModelError(f"{model.name} has no weight {name!r}") from None
