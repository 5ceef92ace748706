"""Configs of encoders: what they ask for is read, and what cannot run is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import ModelConfig
from tests.support.models.encoder_gguf_files import write_encoder_gguf
from tests.support.models.encoder_models import write_encoder
from tests.support.models.tiny_models import safetensors_bytes

INFINITY = float("inf")
NTK = {"type": "ntk", "factor": 8.0}
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "a window of nothing": ("modernbert", {"local_attention": 0}, "sliding window is 0"),
    "a window of text": ("modernbert", {"local_attention": "128"}, "int expected"),
    "no layer that sees all": ("modernbert", {"global_attn_every_n_layers": 0},
     "global_attn_every_n_layers is 0"),
    "few layer types": ("modernbert", {"layer_types": ["full_attention"]}, "for each of 4 layers"),
    "layers of another kind": ("modernbert", {"layer_types": ["chunked"] * 4},
     "sliding_attention or full_attention"),
    "a negative base": ("modernbert", {"global_rope_theta": -1.0}, "RoPE"),
    "an endless base": ("modernbert", {"local_rope_theta": INFINITY}, "RoPE"),
    "scaled layers": ("modernbert", {"rope_parameters": {"full_attention": {"rope_type": "yarn",
     "factor": 2.0}}}, "RoPE scaling 'yarn'"),
    "biases of attention": ("modernbert", {"attention_bias": True},
     "attention_bias = True, which cannot run"),
    "a gate of relu": ("modernbert", {"hidden_activation": "relu"}, "activation 'relu'"),
    "a classifier of the longest": ("cross-modernbert", {"classifier_pooling": "max"}, "'max'; cls, mean"),
    "a classifier of relu": ("cross-modernbert", {"classifier_activation": "relu"}, "'relu'; gelu can run"),
    "a feed-forward layer without a gate": ("jina-bert", {"feed_forward_type": "original"},
     "'original'; geglu"),
    "positions of another kind": ("jina-bert", {"position_embedding_type": "relative_key"},
     "'relative_key' pos"),
    "a million heads": ("jina-bert", {"num_attention_heads": 10**6}, "do not divide"),
    "absolute positions": ("gte-new", {"position_embedding_type": "absolute"}, "'absolute' positions; rope"),
    "root mean squares": ("gte-new", {"layer_norm_type": "rms_norm"}, "cannot run: 'layer_norm' can"),
    "scores by the logarithm of lengths": ("gte-new", {"logn_attention_scale": True}, "logn_attention_scale"),
    "dynamic scaling": ("gte-new", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'; ntk"),
    "a mixed base": ("gte-new", {"rope_scaling": {**NTK, "mixed_b": 0.6}}, "without mixed_b"),
    "scaling by nothing": ("gte-new", {"rope_scaling": {**NTK, "factor": 0}}, "NTK scaling by 0"),
    "scaling by infinity": ("gte-new", {"rope_scaling": {**NTK, "factor": INFINITY}}, "NTK scaling by inf"),
    "a task twice": ("jina-v3", {"lora_adaptations": ["a", "a"]}, "1 to 64 different names"),
    "a task without an instruction": ("jina-v3", {"task_instructions": {"retrieval.query": "x"}},
     "None as the instruction of 'retrieval.passage'"),
    "adapters of no rank": ("jina-v3", {"lora_rank": 0}, "adapters is 0"),
    "adapters of another rank": ("jina-v3", {"lora_rank": 2}, r"plain numbers \(5, .* of its tasks"),
    "adapters without end": ("jina-v3", {"lora_alpha": INFINITY}, "scaled by inf"),
    "adapters that are not trained": ("jina-v3", {"load_trained_adapters": False}, "not trained"),
    "two segments of tasks": ("jina-v3", {"type_vocab_size": 2}, "other segments than one"),
    "a pooler of the first token": ("jina-v3", {"emb_pooler": "cls"}, "emb_pooler = 'cls'"),
    "turns of neighbours": ("jina-v3", {"rotary_emb_interleaved": True}, "rotary_emb_interleaved = True"),
    "many classes": ("gte-new", {"architectures": ["NewForSequenceClassification"], "id2label": {"0": "x",
     "1": "y"}}, "classifier of 2 classes"),
    "a decoder that classifies": ("qwen3", {"architectures": ["Qwen3ForSequenceClassification"],
     "num_labels": 3}, "classifier of 3 classes"),
    "a billion layers": ("modernbert", {"num_hidden_layers": 10**9}, "n_layers"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_an_absurd_config_is_one_clear_error(tmp_path: Path, case: str) -> None:
    name, changes, message = BAD[case]
    directory = write_encoder(tmp_path / "m", name, changes)

    with pytest.raises(ModelError, match=message) as refused:
        load_model(str(directory), "native", tmp_path)
    assert "\n" not in str(refused.value)


def _with_tensors(path: Path, **tensors: tuple[int, ...]) -> None:
    matrices = {name.replace("_", "."): np.ones(shape, np.float32) for name, shape in tensors.items()}
    path.write_bytes(safetensors_bytes(matrices))


def _with_fields(path: Path, **fields: str) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _reverse(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text())[::-1]))


DENSE = {
    "tanh": (lambda of: _with_fields(of / "config.json", activation_function="x.Tanh"), "activation Tanh"),
    "bias": (
        lambda of: _with_tensors(of / "model.safetensors", linear_weight=(96, 48), linear_bias=(96,)),
        "2 tensors",
    ),
    "other inputs": (
        lambda of: _with_tensors(of / "model.safetensors", linear_weight=(96, 47)),
        "dense.1 in",
    ),
    "no file": (lambda of: (of / "model.safetensors").unlink(), "model.safetensors"),
    "no weights": (lambda of: (of / "model.safetensors").write_bytes(b"x" * 9), "2_Dense/model.safetensors"),
    "behind lengths of 1": (lambda of: _reverse(of.parent / "modules.json"), "another order"),
}


@pytest.mark.parametrize("case", DENSE)
def test_a_dense_module_that_cannot_run_is_refused(tmp_path: Path, case: str) -> None:
    directory = write_encoder(tmp_path / "model", "gemma3")
    change, says = DENSE[case]
    change(directory / "2_Dense")

    with pytest.raises(ModelError, match=says):
        load_model(str(directory), "f32", tmp_path / "cache")


def test_a_changed_dense_module_is_packed_anew(tmp_path: Path) -> None:
    directory = write_encoder(tmp_path / "model", "gemma3")
    before = load_model(str(directory), "f32", tmp_path / "cache").content_hash
    _with_tensors(directory / "3_Dense" / "model.safetensors", linear_weight=(40, 96))

    assert load_model(str(directory), "f32", tmp_path / "cache").content_hash != before


@pytest.mark.parametrize("kind", ["WeightedLayerPooling", "Asym"])
def test_modules_that_cannot_run_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    directory = write_encoder(tmp_path / "m", "modernbert")
    modules = json.loads((directory / "modules.json").read_text())
    modules.insert(2, {"path": f"2_{kind}", "type": f"sentence_transformers.models.{kind}"})
    (directory / "modules.json").write_text(json.dumps(modules))

    with pytest.raises(ModelError, match=f"asks for '{kind}'; Transformer, Pooling"):
        load_model(str(directory), "native", tmp_path)


def test_a_score_of_logits_goes_with_a_decoder(tmp_path: Path) -> None:
    directory = write_encoder(tmp_path / "m", "bert")
    modules = [
        {"path": path, "type": f"x.{kind}"} for path, kind in (("", "Transformer"), ("1_L", "LogitScore"))
    ]
    (directory / "modules.json").write_text(json.dumps(modules))

    with pytest.raises(ModelError, match="LogitScore, which goes with a decoder"):
        load_model(str(directory), "native", tmp_path)


def config_of(folder: Path, name: str, **changes: Any) -> ModelConfig:
    return load_model(str(write_encoder(folder / name, name, changes)), "f32", folder / "cache").config


def test_layers_of_modernbert_take_turns(tmp_path: Path) -> None:
    by_rule = config_of(tmp_path, "modernbert")
    types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    bases = {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 7.0}}
    named = config_of(tmp_path / "named", "modernbert", layer_types=types, rope_parameters=bases)

    for config, thetas in ((by_rule, (160000.0, 10000.0)), (named, (5.0, 7.0))):
        kinds = [form.attention for form in config.forms if form.attention]
        assert [kind.window for kind in kinds] == [None, 24, 24, None]
        read_thetas = [kind.rope.theta for kind in kinds if kind.rope is not None]
        assert read_thetas == [thetas[0], thetas[1], thetas[1], thetas[0]]


def test_ntk_scaling_is_a_larger_base_and_slower_turns(tmp_path: Path) -> None:
    rope = config_of(tmp_path, "gte-new").rope

    want = (20000.0 * 8.0) ** -(np.arange(0, 12, 2) / 12) / 8.0 ** (2 / 12)
    assert np.allclose(rope.inv_freq(352), want, rtol=1e-14)


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("modernbert", "modern-bert.attention.sliding_window_pattern", 0, "pattern is 0"),
        ("modernbert", "modern-bert.hidden_activation", "relu2", "activation 'relu2'"),
        ("modernbert", "modern-bert.pooling_type", 4, "classifier, whose head cannot run"),
        ("jina-bert", "jina-bert-v2.attention.causal", True, "holds a decoder"),
        ("qwen3", "qwen3.pooling_type", 4, "lacks the tensor cls.output.weight"),
        ("qwen3-reranker", "qwen3.pooling_type", 3, "its pooling type is not that of scores"),
        ("qwen3-reranker", "tokenizer.chat_template.rerank", "{query}", "without {query} or {document}"),
    ],
)
def test_gguf_metadata_that_cannot_run_are_one_line(
    tmp_path: Path, name: str, key: str, value: Any, message: str
) -> None:
    path = write_encoder_gguf(tmp_path / "m.gguf", name, {key: value})

    with pytest.raises(ModelError, match=message):
        load_model(str(path), "f32", tmp_path / "cache")
