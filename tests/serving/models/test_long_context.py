"""Windows and YaRN after a prompt of 8,192 tokens: what transformers computes, within windows' memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from phasewise.serving.batch import Batch
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.messages import Submit
from phasewise.serving.engine.one_answer import OneAnswer
from phasewise.serving.engine.open_engine import open_engine
from phasewise.serving.loaders import load_model
from phasewise.serving.models.forward import kv_bytes_by_reach
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.topology import read_machine
from phasewise.tuner.plans import PHASES, default_plan
from tests.support.models import family_cases
from tests.support.models import family_models as families
from tests.support.models import reference_models as layout
from tests.support.models.family_cases import CHECKED_STEPS

BOUND = 1e-3
"""Largest difference, as a share of the row's largest logit."""


@pytest.mark.slow
@pytest.mark.parametrize("name", family_cases.LONG_CASES)
def test_long_prompts_go_on_as_in_transformers(name: str, tmp_path: Path) -> None:
    """The same 64 tokens, and logits of some steps, with rings where layers have windows."""
    expected = np.load(layout.FIXTURES / "long_context.npz")
    model = load_model(
        str(families.write_long_hf(tmp_path / name, name)), "f32", cache_dir=tmp_path / "cache"
    )
    machine, prompt = read_machine(), families.long_prompt(name)
    size = EngineSize.for_one(model, len(prompt), family_cases.N_GREEDY)
    window = max(kind.window or 0 for kind in model.config.kinds)
    rows: list[np.ndarray] = []

    with open_engine(model, {phase: default_plan(machine, phase) for phase in PHASES}, size) as opened:
        forward = opened.engine.ranks.forward

        def kept(batch: Batch) -> np.ndarray:
            step_logits = forward(batch)
            rows.extend(step_logits.copy())
            return step_logits

        opened.engine.ranks.forward = kept  # type: ignore[method-assign]
        answer = OneAnswer(Submit("r", tuple(prompt), family_cases.N_GREEDY, GREEDY, ignore_eos=True))
        for _ in answer.pieces(opened.engine):
            pass
        kv_bytes = opened.kv_bytes

    logits = expected[f"{name}/logits"]
    error = np.abs(np.stack(rows)[list(CHECKED_STEPS)] - logits).max(axis=1) / np.abs(logits).max(axis=1)
    assert error.max() <= BOUND, error
    assert np.stack(rows).argmax(axis=1).tolist() == expected[f"{name}/tokens"].tolist()
    seen_by_all, windowed = kv_bytes_by_reach(model)
    assert (size.kv.rings is not None) == (windowed > 0)
    assert kv_bytes <= size.kv.slots * seen_by_all + (window + 512 + 128) * windowed
