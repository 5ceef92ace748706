"""Settings of `phasewise quantise`; light enough for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phasewise._options import option

QuantFormat = Literal["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4", "bf16"]


@dataclass(frozen=True)
class QuantiseSettings:
    """The GGUF file to read, and the one to write."""

    model: str = ""
    out: Path = Path()
    quant_format: QuantFormat = option("q8_0", "type of most matrices in the file", "--format")
    requantise: bool = option(False, "round weights that are quantised already a second time", "--requantise")
