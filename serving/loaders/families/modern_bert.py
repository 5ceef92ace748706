"""ModernBERT: norms before the halves of a layer, RoPE, a gated feed-forward layer, and no biases. Every
third layer sees the whole text, the others a window around each token.
"""

from __future__ import annotations

from dataclasses import replace

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import TensorCut
from phasewise.serving.loaders.families.bert import EncoderFamily, stated_theta
from phasewise.serving.loaders.families.family import Get
from phasewise.serving.loaders.families.reading import FULL, SLIDING, layer_types
from phasewise.serving.models.packed_model import LayerKind, ModelConfig
from phasewise.serving.models.rope import RopeSpec

GLOBAL_EVERY, LOCAL_TOKENS = 3, 128
GLOBAL_THETA, LOCAL_THETA = 160_000.0, 10_000.0


def _modern_bert(
    config: ModelConfig, windowed: list[bool], window: int, thetas: tuple[float, float]
) -> ModelConfig:
    """thetas: of layers that see all, and of the others."""
    assert config.encoder is not None
    whole, local = (RopeSpec(theta, config.head_dim) for theta in thetas)
    kinds = tuple(LayerKind(window, local) if is_local else LayerKind(None, whole) for is_local in windowed)
    scores = config.encoder.scores
    encoder = replace(config.encoder, pre_norms=True, norm_head=scores, segments=False)
    return replace(config, rope=whole, layer_kinds=kinds, encoder=encoder)


def _from_hf(get: Get, config: ModelConfig) -> ModelConfig:
    activation = get("classifier_activation", str, "gelu")
    if config.encoder is not None and config.encoder.scores and activation != "gelu":
        raise ModelError(f"config.json has classifier_activation = {activation!r:.60}; gelu can run")
    rope = get("rope_parameters", dict) or {}
    thetas = (
        _theta(get, rope.get(FULL), "global_rope_theta", GLOBAL_THETA),
        _theta(get, rope.get(SLIDING), "local_rope_theta", LOCAL_THETA),
    )
    return _modern_bert(config, _windowed(get, config), get("local_attention", int, LOCAL_TOKENS), thetas)


def _theta(get: Get, own: object, key: str, default: float) -> float:
    """By the fields of one kind of layers, or what earlier files have in their place."""
    fields = {} if own is None else own
    scaling = fields.get("rope_type", "default") if isinstance(fields, dict) else fields
    if not isinstance(fields, dict) or scaling != "default":
        raise ModelError(f"config.json asks for RoPE scaling {scaling!r:.60}, which cannot run")
    return stated_theta(fields, get(key, float, default))


def _windowed(get: Get, config: ModelConfig) -> list[bool]:
    """True for each layer that has a window."""
    if get("layer_types", list) is not None:
        return layer_types(get, config, 1)
    every = get("global_attn_every_n_layers", int, GLOBAL_EVERY)
    if every < 1:
        raise ModelError(f"config.json has global_attn_every_n_layers = {every}: at least 1 expected")
    return [layer % every != 0 for layer in range(config.n_layers)]


def _from_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    every = get("attention.sliding_window_pattern", int, GLOBAL_EVERY)
    window = get("attention.sliding_window", int)
    if every < 1:
        raise ModelError(f"the GGUF metadata gives a sliding window pattern of {every}: at least 1 expected")
    windowed = [window is not None and layer % every != 0 for layer in range(config.n_layers)]
    whole = get("rope.freq_base", float, GLOBAL_THETA)
    return _modern_bert(config, windowed, window or 0, (whole, get("rope.freq_base_swa", float, whole)))


MODERN_BERT = EncoderFamily(
    "modern-bert",
    ("modernbert",),
    "modern-bert",
    r"layers\.(0|[1-9]\d{0,3})\.(.+)",
    {
        "attn.Wqkv.weight": TensorCut(("q", "k", "v")),
        "attn.Wo.weight": "o",
        "attn_norm.weight": "attn_norm",
        "mlp.Wi.weight": TensorCut(("gate", "up")),
        "mlp.Wo.weight": "down",
        "mlp_norm.weight": "ffn_norm",
    },
    {
        "embeddings.tok_embeddings.weight": "embed",
        "embeddings.norm.weight": "embed_norm",
        "final_norm.weight": "final_norm",
        "head.dense.weight": "score_dense",
        "head.norm.weight": "score_norm",
        "classifier.weight": "score_out",
        "classifier.bias": "score_out_bias",
    },
    has_gate=True,
    positions=False,
    biases=False,
    activations=("gelu", "silu", "gelu_tanh"),
    defaults={"layer_norm_eps": 1e-5, "type_vocab_size": 0},
    hf_fields={"layer_norm_eps": "norm_eps", "hidden_act": "hidden_activation"},
    hf_must_be_off=("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"),
    gguf_scores=False,
    from_hf=_from_hf,
    from_gguf=_from_gguf,
    gguf_names={
        "attn_norm.weight": "attn_norm",
        "ffn_norm.weight": "ffn_norm",
        "ffn_up.weight": TensorCut(("gate", "up")),
    },
    gguf_global_names={"output_norm.weight": "final_norm"},
)
