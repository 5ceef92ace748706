"""A model's config as plain JSON values, and back: what packed files, ranks and fingerprints hold of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phasewise.serving.models.encoding import encoder_from_json, encoder_to_json
from phasewise.serving.models.factors import NO_FACTORS, factors_from_json
from phasewise.serving.models.halves import BOTH_HALVES, halves_from_json, halves_to_json
from phasewise.serving.models.packed_model import LayerKind, ModelConfig
from phasewise.serving.models.parts.attention import heads_from_json
from phasewise.serving.models.parts.latent import latent_from_json, latent_to_json
from phasewise.serving.models.parts.layer_inputs import inputs_from_json
from phasewise.serving.models.parts.mixture import experts_from_json, experts_to_json
from phasewise.serving.models.parts.states.state_layers import state_from_json, state_to_json
from phasewise.serving.models.parts.streams import streams_from_json
from phasewise.serving.models.query_growth import QueryGrowth
from phasewise.serving.models.rope import rope_from_json, rope_to_json

_OFF = (
    "gated_attention",
    "last_row_scores",
    "layer_norms",
    "norm_biases",
    "parallel",
    "ffn_biases",
    "value_norms",
    "layer_scales",
)
USUAL: dict[str, Any] = {
    "gated": True,
    "halves": BOTH_HALVES,
    "factors": NO_FACTORS,
    "ffn_widths": (),
    "shared_kv_layers": 0,
    "drafts": "",
    "n_drafted": 0,
    **dict.fromkeys(("state", "latent", "query_growth", "layer_inputs", "streams")),
    **dict.fromkeys(_OFF, False),
}
"""Values that most models have: `config_to_json` does not mention them."""


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Plain JSON values; `config_from_json` is the inverse.

    What is `USUAL` is not mentioned: files and fingerprints of before others were read stay as they are.
    """
    fields = {name: getattr(config, name) for name in ModelConfig.__dataclass_fields__}
    for name, usual in USUAL.items():
        if fields[name] == usual:
            del fields[name]
    if config.latent is not None:
        fields["latent"] = latent_to_json(config.latent)
    if config.state is not None:
        fields["state"] = state_to_json(config.state)
    if config.query_growth is not None:
        fields["query_growth"] = dict(vars(config.query_growth))
    for name, to_json in (
        ("halves", halves_to_json),
        ("factors", vars),
        ("layer_inputs", vars),
        ("streams", vars),
    ):
        if name in fields:
            fields[name] = dict(to_json(fields[name]))
    kinds = config.kinds if config.layer_kinds else ()
    return {
        **fields,
        "rope": rope_to_json(config.rope),
        "experts": experts_to_json(config.experts),
        "encoder": None if config.encoder is None else encoder_to_json(config.encoder),
        "kinds": [_kind_to_json(kind) for kind in kinds],
        "layer_kinds": [kinds.index(kind) for kind in config.layer_kinds],
    }


def _kind_to_json(kind: LayerKind) -> dict[str, Any]:
    own = {} if kind.heads is None else {"heads": dict(vars(kind.heads))}
    return {"window": kind.window, "rope": rope_to_json(kind.rope), **own}


def config_from_json(fields: Mapping[str, Any]) -> ModelConfig:
    """The config that `config_to_json` wrote; KeyError or TypeError for anything else."""
    values = dict(fields)
    kinds = [
        LayerKind(kind["window"], rope_from_json(kind["rope"]), heads_from_json(kind.get("heads")))
        for kind in values.pop("kinds")
    ]
    values["layer_kinds"] = tuple(kinds[index] for index in values["layer_kinds"])
    values["experts"] = experts_from_json(values["experts"])
    values["state"] = state_from_json(values.get("state"))
    growth = values.get("query_growth")
    values["query_growth"] = None if growth is None else QueryGrowth(**growth)
    values["latent"] = latent_from_json(values.get("latent"))
    values["layer_inputs"] = inputs_from_json(values.get("layer_inputs"))
    values["streams"] = streams_from_json(values.get("streams"))
    values["ffn_widths"] = tuple(values.get("ffn_widths", ()))
    values["halves"] = halves_from_json(values.get("halves"))
    values["factors"] = factors_from_json(values.get("factors"))
    values["encoder"] = None if values["encoder"] is None else encoder_from_json(values["encoder"])
    values["eos_token_ids"] = tuple(values["eos_token_ids"])
    rope = rope_from_json(values.pop("rope"))
    if rope is None:
        raise TypeError("a config without RoPE parameters")
    return ModelConfig(rope=rope, **values)
