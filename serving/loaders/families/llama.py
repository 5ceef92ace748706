"""Llama, Mistral and Mixtral, which GGUF files call llama, and families whose layers are alike. Ministral 3:
YaRN, queries that grow with positions; and the language models of Mistral 3. OLMo 2 and 3: norms after each
half of a layer alone; OLMoE: its mixture; all have a norm over a whole row of queries and keys. Phi 3 and 4:
one tensor for queries, keys and values, one for gate and up. SmolLM 3: some layers know no positions. Arcee
(AFM): feed-forward layers without a gate: down(relu(up(x))^2); Apertus: down(xielu(up(x))), whose numbers are
each layer's own. StarCoder 2: LayerNorms, biases everywhere, no gates. Cohere 2 (Command R7B, Command A):
attention and feed-forward read one LayerNorm, which has no bias; RoPE turns neighbours, in layers with a
window alone; every fourth layer sees all, and knows no positions. Llama 4, the language model: layers with
RoPE see chunks of positions and normalise queries and keys behind RoPE; layers without it see all positions,
and their queries grow. The logistic of a chosen expert's logit multiplies what the expert reads. GGUF files
state neither chunks nor growth: llama.cpp has constants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import OtherForm, TensorCut
from phasewise.serving.loaders.families.family import (
    GGUF_NORM_BIASES,
    HF_NORM_BIASES,
    LAST_NORM_BIAS,
    TEXT_PREFIXES,
    Family,
    Get,
    experts_of,
    fed,
    layer_types,
    local_theta,
    named_layers,
    other_parts,
    positive,
    turned_in_windows,
    whole_number,
    with_experts,
    with_kind,
    with_kinds,
    with_rope,
    with_width,
    with_windows,
    yarn_magnitude,
)
from phasewise.serving.models.packed_model import LayerKind, ModelConfig
from phasewise.serving.models.parts.attention import QueryGrowth
from phasewise.serving.models.parts.experts import LOGISTIC
from phasewise.serving.models.parts.feed_forward import XIELU, XIELU_NUMBERS, FeedForwardForm
from phasewise.serving.models.rope import Llama3Scaling, RopeSpec, YarnScaling


def _with_window(get: Get, config: ModelConfig) -> ModelConfig:
    return with_kind(config, window=get("sliding_window", int))


def _mixtral(get: Get, config: ModelConfig) -> ModelConfig:
    experts = experts_of(get, "num_local_experts", "num_experts_per_tok", config.ffn, normalised=True)
    return with_experts(_with_window(get, config), experts)


def _llama_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    return (_mixtral if get("expert_count", int, 0) else _with_window)(get, config)


LLAMA = Family("llama", from_gguf=_llama_gguf, gguf_interleaved_heads=True)
MISTRAL = Family(
    "mistral",
    gguf=(),
    from_hf=_with_window,
    hf_defaults={
        "sliding_window": 4096,  # null means none
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
)
MIXTRAL = Family(
    "mixtral",
    gguf=(),
    from_hf=_mixtral,
    hf_defaults={
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
)


OLMO3_PERIOD, OLMO3_THETA = 4, 5e5


def _olmo3(get: Get, config: ModelConfig) -> ModelConfig:
    """Add windows; RoPE is scaled only in layers that see all positions."""
    sliding = layer_types(get, config, OLMO3_PERIOD)
    local = RopeSpec(local_theta(get, config.rope.theta), config.head_dim)
    return with_windows(_olmo2(get, config), sliding, get("sliding_window", int), local)


def _olmo_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    return (_olmo2 if get("sliding_window", int) is None else _olmo3)(get, config)


def _olmo2(get: Get, config: ModelConfig) -> ModelConfig:
    del get
    return replace(config, pre_norms=False, post_norms=True, qk_norm=True, whole_qk_norm=True)


def _olmoe(get: Get, config: ModelConfig) -> ModelConfig:
    normalised = get("norm_topk_prob", bool, False)
    experts = experts_of(get, "num_experts", "num_experts_per_tok", config.ffn, normalised)
    return replace(with_experts(config, experts), qk_norm=True, whole_qk_norm=True)


UNCLIPPED = {"clip_qkv": None}
OLMO2 = Family(
    "olmo2", from_hf=_olmo2, from_gguf=_olmo_gguf, hf_defaults={"rms_norm_eps": 1e-5}, hf_only=UNCLIPPED
)
OLMO3 = Family(
    "olmo3",
    gguf=(),
    from_hf=_olmo3,
    hf_defaults={"rms_norm_eps": 1e-5, "rope_theta": OLMO3_THETA, "sliding_window": 4096},
    hf_only=UNCLIPPED,
)
OLMOE = Family(
    "olmoe",
    from_hf=_olmoe,
    hf_defaults={
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 4096,
    },
    hf_only=UNCLIPPED,
)
PHI3 = Family(
    "phi3",
    from_hf=_with_window,
    partial_rope=True,
    hf_defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    gguf_names={"attn_qkv.weight": TensorCut(("q", "k", "v")), "ffn_up.weight": TensorCut(("gate", "up"))},
)


NO_ROPE_PERIOD = 4  # layers between two without RoPE


def layers_with_rope(get: Get, config: ModelConfig) -> list[bool]:
    """True for each layer with RoPE."""
    has_rope = get("no_rope_layers", list)  # 1 where a layer has RoPE, whatever the name says
    if not has_rope:
        period = whole_number(get, "no_rope_layer_interval", NO_ROPE_PERIOD)
        has_rope = [(layer + 1) % period for layer in range(config.n_layers)]
    if len(has_rope) != config.n_layers:
        raise ModelError(
            f"config.json has {counted(len(has_rope), 'entry')} in no_rope_layers"
            f" for {counted(config.n_layers, 'layer')}"
        )
    return [bool(flag) for flag in has_rope]


def _smollm3(get: Get, config: ModelConfig) -> ModelConfig:
    kinds = [LayerKind(None, config.rope if turns else None) for turns in layers_with_rope(get, config)]
    return with_kinds(config, kinds)


SMOLLM3 = Family(
    "smollm3",
    from_hf=_smollm3,
    hf_only={"use_sliding_window": False},
    hf_defaults={
        "rope_theta": 2e6,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    gguf_interleaved_heads=True,
)
ARCEE = Family(
    "arcee",
    hf_defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    ffn_form=FeedForwardForm("relu2", gated=False),
    gguf_interleaved_heads=True,
)


APERTUS_ROPE, APERTUS_THETA = Llama3Scaling(8.0, 1.0, 4.0, 8192), 12e6


def _apertus(get: Get, config: ModelConfig) -> ModelConfig:
    if not (get("rope_parameters", dict) or get("rope_scaling", dict)):
        config = with_rope(config, scaling=APERTUS_ROPE)
    return _normed(get, config)


def _normed(get: Get, config: ModelConfig) -> ModelConfig:
    del get
    return replace(config, qk_norm=True)


_XIELU = dict(zip(("alpha_p", "alpha_n", "beta", "eps"), XIELU_NUMBERS, strict=True))
APERTUS = Family(
    "apertus",
    from_hf=_apertus,
    from_gguf=_normed,
    hf_names={
        "attention_layernorm.weight": "attn_norm",
        "feedforward_layernorm.weight": "ffn_norm",
        **{f"mlp.act_fn.{theirs}": OtherForm(ours) for theirs, ours in _XIELU.items()},
    },
    gguf_numbers={f"xielu.{theirs}": ours for theirs, ours in _XIELU.items()},
    hf_defaults={"rms_norm_eps": 1e-5, "rope_theta": APERTUS_THETA, "max_position_embeddings": 65536},
    ffn_form=FeedForwardForm(XIELU, gated=False),
)


STARCODER_EPS = 1e-5


def _starcoder2(get: Get, config: ModelConfig) -> ModelConfig:
    biases = get("use_bias", bool, config.out_bias)
    return replace(
        _with_window(get, config),
        layer_norms=True,
        norm_biases=True,
        out_bias=biases,
        ffn_biases=biases,
        norm_eps=positive(get, "norm_epsilon", STARCODER_EPS),
    )


STARCODER2 = Family(
    "starcoder2",
    from_hf=_starcoder2,
    hf_names={
        **HF_NORM_BIASES,
        "mlp.c_fc.weight": "up",
        "mlp.c_fc.bias": "up_bias",
        "mlp.c_proj.weight": "down",
        "mlp.c_proj.bias": "down_bias",
    },
    gguf_names={
        **GGUF_NORM_BIASES,
        "ffn_up.bias": "up_bias",
        "ffn_down.bias": "down_bias",
    },
    global_names=LAST_NORM_BIAS,
    hf_biases="use_bias",
    hf_defaults={
        "use_bias": True,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    ffn_form=FeedForwardForm("gelu_tanh", gated=False),
)


OLDER_WINDOW = 4096  # of a Mistral whose config says nothing of it
USUAL_ROPE: dict[str, Any] = {"original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}
USUAL_FACTOR, USUAL_THETA = 16.0, 1e6


def _mistral3(get: Get, config: ModelConfig) -> ModelConfig:
    kind = get("model_type", str)
    if kind == "mistral":
        return with_kind(config, window=get("sliding_window", None, OLDER_WINDOW))
    if kind != "ministral3":
        raise ModelError(
            f"config.json has a text_config with model_type = {kind!r:.60}; mistral and ministral3 can run"
        )
    stated = get("rope_parameters", dict) or get("rope_scaling", dict)
    if stated is None:
        usual = YarnScaling(USUAL_FACTOR, USUAL_ROPE["original_max_position_embeddings"], 1.0)
        config = with_rope(config, theta=USUAL_THETA, dim=config.head_dim, scaling=usual)
    growth = _growth(config, (USUAL_ROPE if stated is None else stated).get("llama_4_scaling_beta"))
    return replace(_with_window(get, config), query_growth=growth)


def _growth(config: ModelConfig, beta: object) -> QueryGrowth | None:
    """The growth of queries, whose span is the original context of the model's YaRN."""
    if beta is None or beta == 0:
        return None
    if isinstance(beta, bool) or not isinstance(beta, int | float):
        raise ModelError(f"the config has llama_4_scaling_beta = {beta!r:.60}: a number expected")
    if not isinstance(config.rope.scaling, YarnScaling):
        raise ModelError("the config has queries that grow with positions, and no YaRN, which cannot run")
    return QueryGrowth(float(beta), config.rope.scaling.original_context)


def _mistral3_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    if get("expert_count", int, 0):
        raise ModelError("mistral3 models with experts cannot run")
    scaling, weight = config.rope.scaling, get("rope.scaling.yarn_log_multiplier", float, 0.0)
    if isinstance(scaling, YarnScaling) and weight > 0:
        magnitude = scaling.magnitude / yarn_magnitude(scaling.factor, weight)
        config = with_rope(config, scaling=replace(scaling, magnitude=magnitude))
    growth = _growth(config, get("attention.temperature_scale", float))
    return replace(_with_window(get, config), query_growth=growth)


MISTRAL3 = Family(
    "mistral3",
    hf=("ministral3", "mistral3"),
    from_hf=_mistral3,
    from_gguf=_mistral3_gguf,
    hf_defaults={
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
    },
    hf_text_prefixes=TEXT_PREFIXES,
    hf_ignored=other_parts("vision_tower", "multi_modal_projector"),
    gguf_interleaved_heads=True,
)


COHERE_PERIOD = 4
COHERE_EPS, COHERE_WINDOW, LOGIT_SCALE = 1e-5, 4096, 0.0625


def _cohere2(get: Get, config: ModelConfig) -> ModelConfig:
    own = replace(
        config,
        layer_norms=True,
        parallel=True,
        norm_eps=positive(get, "layer_norm_eps", COHERE_EPS),
        logit_scale=positive(get, "logit_scale", LOGIT_SCALE),
    )
    sliding = layer_types(get, config, get("sliding_window_pattern", int, COHERE_PERIOD))
    return turned_in_windows(own, sliding, get("sliding_window", int))


COHERE2 = Family(
    "cohere2",
    from_hf=_cohere2,
    hf_only={"use_qk_norm": False},
    hf_defaults={
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "sliding_window": COHERE_WINDOW,
        "bos_token_id": 5,
        "eos_token_id": 255001,
    },
    hf_interleaved_heads=True,
    gguf_interleaved_heads=True,
)


CHUNKED = "chunked_attention"
N_WITHOUT_NORMS = 128
"""Experts of the release (Maverick) that llama.cpp runs without norms of queries and keys."""


def _llama4(get: Get, config: ModelConfig) -> ModelConfig:
    has_rope = layers_with_rope(get, config)
    chunk, grows = get("attention_chunk_size", int), get("attn_temperature_tuning")
    chunked = [rotates and chunk is not None for rotates in has_rope]
    if get("layer_types", list):
        chunked = named_layers(get, config, CHUNKED)
    if type(grows) not in (bool, int):
        raise ModelError(f"config.json has attn_temperature_tuning = {grows!r:.60}: true or false expected")
    kinds = [
        LayerKind(chunk if cut else None, config.rope if rotates else None, in_chunks=cut)
        for cut, rotates in zip(chunked, has_rope, strict=True)
    ]
    growth = QueryGrowth(get("attn_scale", float), get("floor_scale", int), shift=1, unrotated=True)
    own = replace(
        with_kinds(config, kinds),
        plain_qk_norm=get("use_qk_norm", bool),
        query_growth=growth if grows and not all(has_rope) else None,
    )
    return _mixture(get, own, config.ffn, get("intermediate_size_mlp", int))


def _mixture(get: Get, config: ModelConfig, width: int, dense_width: int) -> ModelConfig:
    """Add experts of `width` numbers, and feed-forward layers of `dense_width` to layers without experts."""
    n_layers, named = config.n_layers, get("moe_layers", list)
    step = whole_number(get, "interleave_moe_layer_step", 1, least=0)
    sparse = range(step - 1, n_layers, step) if step else ()
    dense = [layer not in (sparse if named is None else named) for layer in range(n_layers)]
    plain = with_width(config, dense_width)
    if all(dense):
        return plain
    experts = experts_of(
        get, "num_local_experts", "num_experts_per_tok", width, normalised=False, shared_ffn=width
    )
    return with_experts(plain, replace(experts, scores=LOGISTIC, weighs_inputs=True), dense)


def _llama4_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    width, n_experts = get("moe_intermediate_size", int, config.ffn), get("expert_count", int, 0)
    is_whole = get("attention.sliding_window", int) == 0  # so are files whose layers all see all
    stated: dict[str, Any] = {
        "intermediate_size_mlp": config.ffn,
        "use_qk_norm": n_experts != N_WITHOUT_NORMS,
        **({} if n_experts else {"moe_layers": []}),
        **({"attention_chunk_size": None, "no_rope_layers": [1] * config.n_layers} if is_whole else {}),
    }

    def with_stated(key: str, kind: Any = None, default: Any = None) -> Any:
        return stated[key] if key in stated else get(key, kind, default)

    return _llama4(with_stated, with_width(config, width))


_CONSTANTS = {
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "attn_scale": 0.1,
    "floor_scale": 8192,
}
LLAMA4 = Family(
    "llama4",
    hf=("llama4", "llama4_text"),
    from_hf=_llama4,
    from_gguf=_llama4_gguf,
    hf_names={
        "feed_forward.router.weight": "router",
        **fed("feed_forward.shared_expert"),
        **fed("feed_forward.experts.{e}", "experts.{e}."),
        "feed_forward.experts.gate_up_proj": TensorCut(("gate", "up"), of_experts=True, transposed=True),
        "feed_forward.experts.down_proj": TensorCut(("down",), of_experts=True, transposed=True),
    },
    gguf_defaults=_CONSTANTS,
    hf_defaults={
        **_CONSTANTS,
        "use_qk_norm": True,
        "intermediate_size_mlp": 16384,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    hf_text_prefixes=TEXT_PREFIXES,
    hf_ignored=other_parts("vision_model", "multi_modal_projector"),
    hf_interleaved_heads=True,
    gguf_interleaved_heads=True,
)
