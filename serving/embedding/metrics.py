"""Metrics of embeddings for /metrics, collected when they are requested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from phasewise.serving.embedding.lane import Lane

_Family = CounterMetricFamily | GaugeMetricFamily
FAMILIES: Sequence[tuple[type[_Family], str, str, Callable[[Lane], float]]] = (
    (GaugeMetricFamily, "up", "1 where the worker takes inputs", lambda lane: lane.queue.is_up),
    (GaugeMetricFamily, "inputs", "inputs in progress", lambda lane: lane.queue.inputs),
    (GaugeMetricFamily, "tokens", "tokens in progress", lambda lane: lane.queue.tokens),
    (GaugeMetricFamily, "depth_inputs", "inputs it may hold now", lambda lane: lane.queue.usable.inputs),
    (GaugeMetricFamily, "depth_tokens", "tokens it may hold now", lambda lane: lane.queue.usable.tokens),
    (CounterMetricFamily, "batches", "batches sent to the worker", lambda lane: lane.n_batches),
    (CounterMetricFamily, "embedded", "inputs embedded", lambda lane: lane.n_inputs),
    (CounterMetricFamily, "restarts", "starts of the worker beside the first", lambda lane: lane.n_restarts),
)


class EmbeddingMetrics(Collector):
    """A collector of the embedding metrics of every device."""

    def __init__(self, lanes: Callable[[], Sequence[Lane]]) -> None:
        self._lanes = lanes

    def collect(self) -> Iterator[_Family]:
        lanes = self._lanes()
        for kind, name, meaning, value in FAMILIES:
            family = kind(f"phasewise_embedding_{name}", meaning, labels=["device"])
            for lane in lanes:
                family.add_metric([lane.queue.name], float(value(lane)))
            yield family
