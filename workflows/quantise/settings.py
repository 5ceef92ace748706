"""Settings of `phasewise quantise`; light enough for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

QuantFormat = Literal["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4", "bf16"]


@dataclass(frozen=True)
class QuantiseSettings:
    """A GGUF file and the file to be. requantise: round weights that are quantised already once more."""

    model: str
    out: Path
    quant_format: QuantFormat
    requantise: bool = False
