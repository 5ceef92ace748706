"""A tiny model of every family, from a Hugging Face directory and from GGUF, beside what transformers
computes of it.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.loaders import load_model
from phasewise.serving.model import PackedModel
from phasewise.topology import read_machine
from phasewise.tuner.plans import RankCores, ServicePlan, default_plan
from tests.support import family_models as families
from tests.support import reference_models as layout

pytest.importorskip("phasewise.cython_kernels._native", reason="the kernels are not built")
from phasewise.serving.ranks import LocalRanks, Ranks, open_ranks

BOUND = 1e-3
"""Of the largest logit of the row."""

WRITERS = {"safetensors": families.write_family_hf, "gguf": families.write_family_gguf}


def packed(name: str, kind: str, folder: Path, weight_format: str = "f32") -> PackedModel:
    file = folder / (name if kind == "safetensors" else f"{name}.gguf")
    WRITERS[kind](file, name)
    model = load_model(str(file), weight_format, cache_dir=folder / "cache")
    context_length = families.FAMILY_CASES[name].context_length
    return replace(model, config=replace(model.config, context_length=context_length))


def opened(model: PackedModel, kv_slots: int = 256, sequences: int = 8) -> LocalRanks:
    machine = read_machine()
    plans: dict[Any, Any] = {phase: default_plan(machine, phase) for phase in ("prefill", "decode")}
    return LocalRanks(model, plans, kv_slots, max_batch_tokens=1024, max_sequences=sequences)


def greedy(ranks: Ranks, prompt: list[int], n_steps: int, chunk: int = 1 << 30) -> np.ndarray:
    """Logits [n_steps, vocabulary]: after the prompt, then after each chosen token."""
    rows: list[np.ndarray] = []
    for start in range(0, len(prompt), chunk):
        piece = prompt[start : start + chunk]
        found = ranks.forward(
            Batch("prefill", (SequenceSlice(piece, start, 0, start + len(piece) == len(prompt)),))
        )
    rows.append(found[0].copy())
    for at in range(len(prompt), len(prompt) + n_steps - 1):
        step = SequenceSlice([int(rows[-1].argmax())], at, 0, True)
        rows.append(ranks.forward(Batch("decode", (step,)))[0].copy())
    return np.stack(rows)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("name", families.FAMILY_CASES)
def test_every_family_computes_what_transformers_does(name: str, kind: str, tmp_path: Path) -> None:
    expected = np.load(layout.FIXTURES / "families.npz")

    with closing(opened(packed(name, kind, tmp_path))) as ranks:
        for at, prompt in enumerate(families.family_prompts(name)):
            logits = greedy(ranks, prompt, families.N_GREEDY, chunk=1 << 30 if at else 4)

            kept = expected[f"{name}/{at}/logits"]
            error = np.abs(logits[list(families.CHECKED_STEPS)] - kept).max(axis=1) / np.abs(kept).max(axis=1)
            assert error.max() <= BOUND, error
            assert logits.argmax(axis=1).tolist() == expected[f"{name}/{at}/tokens"].tolist()


@pytest.mark.parametrize("name", families.FAMILY_CASES)
def test_no_row_depends_on_the_others_of_its_step(name: str, tmp_path: Path) -> None:
    """Whole prompts, chunks and single tokens, alone and in company: the same bits."""
    model = packed(name, "safetensors", tmp_path, "int8")
    prompts = [families.family_prompts(name)[1][:n] for n in (80, 41, 7)]
    with closing(opened(model)) as ranks:
        alone = [greedy(ranks, prompt, 1)[0] for prompt in prompts]
        by_token = greedy(ranks, prompts[1], 1, chunk=1)[0]
        bases = [0, 96, 160]
        slices = tuple(SequenceSlice(p, 0, base, True) for p, base in zip(prompts, bases, strict=True))
        together = ranks.forward(Batch("prefill", slices)).copy()
        steps = tuple(SequenceSlice([5], len(p), base, True) for p, base in zip(prompts, bases, strict=True))
        decoded = ranks.forward(Batch("decode", steps)).copy()
        singly = [ranks.forward(Batch("decode", (step,)))[0].copy() for step in steps]

    assert (together == np.stack(alone)).all()
    assert (by_token == alone[1]).all()
    assert (decoded == np.stack(singly)).all()


@pytest.mark.parametrize("name", ["gemma2", "olmo2", "granitemoe", "gpt-oss"])
def test_two_ranks_compute_the_same_bits_as_one(name: str, tmp_path: Path) -> None:
    model = packed(name, "safetensors", tmp_path, "int8")
    prompt = families.family_prompts(name)[1]
    two = (RankCores((0,)), RankCores((1,)))  # unpinned: any cores
    plans: dict[Any, Any] = {phase: ServicePlan(phase, two) for phase in ("prefill", "decode")}
    with closing(opened(model)) as one, closing(open_ranks(model, plans, 256, 512, 8, pinned=False)) as ranks:
        expected, found = greedy(one, prompt, 4), greedy(ranks, prompt, 4)

    assert (found == expected).all()
