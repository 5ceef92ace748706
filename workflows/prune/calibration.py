"""Inputs of a model's products over a text: sums for Wanda, X^T X for SparseGPT.

The engine computes the rows, and copies them where they enter a product (`Program.tap`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from phasewise._words import counted
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.prune.settings import READERS
from phasewise.workflows.report import Report

if TYPE_CHECKING:
    from phasewise.serving.models.packed_model import PackedModel

WINDOW_TOKENS = 512
LEAST_TOKENS = 64

Array = npt.NDArray[Any]
Wanted = Literal["squares", "hessian"]


@dataclass(frozen=True)
class Activations:
    """Sums over all rows, by layer and reader. squares float64 [k]; hessian float32 [k, k] if wanted."""

    squares: Mapping[tuple[int, str], Array]
    hessians: Mapping[tuple[int, str], Array]
    n_tokens: int


def windows(model: PackedModel, text: str, n_tokens: int) -> list[list[int]]:
    """The first tokens of a text, in windows that do not overlap. WorkflowError if it is too short."""
    from phasewise.serving.text.tokenizer import Tokenizer

    ids = Tokenizer.from_json(model.tokenizer_json, model.config).encode(text, add_special=False)
    length = min(WINDOW_TOKENS, model.config.context_length)
    if len(ids) < LEAST_TOKENS:
        raise WorkflowError(f"the text has {counted(len(ids), 'token')}; at least {LEAST_TOKENS} are needed")
    ids = ids[:n_tokens]
    return [list(ids[start : start + length]) for start in range(0, len(ids), length)]


def gather(model: PackedModel, pieces: list[list[int]], wanted: Wanted, report: Report) -> Activations:
    """Run the model over all windows. It keeps one row of every product for each token of a window."""
    squares: dict[tuple[int, str], Array] = {}
    hessians: dict[tuple[int, str], Array] = {}
    for number, (rows, n) in enumerate(tapped(model, pieces)):
        for key, taken in rows.items():
            x = taken[:n]
            added = np.einsum("ij,ij->j", x, x, dtype=np.float64)
            squares[key] = squares[key] + added if key in squares else added
            if wanted == "hessian":
                product = x.T @ x
                if key in hessians:
                    hessians[key] += product
                else:
                    hessians[key] = product
        report(f"calibration: {number + 1} of {counted(len(pieces), 'window')}")
    return Activations(squares, hessians, sum(map(len, pieces)))


def tapped(model: PackedModel, pieces: list[list[int]]) -> Iterator[tuple[dict[tuple[int, str], Array], int]]:
    """After every window: the rows that each reader has multiplied, and how many they are."""
    from phasewise.cython_kernels._native import Team
    from phasewise.serving.batch import SequenceSlice
    from phasewise.serving.models.forward import Capacity, build_program
    from phasewise.topology import read_machine
    from phasewise.tuner.plans import default_plan

    longest = max(map(len, pieces))
    cores = default_plan(read_machine(), "prefill").ranks[0].cores
    capacity = Capacity(longest, longest, 1, longest, len(cores))
    program = build_program(model, capacity)
    rows: dict[tuple[int, str], Array] = {}
    for layer in range(model.config.n_layers):
        for reader in dict.fromkeys(READERS.values()):
            weight = _a_weight(model, layer, reader)
            rows[layer, reader] = np.zeros((longest, weight.k), np.float32)
            program.tap(weight, rows[layer, reader])
    team = Team(cores)
    try:
        for piece in pieces:
            program.run(team, [SequenceSlice(piece, 0, 0, True)], every_row=True)
            yield rows, len(piece)
    finally:
        team.close()


def _a_weight(model: PackedModel, layer: int, reader: str) -> Any:
    """Some weight that reads these rows: the fused one, or the first of its parts."""
    stem = f"layers.{layer}."
    for name in (reader, *(part for part, group in READERS.items() if group == reader)):
        if stem + name in model.weights:
            return model.weights[stem + name]
    raise WorkflowError(
        f"{model.name} has no weight {stem}{reader}: mixtures of experts cannot be calibrated"
    )
