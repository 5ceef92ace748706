"""The page on adding a family works as written: its example loads from both formats and computes."""

from __future__ import annotations

import dataclasses
import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders import families, load_model
from phasewise.serving.loaders.families import Family
from phasewise.tuner.plans import PHASES, RankCores, ServicePlan
from tests.support.models.tiny_models import (
    gguf_name,
    hf_config,
    safetensors_bytes,
    tiny_gguf,
    tiny_weights,
    tokenizer_json,
    write_tiny_hf,
)

pytest.importorskip("phasewise.cython_kernels._native", reason="the kernels are not built")
from phasewise.serving.ranks.open_ranks import KvSettings, RankOptions, open_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "model-families.md").read_text()
DIVISOR = 4.0


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> Family:
    """The page's family, in the table."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    module: dict[str, Any] = {}
    exec(compile(block, "calm.py", "exec"), module)
    family: Family = module["CALM"]
    monkeypatch.setitem(families.BY_HF, *family.hf, family)
    monkeypatch.setitem(families.BY_GGUF, *family.gguf, family)
    return family


def write_calm_hf(folder: Path, divisor: object) -> Path:
    """The tiny Llama under the names that the page gives."""
    folder.mkdir()
    weights = tiny_weights("llama")
    for name in [name for name in weights if "mlp.gate_proj" in name]:
        stem = name.removesuffix("gate_proj.weight")
        parts = [weights.pop(f"{stem}{part}_proj.weight") for part in ("gate", "up")]
        weights[f"{stem}gate_up.weight"] = np.concatenate(parts)
        weights[f"{stem}down.weight"] = weights.pop(f"{stem}down_proj.weight")
    config = {**hf_config("llama"), "model_type": "calm", "logit_divisor": divisor}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors_bytes(weights))
    return folder


def write_calm_gguf(path: Path) -> Path:
    """The same; query and key heads are not interleaved, for the family does not say so."""
    file = tiny_gguf("llama")
    settings = {key.replace("llama.", "calm."): value for key, value in file.metadata.items()}
    file.metadata.clear()
    file.metadata.update(settings)
    file.add("general.architecture", "calm")
    file.add("calm.logit_divisor", DIVISOR)
    file.tensors.clear()
    for name, values in tiny_weights("llama").items():
        file.add_tensor(gguf_name(name), values, "F32")
    path.write_bytes(file.to_bytes())
    return path


def logits(path: Path, cache: Path) -> np.ndarray:
    plans = {phase: ServicePlan(phase, (RankCores((0,)),)) for phase in PHASES}
    model = load_model(str(path), "f32", cache_dir=cache)
    with closing(open_ranks(model, plans, RankOptions(KvSettings(64), 16, 1, pinned=False))) as ranks:
        return ranks.forward(Batch("prefill", (SequenceSlice([5, 7, 11, 13], 0, 0, True),))).copy()


@pytest.mark.usefixtures("calm")
def test_the_pages_family_computes_a_llama_with_divided_logits(tmp_path: Path) -> None:
    """A divisor that is a power of two: to the bit."""
    plain = logits(write_tiny_hf(tmp_path / "llama"), tmp_path / "cache")

    assert (logits(write_calm_hf(tmp_path / "calm", DIVISOR), tmp_path / "cache") == plain / DIVISOR).all()
    assert (logits(write_calm_gguf(tmp_path / "calm.gguf"), tmp_path / "cache") == plain / DIVISOR).all()


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize("divisor", [0, -4.0, "4", float("nan"), 1e-30])
def test_bad_settings_of_the_pages_family_are_one_line(tmp_path: Path, divisor: object) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(str(write_calm_hf(tmp_path / "calm", divisor)), "f32", cache_dir=tmp_path / "cache")

    assert "\n" not in str(caught.value)


def test_the_page_explains_every_field_of_an_entry() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", PAGE, re.M)
    explained = {name for row in rows for name in re.findall(r"`(\w+)`", row)}

    assert explained == {field.name for field in dataclasses.fields(Family)}


def test_the_files_and_tests_that_the_page_names_are_there() -> None:
    root = Path(__file__).parents[2]
    for name in re.findall(r"`((?:serving|tests|cython_kernels)/[\w/]+\.py)`", PAGE):
        if not name.endswith("/calm.py"):
            assert (root / name).is_file(), name
