"""The prototype that answers what another engine has computed: here that engine is one of ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)
from benchmarks.vllm_hand_over import answer_to, continued
from phasewise.serving.batch import SequenceSlice
from phasewise.serving.engine.messages import Submit
from phasewise.serving.engine.open_engine import OpenEngine, open_engine
from phasewise.serving.loaders import load_model
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.tuner.plans import PHASES, RankCores, ServicePlan
from tests.support.engine_sizes import engine_size
from tests.support.models.tiny_models import TinyShape, write_tiny_hf

SHAPE = TinyShape(n_layers=2, hidden=128, ffn=256, n_heads=2, n_kv_heads=2, head_dim=64)
PROMPT = tuple(3 + (7 * i * i + i) % 240 for i in range(150))
PLANS: dict[Any, Any] = {phase: ServicePlan(phase, (RankCores((0,)),)) for phase in PHASES}
PANEL = 16


class Slots:
    """The place of the first sequence of the latest step."""

    def __init__(self) -> None:
        self.base = 0

    def begins(self, slices: Sequence[SequenceSlice], step: int) -> None:
        self.base = slices[0].slot_base


def kept_by(opened: OpenEngine, base: int, n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values in memory, float32 [layers, tokens, heads, dimensions], number by number."""
    share = opened.engine.ranks.kv_share
    shape, slots = share.shape, -(-n_tokens // PANEL) * PANEL
    keys, values = np.zeros((2, shape.n_layers, slots, shape.n_kv_heads, shape.head_dim), np.float32)
    for layer in range(shape.n_layers):
        raw = np.zeros(share.memory.wire_bytes(slots), np.uint8)
        share.memory.read(layer, base, slots, raw)
        if shape.kv_format == "bf16":
            rows = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            rows = raw.view(np.float32)
        for head, (panels, by_slot) in enumerate(rows.reshape(shape.n_kv_heads, 2, -1)):
            for slot in range(slots):
                panel = panels.reshape(-1, shape.head_dim, PANEL)[slot // PANEL]
                keys[layer, slot, head] = panel[:, slot % PANEL]
            values[layer, :, head] = by_slot.reshape(slots, shape.head_dim)
    return keys[:, :n_tokens], values[:, :n_tokens]


@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
def test_an_answer_goes_on_from_keys_and_values_token_by_token(kv_format: str, tmp_path: Path) -> None:
    """As it would have from the prompt on."""
    model = load_model(str(write_tiny_hf(tmp_path / "m", shape=SHAPE)), "native", tmp_path / "cache")
    size = engine_size(256, 512, 2, 256, kv_format)
    size = replace(size, kv=replace(size.kv, shared=True))
    request = Submit("a", PROMPT, 12, GREEDY, ignore_eos=True)
    with (
        open_engine(model, PLANS, size, pinned=False) as theirs,
        open_engine(model, PLANS, size, pinned=False) as ours,
    ):
        slots = Slots()
        theirs.engine.ranks.follow(slots)
        expected = answer_to(theirs, request)
        tokens, _ = continued(ours, request, *kept_by(theirs, slots.base, len(PROMPT)))
        ours.engine.scheduler.check()

    assert tokens == expected
