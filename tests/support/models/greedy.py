"""Greedy decoding on ranks of our own, one sequence at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks.open_ranks import KvSettings, LocalRanks, RankOptions, Ranks
from phasewise.topology import read_machine
from phasewise.tuner.plans import default_plan


def local_ranks(
    model: PackedModel, kv_slots: int = 256, sequences: int = 8, kv_format: str = "auto", **more: Any
) -> LocalRanks:
    """By the default plans of this machine. more: further options."""
    machine = read_machine()
    plans: dict[Any, Any] = {phase: default_plan(machine, phase) for phase in ("prefill", "decode")}
    options = RankOptions(
        KvSettings(kv_slots, kv_format, states=sequences), max_batch_tokens=1024, max_sequences=sequences
    )
    return LocalRanks(model, plans, replace(options, **more))


def greedy(ranks: Ranks, prompt: list[int], n_steps: int, chunk: int = 1 << 30) -> np.ndarray:
    """Logits [n_steps, vocabulary]: after the prompt, then after each chosen token."""
    rows: list[np.ndarray] = []
    for start in range(0, len(prompt), chunk):
        piece = prompt[start : start + chunk]
        wanted = start + len(piece) == len(prompt)
        logits = ranks.forward(Batch("prefill", (SequenceSlice(piece, start, 0, wanted),)))
    rows.append(logits[0].copy())
    for position in range(len(prompt), len(prompt) + n_steps - 1):
        step = SequenceSlice([int(rows[-1].argmax())], position, 0, True)
        rows.append(ranks.forward(Batch("decode", (step,)))[0].copy())
    return np.stack(rows)
