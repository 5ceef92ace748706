"""The outcome of one request of a load: its latencies, or why it failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class FailureKind(StrEnum):
    """The reason that a request has no whole answer."""

    refused = "refused"
    """No connection could be made."""
    overloaded = "http_429"
    rejected = "http_4xx"
    broken_server = "http_5xx"
    broken_stream = "broken_stream"
    """The connection closed before the answer was finished."""
    garbage = "garbage"
    """The answer is not a stream of completions."""
    stream_error = "stream_error"
    """The server said in the stream that it failed."""
    timeout = "timeout"
    unfinished = "unfinished"
    """Cut off by this client: Ctrl-C, or a probe that was already decided."""


@dataclass(slots=True)
class RequestOutcome:
    """Instants of one request, in seconds; `start_s` on the run's clock, everything else after it.

    Tokens come as events; one event may bring several. `latency_s` ends with the last event of a choice, as
    in vLLM's benchmark.
    """

    start_s: float
    prompt_tokens: int
    output_tokens: int = 0
    ttft_s: float = 0.0
    latency_s: float = 0.0
    itls_s: list[float] = field(default_factory=list)
    failure: FailureKind | None = None
    error: str = ""
    retry_after_s: float | None = None
    cached_tokens: int | None = None
    """Tokens of the prompt that the server did not compute again; None: it does not say."""
    number: int = 0
    """Place of the request in its load."""

    @property
    def is_complete(self) -> bool:
        return self.failure is None

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None where there is only one."""
        if self.output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)
