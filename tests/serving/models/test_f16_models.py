"""A model of F16 weights answers bit for bit as its numbers do in f32, with half the bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from phasewise.cython_kernels import isa
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks.open_ranks import KvSettings, RankOptions, open_ranks
from phasewise.tuner.plans import PHASES, RankCores, ServicePlan
from tests.support.models.tiny_models import TinyShape, write_tiny_gguf

SHAPE = TinyShape(hidden=72, ffn=104, n_heads=2, n_kv_heads=1, head_dim=36)
IDS = [index % SHAPE.vocab_size for index in range(3, 90)]


def logits_of(model: PackedModel) -> np.ndarray:
    """Logits of a prompt and of two tokens behind it."""
    plans = {phase: ServicePlan(phase, (RankCores((0,)),)) for phase in PHASES}
    ranks = open_ranks(model, plans, RankOptions(KvSettings(128), 128, 1, pinned=False))
    try:
        batches = [
            Batch("prefill", (SequenceSlice(IDS, 0, 0, True),)),
            *(Batch("decode", (SequenceSlice([5], len(IDS) + more, 0, True),)) for more in (0, 1)),
        ]
        rows = [ranks.forward(batch).copy() for batch in batches]
    finally:
        ranks.close()
    return np.concatenate(rows)


@pytest.mark.parametrize("types", ["F16", {"": "F16", "attn_v": "BF16", "ffn_down": "F32"}])
def test_answers_are_those_of_f32_weights(tmp_path: Path, types: str | dict[str, str]) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", types=types, shape=SHAPE)
    native = load_model(str(path), "native", tmp_path)
    kinds = {weight.kind for weight in native.weights.values()}
    assert kinds == ({"f16"} if types == "F16" else {"f16", "bf16", "f32"})
    if types != "F16":  # bf16 rounds its inputs: another arithmetic than f32
        assert np.isfinite(logits_of(native)).all()
        return
    wide = load_model(str(path), "f32", tmp_path)
    assert 2 * native.weight_bytes == wide.weight_bytes
    for name in isa.usable():
        with isa.using(name):
            assert np.array_equal(logits_of(native).view(np.uint32), logits_of(wide).view(np.uint32)), name
