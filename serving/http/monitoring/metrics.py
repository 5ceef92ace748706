"""Prometheus metrics of one server, in a separate registry, collected on the event loop. Times are those of a
request's life: TTFT = first token - sent; TPOT = (last token - first token) / (tokens - 1); ITL = a token -
the one before. Draft tokens accepted in one step come together: ITL is then from step to step. Values that
the engine counts are read when /metrics is requested."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

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
from phasewise.serving.engine.messages import Answer, EngineLoad, HandOverCounts, StepStats
from phasewise.serving.http.answers.client import Observer, RequestLife
from phasewise.serving.http.errors import ApiError
from phasewise.serving.http.models.model_shelf import ShelfCounts
from phasewise.serving.pools.contract import ALIGNMENT
from phasewise.serving.processes.headroom import malloc_bytes_in_use
from phasewise.tuner.plans import PHASES

if TYPE_CHECKING:
    from phasewise.serving.embedding.lane import Lane

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1)
Labels = tuple[str, ...]
Metric = TypeVar("Metric", Counter, Histogram)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Gauges:
    """Functions that read gauges, called when metrics are requested."""

    load: Callable[[], EngineLoad | None] = lambda: None
    n_connections: Callable[[], int] = lambda: 0
    is_ready: Callable[[], bool] = lambda: False
    recoveries: Callable[[], Recoveries] = Recoveries
    n_without_database: Callable[[], int] = lambda: 0
    threads: Callable[[], Mapping[str, int]] = dict
    """Reads the number of threads of each phase; empty where instances compute."""
    n_lengths_lost: Callable[[], int] = lambda: 0
    n_access_lines_lost: Callable[[], int] = lambda: 0
    models: Callable[[], ShelfCounts | None] = lambda: None
    """Reads the counts of models loaded on demand; None where all models stay."""
    instances: Callable[[], Sequence[InstanceState]] = tuple
    """Reads the states of the instances of pools; empty where one engine computes everything."""
    products: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Products in the tuning database at the start: model to state to count."""
    adapters: Callable[[], Sequence[Sequence[str]]] = tuple
    """Reads, for each adapter in memory, the names that requests may give it."""
    lanes: Callable[[], Sequence[Lane]] = tuple
    """Reads the lanes of the devices that embed; empty where none does."""


class Metrics(Observer):
    """Collects metrics of the requests and answers. `http`: counts the answers. `gauges`: reads all other
    values. `models`: ids of the served models; None: loaded on demand. With more than one model, metrics of
    requests, tokens, steps and KV slots have the label `model`."""

    def __init__(self, gauges: Gauges, models: Sequence[str] | None = ()) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second, unused line for each count
        self._is_by_model = models is None or len(models) > 1
        self._model: Labels = ("model",) if self._is_by_model else ()
        """Label names that tell models apart: `model`, or none with one model."""
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
        self._ttft = self._histogram("ttft_seconds", "time to first token", _LATENCY_S)
        self._tpot = self._histogram("tpot_seconds", "time per token after the first", _PER_TOKEN_S)
        self._itl = self._histogram("itl_seconds", "time between two tokens", _PER_TOKEN_S)
        self._sequences = self._histogram("batch_sequences", "sequences per step", _SIZES, "phase")
        self._tokens = self._histogram("batch_tokens", "tokens per step", _SIZES, "phase")
        self._seconds = self._histogram("step_seconds", "time per step", _PER_TOKEN_S, "phase")

    def sent(self, life: RequestLife) -> None:
        _child(self._prompt, self._labels(life.request.model)).inc(len(life.request.prompt_token_ids))

    def came(self, life: RequestLife, piece: Answer) -> None:
        labels = self._labels(life.request.model)
        if life.request.in_shadow:
            pass  # nobody waits for its tokens
        elif life.first_ns is None:
            _child(self._ttft, labels).observe((piece.at_ns - life.sent_ns) / 1e9)
        else:
            _child(self._itl, labels).observe((piece.at_ns - life.last.at_ns) / 1e9)
        if piece.n_generated > life.n_generated:  # tokens held back may be sampled again
            _child(self._generated, labels).inc(piece.n_generated - life.n_generated)

    def ended(self, life: RequestLife) -> None:
        labels, last = self._labels(life.request.model), life.last
        if last.finish_reason is not None and last.n_generated > 1 and not life.request.in_shadow:
            answering_s = (last.at_ns - (life.first_ns or 0)) / 1e9
            _child(self._tpot, labels).observe(answering_s / (last.n_generated - 1))
        self._ended.labels(*labels, life.reason).inc()

    def stepped(self, stats: StepStats) -> None:
        """Record one engine step; values that can wait for a scrape are not computed here."""
        labels = (*self._labels(stats.model), stats.phase)
        self._sequences.labels(*labels).observe(stats.n_sequences)
        self._tokens.labels(*labels).observe(stats.n_tokens)
        self._seconds.labels(*labels).observe(stats.duration_ns / 1e9)

    def refused(self, error: ApiError) -> None:
        """Count an error answer by its code."""
        self._refused.labels(error.code or f"status_{error.status}").inc()

    def answered_by_connection(self, status: int) -> None:
        """Count an answer that the connection sent before the application saw a request."""
        self.http.labels("none", status).inc()

    def slow_reader_cut(self) -> None:
        self._slow.inc()

    def exposition(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def _labels(self, model: str) -> Labels:
        return (model,) if self._is_by_model else ()

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"phasewise_{name}", meaning, labels, registry=self.registry)

    def _histogram(self, name: str, meaning: str, bounds: Sequence[float], *more: str) -> Histogram:
        """Make a histogram with labels for the model and `more`: `phase`, or none."""
        names = (*self._model, *more)
        metric = Histogram(f"phasewise_{name}", meaning, names, buckets=bounds, registry=self.registry)
        phases: list[Labels] = [(phase,) for phase in PHASES] if more else [()]
        for model, phase in product(self._of_models, phases):
            _child(metric, (*model, *phase))
        return metric


def _child(metric: Metric, labels: Labels) -> Metric:
    return metric.labels(*labels) if labels else metric


class _Read(Collector):
    """Reads the gauges when metrics are requested. `model`: label names that tell models apart."""

    def __init__(self, gauges: Gauges, model: Labels) -> None:
        self._gauges = gauges
        self._model = model

    def collect(self) -> Iterator[Family]:
        gauges, recoveries = self._gauges, self._gauges.recoveries()
        yield _metric(GAUGE, "ready", "1 where requests may come", gauges.is_ready())
        yield _metric(GAUGE, "connections", "open connections", gauges.n_connections())
        for name, meaning, count in (
            ("ranks_replaced", "times that ranks were started anew", recoveries.ranks_replaced),
            ("requests_rerun", "requests run again from their beginning", recoveries.requests_rerun),
            ("answers_continued", "begun answers that went on after a loss", recoveries.answers_continued),
            (
                "starts_without_database",
                "starts, of instances too, that went on without the tuning database",
                gauges.n_without_database(),
            ),
            ("lengths_lost", "lines the length log does not have", gauges.n_lengths_lost()),
            ("access_lines_lost", "lines the access log does not have", gauges.n_access_lines_lost()),
        ):
            yield _metric(COUNTER, name, meaning, count)
        threads: dict[Labels, int] = {(phase,): count for phase, count in gauges.threads().items()}
        if threads:
            yield _metric(GAUGE, "threads", "threads of a phase, as it runs now", threads, ("phase",))
            moves = "times that an engine went on by other plans because its cores had changed"
            yield _metric(COUNTER, "core_moves", moves, recoveries.core_moves)
        yield _metric(
            GAUGE, "python_blocks", "blocks of memory that Python has given out", sys.getallocatedblocks()
        )
        if (malloc_bytes := malloc_bytes_in_use()) is not None:
            yield _metric(GAUGE, "malloc_bytes", "bytes that malloc has given out", malloc_bytes)
        if (models := gauges.models()) is not None:
            yield from _of_rows(_OF_MODELS, {(): models})
        if gauges.products:
            states: dict[Labels, int] = {
                (model, state) if self._model else (state,): count
                for model, states in gauges.products.items()
                for state, count in states.items()
            }
            meaning = "products of the model in the tuning database at the start, by state"
            yield _metric(GAUGE, "products", meaning, states, (*self._model, "state"))
        if adapters := gauges.adapters():
            yield _lora_requests_info(adapters)
        if (load := gauges.load()) is not None:
            loads: dict[Labels, EngineLoad] = (
                {(): load} if not self._model else {(name,): of for name, of in (load.by_model or {}).items()}
            )
            yield from _of_loads(loads, self._model)
            if load.hand_overs is not None:
                yield from _of_hand_overs(load.hand_overs)
        if instances := gauges.instances():
            yield from _of_instances({(state.name, state.role): state for state in instances})
        lanes: dict[Labels, Lane] = {(lane.queue.name,): lane for lane in gauges.lanes()}
        yield from _of_rows(_OF_LANES, lanes, ("device",), "embedding_")


Family = CounterMetricFamily | GaugeMetricFamily
GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily
Row = tuple[type[Family], str, str, str]
"""A metric's type, name and help text, and the attribute that its value is read from: `a`, or `a.b`."""


def _metric(
    kind: type[Family], name: str, meaning: str, values: Mapping[Labels, float] | float, names: Labels = ()
) -> Family:
    """A metric with a value for each label set, or with one value without labels."""
    family = kind(f"phasewise_{name}", meaning, labels=names)
    for labels, value in values.items() if isinstance(values, Mapping) else (((), values),):
        family.add_metric(labels, value)
    return family


def _of_rows(
    rows: Sequence[Row], states: Mapping[Labels, object], names: Labels = (), prefix: str = ""
) -> Iterator[Family]:
    """The metrics of `rows`, each with one value per state. `names`: label names of the states."""
    for kind, name, meaning, read_from in rows if states else ():
        values = {labels: attrgetter(read_from)(state) for labels, state in states.items()}
        yield _metric(kind, f"{prefix}{name}", meaning, values, names)


_OF_LOADS: tuple[Row, ...] = (
    (GAUGE, "requests_waiting", "requests without KV slots", "n_waiting"),
    (GAUGE, "clients_waiting", "clients that take turns at being admitted", "n_clients_waiting"),
    (GAUGE, "requests_running", "requests with KV slots", "n_running"),
    (GAUGE, "requests_of_batches", "requests in shadow, waiting or running", "n_in_shadow"),
    (GAUGE, "kv_slots_used", "KV slots in use", "kv_slots_used"),
    (GAUGE, "kv_slots", "KV slots in all", "kv_slots"),
    (GAUGE, "kv_use", "share of the KV slots in use, from 0 to 1", "kv_use"),
    (COUNTER, "preemptions", "running requests that were queued again", "preemptions"),
    (COUNTER, "prefix_hits", "requests that took over a prompt computed before", "prefix_hits"),
    (COUNTER, "prefix_tokens_reused", "tokens not computed again", "prefix_tokens_reused"),
    (COUNTER, "phase_switches", "changes between prefill and decode", "phase_switches"),
    (COUNTER, "steps_over_tpot", "decode steps that took longer than --tpot", "steps_over_tpot"),
)
_OF_DRAFTS: tuple[Row, ...] = (
    (COUNTER, "drafted_tokens", "tokens of answers that were drafted", "drafted"),
    (COUNTER, "drafted_tokens_accepted", "those of them that came", "accepted"),
)
_OF_STORES: tuple[Row, ...] = (
    (COUNTER, "stored_prefix_hits", "requests whose beginning was read from disk", "hits"),
    (COUNTER, "stored_prefix_tokens", "tokens read from disk, not computed", "tokens_restored"),
    (COUNTER, "stored_prefix_read_bytes", "bytes of prefixes read", "bytes_read"),
    (COUNTER, "stored_prefix_written_bytes", "bytes of prefixes written", "bytes_written"),
    (GAUGE, "stored_prefix_kept_bytes", "bytes in the prefix cache's folder", "bytes_kept"),
    (COUNTER, "stored_prefix_evictions", "blocks removed for room", "evictions"),
    (COUNTER, "stored_prefix_writes_failed", "prefixes that were not kept", "writes_failed"),
)
_OF_POOLS: tuple[Row, ...] = (
    (GAUGE, "kv_slots_largest_reservable", "KV slots a request could get now", "largest_reservable"),
    (COUNTER, "kv_migrations", "requests moved to a larger block", "migrations"),
    (COUNTER, "kv_overflows", "requests that outgrew their first block", "overflows"),
    (COUNTER, "kv_to_large", "requests sent to the large bucket at once", "to_large"),
    (COUNTER, "kv_mispredictions", "answers that fell into another bucket", "mispredicted"),
    (COUNTER, "kv_bucket_refreshes", "times that new bounds came into use", "refreshes"),
)
_OF_BUCKETS: tuple[Row, ...] = (
    (GAUGE, "kv_bucket_bound_tokens", "longest answer a bucket is meant for", "bound_tokens"),
    (GAUGE, "kv_bucket_blocks_used", "blocks in use", "blocks_used"),
    (GAUGE, "kv_bucket_slots_used", "KV slots in use", "slots_used"),
    (COUNTER, "kv_bucket_slots_ended", "KV slots of requests that ended", "slots_ended"),
    (COUNTER, "kv_bucket_slots_wasted", "those of them that were never used", "slots_wasted"),
)
_OF_MODELS: tuple[Row, ...] = (
    (GAUGE, "models_loaded", "models in memory", "loaded"),
    (GAUGE, "models_bytes", "bytes that they take of --models-memory", "n_bytes"),
    (COUNTER, "model_loads", "models loaded", "loads"),
    (COUNTER, "model_load_failures", "models that could not be loaded", "failures"),
    (COUNTER, "model_unloads", "models unloaded", "unloads"),
    (COUNTER, "model_load_seconds", "time of all loads", "load_seconds"),
)
_OF_LANES: tuple[Row, ...] = (
    (GAUGE, "up", "1 where the worker takes inputs", "queue.is_up"),
    (GAUGE, "inputs", "inputs in progress", "queue.inputs"),
    (GAUGE, "tokens", "tokens in progress", "queue.tokens"),
    (GAUGE, "depth_inputs", "inputs it may hold now", "queue.usable.inputs"),
    (GAUGE, "depth_tokens", "tokens it may hold now", "queue.usable.tokens"),
    (COUNTER, "batches", "batches sent to the worker", "n_batches"),
    (COUNTER, "embedded", "inputs embedded", "n_inputs"),
    (COUNTER, "restarts", "starts of the worker beside the first", "n_restarts"),
)


def _of_loads(loads: Mapping[Labels, EngineLoad], names: Labels) -> Iterator[Family]:
    """The metrics of the engine loads, with the labels `names`."""
    pools = {labels: load.pool for labels, load in loads.items() if load.pool is not None}
    drafts = {labels: load.drafts for labels, load in loads.items() if load.drafts is not None}
    stores = {labels: load.stored for labels, load in loads.items() if load.stored is not None}
    buckets = {(*labels, bucket.name): bucket for labels, pool in pools.items() for bucket in pool.buckets}
    yield from _of_rows(_OF_LOADS, loads, names)
    yield from _of_rows(_OF_DRAFTS, drafts, names)
    yield from _of_rows(_OF_POOLS, pools, names)
    yield from _of_rows(_OF_BUCKETS, buckets, (*names, "bucket"))
    yield from _of_rows(_OF_STORES, stores, names)
    if stores:
        refused = {
            (*labels, reason): count
            for labels, store in stores.items()
            for reason, count in sorted((store.refused or {}).items())
        }
        meaning = "records of prefixes not believed, by reason"
        yield _metric(COUNTER, "stored_prefix_refused", meaning, refused, (*names, "reason"))
    # A picker that remembers prompts knows from it how many tokens one block holds, and when a server has
    # forgotten the oldest.
    blocks = {(*labels, str(ALIGNMENT), str(load.kv_slots // ALIGNMENT)): 1 for labels, load in loads.items()}
    meaning = "always 1; how the KV cache is divided"
    yield _metric(GAUGE, "kv_cache_info", meaning, blocks, (*names, "block_size", "num_gpu_blocks"))


def _of_hand_overs(counts: HandOverCounts) -> Iterator[Family]:
    yield _metric(COUNTER, "hand_overs", "requests divided between two instances", counts.divided)
    for name, meaning, failed in (
        ("hand_overs_failed", "hand-overs that failed, by reason", counts.failed),
        ("kv_frames_refused", "frames of keys and values thrown away, by reason", counts.frames_refused),
    ):
        values: dict[Labels, int] = {(reason,): count for reason, count in sorted(failed.items())}
        yield _metric(COUNTER, name, meaning, values, ("reason",))


def _lora_requests_info(adapters: Sequence[Sequence[str]]) -> Family:
    """vLLM's `lora_requests_info` for adapters, each given by the names that requests may use. All adapters
    stay in memory and a step may use any of them, so all are reported as running and none as waiting."""
    names = ",".join(name for adapter in adapters for name in adapter)
    meaning = "when it was read, in Unix time; which adapters are in memory"
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    return _metric(
        GAUGE, "lora_requests_info", meaning, {(str(len(adapters)), names, ""): time.time()}, labels
    )


# ---- by instance, where a server has several -------------------------------------------------------------

_OF_INSTANCE_LOADS: tuple[Row, ...] = (
    (GAUGE, "requests_waiting", "its requests without KV slots", "n_waiting"),
    (GAUGE, "requests_running", "its requests with KV slots", "n_running"),
    (GAUGE, "kv_slots_used", "its KV slots in use", "kv_slots_used"),
    (GAUGE, "kv_slots", "its KV slots in all", "kv_slots"),
    (COUNTER, "prefix_tokens_reused", "tokens that it did not compute again", "prefix_tokens_reused"),
)
_OF_INSTANCES: tuple[Row, ...] = (
    (GAUGE, "prefix_tokens_held", "tokens of beginnings of prompts that it holds", "prefix_tokens_held"),
    (COUNTER, "prompts", "prompts routed to it", "prompts"),
    (COUNTER, "prompt_tokens", "tokens of prompts routed to it", "prompt_tokens"),
    (
        COUNTER,
        "prefix_tokens_expected",
        "those of them that it was expected to have",
        "prefix_tokens_expected",
    ),
    (COUNTER, "answers", "answers routed to it", "answers"),
    (GAUGE, "kv_bytes", "bytes of its memory for keys and values", "kv_bytes"),
    (COUNTER, "pool_changes", "times that it changed its pool", "pool_changes"),
    (GAUGE, "handing_over", "prompts on their way from it, and blocks of it being filled", "handing_over"),
    (COUNTER, "hand_overs", "its prompts that arrived elsewhere", "hand_overs"),
    (
        COUNTER,
        "hand_over_seconds",
        "time from the ends of such prompts to their arrivals",
        "hand_over_seconds",
    ),
    (COUNTER, "hand_over_bytes", "bytes of their keys and values", "hand_over_bytes"),
    (COUNTER, "restarts", "times that it was started anew", "restarts"),
    (COUNTER, "prefix_reports_refused", "what it said of prefixes and could not be true", "reports_refused"),
)
_OF_PLACES = ("node", "label", "format", "kv_format", "sparse_weights", "prefill_plan", "decode_plan")
_NO_LOAD = EngineLoad(0, 0, 0, 0)


def _of_instances(states: Mapping[Labels, InstanceState]) -> Iterator[Family]:
    """The metrics of instances, by instance and role. An instance that does not run has no place."""
    names, prefix = ("instance", "role"), "instance_"
    loads = {labels: state.load or _NO_LOAD for labels, state in states.items()}
    ready = {labels: float(state.load is not None) for labels, state in states.items()}
    yield _metric(GAUGE, f"{prefix}ready", "1 where it can be given requests", ready, names)
    yield from _of_rows(_OF_INSTANCE_LOADS, loads, names, prefix)
    token_s = {labels: load.prompt_token_ns / 1e9 for labels, load in loads.items()}
    meaning = "time that a prompt goes on there for each of its tokens, of late"
    yield _metric(GAUGE, f"{prefix}prompt_token_seconds", meaning, token_s, names)
    yield from _of_rows(_OF_INSTANCES, states, names, prefix)
    pools = {(*labels, state.pool): 1 for labels, state in states.items()}
    yield _metric(GAUGE, f"{prefix}pool", "1 for the pool that it is in now", pools, (*names, "pool"))
    infos = {
        (*labels, *(state.place.get(label, "") for label in _OF_PLACES)): 1
        for labels, state in states.items()
        if state.place
    }
    meaning = "always 1; where and how an instance that runs does so"
    yield _metric(GAUGE, f"{prefix}info", meaning, infos, (*names, *_OF_PLACES))
