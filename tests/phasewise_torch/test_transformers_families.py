"""Tiny random models of every family that transformers generates text with: right, or refused in one line.

A family that no reader knows must be refused by its name; one that is read must give transformers' logits,
also when its config.json is changed: keys left out, other names of them, other values.
"""

from __future__ import annotations

import json
import os
import random
import warnings
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.families import BY_HF
from phasewise.serving.loaders.families.encoders import ENCODERS_BY_HF
from phasewise.serving.loaders.formats.hf_config import config_of
from tests.support.models import family_cases, tiny_models
from tests.support.models import family_models as families
from tests.support.tiers import n_examples

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("phasewise.cython_kernels._native", reason="the kernels are not built")
from tests.support.models.greedy import greedy, local_ranks  # noqa: E402

KINDS = transformers.models.auto.configuration_auto.CONFIG_MAPPING
BOUND = 2e-3
"""Largest difference, as a share of the row's largest logit."""
N_PROMPT, N_TOKENS = 70, 6
MOST_NUMBERS = 5e6
READ = set(BY_HF)
SIZES: dict[str, Any] = {
    "vocab_size": tiny_models.TinyShape().vocab_size, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "sliding_window": 24, "moe_intermediate_size": 32, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "shared_expert_intermediate_size": 48, "shared_intermediate_size": 48, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "mamba_n_heads": 8,
    "mamba_d_head": 16, "mamba_d_state": 16, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_layer": 4, "n_embd": 64, "n_head": 4, "num_layers": 4,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 300, "ffn_dim": 96, "d_model": 64,
    "first_k_dense_replace": 1, "full_attn_idxs": [1], "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "mlp_only_layers": [], "layer_types": None, "query_pre_attn_scalar": 16,
}  # fmt: skip

LINEAR = {"num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "gemma3n_text": {
        "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0], "laurel_rank": 8,
        "vocab_size_per_layer_input": 272,
    },
    "gemma4_text": {"vocab_size_per_layer_input": 272, "enable_moe_block": True, "top_k_experts": 2},
    "kimi_linear": {"linear_attn_config": {**LINEAR, "kda_layers": [1, 2, 3], "full_attn_layers": [4]}},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"], "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16,
    },
    "dots1": {"n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_groups": 2, "mamba_chunk_size": 16},
}  # fmt: skip
"""Sizes of families that have names of their own for them, or whose defaults are large."""
UNSET = {"falcon_h1": ["layer_types"], "nemotron_h": ["layer_types", "num_hidden_layers", "sliding_window"]}
"""Fields that a family derives from others."""


def tiny_config(model_type: str) -> Any:
    """A config of a family with small sizes, where it has such fields; layers are as its defaults say."""
    kind = KINDS[model_type]
    fields = set(kind().to_dict()) | set(getattr(kind, "attribute_map", {}))
    parts = {part: tiny_part(kind, part) for part in ("text_config", "vision_config") if part in fields}
    sizes = {key: value for key, value in SIZES.items() if key in fields}
    if "kv_lora_rank" in fields:  # every head of latent attention has keys of its own
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    sizes = {key: value for key, value in sizes.items() if key not in UNSET.get(model_type, ())}
    sizes.update(OWN_SIZES.get(model_type, {}))
    return kind(**sizes, **parts)


def tiny_part(kind: Any, part: str) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(kind(), part).to_dict()
    own = {key: value for key, value in SIZES.items() if key in fields}
    return {"model_type": fields["model_type"], **own}


def write_model(model_type: str, folder: Path, seed: int) -> Path:
    """A directory that transformers has saved; of a family that is not read its config alone."""
    kind = KINDS[model_type]
    try:
        config = tiny_config(model_type) if model_type in READ else kind()
        config.save_pretrained(folder)
    except Exception as error:
        pytest.skip(f"transformers refuses its own config of {model_type}: {error!r:.200}")
    (folder / "tokenizer.json").write_text(tiny_models.tokenizer_json(tiny_models.TinyShape()))
    (folder / "tokenizer_config.json").write_text("{}")
    if model_type not in READ:
        return folder
    torch.manual_seed(seed)
    try:
        refuse_large(config)
    except ImportError as error:
        pytest.skip(f"transformers needs more for {model_type}: {' '.join(str(error).split()):.200}")
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    tied = bool(getattr(config, "tie_word_embeddings", False))
    with torch.no_grad():
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            if values.is_floating_point() and values.dim() > 0 and "inv_freq" not in name:
                draw(name, values, tied)
    model.save_pretrained(folder)
    return folder


def refuse_large(config: Any) -> None:
    """AssertionError before numbers are drawn for a model much larger than any written here."""
    with torch.device("meta"):
        n_numbers = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
    assert n_numbers < MOST_NUMBERS, f"{config.model_type} is not small: {n_numbers}"


def draw(name: str, values: Any, tied: bool) -> None:
    """Numbers of a size for their place: matrices that keep lengths, norms near what they begin with."""
    if values.dim() == 1:
        around = float(values.mean()) if "norm" in name and not name.endswith("bias") else 0.0
        values.copy_(torch.empty_like(values).uniform_(-0.25, 0.25) + around)
        return
    reach = 1.0 if "embed" in name else (3.0 / values.shape[-1]) ** 0.5 * 1.5
    values.uniform_(-reach, reach).mul_(0.05 if tied and "embed" in name else 1.0)


def prompt_of(seed: int, vocab_size: int) -> list[int]:
    drawn = np.random.PCG64(seed).random_raw(N_PROMPT)
    return (drawn % np.uint64(vocab_size)).astype(int).tolist()


def expected_logits(folder: Path, prompt: list[int]) -> np.ndarray:
    """transformers' logits after the prompt and some tokens of its own choice. Any error is the caller's."""
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        refuse_large(transformers.AutoConfig.from_pretrained(folder))
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert not loading["missing_keys"], loading
        ids, rows = list(prompt), []
        for _ in range(N_TOKENS):
            rows.append(model.eval()(torch.tensor([ids]), use_cache=False).logits[0, -1].numpy().copy())
            ids.append(int(rows[-1].argmax()))
    return np.stack(rows)


def check(folder: Path, prompt: list[int], expected: np.ndarray | None = None) -> str:
    """The refusal, or "right". AssertionError for other numbers than transformers'."""
    try:
        opened = local_ranks(load_model(str(folder), "f32", cache_dir=folder / "cache"))
    except ModelError as error:
        return str(error)
    with closing(opened) as ranks:
        expected = expected_logits(folder, prompt) if expected is None else expected
        logits = greedy(ranks, prompt, N_TOKENS, chunk=32)
    same = np.cumprod([True, *(logits.argmax(axis=1) == expected.argmax(axis=1))[:-1]]).astype(bool)
    error = np.abs(logits - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert error[same].max() <= BOUND, (error, json.loads((folder / "config.json").read_text()))
    return "right"


def every_family() -> list[str]:
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return [name for name in names if os.environ.get("FAMILY", "") in name]


@pytest.mark.many
@pytest.mark.parametrize("model_type", every_family())
def test_every_family_of_transformers_is_right_or_refused_by_name(model_type: str, tmp_path: Path) -> None:
    folder = write_model(model_type, tmp_path / "model", seed=1)
    stated = json.loads((folder / "config.json").read_text())["model_type"]

    said = check(folder, prompt_of(3, SIZES["vocab_size"]))

    assert "\n" not in said
    if stated in ENCODERS_BY_HF:
        assert said != "right"
    elif stated not in READ:
        assert repr(stated) in said


DEFAULTS_OF_NUMBERS: dict[str, Any] = {"vocab_size": 300000, "head_dim": 64}
WRITERS_OWN = ("bos_token_id", "eos_token_id", "model_type", "vocab_size", "head_dim")
"""Keys that change no number, or that are given so that each family's defaults can be."""


@pytest.mark.parametrize("model_type", sorted(READ & set(KINDS)))
def test_a_key_that_is_left_out_means_what_transformers_takes_for_it(model_type: str) -> None:
    """Or is refused, now or once the tensors are seen: heads and widths show in their shapes."""
    kind = KINDS[model_type]
    fields: dict[str, Any] = kind().to_dict()
    if "text_config" in fields:
        pytest.skip("its language model is a family of its own")
    fields |= {**DEFAULTS_OF_NUMBERS, "model_type": model_type, "dtype": None}
    if model_type == "granitemoehybrid":
        fields["layer_types"] = ["mamba", *["attention"] * (fields["num_hidden_layers"] - 1)]
    if model_type == "deepseek_v2":
        fields["num_experts_per_tok"] = 6  # no default: a file without it is refused
    if model_type == "dots1":
        fields |= {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 0}
    expected = config_of(fields, {}, add_bos=False)

    different = []
    for key in set(fields) - set(WRITERS_OWN):
        try:
            config = config_of({name: value for name, value in fields.items() if name != key}, {}, False)
        except ModelError:
            continue
        if replace(config, n_kv_heads=expected.n_kv_heads) != expected:
            different.append(key)
    assert not different, different


CHANGES: dict[str, list[Any]] = {
    "tie_word_embeddings": [True, False],
    "attention_bias": [True, False],
    "mlp_bias": [True],
    "partial_rotary_factor": [0.5],
    "sliding_window": [None, 8, 24, 200],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 2],
    "rms_norm_eps": [1e-5, 1e-2],
    "layer_norm_eps": [1e-2],
    "norm_epsilon": [1e-2],
    "hidden_act": ["gelu", "silu", "gelu_pytorch_tanh", "relu"],
    "hidden_activation": ["gelu", "silu"],
    "num_experts_per_tok": [1, 3],
    "top_k_experts": [1, 2],
    "enable_moe_block": [True, False],
    "use_double_wide_mlp": [True, False],
    "norm_topk_prob": [True, False],
    "routed_scaling_factor": [2.0],
    "rope_theta": [1e4, 5e5],
    "rope_scaling": [
        {"rope_type": "linear", "factor": 4.0},
        {"type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        None,
    ],
    "original_max_position_embeddings": [32, 128],
    "query_pre_attn_scalar": [8, 64],
    "attn_logit_softcapping": [None, 5.0],
    "final_logit_softcapping": [None, 5.0],
    "logit_scale": [2.0],
    "no_rope_layer_interval": [2],
    "sliding_window_pattern": [2],
    "first_k_dense_replace": [0, 2],
    "use_qk_norm": [True, False],
    "attention_chunk_size": [None, 24],
    "attn_temperature_tuning": [True, False, 4],
    "moe_layers": [[0], [0, 1, 2, 3], []],
    "interleave_moe_layer_step": [1, 3],
    "clip_qkv": [0.1],
    "residual_multiplier": [0.5],
    "embedding_multiplier": [2.0],
    "logits_scaling": [2.0],
    "attention_multiplier": [0.1],
    "full_attention_interval": [2],
    "decoder_sparse_step": [2],
    "mlp_only_layers": [[1]],
    "mamba_rms_norm": [True, False],
    "mamba_norm_before_gate": [True, False],
    "mamba_conv_bias": [True, False],
    "use_conv_bias": [True, False],
    "ssm_multipliers": [None, [1.0, 0.5, 2.0, 0.25, 1.5], [1.0]],
    "mlp_multipliers": [None, [0.5, 2.0]],
    "key_multiplier": [0.5],
    "time_step_limit": [[0.0, 1.0]],
    "mlp_hidden_act": ["relu2", "silu"],
    "layer_norm_epsilon": [1e-2],
    "layers_block_type": [None, ["mamba", "mlp", "attention", "mamba", "mamba", "mlp"]],
    "moe_shared_expert_intermediate_size": [48],
    "moe_latent_size": [None, 16],
    "moe_renormalize": [True, False],
    "linear_attn_config": [
        {"full_attn_layers": [1, 5], "kda_layers": [2, 3, 4], "head_dim": 20, "num_heads": 4},
    ],
}  # fmt: skip
CHOOSES_BY_PROMPT = ("phi3-longrope", "phi3-shortrope", "phimoe")
"""transformers chooses LongRoPE's factors by the length of a prompt: docs/models.md."""
LAYERS = ("full_attention", "sliding_attention", "linear_attention", "chunked_attention")


def changed(fields: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Some keys left out, some with other values, all layers of one kind, or names of transformers 4."""
    out = dict(fields)
    rope = out.get("rope_parameters")
    if rng.random() < 0.5 and isinstance(rope, dict) and "rope_theta" in rope:
        del out["rope_parameters"]
        out |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        if rope.get("rope_type", "default") != "default":
            out["rope_scaling"] = rope
    if "layer_types" in out and rng.random() < 0.5:
        drawn = [rng.choice(LAYERS[:2]) for _ in range(out["num_hidden_layers"])]
        out["layer_types"] = rng.choice([None, drawn, [rng.choice(LAYERS)] * out["num_hidden_layers"]])
    for key in rng.sample(sorted(set(CHANGES) & {*out, "partial_rotary_factor", "rope_scaling"}), k=2):
        out[key] = rng.choice(CHANGES[key])
    for key in rng.sample(sorted(set(out) - {"model_type", "architectures"}), k=rng.randrange(3)):
        del out[key]
    return out


@pytest.mark.many
@pytest.mark.parametrize(
    "name", [name for name in family_cases.FAMILY_CASES if name not in CHOOSES_BY_PROMPT]
)
def test_drawn_configs_are_right_or_refused(name: str, tmp_path: Path) -> None:
    """A config that transformers refuses, or fills with numbers of its own, is not judged."""
    rng = random.Random(f"{name}/configs")
    folder = families.write_family_hf(tmp_path / name, name)
    plain = transformers.AutoConfig.from_pretrained(folder).to_dict()
    stated = json.loads((folder / "config.json").read_text())
    prompt = prompt_of(3, stated["vocab_size"])
    for _ in range(n_examples(12)):
        fields = changed(rng.choice([plain, stated]), rng)
        fields |= {"model_type": stated["model_type"], "vocab_size": stated["vocab_size"]}
        (folder / "config.json").write_text(json.dumps(fields))
        try:
            expected = expected_logits(folder, prompt)
        except Exception:  # whatever its own checks find
            continue
        assert "\n" not in check(folder, prompt, expected)
