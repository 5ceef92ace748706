"""Prometheus metrics of one server, in a registry of its own.

The instants are those of a request's life: sent, first token, last token. TTFT = first token - sent;
TPOT = (last token - first token) / (tokens - 1).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from phasewise.serving.http.errors import ApiError
from phasewise.serving.messages import Answer, Delivery, EngineLoad, Failure, StepStats, Submit

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(slots=True)
class _Life:
    sent_ns: int
    first_ns: int | None = None


class Metrics:
    """Observes the traffic with the engine; `http` counts the answers, `read_load` gives the gauges."""

    def __init__(self, read_load: Callable[[], EngineLoad | None]) -> None:
        self._read_load = read_load
        self.registry = registry = CollectorRegistry()
        self.http = Counter("phasewise_http_responses", "answers", ["path", "status"], registry=registry)
        self._ended = Counter(
            "phasewise_requests", "requests ended, by finish reason", ["reason"], registry=registry
        )
        self._refused = Counter(
            "phasewise_requests_rejected", "requests refused, by reason", ["reason"], registry=registry
        )
        self._prompt = Counter("phasewise_prompt_tokens", "tokens in prompts", registry=registry)
        self._generated = Counter("phasewise_generated_tokens", "tokens generated", registry=registry)
        self._ttft = Histogram(
            "phasewise_ttft_seconds", "time to first token", buckets=_LATENCY_S, registry=registry
        )
        self._tpot = Histogram(
            "phasewise_tpot_seconds",
            "time per token after the first",
            buckets=_PER_TOKEN_S,
            registry=registry,
        )
        self._build_step_metrics()
        self._lives: dict[str, _Life] = {}

    def sent(self, request: Submit) -> None:
        self._lives[request.request_id] = _Life(time.perf_counter_ns())
        self._prompt.inc(len(request.prompt_token_ids))

    def delivered(self, delivery: Delivery) -> None:
        for out in delivery.outs:
            self._piece(out)
        if delivery.stats is not None:
            self._step(delivery.stats)

    def forgotten(self, request_id: str) -> None:
        """Its client left before it ended."""
        if self._lives.pop(request_id, None) is not None:
            self._ended.labels("aborted").inc()

    def refused(self, error: ApiError) -> None:
        """An error of ours is being answered."""
        self._refused.labels(error.code or f"status_{error.status}").inc()

    def exposition(self) -> bytes:
        """All of it, in Prometheus's text format."""
        self._set_gauges()
        return generate_latest(self.registry)

    def _build_step_metrics(self) -> None:
        registry = self.registry
        self._waiting = Gauge("phasewise_requests_waiting", "requests without KV slots", registry=registry)
        self._running = Gauge("phasewise_requests_running", "requests with KV slots", registry=registry)
        self._kv_used = Gauge("phasewise_kv_slots_used", "KV slots in use", registry=registry)
        self._kv_slots = Gauge("phasewise_kv_slots", "KV slots in all", registry=registry)
        sequences = _by_phase("phasewise_batch_sequences", "sequences per step", _SIZES, registry)
        tokens = _by_phase("phasewise_batch_tokens", "tokens per step", _SIZES, registry)
        seconds = _by_phase("phasewise_step_seconds", "time per step", _PER_TOKEN_S, registry)
        self._steps = {
            phase: (sequences.labels(phase), tokens.labels(phase), seconds.labels(phase))
            for phase in ("prefill", "decode")
        }

    def _piece(self, out: Answer | Failure) -> None:
        life = self._lives.get(out.request_id)
        if life is None:
            return
        if isinstance(out, Failure):
            self._end(out.request_id, "error")
            return
        self._generated.inc()
        if life.first_ns is None:
            life.first_ns = out.at_ns
            self._ttft.observe((out.at_ns - life.sent_ns) / 1e9)
        if out.finish_reason is not None:
            if out.n_generated > 1:
                self._tpot.observe((out.at_ns - life.first_ns) / 1e9 / (out.n_generated - 1))
            self._end(out.request_id, out.finish_reason)

    def _end(self, request_id: str, reason: str) -> None:
        del self._lives[request_id]
        self._ended.labels(reason).inc()

    def _step(self, stats: StepStats) -> None:
        """Once a step, so on the way of every token: nothing that can wait for a scrape."""
        sequences, tokens, seconds = self._steps[stats.phase]
        sequences.observe(stats.n_sequences)
        tokens.observe(stats.n_tokens)
        seconds.observe(stats.duration_ns / 1e9)

    def _set_gauges(self) -> None:
        load = self._read_load()
        if load is not None:
            self._waiting.set(load.n_waiting)
            self._running.set(load.n_running)
            self._kv_used.set(load.kv_slots_used)
            self._kv_slots.set(load.kv_slots)


def _by_phase(name: str, meaning: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(name, meaning, ["phase"], buckets=buckets, registry=registry)
