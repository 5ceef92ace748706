"""The settings of a load test, as its user states them; `assemble.load_test_of` makes a `LoadTest`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from phasewise.loadtest.arrivals import Arrivals


@dataclass(frozen=True)
class SendingTimes:
    """When requests are sent: at a rate (requests/s), at a trace's arrivals, by a day's curve, which takes
    `day_s`, or by clients that wait.
    """

    rate: float | None = None
    arrivals: Arrivals = Arrivals.poisson
    burstiness: float = 1.0
    concurrency: int | None = None
    trace: Path | None = None
    time_scale: float = 1.0
    duration_s: float | None = None
    daily: str | None = None
    day_s: float = 240.0


@dataclass(frozen=True)
class SentLengths:
    """The number of requests, and their lengths in tokens: fixed, drawn from a distribution, or the trace's.

    `turns`: of each conversation, whose turns have the lengths of requests in turn; `shared_prefix`: tokens
    that all of them begin with. `seed`: of arrivals, lengths and prompts; None: those of seed 0, and prompts
    that no run has sent before, so that none is in the server's cache.
    """

    requests: int | None = None
    input_len: int | None = None
    output_len: int | None = None
    lengths: str | None = None
    length_scale: float = 1.0
    turns: int = 1
    shared_prefix: int = 0
    warmup: int = 2
    seed: int | None = None


@dataclass(frozen=True)
class Asking:
    """The form of a request. `endpoint`: completions or chat. `extra_body`: a JSON object as text."""

    endpoint: str = "completions"
    ignore_eos: bool = False
    temperature: float = 0.0
    extra_body: str | None = None
    text_prompts: bool = False
    api_key: str | None = field(default=None, repr=False)
    unix_socket: Path | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Promises:
    """Latency limits, and the search for the highest rate that keeps them."""

    goodput: str | None = None
    slo_scale: float = 1.0
    find_rate: bool = False
    over_offline: bool = False
    probe_s: float = 20.0
    most_probes: int = 16
    votes: int = 3
