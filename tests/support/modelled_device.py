"""A worker of an accelerator that does not exist: a batch of n inputs takes alpha n + beta seconds.

    python -m tests.support.modelled_device ALPHA_S BETA_S FOLDER FD SPEC

Vectors depend on the tokens alone. A number in the file FOLDER/slow makes batches as many times as long;
while FOLDER/hang exists, a batch is never answered.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phasewise.serving.embedding.depth import LatencyLine
from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.embedding.protocol import Floats
from phasewise.serving.embedding.worker import WorkerSpec, main


def vector_of(tokens: Tokens, width: int) -> Floats:
    """The vector that this device gives an input."""
    return np.random.default_rng(tokens.ids).standard_normal(width).astype(np.float32)


@dataclass(frozen=True)
class ModelledDevice:
    """The device, for vectors of `width` numbers."""

    line: LatencyLine
    folder: Path
    width: int

    def embed(self, inputs: Sequence[Tokens]) -> Floats:
        while (self.folder / "hang").exists():
            time.sleep(0.01)
        slow = self.folder / "slow"
        times = float(slow.read_text()) if slow.exists() else 1.0
        time.sleep(times * self.line.seconds(len(inputs)))
        return np.stack([vector_of(tokens, self.width) for tokens in inputs])


def command(line: LatencyLine, folder: Path) -> tuple[str, ...]:
    """The words that start one."""
    seconds = str(line.alpha_s), str(line.beta_s)
    return (sys.executable, "-m", "tests.support.modelled_device", *seconds, str(folder))


if __name__ == "__main__":
    alpha_s, beta_s, place, *rest = sys.argv[1:]

    def make(spec: WorkerSpec) -> ModelledDevice:
        assert spec.width is not None
        return ModelledDevice(LatencyLine(float(alpha_s), float(beta_s)), Path(place), spec.width)

    main(rest, make)
