"""The time of a replayed step: measured speeds, with linear interpolation between them."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from phasewise.serving.batch import Batch
from phasewise.tuner.errors import TraceError


@dataclass(frozen=True)
class Speeds:
    """Measured rates of a machine, per second."""

    prompt_tokens: float
    decode: tuple[tuple[int, float], ...]
    """(sequences, tokens per second of all sequences together), ascending; at least one pair."""
    moved_slots: float = math.inf

    def step_s(self, batch: Batch) -> float:
        """Seconds of one batch, its copies included."""
        moved_s = sum(copy.n_slots for copy in batch.copies) / self.moved_slots
        if batch.phase == "prefill":
            return moved_s + batch.n_tokens / self.prompt_tokens
        return moved_s + self._decode_s(len(batch.slices))

    def _decode_s(self, n_sequences: int) -> float:
        """Linear between two known counts; beyond the last one, at its time per sequence."""
        steps = [(count, count / rate) for count, rate in self.decode]
        index = bisect_left(steps, (n_sequences, 0.0))
        if index == len(steps):
            count, step_s = steps[-1]
            return step_s * n_sequences / count
        if index == 0:
            return steps[0][1]
        (low, low_s), (high, high_s) = steps[index - 1], steps[index]
        return low_s + (high_s - low_s) * (n_sequences - low) / (high - low)


def speeds_of(text: str) -> Speeds:
    """Read `prompt:900,1:108,8:641`: tokens/s of prompts, and of decode by number of sequences.

    `copy:200000` adds the slots per second of copies, which otherwise take no time. Raises TraceError.
    """
    rates = dict(_pair(part, text) for part in text.split(","))
    prompt, copy = rates.pop("prompt", None), rates.pop("copy", math.inf)
    if prompt is None or not rates or not all(name.isdecimal() and int(name) > 0 for name in rates):
        raise _unreadable(text)
    return Speeds(prompt, tuple(sorted((int(name), rate) for name, rate in rates.items())), copy)


def _pair(part: str, whole: str) -> tuple[str, float]:
    name, _, rate = part.strip().partition(":")
    try:
        value = float(rate)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise _unreadable(whole)
    return name, value


def _unreadable(text: str) -> TraceError:
    return TraceError(f"{text!r:.60} are no speeds: write prompt:900,1:108,4:363,8:641 (tokens per second)")
