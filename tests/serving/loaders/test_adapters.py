"""Adapters' files: PEFT's and llama.cpp's say the same, and what cannot run is refused in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.adapter_files import (
    load_adapter,
    load_parts,
    named_path,
    named_paths,
    with_adapters,
)
from phasewise.serving.models.packed_model import ModelConfig
from tests.support.models.adapters import ALL_TARGETS, Pairs, drawn_pairs, write_gguf_adapter, write_peft
from tests.support.models.reference_forward import tiny_config, tiny_model
from tests.support.models.tiny_models import TinyShape, safetensors_bytes, tiny_weights

SHAPE = TinyShape()
WEIGHTS = tiny_weights("llama", SHAPE)
HEADS = {"q_proj": SHAPE.n_heads, "k_proj": SHAPE.n_kv_heads}


def config() -> ModelConfig:
    return tiny_config(
        n_layers=SHAPE.n_layers,
        hidden=SHAPE.hidden,
        ffn=SHAPE.ffn,
        n_heads=SHAPE.n_heads,
        n_kv_heads=SHAPE.n_kv_heads,
        head_dim=SHAPE.head_dim,
        vocab_size=SHAPE.vocab_size,
    )


def pairs(**more: Any) -> Pairs:
    return drawn_pairs(WEIGHTS, "adapter", **more)


def test_both_formats_give_the_same_adapter(tmp_path: Path) -> None:
    """llama.cpp's file, with its order of query and key rows, holds what PEFT's directory holds."""
    drawn = pairs(rank=4)
    peft = load_adapter("a", write_peft(tmp_path / "peft", drawn), config())
    gguf = load_adapter("b", write_gguf_adapter(tmp_path / "a.gguf", drawn, 8.0, HEADS), config())

    assert peft.content_hash == gguf.content_hash
    assert set(peft.updates) == {
        f"layers.{layer}.{reader}"
        for layer in range(SHAPE.n_layers)
        for reader in ("qkv", "o", "gate_up", "down")
    }


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 2.0),
        ({"lora_alpha": 3}, 0.75),
        ({"use_rslora": True, "lora_alpha": 3}, 1.5),
        ({"alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"_proj": 2}}, 2.0),
        ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 2}}, 0.5),
    ],
)
def test_scales_are_those_that_peft_would_use(tmp_path: Path, changes: dict[str, Any], scale: float) -> None:
    drawn = pairs(rank=4, targets=("q_proj",))
    parts = load_parts(write_peft(tmp_path / "a", drawn, **changes), config())

    assert parts["layers.0.q"].scale == pytest.approx(scale)


def test_numbers_are_kept_as_they_are(tmp_path: Path) -> None:
    """bf16 numbers take two bytes each, others four; none is rounded."""
    wide = load_adapter("a", write_peft(tmp_path / "a", pairs()), config())
    narrow = load_adapter("b", write_peft(tmp_path / "b", pairs(), "bfloat16"), config())

    assert {update.down.kind for update in wide.updates.values()} == {"f32"}
    assert {update.down.kind for update in narrow.updates.values()} == {"bf16"}
    assert 2 * narrow.n_bytes == wide.n_bytes


def _with_tensor(name: str, values: np.ndarray) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        drawn = pairs(rank=4, targets=("q_proj",))
        tensors = {}
        for weight, (a, b) in drawn.items():
            stem = f"base_model.model.{weight.removesuffix('.weight')}"
            tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
        tensors[name] = values
        (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))

    return spoil


def _with_config(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return spoil


def _cut_short(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def _led_out(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    outside = folder.parent / "elsewhere.safetensors"
    outside.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(outside)


_Q = "base_model.model.model.layers.0.self_attn.q_proj"
_EMBED = "base_model.model.model.embed_tokens"
SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    "dora": (_with_config(use_dora=True), "DoRA"),
    "modules": (_with_config(modules_to_save=["lm_head"]), "modules_to_save"),
    "bias": (_with_config(bias="all"), "biases"),
    "tokens": (_with_config(trainable_token_indices=[1]), "trainable_token_indices"),
    "another kind": (_with_config(peft_type="IA3"), "'IA3'"),
    "pissa": (_with_config(init_lora_weights="pissa_niter_4"), "pissa"),
    "pattern": (_with_config(alpha_pattern={"(a+)+$": 1}), "expressions"),
    "alpha": (_with_config(lora_alpha="many"), "lora_alpha"),
    "scale": (_with_config(lora_alpha=1e12), "scaled by"),
    "rank said": (_with_config(r=5), "rank 4"),
    "no file": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "save the adapter"),
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json"),
    "no object": (lambda folder: (folder / "adapter_config.json").write_text("[]"), "object"),  # type: ignore[dict-item, return-value]
    "cut short": (_cut_short, "adapter_model.safetensors"),
    "led out": (_led_out, "leads out"),
    "shape": (_with_tensor(f"{_Q}.lora_B.weight", np.zeros((4, 4), np.float32)), "another model's"),
    "rank of B": (_with_tensor(f"{_Q}.lora_B.weight", np.zeros((64, 5), np.float32)), "another model's"),
    "huge rank": (_with_tensor(f"{_Q}.lora_A.weight", np.zeros((513, SHAPE.hidden), np.float32)), "rank 513"),
    "nan": (_with_tensor(f"{_Q}.lora_A.weight", np.full((4, SHAPE.hidden), np.nan, np.float32)), "finite"),
    "embedding": (_with_tensor(f"{_EMBED}.lora_embedding_A", np.zeros((4, 9), np.float32)), "embeddings"),
    "head": (_with_tensor("base_model.model.lm_head.lora_A.weight", np.zeros((4, 64), np.float32)), "lora_A"),
    "stranger": (_with_tensor(f"{_Q}.lora_C.weight", np.zeros((4, 64), np.float32)), "lora_C"),
    "half": (
        _with_tensor(
            "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", np.zeros((4, 64), np.float32)
        ),
        "only lora_A",
    ),
    "layer": (
        _with_tensor(
            "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight", np.zeros((4, 64), np.float32)
        ),
        "only lora_A",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_cannot_run_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    """The line names the directory and what is wrong with it."""
    spoil, said = SPOILED[name]
    folder = write_peft(tmp_path / "adapter", pairs(rank=4, targets=("q_proj",)))
    spoil(folder)
    with pytest.raises(ModelError) as caught:
        load_adapter("a", folder, config())

    assert said in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"general.type": "model"}, "general.type"),
        ({"adapter.type": "control_vector"}, "adapter.type"),
        ({"general.architecture": "nothing"}, "nothing"),
    ],
)
def test_other_gguf_files_are_refused(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    file = write_gguf_adapter(tmp_path / "a.gguf", pairs(), 8.0, HEADS, **more)
    with pytest.raises(ModelError, match=said):
        load_adapter("a", file, config())


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = write_peft(tmp_path / "a", pairs(targets=ALL_TARGETS))
    with pytest.raises(ModelError, match="another model's"):
        load_adapter("a", folder, tiny_config(n_layers=SHAPE.n_layers, hidden=2 * SHAPE.hidden))
    with pytest.raises(ModelError, match="something else"):
        load_adapter("a", folder, replace(config(), forms=config().forms[:1]))


def test_names_are_the_paths_own_or_given() -> None:
    assert named_path("poet=/x/y") == ("poet", Path("/x/y"))
    assert named_path("/x/poet.gguf") == ("poet", Path("/x/poet.gguf"))
    assert named_path("./a=b/c") == ("c", Path("./a=b/c"))
    for text in ("", "a b=/x", "=/x", "a=", "a:b=/x", f"{'a' * 129}=/x"):
        with pytest.raises(ModelError, match="NAME=PATH"):
            named_path(text)
    with pytest.raises(ModelError, match="two adapters"):
        named_paths(["a=/x", "a=/y"])


def test_a_path_that_leads_nowhere_is_one_line(tmp_path: Path) -> None:
    model = tiny_model(config())
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none", tmp_path / "pipe"):
        with pytest.raises(ModelError) as caught:
            with_adapters(model, [f"a={path}"])
        assert "\n" not in str(caught.value)
