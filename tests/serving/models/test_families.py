"""A tiny model of every family, from a Hugging Face directory and from GGUF, beside what transformers
computes of it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from phasewise.cython_kernels import isa, packing
from phasewise.cython_kernels.kv_formats import KV_FORMATS
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.errors import ModelError, RanksError
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.formats.hf_config import config_of
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.models.parts.attention import LATENT_KV_FORMATS
from phasewise.serving.models.parts.mixture import STACKS
from phasewise.tuner.lookup import ScheduleTable
from phasewise.tuner.plans import PHASES, RankCores, ServicePlan
from tests.support.models import family_cases, family_gguf_files
from tests.support.models import family_models as families
from tests.support.models import reference_models as layout
from tests.support.models.family_cases import CHECKED_STEPS
from tests.support.tiers import isas, n_examples

pytest.importorskip("phasewise.cython_kernels._native", reason="the kernels are not built")
from phasewise.serving.models.forward import kv_bytes_per_slot
from phasewise.serving.ranks.open_ranks import KvSettings, RankOptions, open_ranks
from tests.support.models.greedy import greedy, local_ranks

BOUND = 1e-3
"""Largest difference, as a share of the row's largest logit."""

WRITERS = {"safetensors": families.write_family_hf, "gguf": family_gguf_files.write_family_gguf}


def packed(name: str, kind: str, folder: Path, weight_format: str = "f32") -> PackedModel:
    file = folder / (name if kind == "safetensors" else f"{name}.gguf")
    WRITERS[kind](file, name)
    model = load_model(str(file), weight_format, cache_dir=folder / "cache")
    context_length = family_cases.FAMILY_CASES[name].context_length
    return replace(model, config=replace(model.config, context_length=context_length))


IN_FORMATS = [
    (name, kind)
    for name, case in family_cases.FAMILY_CASES.items()
    for kind in WRITERS
    if case.gguf or kind != "gguf"
]
"""Families by the formats that they are read from."""


GLM_OF_LING = {"model_type": "glm4_moe", "n_routed_experts": 8, "n_shared_experts": 1, "use_qk_norm": True}
GLM_NAMES = {
    "word_embeddings": "embed_tokens", "attention.query_layernorm": "self_attn.q_norm",
    "attention.key_layernorm": "self_attn.k_norm", "attention.dense": "self_attn.o_proj",
    ".attention.": ".self_attn.", "expert_bias": "e_score_correction_bias",
}  # fmt: skip
CHUNK = 64
LEAST_MARGIN = 0.01


@pytest.mark.parametrize("name", family_cases.FAMILY_CASES)
def test_the_best_token_of_every_step_is_best_by_a_margin(name: str) -> None:
    """By transformers' logits: what another order of sums changes cannot change a token. A prompt is longer
    than windows and chunks."""
    expected = np.load(layout.FIXTURES / "families.npz")
    prompts = families.family_prompts(name)

    for index in range(len(prompts)):
        margins = expected[f"{name}/{index}/margins"]
        assert margins.shape == (family_cases.N_GREEDY,)
        assert margins.min() >= LEAST_MARGIN, index
    window = family_cases.FAMILY_CASES[name].fields.get("sliding_window") or 0
    assert max(map(len, prompts)) > max(window, CHUNK)


@pytest.mark.parametrize(("name", "kind"), IN_FORMATS)
def test_every_family_computes_what_transformers_does(name: str, kind: str, tmp_path: Path) -> None:
    expected = np.load(layout.FIXTURES / "families.npz")

    with closing(local_ranks(packed(name, kind, tmp_path))) as ranks:
        for index, prompt in enumerate(families.family_prompts(name)):
            logits = greedy(ranks, prompt, family_cases.N_GREEDY, chunk=CHUNK if index else 4)

            kept = expected[f"{name}/{index}/logits"]
            error = np.abs(logits[list(CHECKED_STEPS)] - kept).max(axis=1) / np.abs(kept).max(axis=1)
            assert error.max() <= BOUND, error
            assert logits.argmax(axis=1).tolist() == expected[f"{name}/{index}/tokens"].tolist()


@pytest.mark.many
@pytest.mark.parametrize("name", family_cases.FAMILY_CASES)
def test_every_family_has_the_same_bits_on_all_instruction_sets(name: str, tmp_path: Path) -> None:
    """In float32 what transformers computes; in every bit what the lowest instruction set gives."""
    expected = np.load(layout.FIXTURES / "families.npz")[f"{name}/1/logits"][:1]
    prompt = families.family_prompts(name)[1]
    for kind, kv_formats in (("f32", ["auto"]), ("int8", KV_FORMATS), ("int4", ["auto"])):
        model = packed(name, "safetensors", tmp_path, kind)
        latent = model.config.latent is not None
        for kv_format in LATENT_KV_FORMATS if latent and kind == "int8" else kv_formats:
            by_isa = {}
            for isa_name in isas():
                with isa.using(isa_name), closing(local_ranks(model, kv_format=kv_format)) as ranks:
                    by_isa[isa_name] = greedy(ranks, prompt, 3)
            lowest, *others = by_isa
            assert [other for other in others if by_isa[other].tobytes() != by_isa[lowest].tobytes()] == [], (
                kind,
                kv_format,
            )
            if kind == "f32":
                assert np.abs(by_isa[lowest][:1] - expected).max() <= BOUND * np.abs(expected).max()


def drawn_prompts(n: int, vocab_size: int) -> Iterator[list[SequenceSlice]]:
    """In steps of several, of 1 to 48 tokens each; every row of a step is looked at."""
    rng = random.Random(41)
    prompts = [[rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 48))] for _ in range(n)]
    for start in range(0, n, 4):
        yield [
            SequenceSlice(prompt, 0, 64 * i, True, state=i)
            for i, prompt in enumerate(prompts[start : start + 4])
        ]


@pytest.mark.many
@pytest.mark.parametrize("name", family_cases.FAMILY_CASES)
def test_drawn_prompts_have_the_same_bits_on_all_instruction_sets(name: str, tmp_path: Path) -> None:
    """In every format, by --arithmetic canonical: the logits after every token."""
    lookups = dict.fromkeys(PHASES, ScheduleTable().asked("canonical", None))
    for weight_format in ("f32", "bf16", "int8", "int4"):
        model = packed(name, "safetensors", tmp_path, weight_format)
        by_isa: dict[str, list[bytes]] = {}
        for isa_name in isas():
            with isa.using(isa_name), closing(local_ranks(model, schedules=lookups)) as ranks:
                by_isa[isa_name] = [
                    ranks.all_logits(Batch("prefill", tuple(step))).tobytes()
                    for step in drawn_prompts(n_examples(12, soak=100), model.config.vocab_size)
                ]
        lowest, *others = by_isa
        assert [other for other in others if by_isa[other] != by_isa[lowest]] == [], weight_format


@pytest.mark.many
@pytest.mark.parametrize("name", family_cases.FAMILY_CASES)
def test_no_row_depends_on_the_others_of_its_step(name: str, tmp_path: Path) -> None:
    """Whole prompts, chunks and single tokens, alone and in company: the same bits."""
    model = packed(name, "safetensors", tmp_path, "int8")
    prompts = [families.family_prompts(name)[1][:n] for n in (80, 41, 7)]
    with closing(local_ranks(model)) as ranks:
        alone = [greedy(ranks, prompt, 1)[0] for prompt in prompts]
        by_token = greedy(ranks, prompts[1], 1, chunk=1)[0]
        bases = [0, 96, 160]
        slices = tuple(
            SequenceSlice(p, 0, base, True, state=i)
            for i, (p, base) in enumerate(zip(prompts, bases, strict=True))
        )
        together = ranks.forward(Batch("prefill", slices)).copy()
        steps = tuple(
            SequenceSlice([5], len(p), base, True, state=i)
            for i, (p, base) in enumerate(zip(prompts, bases, strict=True))
        )
        decoded = ranks.forward(Batch("decode", steps)).copy()
        ranks.forward(Batch("prefill", slices))  # states have gone on
        singly = [ranks.forward(Batch("decode", (step,)))[0].copy() for step in steps]

    assert (together == np.stack(alone)).all()
    assert (by_token == alone[1]).all()
    assert (decoded == np.stack(singly)).all()


@pytest.mark.many
@pytest.mark.parametrize(
    "name",
    [
        "gemma2",
        "gemma3n",
        "gemma4",
        "gemma4-dense",
        "gemma4-moe",
        "olmo2",
        "granitemoe-shared",
        "gpt-oss",
        "arcee",
        "glm4",
        "cohere2-biases",
        "starcoder2",
        "ministral3",
        "minimax-m2",
        "falcon-h1",
        "nemotron-h-moe",
        "nemotron-super",
        "apertus",
        "phimoe",
        "deepseek2",
        "deepseek2-groups",
        "deepseek3",
        "deepseek32",
        "glm-dsa",
        "glm4moelite",
        "hunyuan",
        "lfm2moe",
        "ernie4.5-moe",
        "kimi-linear",
        "llama4",
    ],
)
def test_several_ranks_compute_the_same_bits_as_one(name: str, tmp_path: Path) -> None:
    """Two compute prompts; answers one more than there are KV heads, which they share."""
    model = packed(name, "safetensors", tmp_path, "int8")
    prompt = families.family_prompts(name)[1]
    n_sharing = min(model.config.n_heads, model.config.n_kv_heads + 1)
    ranks_of = tuple(RankCores((core,)) for core in range(n_sharing))  # unpinned: any cores
    plans: dict[Any, Any] = {
        "prefill": ServicePlan("prefill", ranks_of[:2]),
        "decode": ServicePlan("decode", ranks_of),
    }
    with (
        closing(local_ranks(model)) as single,
        closing(open_ranks(model, plans, RankOptions(KvSettings(256), 512, 8, pinned=False))) as ranks,
    ):
        expected, divided = greedy(single, prompt, 4), greedy(ranks, prompt, 4)

    assert (divided == expected).all()


@pytest.mark.parametrize("kv_format", ["int16", "int8", "int4"])
def test_latent_vectors_take_no_format_with_scales(kv_format: str, tmp_path: Path) -> None:
    model = packed("deepseek3", "safetensors", tmp_path)

    with pytest.raises(ModelError, match=f"cannot be {kv_format}: --kv-format f32, f16 or bf16 can"):
        local_ranks(model, kv_format=kv_format)


@pytest.mark.parametrize("name", ["deepseek3", "glm-dsa", "kimi-linear"])
def test_ranks_share_out_the_heads_over_latent_vectors(name: str, tmp_path: Path) -> None:
    """Three ranks of one and two threads for two to four heads; prompts in chunks, and several at once."""
    model = packed(name, "safetensors", tmp_path)
    prompts = [families.family_prompts(name)[1][:n] for n in (80, 41, 7)]
    several = tuple(
        RankCores((i, i + 1) if i == 0 else (i + 1,)) for i in range(min(3, model.config.n_heads))
    )
    plans: dict[Any, Any] = {phase: ServicePlan(phase, several) for phase in PHASES}
    slices = tuple(
        SequenceSlice(prompt, 0, base, True, state=i)
        for i, (prompt, base) in enumerate(zip(prompts, [0, 96, 160], strict=True))
    )
    options = RankOptions(KvSettings(256, states=3), 512, 8, pinned=False)
    with closing(local_ranks(model)) as single, closing(open_ranks(model, plans, options)) as ranks:
        together = [some.forward(Batch("prefill", slices)).copy() for some in (single, ranks)]
        cut = [greedy(some, prompts[0], 6, chunk=chunk) for some, chunk in ((single, 1 << 30), (ranks, 9))]

    assert (together[0] == together[1]).all()
    assert (cut[0] == cut[1]).all()


def test_more_ranks_than_heads_over_latent_vectors_are_refused_by_name(tmp_path: Path) -> None:
    model = packed("deepseek3", "safetensors", tmp_path)
    heads = model.config.n_heads
    too_many = tuple(RankCores((core,)) for core in range(heads + 1))
    plans: dict[Any, Any] = {phase: ServicePlan(phase, too_many) for phase in PHASES}

    with pytest.raises(RanksError, match=f"{heads} query heads to share: use a plan of at most {heads}"):
        open_ranks(model, plans, RankOptions(KvSettings(256), 512, 8, pinned=False))


def test_a_token_of_latent_attention_takes_its_formula_of_bytes(tmp_path: Path) -> None:
    """Layers times kv_lora_rank and qk_rope_head_dim numbers, once."""
    model = packed("deepseek3", "safetensors", tmp_path, "int8")

    assert kv_bytes_per_slot(model) == 3 * (32 + 8) * 2
    assert kv_bytes_per_slot(model, "f32") == 3 * (32 + 8) * 4


def test_layers_that_predict_more_tokens_are_left_out(tmp_path: Path) -> None:
    """They are layers behind the last one."""
    alone = packed("deepseek3", "safetensors", tmp_path)
    weights = families.family_weights("deepseek3")
    folder = families.write_family_hf(tmp_path / "more", "deepseek3", {"num_nextn_predict_layers": 1})
    weights["model.layers.3.eh_proj.weight"] = np.ones((64, 128), np.float32)
    save_file(weights, folder / "model.safetensors")

    loaded = load_model(str(folder), "f32", cache_dir=tmp_path / "cache")

    assert loaded.weights.keys() == alone.weights.keys()


@pytest.mark.parametrize("name", ["deepseek32", "glm-dsa"])
def test_a_token_of_an_indexed_model_keeps_a_key_of_the_indexer(name: str, tmp_path: Path) -> None:
    model = packed(name, "safetensors", tmp_path, "int8")

    assert kv_bytes_per_slot(model) == 3 * (32 + 8 + 16) * 2
    assert [form.reuses_choice for form in model.config.forms] == [False, name == "glm-dsa", False]


def test_a_first_layer_without_an_indexer_is_refused(tmp_path: Path) -> None:
    folder = families.write_family_hf(
        tmp_path / "glm", "glm-dsa", {"indexer_types": ["shared", "full", "full"]}
    )

    with pytest.raises(ModelError, match="positions that no layer before it chose"):
        load_model(str(folder), "f32", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({}, "FFFFFFFF"),
        ({"index_topk_freq": 4}, "FFSSSFSS"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFSSSFS"),
        ({"index_topk_pattern": "FSFSFSSS"}, "FSFSFSSS"),
    ],
)
def test_layers_share_a_choice_as_the_config_says(changes: dict[str, Any], shared: str) -> None:
    """As transformers derives it."""
    fields = {**family_cases.FAMILY_CASES["glm-dsa"].fields, "num_hidden_layers": 8, **changes}
    del fields["indexer_types"]

    forms = config_of(fields, {}, False).forms

    assert "".join("FS"[form.reuses_choice] for form in forms) == shared


def test_weights_of_experts_that_no_row_chooses_are_not_read(tmp_path: Path) -> None:
    """With a router of zeros the first experts are chosen; the others' weights are then made NaN."""
    model = packed("olmoe", "safetensors", tmp_path)
    experts = model.config.experts
    assert experts is not None
    weights = {name: replace(weight, values=weight.values.copy()) for name, weight in model.weights.items()}
    for name, weight in weights.items():
        weight.values[...] *= 0 if name.endswith("router") else 1
    prompt = families.family_prompts("olmoe")[1]
    with closing(local_ranks(replace(model, weights=weights, file=None))) as ranks:
        expected = greedy(ranks, prompt, 3)
    for name, weight in weights.items():
        if name.endswith(STACKS):
            weight.values[len(weight.values) * experts.chosen // experts.count :] = np.nan

    with closing(local_ranks(replace(model, weights=weights, file=None))) as ranks:
        computed = greedy(ranks, prompt, 3)

    assert np.isfinite(expected).all()
    assert (computed == expected).all()


def test_mxfp4_experts_of_safetensors_are_the_numbers_of_the_format(tmp_path: Path) -> None:
    """Codes and exponents drawn at random, in the layout of published gpt-oss checkpoints."""
    folder = tmp_path / "gpt-oss"
    drawn = families.write_mxfp4_hf(folder)

    model = load_model(str(folder), "native", cache_dir=tmp_path / "cache")

    for layer in range(4):
        up, down = (model.weights[f"layers.{layer}{name}"] for name in STACKS)
        assert (up.kind, down.kind) == ("mxfp4", "mxfp4")
        interleaved = drawn[f"{layer}.gate_up_proj"]
        expected = np.concatenate([interleaved[:, ::2], interleaved[:, 1::2]], axis=1).reshape(-1, 64)
        assert (packing.unpack(up) == expected).all()
        assert (packing.unpack(down) == drawn[f"{layer}.down_proj"].reshape(-1, 64)).all()


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize(
    ("name", "larger"),
    [
        ("gemma3", "gemma3"),
        ("gemma3n", "gemma3n"),
        ("gemma4", "gemma4"),
        ("gemma4-moe", "gemma4"),
        ("ministral3", "mistral3"),
        ("llama4", "llama4"),
    ],
)
def test_the_language_model_of_a_larger_one_is_read(
    name: str, larger: str, prefix: str, tmp_path: Path
) -> None:
    alone = packed(name, "safetensors", tmp_path)
    folder = families.write_family_hf(tmp_path / "larger", name)
    config = {"model_type": larger, "text_config": family_cases.FAMILY_CASES[name].fields}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {
        theirs.replace("model.", prefix, 1): weight
        for theirs, weight in families.family_weights(name).items()
    }
    tower = "vision_model" if larger == "llama4" else "vision_tower"
    weights[f"{tower}.patches.weight"] = np.ones((4, 4, 3, 3), np.float32)
    save_file(weights, folder / "model.safetensors")

    loaded = load_model(str(folder), "f32", cache_dir=tmp_path / "cache")

    assert replace(loaded.config, context_length=256) == alone.config
    assert all((loaded.vectors[name] == vector).all() for name, vector in alone.vectors.items())
    assert all((loaded.weights[name].values == weight.values).all() for name, weight in alone.weights.items())


def test_layers_beyond_the_model_are_not_read(tmp_path: Path) -> None:
    """Those that predict more tokens come after the model's own, under numbers that go on."""
    alone = packed("glm4moe-plain", "safetensors", tmp_path)
    folder = families.write_family_hf(tmp_path / "more", "glm4moe-plain")
    weights = families.family_weights("glm4moe-plain")
    weights["model.layers.3.eh_proj.weight"] = np.ones((64, 128), np.float32)
    save_file(weights, folder / "model.safetensors")

    loaded = load_model(str(folder), "f32", cache_dir=tmp_path / "cache")

    assert loaded.config == replace(alone.config, context_length=loaded.config.context_length)
    assert set(loaded.weights) == set(alone.weights)
    weights["model.layers.4.mlp.up_proj.weight"] = np.ones((64, 64), np.float32)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.4\.up, for which its config has no use"):
        load_model(str(folder), "f32", cache_dir=tmp_path / "more-cache")


def test_a_mixture_of_ling_computes_what_one_of_glm_does(tmp_path: Path) -> None:
    """Nothing but the names of its tensors and settings is its own."""
    case, weights = family_cases.ALL_CASES["bailingmoe2"], families.family_weights("bailingmoe2")
    ours = families.write_family_hf(tmp_path / "ling", "bailingmoe2")
    theirs = families.write_family_hf(tmp_path / "glm", "glm4moe", {**case.fields, **GLM_OF_LING})
    for old, new in GLM_NAMES.items():
        weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
    for name in [name for name in weights if "query_key_value" in name]:
        parts = np.split(weights.pop(name), [128, 192])
        weights |= {
            name.replace("query_key_value", f"{part}_proj"): t for part, t in zip("qkv", parts, strict=True)
        }
    save_file(weights, theirs / "model.safetensors")
    logits = []
    for folder in (ours, theirs):
        model = load_model(str(folder), "f32", cache_dir=tmp_path / "cache")
        with closing(local_ranks(replace(model, config=replace(model.config, context_length=256)))) as ranks:
            logits.append(greedy(ranks, families.family_prompts("bailingmoe2")[1], 8))

    assert logits[0].tobytes() == logits[1].tobytes()


def test_a_head_of_its_own_is_used_whatever_the_config_says(tmp_path: Path) -> None:
    """As transformers 5 does: a config that calls embeddings tied is wrong where files hold another head."""
    apart = packed("glm4", "safetensors", tmp_path)
    folder = families.write_family_hf(tmp_path / "tied", "glm4", {"tie_word_embeddings": True})

    loaded = load_model(str(folder), "f32", cache_dir=tmp_path / "cache")

    assert (loaded.weights["lm_head"].values == apart.weights["lm_head"].values).all()
    weights = families.family_weights("glm4")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    save_file(weights, folder / "model.safetensors")
    assert "lm_head" not in load_model(str(folder), "f32", cache_dir=tmp_path / "cache").weights


@pytest.mark.parametrize(
    ("name", "key", "absent_is_off"),
    [
        ("glm4", "attention_bias", False),
        ("glm4moe", "attention_bias", True),
        ("cohere2-biases", "attention_bias", True),
        ("gpt-oss", "attention_bias", False),
        ("starcoder2", "use_bias", False),
    ],
)
def test_biases_that_the_config_does_not_give_are_refused(
    name: str, key: str, absent_is_off: bool, tmp_path: Path
) -> None:
    """transformers leaves them out; what a missing key means is the family's."""
    folder = families.write_family_hf(tmp_path / name, name)
    stated = json.loads((folder / "config.json").read_text())
    for value in (False, None):
        fields = {k: v for k, v in {**stated, key: value}.items() if v is not None}
        (folder / "config.json").write_text(json.dumps(fields))
        if value is None and not absent_is_off:
            load_model(str(folder), "f32", cache_dir=tmp_path / "cache")
            continue
        with pytest.raises(ModelError, match=rf"\.[qkv]_proj\.bias' that its config.json.*{key} is not true"):
            load_model(str(folder), "f32", cache_dir=tmp_path / "cache")
