"""`phasewise merge`: the weights are W + s B A rounded once, everything else is the model's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from phasewise.cython_kernels.packing import from_bf16, to_bf16
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.formats.safetensors_file import read_entries, tensor_of
from phasewise.serving.loaders.source import SourceFile
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.merge.run import MergedType, merge
from tests.support.models.adapters import TINY_CASE, drawn_pairs, merged, write_peft
from tests.support.models.reference_models import tiny_case_weights, write_tiny_case
from tests.support.models.tiny_models import write_tiny_gguf


def tensors(folder: Path) -> dict[str, np.ndarray]:
    with SourceFile(folder / "model.safetensors") as file:
        by_name = {name: tensor_of(file, name, entry) for name, entry in read_entries(file).items()}
        return {
            name: np.asarray(tensor.rows(0, int(np.prod(tensor.shape[:-1])))).reshape(tensor.shape)
            for name, tensor in by_name.items()
        }


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_merged_weights_are_rounded_once(tmp_path: Path, dtype: MergedType) -> None:
    weights = tiny_case_weights(TINY_CASE)
    drawn = drawn_pairs(weights, "merge", rank=3, targets=("q_proj", "up_proj"))
    base, adapter = write_tiny_case(tmp_path / "base", TINY_CASE), write_peft(tmp_path / "adapter", drawn)

    outcome = merge(str(base), str(adapter), tmp_path / "out", dtype)

    wanted = merged(weights, drawn, 2.0)
    written = tensors(tmp_path / "out")
    assert outcome.n_changed == len(drawn)
    assert list(written) == list(wanted)
    for name, values in wanted.items():
        rounded = from_bf16(to_bf16(values)) if dtype == "bf16" else values
        assert (written[name] == rounded).all(), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == {"f32": "float32", "bf16": "bfloat16"}[dtype]
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (base / "tokenizer.json").read_text()


def test_what_cannot_be_merged_leaves_nothing(tmp_path: Path) -> None:
    weights = tiny_case_weights(TINY_CASE)
    drawn = drawn_pairs(weights, "merge", rank=3, targets=("q_proj",))
    base, adapter = write_tiny_case(tmp_path / "base", TINY_CASE), write_peft(tmp_path / "adapter", drawn)
    gguf, out = write_tiny_gguf(tmp_path / "model.gguf"), tmp_path / "out"

    with pytest.raises(WorkflowError, match="GGUF"):
        merge(str(gguf), str(adapter), out, "f32")
    with pytest.raises(WorkflowError, match="exists already"):
        merge(str(base), str(adapter), tmp_path, "f32")
    write_peft(adapter, drawn, use_dora=True)
    with pytest.raises(ModelError, match="DoRA"):
        merge(str(base), str(adapter), out, "f32")
    assert not out.exists()
    assert not list(tmp_path.glob(".out*"))
