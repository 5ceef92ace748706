"""Settings of `predict-len collect` and `predict-len eval`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phasewise._options import changed, named, option, refuse_unused
from phasewise.workflows.options import DB, FORMAT, THREADS

TOKENS = named(
    "model whose tokens the log's prompts are [default: the one that its lines name]",
    "--model",
    metavar="MODEL",
)
PREDICTOR = named("predictor file [default: the one trained for the model]", "--predictor", metavar="FILE")
SEED = named("seed that draws the held-out prompts and the first weights", "--seed", min=0)


@dataclass(frozen=True)
class CollectWish:
    """The way prompts are answered."""

    max_tokens: int = option(512, "generate at most N tokens per answer", min=1)
    temperature: float = option(0.0, "0: always the likeliest token", min=0.0, config_only=True)
    limit: int | None = option(None, "use only the first N prompts", min=1)
    sequences: int = option(32, "answers computed at the same time", min=1, max=512)
    weight_format: str = FORMAT("native")
    threads: int | None = THREADS(None)
    db: str | None = DB(None)


@dataclass(frozen=True)
class EvalWish:
    """The way predictions are judged."""

    predictor: Path | None = PREDICTOR(None)  # noqa: RUF009 (a field)
    model: str | None = TOKENS(None)
    split: float = option(0.3, "share of the prompts held out", min=0.05, max=0.9)
    folds: int | None = option(
        None,
        "divide the prompts into N parts, and judge each by what the other parts teach, instead of --split",
        min=2,
        max=20,
        metavar="N",
    )
    overflow: float = option(0.005, "share of answers that may outgrow their first block", min=0.0, max=0.9)
    seed: int = SEED(0)
    db: str | None = DB(None)

    def __post_init__(self) -> None:
        if self.folds is not None:
            refuse_unused("with --folds", changed(self, "split"))
