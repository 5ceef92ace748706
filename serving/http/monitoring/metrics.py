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
from dataclasses import dataclass, field
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from phasewise.serving.engine.engine_host import InstanceState, Recoveries
from phasewise.serving.engine.messages import (
    Answer,
    EngineLoad,
    Failure,
    HandOverCounts,
    StepStats,
    Submit,
)
from phasewise.serving.http.answers.client import Observer
from phasewise.serving.http.errors import ApiError
from phasewise.serving.http.http_settings import RequestFacts
from phasewise.serving.http.monitoring.instance_metrics import (
    Family,
    Labels,
    Row,
    families,
    instance_families,
)
from phasewise.serving.http.monitoring.live import LiveView
from phasewise.serving.pools.contract import ALIGNMENT
from phasewise.serving.processes.headroom import malloc_bytes_in_use
from phasewise.tuner.plans import PHASES

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1)
_MOST_NAMED = 1000
"""Models, adapters and keys come and go; a counter with a line for each of them must not grow without end."""
Metric = TypeVar("Metric", Counter, Histogram)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Gauges:
    """Gauges that are read rather than observed, each when metrics are asked for."""

    load: Callable[[], EngineLoad | None] = lambda: None
    n_connections: Callable[[], int] = lambda: 0
    is_ready: Callable[[], bool] = lambda: False
    recoveries: Callable[[], Recoveries] = Recoveries
    n_without_database: Callable[[], int] = lambda: 0
    threads: Callable[[], Mapping[str, int]] = dict
    """Threads of each phase, as they run now; nothing where instances compute."""
    n_lengths_lost: Callable[[], int] = lambda: 0
    n_access_lines_lost: Callable[[], int] = lambda: 0
    joules: Callable[[], Mapping[str, float]] = dict
    phase_joules: Callable[[], Mapping[str, float]] = dict
    """Energy since the start, by zone of the machine; empty where it cannot be read."""
    models: Callable[[], ModelCounts | None] = lambda: None
    """Models that come and go; None where all stay."""
    instances: Callable[[], Sequence[InstanceState]] = tuple
    """Instances of pools; none where one engine does everything."""
    products: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By model: how many products the tuning database knows, by state, as they were at the start."""
    adapters: Callable[[], Sequence[Sequence[str]]] = tuple
    """For each adapter in memory the names that requests may give it."""


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """Models of a folder: those in memory now, and counts since the start."""

    loaded: int
    n_bytes: int
    loads: int
    failures: int
    unloads: int
    load_seconds: float


@dataclass(slots=True)
class _Life:
    labels: Labels
    of: tuple[str, str]
    """Model and adapter."""
    sent_ns: int
    in_shadow: bool = False
    first_ns: int | None = None
    last_ns: int = 0
    n_generated: int = 0


class Metrics(Observer):
    """Observes the traffic with the engine; `http` counts the answers, `gauges` gives the rest.

    models: ids of those that are served; None: they come and go. But for a single one, what is counted of
    requests, tokens, steps and KV slots has the label `model`.
    """

    def __init__(self, gauges: Gauges, models: Sequence[str] | None = ()) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second, unused line for each count
        self._is_by_model = models is None or len(models) > 1
        self._model: Labels = ("model",) if self._is_by_model else ()
        """The names of the labels that tell models apart."""
        self._of_models = [self._labels(model) for model in models or ()] if self._is_by_model else [()]
        self.registry = registry = CollectorRegistry()
        registry.register(_Read(gauges, self._model))
        self.threads = gauges.threads
        ProcessCollector(registry=registry)
        self.http = self._counter("http_responses", "answers", "path", "status")
        self._ended = self._counter("requests", "requests ended, by finish reason", *self._model, "reason")
        self._refused = self._counter("requests_rejected", "requests refused, by reason", "reason")
        self._slow = self._counter("slow_readers_cut", "connections closed because their reader stopped")
        self._prompt = self._counter("prompt_tokens", "tokens in prompts", *self._model)
        self._generated = self._counter("generated_tokens", "tokens generated", *self._model)
        by_key = "requests that a model was asked, by the label of their key"
        self._asked = self._counter("model_requests", by_key, "model", "adapter", "key")
        of_model = "tokens of prompts and answers, by model and adapter"
        self._of_model = self._counter("model_tokens", of_model, "model", "adapter", "kind")
        self._named: set[tuple[str, ...]] = set()
        """Labels that those two have: at most `_MOST_NAMED`."""
        self._ttft = self._histogram("ttft_seconds", "time to first token", _LATENCY_S)
        self._tpot = self._histogram("tpot_seconds", "time per token after the first", _PER_TOKEN_S)
        self._itl = self._histogram("itl_seconds", "time between two tokens", _PER_TOKEN_S)
        self._sequences = self._by_phase("batch_sequences", "sequences per step", _SIZES)
        self._tokens = self._by_phase("batch_tokens", "tokens per step", _SIZES)
        self._seconds = self._by_phase("step_seconds", "time per step", _PER_TOKEN_S)
        self._lives: dict[str, _Life] = {}
        self.live = LiveView()
        """The same for the page, in short."""

    def sent(self, request: Submit, facts: RequestFacts) -> None:
        labels = self._labels(request.model)
        of = (request.model, request.adapter)
        self._lives[request.request_id] = _Life(labels, of, time.perf_counter_ns(), request.in_shadow)
        n_prompt = len(request.prompt_token_ids)
        _child(self._prompt, labels).inc(n_prompt)
        self._of_model.labels(*self._bounded(*of, "prompt")).inc(n_prompt)

    def delivered(self, outs: Sequence[Answer | Failure], stats: StepStats | None) -> None:
        generated: dict[tuple[Labels, tuple[str, str]], int] = {}
        for out in outs:
            life = self._lives.get(out.request_id)
            if life is not None:  # else it is no more
                whose = (life.labels, life.of)
                generated[whose] = generated.get(whose, 0) + self._piece(out, life)
        for (labels, of), n_tokens in generated.items():
            if n_tokens:
                _child(self._generated, labels).inc(n_tokens)
                self._of_model.labels(*self._bounded(*of, "answer")).inc(n_tokens)
        if stats is not None:
            self._step(stats)

    def forgotten(self, request_id: str) -> None:
        """Its client left before it ended."""
        life = self._lives.pop(request_id, None)
        if life is not None:
            self._ended.labels(*life.labels, "aborted").inc()

    def asked(self, model: str, adapter: str, key: str) -> None:
        """A request for a model has been answered, or refused after it was read. key: the label."""
        self._asked.labels(*self._bounded(model, adapter, key)).inc()

    def _bounded(self, *labels: str) -> tuple[str, ...]:
        """Themselves, or `other` for each beyond those that are counted apart."""
        if labels in self._named:
            return labels
        if len(self._named) >= _MOST_NAMED:
            return ("other",) * len(labels)
        self._named.add(labels)
        return labels

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

    def _labels(self, model: str) -> Labels:
        return (model,) if self._is_by_model else ()

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"phasewise_{name}", meaning, labels, registry=self.registry)

    def _histogram(self, name: str, meaning: str, bounds: Sequence[float]) -> Histogram:
        metric = Histogram(f"phasewise_{name}", meaning, self._model, buckets=bounds, registry=self.registry)
        for labels in self._of_models:
            _child(metric, labels)
        return metric

    def _by_phase(self, name: str, meaning: str, bounds: Sequence[float]) -> Histogram:
        """By model and phase."""
        names = (*self._model, "phase")
        metric = Histogram(f"phasewise_{name}", meaning, names, buckets=bounds, registry=self.registry)
        for labels in self._of_models:
            for phase in PHASES:
                metric.labels(*labels, phase)
        return metric

    def _piece(self, out: Answer | Failure, life: _Life) -> int:
        """Tokens that came with it: none where the request failed."""
        if isinstance(out, Failure):
            self._end(out.request_id, "error")
            return 0
        if life.in_shadow:  # nobody waits for its tokens
            life.first_ns = out.at_ns
        elif life.first_ns is None:
            life.first_ns = out.at_ns
            ttft_s = (out.at_ns - life.sent_ns) / 1e9
            _child(self._ttft, life.labels).observe(ttft_s)
            self.live.ttft_ms.append(1e3 * ttft_s)
        else:
            _child(self._itl, life.labels).observe((out.at_ns - life.last_ns) / 1e9)
        life.last_ns = out.at_ns
        if out.finish_reason is not None:
            if out.n_generated > 1 and not life.in_shadow:
                tpot_s = (out.at_ns - life.first_ns) / 1e9 / (out.n_generated - 1)
                _child(self._tpot, life.labels).observe(tpot_s)
                self.live.tpot_ms.append(1e3 * tpot_s)
            self.live.n_ended += 1
            self._end(out.request_id, out.finish_reason)
        n_new = max(0, out.n_generated - life.n_generated)  # tokens held back may be sampled again
        life.n_generated += n_new
        return n_new

    def _end(self, request_id: str, reason: str) -> None:
        self._ended.labels(*self._lives.pop(request_id).labels, reason).inc()

    def _step(self, stats: StepStats) -> None:
        """Once a step, so on the way of every token: nothing that can wait for a scrape."""
        labels = (*self._labels(stats.model), stats.phase)
        self._sequences.labels(*labels).observe(stats.n_sequences)
        self._tokens.labels(*labels).observe(stats.n_tokens)
        self._seconds.labels(*labels).observe(stats.duration_ns / 1e9)
        self.live.tokens[stats.phase] += stats.n_tokens


def _child(metric: Metric, labels: Labels) -> Metric:
    return metric.labels(*labels) if labels else metric


class _Read(Collector):
    """Gauges of values known elsewhere, read when asked for. model: the label of what is known of each
    model, if any.
    """

    def __init__(self, gauges: Gauges, model: Labels) -> None:
        self._gauges = gauges
        self._model = model

    def collect(self) -> Iterator[Family]:
        gauges = self._gauges
        yield _gauge("ready", "1 where requests may come", gauges.is_ready())
        yield _gauge("connections", "open connections", gauges.n_connections())
        recoveries = gauges.recoveries()
        yield _count("ranks_replaced", "times that ranks were started anew", recoveries.ranks_replaced)
        rerun, continued = recoveries.requests_rerun, recoveries.answers_continued
        yield _count("requests_rerun", "requests run again from their beginning", rerun)
        yield _count("answers_continued", "begun answers that went on after a loss", continued)
        without = "starts, of instances too, that went on without the tuning database"
        yield _count("starts_without_database", without, gauges.n_without_database())
        yield from _threads(gauges)
        yield _gauge("python_blocks", "blocks of memory that Python has given out", sys.getallocatedblocks())
        malloc_bytes = malloc_bytes_in_use()
        if malloc_bytes is not None:
            yield _gauge("malloc_bytes", "bytes that malloc has given out", malloc_bytes)
        joules = gauges.joules()
        if joules:
            family = CounterMetricFamily("phasewise_energy_joules", "energy of the machine", labels=("zone",))
            for zone, spent in joules.items():
                family.add_metric((zone,), spent)
            yield family
            meaning = "energy of the machine, by the time of steps; idle: of no step"
            family = CounterMetricFamily("phasewise_energy_phase_joules", meaning, labels=("phase",))
            for phase, spent in gauges.phase_joules().items():
                family.add_metric((phase,), spent)
            yield family
        yield _gauge("energy_measured", "1 where the machine's energy counters can be read", bool(joules))
        models = gauges.models()
        if models is not None:
            yield from _of_models(models)
        if gauges.products:
            yield self._of_products(gauges.products)
        yield _count("lengths_lost", "lines the length log does not have", gauges.n_lengths_lost())
        yield _count("access_lines_lost", "lines the access log does not have", gauges.n_access_lines_lost())
        adapters = gauges.adapters()
        if adapters:
            yield lora_requests_info(adapters)
        load = gauges.load()
        if load is not None:
            yield from _of_loads(self._by_labels(load), self._model)
            yield kv_cache_info(self._by_labels(load), self._model)
            if load.hand_overs is not None:
                yield from _of_hand_overs(load.hand_overs)
        yield from instance_families(gauges.instances())

    def _of_products(self, products: Mapping[str, Mapping[str, int]]) -> Family:
        family = GaugeMetricFamily(
            "phasewise_products",
            "products of the model in the tuning database at the start, by state",
            labels=(*self._model, "state"),
        )
        for model, states in products.items():
            for state, count in states.items():
                family.add_metric((model, state) if self._model else (state,), count)
        return family

    def _by_labels(self, load: EngineLoad) -> dict[Labels, EngineLoad]:
        if not self._model:
            return {(): load}
        return {(name,): own for name, own in (load.by_model or {}).items()}


_OF_LOADS: tuple[Row, ...] = (
    ("requests_waiting", "requests without KV slots", "n_waiting", GaugeMetricFamily),
    ("clients_waiting", "clients that take turns at being admitted", "n_clients_waiting", GaugeMetricFamily),
    ("requests_running", "requests with KV slots", "n_running", GaugeMetricFamily),
    ("requests_of_batches", "requests in shadow, waiting or running", "n_in_shadow", GaugeMetricFamily),
    ("kv_slots_used", "KV slots in use", "kv_slots_used", GaugeMetricFamily),
    ("kv_slots", "KV slots in all", "kv_slots", GaugeMetricFamily),
    ("kv_use", "share of the KV slots in use, from 0 to 1", "kv_use", GaugeMetricFamily),
    ("preemptions", "running requests that were queued again", "preemptions", CounterMetricFamily),
    ("prefix_hits", "requests that took over a prompt computed before", "prefix_hits", CounterMetricFamily),
    ("prefix_tokens_reused", "tokens not computed again", "prefix_tokens_reused", CounterMetricFamily),
    ("phase_switches", "changes between prefill and decode", "phase_switches", CounterMetricFamily),
    ("steps_over_tpot", "decode steps that took longer than --tpot", "steps_over_tpot", CounterMetricFamily),
)
_OF_DRAFTS: tuple[Row, ...] = (
    ("drafted_tokens", "tokens of answers that were drafted", "drafted", CounterMetricFamily),
    ("drafted_tokens_accepted", "those of them that came", "accepted", CounterMetricFamily),
)
_OF_STORES: tuple[Row, ...] = (
    ("stored_prefix_hits", "requests whose beginning was read from disk", "hits", CounterMetricFamily),
    ("stored_prefix_tokens", "tokens read from disk, not computed", "tokens_restored", CounterMetricFamily),
    ("stored_prefix_read_bytes", "bytes of prefixes read", "bytes_read", CounterMetricFamily),
    ("stored_prefix_written_bytes", "bytes of prefixes written", "bytes_written", CounterMetricFamily),
    ("stored_prefix_kept_bytes", "bytes in the prefix cache's folder", "bytes_kept", GaugeMetricFamily),
    ("stored_prefix_evictions", "blocks removed for room", "evictions", CounterMetricFamily),
    ("stored_prefix_writes_failed", "prefixes that were not kept", "writes_failed", CounterMetricFamily),
)
_OF_POOLS: tuple[Row, ...] = (
    (
        "kv_slots_largest_reservable",
        "KV slots a request could get now",
        "largest_reservable",
        GaugeMetricFamily,
    ),
    ("kv_migrations", "requests moved to a larger block", "migrations", CounterMetricFamily),
    ("kv_overflows", "requests that outgrew their first block", "overflows", CounterMetricFamily),
    ("kv_to_large", "requests sent to the large bucket at once", "to_large", CounterMetricFamily),
    ("kv_mispredictions", "answers that fell into another bucket", "mispredicted", CounterMetricFamily),
    ("kv_bucket_refreshes", "times that new bounds came into use", "refreshes", CounterMetricFamily),
)
_OF_BUCKETS: tuple[Row, ...] = (
    ("kv_bucket_bound_tokens", "longest answer a bucket is meant for", "bound_tokens", GaugeMetricFamily),
    ("kv_bucket_blocks_used", "blocks in use", "blocks_used", GaugeMetricFamily),
    ("kv_bucket_slots_used", "KV slots in use", "slots_used", GaugeMetricFamily),
    ("kv_bucket_slots_ended", "KV slots of requests that ended", "slots_ended", CounterMetricFamily),
    ("kv_bucket_slots_wasted", "those of them that were never used", "slots_wasted", CounterMetricFamily),
)


def _of_loads(loads: Mapping[Labels, EngineLoad], names: Labels) -> Iterator[Family]:
    """By the labels `names`."""
    pools = {labels: load.pool for labels, load in loads.items() if load.pool is not None}
    drafts = {labels: load.drafts for labels, load in loads.items() if load.drafts is not None}
    buckets = {(*labels, bucket.name): bucket for labels, pool in pools.items() for bucket in pool.buckets}
    yield from families(_OF_LOADS, loads, names)
    yield from families(_OF_DRAFTS, drafts, names)
    yield from families(_OF_POOLS, pools, names)
    yield from families(_OF_BUCKETS, buckets, (*names, "bucket"))
    stores = {labels: load.stored for labels, load in loads.items() if load.stored is not None}
    yield from families(_OF_STORES, stores, names)
    if stores:
        name, meaning = "phasewise_stored_prefix_refused", "records of prefixes not believed, by reason"
        refused = CounterMetricFamily(name, meaning, labels=(*names, "reason"))
        for labels, store in stores.items():
            for reason, count in sorted((store.refused or {}).items()):
                refused.add_metric((*labels, reason), count)
        yield refused


def _of_models(counts: ModelCounts) -> Iterator[Family]:
    yield _gauge("models_loaded", "models in memory", counts.loaded)
    yield _gauge("models_bytes", "bytes that they take of --models-memory", counts.n_bytes)
    yield _count("model_loads", "models loaded", counts.loads)
    yield _count("model_load_failures", "models that could not be loaded", counts.failures)
    yield _count("model_unloads", "models unloaded", counts.unloads)
    yield _count("model_load_seconds", "time of all loads", counts.load_seconds)


def _of_hand_overs(counts: HandOverCounts) -> Iterator[Family]:
    yield _count("hand_overs", "requests divided between two instances", counts.divided)
    yield _by_reason("hand_overs_failed", "hand-overs that failed", counts.failed)
    yield _by_reason("kv_frames_refused", "frames of keys and values thrown away", counts.frames_refused)


def _by_reason(name: str, meaning: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"phasewise_{name}", f"{meaning}, by reason", labels=("reason",))
    for reason, count in sorted(counts.items()):
        family.add_metric((reason,), count)
    return family


def _threads(gauges: Gauges) -> Iterator[Family]:
    """The plans in use, where the engine follows its cores."""
    threads = gauges.threads()
    if not threads:
        return
    family = GaugeMetricFamily("phasewise_threads", "threads of a phase, as it runs now", labels=("phase",))
    for phase, count in threads.items():
        family.add_metric((phase,), count)
    yield family
    moves = "times that an engine went on by other plans because its cores had changed"
    yield _count("core_moves", moves, gauges.recoveries().core_moves)


def _gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"phasewise_{name}", meaning, value=value)


def _count(name: str, meaning: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"phasewise_{name}", meaning, value=value)


def kv_cache_info(loads: Mapping[tuple[str, ...], EngineLoad], names: Sequence[str]) -> GaugeMetricFamily:
    """Blocks of the KV cache, by the labels `names`. A picker that remembers prompts knows from it how many
    tokens one block holds, and when a server has forgotten the oldest.
    """
    family = GaugeMetricFamily(
        "phasewise_kv_cache_info",
        "always 1; how the KV cache is divided",
        labels=(*names, "block_size", "num_gpu_blocks"),
    )
    for labels, load in loads.items():
        family.add_metric((*labels, str(ALIGNMENT), str(load.kv_slots // ALIGNMENT)), 1)
    return family


def lora_requests_info(adapters: Sequence[Sequence[str]]) -> GaugeMetricFamily:
    """Adapters, each by the names that requests may give it. All are in memory from the start, and a step may
    use every one: none is loaded for a request, so none waits.
    """
    family = GaugeMetricFamily(
        "phasewise_lora_requests_info",
        "when it was read, in Unix time; which adapters are in memory",
        labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    )
    names = ",".join(name for adapter in adapters for name in adapter)
    family.add_metric((str(len(adapters)), names, ""), time.time())
    return family
