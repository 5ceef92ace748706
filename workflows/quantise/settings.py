"""Settings of `phasewise quantise`; light enough for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

QuantFormat = Literal["q8_0", "q4_0", "q4_k", "q6_k"]
CALIBRATION_TOKENS = 16384


@dataclass(frozen=True)
class QuantiseSettings:
    """A model and the file to be. calibration: a text whose activations weigh the inputs of each matrix.

    requantise: take weights that are quantised already, and round them a second time.
    """

    model: str
    out: Path
    quant_format: QuantFormat
    calibration: Path | None = None
    calibration_tokens: int = CALIBRATION_TOKENS
    requantise: bool = False
