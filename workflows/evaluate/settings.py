"""Settings of `phasewise eval`; light enough for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phasewise.serving.models.sparse_mode import SparseMode
from phasewise.workflows.opening.arithmetic_choice import ArithmeticChoice
from phasewise.workflows.opening.open_model import Weights


@dataclass(frozen=True)
class EvalSettings:
    """The measurements, and the way the model runs.

    against: a weight format of the same model, or another model. context: tokens of
    a chunk of the text. chunks, questions: at most so many; None: all.
    """

    text: Path | None = None
    against: str | None = None
    choices: list[Path] | None = None
    context: int = 512
    chunks: int | None = None
    questions: int | None = None
    weight_format: str = "native"
    kv_format: str = "auto"
    sparse: SparseMode = "auto"
    threads: int | None = None
    ranks: int | None = None
    arithmetic: ArithmeticChoice = "tuned"

    @property
    def reads_text(self) -> bool:
        """True unless questions alone are asked."""
        return self.text is not None or self.against is not None or not self.choices

    @property
    def weights(self) -> Weights:
        return Weights(self.weight_format, self.sparse, arithmetic=self.arithmetic)
