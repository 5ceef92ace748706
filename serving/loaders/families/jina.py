"""jina v2: BERT whose attention falls with the distance (ALiBi), with a gated feed-forward layer. config.json
calls it "bert", with positions "alibi".

jina v3: XLM-R with RoPE, and low-rank adapters of every product and of the embeddings for each task.
config.json calls it "xlm-roberta", with positions "rotary", and names the tasks in `lora_adaptations`. A
tensor that tasks change is stored as torch's parametrisations have it: "NAME.parametrizations.weight" with
"original", "0.lora_A" and "0.lora_B" behind it, A and B of all tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import Names, TensorCut
from phasewise.serving.loaders.families.bert import BERT, EncoderFamily
from phasewise.serving.loaders.families.family import Get
from phasewise.serving.models.encoding import EncoderTasks
from phasewise.serving.models.packed_model import LayerKind, ModelConfig
from phasewise.serving.models.rope import RopeSpec

TASKS = "lora_adaptations"
_INSTRUCTIONS = ("task_instructions", "lora_prompts")  # the latter in files of its first days
_MOST_CHARACTERS = 1 << 14
_THETA = 10_000.0


def _with_distances(get: Get, config: ModelConfig) -> ModelConfig:
    del get
    assert config.encoder is not None
    encoder = replace(config.encoder, distances=True)
    return replace(config, encoder=encoder, layer_kinds=(LayerKind(None, None),) * config.n_layers)


def _v2_from_hf(get: Get, config: ModelConfig) -> ModelConfig:
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
    from_hf=_v2_from_hf,
    from_gguf=_with_distances,
    gguf_names={"ffn_up.weight": TensorCut(("gate", "up"))},
)


def _from_hf(get: Get, config: ModelConfig) -> ModelConfig:
    assert config.encoder is not None
    pooler = get("emb_pooler", str)
    if config.encoder.scores or pooler not in (None, "mean"):
        asked = "a classifier" if config.encoder.scores else f"emb_pooler = {pooler!r:.60}"
        raise ModelError(f"config.json has {asked}: means of rows, without a head, can run in this family")
    tasks = _tasks_of(get)
    if tasks is not None and get("type_vocab_size", int) != 1:
        raise ModelError("config.json has tasks, and other segments than one, which cannot run")
    rope = RopeSpec(get("rotary_emb_base", float, _THETA), config.head_dim)
    return replace(config, rope=rope, encoder=replace(config.encoder, tasks=tasks))


def _tasks_of(get: Get) -> EncoderTasks | None:
    names, rank = get(TASKS, list) or [], get("lora_rank", int, 4)
    if not names:
        return None
    if not get("load_trained_adapters", bool, True):
        raise ModelError("config.json has tasks whose adapters are not trained (load_trained_adapters)")
    alpha = get("lora_alpha", float, 1.0)
    return EncoderTasks(tuple(names), rank, alpha / rank if rank > 0 else 1.0)


def instructions_of(fields: Mapping[str, Any], tasks: EncoderTasks) -> tuple[tuple[str, str], ...]:
    """The text before the texts of each task. ModelError for what is no short text."""
    given: Any = next((fields[name] for name in _INSTRUCTIONS if fields.get(name) is not None), {})
    for name in tasks.names:
        text = given.get(name) if isinstance(given, dict) else None
        if not isinstance(text, str) or len(text) > _MOST_CHARACTERS:
            raise ModelError(
                f"config.json has {text!r:.40} as the instruction of {name!r:.40}: a short text expected"
            )
    return tuple((name, given[name]) for name in tasks.names)


def _parametrised(theirs: str, ours: str | TensorCut, task: str) -> Names:
    return {
        f"{theirs}.weight": ours,
        f"{theirs}.parametrizations.weight.original": ours,
        f"{theirs}.parametrizations.weight.0.lora_A": f"task_{task}_a",
        f"{theirs}.parametrizations.weight.0.lora_B": f"task_{task}_b",
    }


_GLOBAL_NAMES = {
    name: ours
    for theirs, own, task in (
        ("embeddings.word_embeddings", "embed", "embed"),
        ("embeddings.token_type_embeddings", "segments", "segments"),
    )
    for name, ours in _parametrised(theirs, own, task).items()
    if isinstance(ours, str)
}

JINA_V3 = EncoderFamily(
    "jina-v3",
    (),
    None,
    BERT.hf_layer,
    {
        **_parametrised("mixer.Wqkv", TensorCut(("q", "k", "v")), "qkv"),
        "mixer.Wqkv.bias": TensorCut(("q_bias", "k_bias", "v_bias")),
        **_parametrised("mixer.out_proj", "o", "o"),
        "mixer.out_proj.bias": "o_bias",
        **_parametrised("mlp.fc1", "up", "up"),
        "mlp.fc1.bias": "up_bias",
        **_parametrised("mlp.fc2", "down", "down"),
        "mlp.fc2.bias": "down_bias",
        "norm1.weight": "attn_norm",
        "norm1.bias": "attn_norm_bias",
        "norm2.weight": "ffn_norm",
        "norm2.bias": "ffn_norm_bias",
    },
    {**_GLOBAL_NAMES, "emb_ln.weight": "embed_norm", "emb_ln.bias": "embed_norm_bias"},
    positions=False,
    position_kinds=("rotary",),
    activations=("gelu", "gelu_tanh"),
    defaults={"type_vocab_size": 1, "layer_norm_eps": 1e-5},
    hf_must_be_off=("rotary_emb_interleaved", "rotary_emb_scale_base", "last_layer_subset", "truncate_dim"),
    from_hf=_from_hf,
)
