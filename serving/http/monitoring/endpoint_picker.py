"""Metrics that only an endpoint picker asks for: the gateway in front of several servers that chooses one.

The model-server protocol of the Gateway API's inference extension fixes these names of labels. What else it
asks for, requests that wait and run and the use of the KV cache, is in `metrics`; deploy/kubernetes says to
the picker which metric is which.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily

from phasewise.serving.engine.messages import EngineLoad
from phasewise.serving.pools.contract import ALIGNMENT


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
