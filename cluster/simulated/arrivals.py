"""Arrivals drawn at a rate, with the lengths of a trace (Splitwise V-B)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from phasewise._words import number
from phasewise.cluster.errors import ClusterError
from phasewise.cluster.simulated.simulated_requests import Arrival

MAX_ARRIVALS = 1_000_000

Draw = Literal["requests", "columns"]
"""Ways to draw lengths. `requests`: a prompt keeps its answer. `columns`: prompts and answers are drawn
independently, as the authors' generator does."""


def poisson(
    lengths: Sequence[tuple[int, int]], rate: float, duration_s: float, seed: int, draw: Draw = "requests"
) -> list[Arrival]:
    """Requests at exponential intervals, with (prompt, output) tokens drawn from `lengths`. The same for the
    same seed. Times do not depend on the lengths, so a rate's arrivals can be compared."""
    if not lengths:
        raise ClusterError("there is no request to draw lengths from")
    if not 0 < rate * duration_s <= MAX_ARRIVALS:
        raise ClusterError(
            f"{number(rate)} requests/s for {number(duration_s)} s are not between 1 and {MAX_ARRIVALS}"
            " requests"
        )
    clock, prompts, outputs = (random.Random(f"{seed}:{what}") for what in ("clock", "prompts", "outputs"))
    arrivals: list[Arrival] = []
    now_s = clock.expovariate(1.0) / rate
    while now_s < duration_s:
        chosen = prompts.choice(lengths)
        output = chosen[1] if draw == "requests" else outputs.choice(lengths)[1]
        arrivals.append(Arrival(len(arrivals), now_s, chosen[0], output))
        now_s += clock.expovariate(1.0) / rate
    if not arrivals:
        raise ClusterError(f"no request arrives in {number(duration_s)} s at {number(rate)} requests/s")
    return arrivals
