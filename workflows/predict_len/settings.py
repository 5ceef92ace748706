"""Settings of `predict-len collect` and `predict-len eval`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TIMED_CALLS = 200
"""Predictions whose median time `predict-len predict --time` tells."""


@dataclass(frozen=True)
class CollectWish:
    """The way prompts are answered. `limit`: only the first prompts. `sequences`: answers computed at a
    time.
    """

    max_tokens: int = 512
    temperature: float = 0.0
    limit: int | None = None
    sequences: int = 32
    weight_format: str = "native"
    threads: int | None = None
    db: str | None = None


@dataclass(frozen=True)
class EvalWish:
    """The way predictions are judged.

    `split`: share of the prompts held out. `overflow`: share of answers that may outgrow their block.
    `folds`: judge every prompt, by what the other folds teach. `drift`: train on the first log only.
    `encoder`: what reads prompts, `prompt_vectors.find_encoder`.
    """

    predictor: Path | None = None
    model: str | None = None
    split: float = 0.3
    folds: int | None = None
    overflow: float = 0.005
    drift: bool = False
    encoder: str = "auto"
    seed: int = 0
    db: str | None = None
