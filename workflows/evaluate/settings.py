"""Settings of `phasewise eval`; light enough for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phasewise._options import option
from phasewise.serving.models.storage_modes import SparseMode
from phasewise.workflows.opening.settings import Weights
from phasewise.workflows.options import (
    ARITHMETIC,
    FORMAT,
    KV_FORMAT,
    RANKS,
    SPARSE,
    THREADS,
    ArithmeticChoice,
)


@dataclass(frozen=True)
class EvalSettings:
    """The measurements, and the way the model runs."""

    text: Path | None = option(
        None, "UTF-8 text to measure the perplexity on [default: one that is shipped]", metavar="FILE"
    )
    against: str | None = option(
        None,
        "reference beside which the model is set: a weight format of the same model, e.g. f32, or another "
        "model of the same vocabulary",
        metavar="FORMAT|MODEL",
    )
    context: int = option(512, "tokens of a chunk of the text; its second half counts", min=8)
    chunks: int | None = option(None, "read at most N chunks [default: all]", min=1, metavar="N")
    weight_format: str = FORMAT("native")
    kv_format: str = KV_FORMAT("auto")
    sparse: SparseMode = SPARSE("auto", config_only=True)
    threads: int | None = THREADS(None)
    ranks: int | None = RANKS(None)
    arithmetic: ArithmeticChoice = ARITHMETIC("tuned")

    @property
    def weights(self) -> Weights:
        return Weights(self.weight_format, self.sparse, arithmetic=self.arithmetic)
