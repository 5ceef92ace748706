"""Metrics of embeddings for /metrics, read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from phasewise.serving.embedding.lane import LaneState


class EmbeddingMetrics(Collector):
    """By device."""

    def __init__(self, lanes: Callable[[], Sequence[LaneState]]) -> None:
        self._lanes = lanes

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        lanes = self._lanes()
        gauges = {
            "up": ("1 where the worker takes inputs", [float(lane.is_up) for lane in lanes]),
            "inputs": ("inputs in progress", [float(lane.inputs) for lane in lanes]),
            "tokens": ("tokens in progress", [float(lane.tokens) for lane in lanes]),
            "depth_inputs": ("inputs it may hold now", [float(lane.depth.inputs) for lane in lanes]),
            "depth_tokens": ("tokens it may hold now", [float(lane.depth.tokens) for lane in lanes]),
        }
        counts = {
            "batches": ("batches sent to the worker", [float(lane.n_batches) for lane in lanes]),
            "embedded": ("inputs embedded", [float(lane.n_inputs) for lane in lanes]),
            "restarts": (
                "times that the worker was started again",
                [float(lane.n_restarts) for lane in lanes],
            ),
        }
        for name, (meaning, values) in gauges.items():
            gauge = GaugeMetricFamily(f"phasewise_embedding_{name}", meaning, labels=["device"])
            for lane, value in zip(lanes, values, strict=True):
                gauge.add_metric([lane.name], value)
            yield gauge
        for name, (meaning, values) in counts.items():
            count = CounterMetricFamily(f"phasewise_embedding_{name}", meaning, labels=["device"])
            for lane, value in zip(lanes, values, strict=True):
                count.add_metric([lane.name], value)
            yield count
