"""Arrivals at a cluster, and the instants of each request's life, whose differences are the metrics."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phasewise._words import number
from phasewise.cluster.errors import ClusterError

MAX_ARRIVALS = 1_000_000


class Arrival(NamedTuple):
    """A request of a trace."""

    request_id: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    """An id for the content of each block of `PREFIX_BLOCK_TOKENS` prompt tokens; equal ids mean the same
    tokens after the same prefix. Empty: the prompt shares no prefix."""
    client: str = ""
    """The client that sends the request: clients share a machine, one client's requests keep their order."""


PREFIX_BLOCK_TOKENS = 512
"""Prompt tokens of a block of prefix ids, as in Mooncake's traces, the only public source of such ids."""


@dataclass(slots=True)
class Life:
    """The instants of one request, in seconds; NaN until they come. Machines are indices into the cluster."""

    arrival: Arrival
    prompt_machine: int = -1
    token_machine: int = -1
    prompt_start_s: float = float("nan")
    """The instant at which the first step begins that computes a part of the prompt."""
    prompt_end_s: float = float("nan")
    """The instant at which the last step ends that computes a part of the prompt."""
    kv_arrival_s: float = float("nan")
    """The instant at which keys and values are on the token machine; NaN if one machine does both phases."""
    first_token_s: float = float("nan")
    end_s: float = float("nan")

    @property
    def ttft_s(self) -> float:
        """Seconds from the arrival to the first token."""
        return self.first_token_s - self.arrival.at_s

    @property
    def e2e_s(self) -> float:
        """Seconds from the arrival to the last token."""
        return self.end_s - self.arrival.at_s

    @property
    def tbt_s(self) -> float:
        """Mean seconds between tokens; 0 for an answer of one token."""
        n_gaps = self.arrival.output_tokens - 1
        return (self.end_s - self.first_token_s) / n_gaps if n_gaps > 0 else 0.0

    @property
    def transfer_s(self) -> float:
        """Seconds from the prompt's end to the arrival of keys and values; NaN if they stayed."""
        return self.kv_arrival_s - self.prompt_end_s


def poisson(lengths: Sequence[tuple[int, int]], rate: float, duration_s: float, seed: int) -> list[Arrival]:
    """Draw requests at exponential intervals, with (prompt, output) tokens drawn from `lengths`. The same
    seed gives the same requests. Times do not depend on the lengths, so a rate's arrivals can be compared."""
    if not lengths:
        raise ClusterError("there is no request to draw lengths from")
    if not 0 < rate * duration_s <= MAX_ARRIVALS:
        raise ClusterError(
            f"{number(rate)} requests/s for {number(duration_s)} s are not between 1 and {MAX_ARRIVALS}"
            " requests"
        )
    clock, requests = random.Random(f"{seed}:clock"), random.Random(f"{seed}:prompts")
    arrivals: list[Arrival] = []
    now_s = clock.expovariate(1.0) / rate
    while now_s < duration_s:
        arrivals.append(Arrival(len(arrivals), now_s, *requests.choice(lengths)))
        now_s += clock.expovariate(1.0) / rate
    if not arrivals:
        raise ClusterError(f"no request arrives in {number(duration_s)} s at {number(rate)} requests/s")
    return arrivals
