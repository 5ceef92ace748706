"""Settings of `phasewise prune`: what becomes zero, by which method, and how it is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phasewise._options import changed, option, refuse_unused
from phasewise.workflows.errors import UsageError

Method = Literal["magnitude", "wanda", "sparsegpt"]
EMBEDDINGS = ("embed", "lm_head")
READERS = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "o", "gate": "gate_up", "up": "gate_up", "down": "down"}
"""Weights that a layer may have, and the name of their inputs: those that read the same rows share them."""


@dataclass(frozen=True)
class Pattern:
    """The number of weights that become zero: a share, or `zeros` of every `of` along the inputs."""

    share: float
    zeros: int = 0
    of: int = 0

    @property
    def is_structured(self) -> bool:
        return self.of > 0

    def __str__(self) -> str:
        return f"{self.zeros}:{self.of}" if self.is_structured else f"{self.share:g}"


def parse_pattern(text: str) -> Pattern:
    """`0.5`, or `2:4`: two of every four along the inputs. UsageError for anything else."""
    zeros, colon, of = text.partition(":")
    try:
        if not colon:
            return Pattern(float(text))
        pattern = Pattern(int(zeros) / int(of), int(zeros), int(of))
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"--sparsity {text}: a share such as 0.5, or 2:4, expected") from None
    if not 0 < pattern.zeros < pattern.of <= 32:
        raise UsageError(f"--sparsity {text}: fewer zeros than weights in a group of at most 32 expected")
    return pattern


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


@dataclass(frozen=True)
class PruneSettings:
    """A model, the directory that is written, the zeros, and the rest of the options."""

    model: str = ""
    out: Path = Path()
    pattern: Pattern = Pattern(0.5)
    method: Method = option("magnitude", "how weights are chosen")
    calibration: Path | None = option(
        None, "text whose activations weigh the weights: wanda, sparsegpt and --recover", metavar="FILE"
    )
    calibration_tokens: int = option(16384, "tokens of the calibration text", min=64)
    skip: tuple[str, ...] = option(
        EMBEDDINGS,
        "weights left as they are, with commas between",
        metavar="NAMES",
        parser=_names,
        written="embed,lm_head",
    )
    storage: Literal["dense", "bitmask"] = option(
        "dense", "dense, or bitmask: compressed-tensors' sparse-bitmask"
    )
    evaluation: Path | None = option(None, "text to measure the perplexity on", "--eval", metavar="FILE")
    recover: bool = option(
        False, "fit the weights that are kept to what each layer computed before, over the text", "--recover"
    )

    def __post_init__(self) -> None:
        unknown = sorted(set(self.skip) - {*EMBEDDINGS, *READERS})
        if unknown:
            raise UsageError(f"--skip {unknown[0]}: {', '.join((*EMBEDDINGS, *READERS))} can be skipped")
        if not self.pattern.is_structured and not 0 < self.pattern.share < 1:
            raise UsageError(f"--sparsity {self.pattern}: a share between 0 and 1, or 2:4, expected")
        if not self.reads_inputs:
            nothing = "nothing reads it; add --recover, or leave that out"
            refuse_unused("with --method magnitude", changed(self, "calibration"), nothing)
        if self.calibration is None:
            refuse_unused("without --calibration", changed(self, "calibration_tokens"))
        if self.calibration is None and self.reads_inputs:
            what = "--recover" if self.method == "magnitude" else f"--method {self.method}"
            raise UsageError(f"{what} reads the inputs of weights: give a text with --calibration FILE")

    @property
    def reads_inputs(self) -> bool:
        """True where the settings need sums over the inputs of products."""
        return self.method != "magnitude" or self.recover
