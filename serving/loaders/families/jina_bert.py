"""jina v2: BERT whose attention falls with the distance (ALiBi), with a gated feed-forward layer.

config.json calls it "bert", with positions "alibi".
"""

from __future__ import annotations

from dataclasses import replace

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import TensorCut
from phasewise.serving.loaders.families.bert import BERT, EncoderFamily
from phasewise.serving.loaders.families.family import Get
from phasewise.serving.models.packed_model import LayerKind, ModelConfig


def _with_distances(get: Get, config: ModelConfig) -> ModelConfig:
    del get
    assert config.encoder is not None
    encoder = replace(config.encoder, distances=True)
    return replace(config, encoder=encoder, layer_kinds=(LayerKind(None, None),) * config.n_layers)


def _from_hf(get: Get, config: ModelConfig) -> ModelConfig:
    kind = get("feed_forward_type", str, "original")
    if kind != "geglu":
        raise ModelError(f"config.json has feed_forward_type = {kind!r:.60}; geglu can run")
    return _with_distances(get, config)


JINA_BERT = EncoderFamily(
    "jina-bert",
    (),
    "jina-bert-v2",
    BERT.hf_layer,
    {
        **{theirs: ours for theirs, ours in BERT.hf_names.items() if theirs.startswith("attention.")},
        "mlp.gated_layers.weight": TensorCut(("gate", "up")),
        "mlp.wo.weight": "down",
        "mlp.wo.bias": "down_bias",
        "mlp.layernorm.weight": "ffn_norm",
        "mlp.layernorm.bias": "ffn_norm_bias",
    },
    BERT.hf_global_names,
    has_gate=True,
    positions=False,
    position_kinds=("alibi",),
    activations=("gelu",),
    from_hf=_from_hf,
    from_gguf=_with_distances,
    gguf_names={"ffn_up.weight": TensorCut(("gate", "up"))},
)
