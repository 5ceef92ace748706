"""Prometheus metrics of one server, in a registry of its own.

The instants are those of a request's life: sent, first token, last token. TTFT = first token - sent;
TPOT = (last token - first token) / (tokens - 1); ITL = a token - the one before. Tokens of one step, as
drafts give them, come together: ITL is then from step to step.
What the engine counts itself is read when /metrics is asked for. All of it happens on the event loop.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from phasewise.serving.headroom import malloc_bytes_in_use
from phasewise.serving.http.errors import ApiError
from phasewise.serving.http.histogram import LocalHistogram, LocalHistograms
from phasewise.serving.http.http_settings import RequestFacts
from phasewise.serving.messages import Answer, Delivery, EngineLoad, Failure, StepStats, Submit
from phasewise.tuner.plans import Phase

if TYPE_CHECKING:
    from phasewise.serving.pools.contract import PoolStats

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)

Family = CounterMetricFamily | GaugeMetricFamily


@dataclass(frozen=True)
class Gauges:
    """What is read rather than observed, each when metrics are asked for."""

    load: Callable[[], EngineLoad | None] = lambda: None
    n_connections: Callable[[], int] = lambda: 0
    is_ready: Callable[[], bool] = lambda: False
    n_ranks_replaced: Callable[[], int] = lambda: 0
    n_requests_rerun: Callable[[], int] = lambda: 0
    n_lengths_lost: Callable[[], int] = lambda: 0


@dataclass(slots=True)
class _Life:
    sent_ns: int
    first_ns: int | None = None
    last_ns: int = 0
    n_generated: int = 0


class Metrics:
    """Observes the traffic with the engine; `http` counts the answers, `gauges` gives the rest."""

    def __init__(self, gauges: Gauges) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second, unused line for each count
        self.registry = registry = CollectorRegistry()
        registry.register(_Read(gauges))
        ProcessCollector(registry=registry)
        self.http = self._counter("http_responses", "answers", "path", "status")
        self._ended = self._counter("requests", "requests ended, by finish reason", "reason")
        self._refused = self._counter("requests_rejected", "requests refused, by reason", "reason")
        self._slow = self._counter("slow_readers_cut", "connections closed because their reader stopped")
        self._prompt = self._counter("prompt_tokens", "tokens in prompts")
        self._generated = self._counter("generated_tokens", "tokens generated")
        self._ttft = self._histogram("ttft_seconds", "time to first token", _LATENCY_S)
        self._tpot = self._histogram("tpot_seconds", "time per token after the first", _PER_TOKEN_S)
        self._itl = self._histogram("itl_seconds", "time between two tokens", _PER_TOKEN_S)
        self._sequences = self._by_phase("batch_sequences", "sequences per step", _SIZES)
        self._tokens = self._by_phase("batch_tokens", "tokens per step", _SIZES)
        self._seconds = self._by_phase("step_seconds", "time per step", _PER_TOKEN_S)
        self._lives: dict[str, _Life] = {}

    def sent(self, request: Submit, facts: RequestFacts) -> None:
        self._lives[request.request_id] = _Life(time.perf_counter_ns())
        self._prompt.inc(len(request.prompt_token_ids))

    def delivered(self, delivery: Delivery) -> None:
        n_generated = sum(self._piece(out) for out in delivery.outs)
        if n_generated:
            self._generated.inc(n_generated)
        if delivery.stats is not None:
            self._step(delivery.stats)

    def forgotten(self, request_id: str) -> None:
        """Its client left before it ended."""
        if self._lives.pop(request_id, None) is not None:
            self._ended.labels("aborted").inc()

    def refused(self, error: ApiError) -> None:
        """An error of ours is being answered."""
        self._refused.labels(error.code or f"status_{error.status}").inc()

    def answered_by_connection(self, status: int) -> None:
        """An answer below the application, to what is no request yet: no path is known."""
        self.http.labels("none", status).inc()

    def slow_reader_cut(self) -> None:
        self._slow.inc()

    def exposition(self) -> bytes:
        """All of it, in Prometheus's text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"phasewise_{name}", meaning, labels, registry=self.registry)

    def _histogram(self, name: str, meaning: str, bounds: Sequence[float]) -> LocalHistogram:
        histogram = LocalHistogram(bounds)
        self.registry.register(LocalHistograms(f"phasewise_{name}", meaning, (), {(): histogram}))
        return histogram

    def _by_phase(self, name: str, meaning: str, bounds: Sequence[float]) -> dict[Phase, LocalHistogram]:
        histograms: dict[Phase, LocalHistogram] = {
            "prefill": LocalHistogram(bounds),
            "decode": LocalHistogram(bounds),
        }
        by_labels: dict[tuple[str, ...], LocalHistogram] = {
            (phase,): histogram for phase, histogram in histograms.items()
        }
        self.registry.register(LocalHistograms(f"phasewise_{name}", meaning, ("phase",), by_labels))
        return histograms

    def _piece(self, out: Answer | Failure) -> int:
        """Tokens that came with it: none where the request is no more, or failed."""
        life = self._lives.get(out.request_id)
        if life is None:
            return 0
        if isinstance(out, Failure):
            self._end(out.request_id, "error")
            return 0
        if life.first_ns is None:
            life.first_ns = out.at_ns
            self._ttft.observe((out.at_ns - life.sent_ns) / 1e9)
        else:
            self._itl.observe((out.at_ns - life.last_ns) / 1e9)
        life.last_ns = out.at_ns
        if out.finish_reason is not None:
            if out.n_generated > 1:
                self._tpot.observe((out.at_ns - life.first_ns) / 1e9 / (out.n_generated - 1))
            self._end(out.request_id, out.finish_reason)
        n_new, life.n_generated = out.n_generated - life.n_generated, out.n_generated
        return n_new

    def _end(self, request_id: str, reason: str) -> None:
        del self._lives[request_id]
        self._ended.labels(reason).inc()

    def _step(self, stats: StepStats) -> None:
        """Once a step, so on the way of every token: nothing that can wait for a scrape."""
        self._sequences[stats.phase].observe(stats.n_sequences)
        self._tokens[stats.phase].observe(stats.n_tokens)
        self._seconds[stats.phase].observe(stats.duration_ns / 1e9)


class _Read(Collector):
    """What is known elsewhere, as it is now."""

    def __init__(self, gauges: Gauges) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[Family]:
        gauges = self._gauges
        yield _gauge("ready", "1 where requests may come", gauges.is_ready())
        yield _gauge("connections", "open connections", gauges.n_connections())
        yield _count("ranks_replaced", "times that ranks were started anew", gauges.n_ranks_replaced())
        yield _count("requests_rerun", "requests run again on new ranks", gauges.n_requests_rerun())
        yield _gauge("python_blocks", "blocks of memory that Python has given out", sys.getallocatedblocks())
        malloc_bytes = malloc_bytes_in_use()
        if malloc_bytes is not None:
            yield _gauge("malloc_bytes", "bytes that malloc has given out", malloc_bytes)
        yield _count("lengths_lost", "lines the length log does not have", gauges.n_lengths_lost())
        load = gauges.load()
        if load is not None:
            yield from _of_load(load)
            if load.pool is not None:
                yield from _of_pool(load.pool)


def _of_load(load: EngineLoad) -> Iterator[Family]:
    yield _gauge("requests_waiting", "requests without KV slots", load.n_waiting)
    yield _gauge("clients_waiting", "clients that take turns at being admitted", load.n_clients_waiting)
    yield _gauge("requests_running", "requests with KV slots", load.n_running)
    yield _gauge("kv_slots_used", "KV slots in use", load.kv_slots_used)
    yield _gauge("kv_slots", "KV slots in all", load.kv_slots)
    yield _count("preemptions", "running requests that were queued again", load.preemptions)
    yield _count("prefix_hits", "requests that took over a prompt computed before", load.prefix_hits)
    yield _count("prefix_tokens_reused", "tokens not computed again", load.prefix_tokens_reused)
    yield _count("phase_switches", "changes between prefill and decode", load.phase_switches)
    yield _count("steps_over_tpot", "decode steps that took longer than --tpot", load.steps_over_tpot)
    if load.drafts is not None:
        accepted, rejected = load.drafts
        yield _count("drafted_tokens", "tokens of answers that were drafted", accepted + rejected)
        yield _count("drafted_tokens_accepted", "those of them that came", accepted)
    if load.hand_overs is not None:
        yield _count("hand_overs", "requests divided between two instances", load.hand_overs.divided)
        yield _by_reason("hand_overs_failed", "hand-overs that failed", load.hand_overs.failed)
        yield _by_reason(
            "kv_frames_refused", "frames of keys and values thrown away", load.hand_overs.frames_refused
        )


def _by_reason(name: str, meaning: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"phasewise_{name}", f"{meaning}, by reason", labels=("reason",))
    for reason, count in sorted(counts.items()):
        family.add_metric((reason,), count)
    return family


def _of_pool(pool: PoolStats) -> Iterator[Family]:
    yield _gauge("kv_slots_largest_reservable", "KV slots a request could get now", pool.largest_reservable)
    yield _count("kv_migrations", "requests moved to a larger block", pool.migrations)
    yield _count("kv_overflows", "requests that outgrew their first block", pool.overflows)
    yield _count("kv_to_large", "requests sent to the large bucket at once", pool.to_large)
    yield _count("kv_mispredictions", "answers that fell into another bucket", pool.mispredicted)
    yield _count("kv_bucket_refreshes", "times that new bounds came into use", pool.refreshes)
    for name, meaning, field, family in _OF_BUCKETS:
        metric = family(f"phasewise_{name}", meaning, labels=["bucket"])
        for bucket in pool.buckets:
            metric.add_metric([bucket.name], getattr(bucket, field))
        yield metric


_OF_BUCKETS: tuple[tuple[str, str, str, type[Family]], ...] = (
    ("kv_bucket_bound_tokens", "longest answer a bucket is meant for", "bound_tokens", GaugeMetricFamily),
    ("kv_bucket_blocks_used", "blocks in use", "blocks_used", GaugeMetricFamily),
    ("kv_bucket_slots_used", "KV slots in use", "slots_used", GaugeMetricFamily),
    ("kv_bucket_slots_ended", "KV slots of requests that ended", "slots_ended", CounterMetricFamily),
    ("kv_bucket_slots_wasted", "those of them that were never used", "slots_wasted", CounterMetricFamily),
)


def _gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"phasewise_{name}", meaning, value=value)


def _count(name: str, meaning: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"phasewise_{name}", meaning, value=value)
