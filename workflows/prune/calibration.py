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
from phasewise.cython_kernels import packing
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.prune.directory import bf16_bits
from phasewise.workflows.prune.masks import damped
from phasewise.workflows.prune.settings import READERS
from phasewise.workflows.report import Report

if TYPE_CHECKING:
    from phasewise.serving.models.packed_model import PackedModel

MOST_STEPS = 300
LEAST_GAIN = 1e-5
"""Share of a weight's error: a step that gains less is the last one."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class OutputError:
    """Sums of squares of a weight's outputs over a text: of their changes by pruning, and of the outputs."""

    pruned: float
    recovered: float
    all_outputs: float


@dataclass(frozen=True)
class Recovery:
    """Summary of `prune --recover`. Errors: root mean squares over the outputs' own, mean over weights."""

    n_weights: int
    most_steps: int
    output_error_pruned: float
    output_error_recovered: float
    perplexity_pruned: float | None = None
    """Perplexity of the model with the same zeros and the values that pruning left."""


def recover(w: Array, pruned: Array, hessian: Array) -> tuple[Array, int, OutputError]:
    """(float32 [n, k] of bf16 values, steps taken, their errors). Zeros of `pruned` stay, and only they.

    w, pruned: float32 [n, k] of bf16 values, before and after pruning. hessian: float32 [k, k]. A row whose
    error does not become smaller keeps the values of `pruned`.
    """
    fitted, n_steps = _descend(w, pruned, damped(hessian).astype(np.float32))
    fitted = packing.from_bf16(bf16_bits(fitted))
    fitted = np.where(fitted == 0, pruned, fitted)
    before, after = _row_errors(pruned - w, hessian), _row_errors(fitted - w, hessian)
    is_better = after < before
    values: Array = np.where(is_better[:, None], fitted, pruned)
    error = OutputError(
        float(before.sum()),
        float(np.where(is_better, after, before).sum()),
        float(_row_errors(w, hessian).sum()),
    )
    return values, n_steps, error


def _descend(w: Array, pruned: Array, hessian: Array) -> tuple[Array, int]:
    """Conjugate gradients from `pruned` on; returns the values, and the number of steps."""
    kept = pruned != 0
    diagonal = np.diag(hessian)
    values = pruned.astype(np.float32, copy=True)
    residual = np.where(kept, (w - pruned) @ hessian, np.float32(0))
    direction = residual / diagonal
    slope = _row_dots(residual, direction)
    error = float(_row_errors(pruned - w, hessian).sum())
    for step in range(MOST_STEPS):
        image = np.where(kept, direction @ hessian, np.float32(0))
        length = _quotients(slope, _row_dots(direction, image))
        gain = float((length * slope).sum())
        if gain <= LEAST_GAIN * error:
            return values, step
        error -= gain
        factors = length.astype(np.float32)[:, None]
        values += factors * direction
        residual -= factors * image
        scaled = residual / diagonal
        next_slope = _row_dots(residual, scaled)
        direction = scaled + _quotients(next_slope, slope).astype(np.float32)[:, None] * direction
        slope = next_slope
    return values, MOST_STEPS


def _row_errors(change: Array, hessian: Array) -> Array:
    """float64 [n]: for each row d of `change`, d H d^T."""
    return _row_dots(change, change @ hessian)


def _row_dots(a: Array, b: Array) -> Array:
    dots: Array = np.einsum("ij,ij->i", a, b, dtype=np.float64)
    return dots


def _quotients(numerators: Array, denominators: Array) -> Array:
    """Quotients by element; 0 where a denominator is not positive."""
    return np.divide(numerators, denominators, out=np.zeros_like(numerators), where=denominators > 0)


class RecoveryTally:
    """Errors and steps, added up while weights are recovered."""

    def __init__(self) -> None:
        self._pruned: list[float] = []
        self._recovered: list[float] = []
        self._most_steps = 0

    def add(self, n_steps: int, error: OutputError) -> None:
        if error.all_outputs > 0:
            self._pruned.append((error.pruned / error.all_outputs) ** 0.5)
            self._recovered.append((error.recovered / error.all_outputs) ** 0.5)
        self._most_steps = max(self._most_steps, n_steps)

    def recovery(self) -> Recovery:
        return Recovery(len(self._pruned), self._most_steps, _mean(self._pruned), _mean(self._recovered))


def _mean(shares: list[float]) -> float:
    return sum(shares) / len(shares) if shares else 0.0


WINDOW_TOKENS = 512
LEAST_TOKENS = 64

Wanted = Literal["squares", "hessian"]


@dataclass(frozen=True)
class Activations:
    """Sums over all input rows, by layer and reader: squares float64 [k], hessians float32 [k, k] if any."""

    squares: Mapping[tuple[int, str], Array]
    hessians: Mapping[tuple[int, str], Array]
    n_tokens: int


def windows(model: PackedModel, text: str, n_tokens: int) -> list[list[int]]:
    """The first tokens of a text, in windows that do not overlap. WorkflowError if it is too short."""
    from phasewise.serving.text.tokenizer import Tokenizer

    ids = Tokenizer(model.tokenizer_json, model.config).encode(text, add_special=False)
    length = min(WINDOW_TOKENS, model.config.context_length)
    if len(ids) < LEAST_TOKENS:
        raise WorkflowError(f"the text has {counted(len(ids), 'token')}; at least {LEAST_TOKENS} are needed")
    ids = ids[:n_tokens]
    return [list(ids[start : start + length]) for start in range(0, len(ids), length)]


def gather(model: PackedModel, pieces: list[list[int]], wanted: Wanted, report: Report) -> Activations:
    """Run the model over all windows. Memory holds one row of every product for each token of a window."""
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
    """After every window, yield the rows that each reader has multiplied, and the number of rows."""
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
    """A weight that multiplies a reader's rows: the fused one, or the first of its parts."""
    stem = f"layers.{layer}."
    for name in (reader, *(part for part, group in READERS.items() if group == reader)):
        if stem + name in model.weights:
            return model.weights[stem + name]
    raise WorkflowError(
        f"{model.name} has no weight {stem}{reader}: mixtures of experts cannot be calibrated"
    )
