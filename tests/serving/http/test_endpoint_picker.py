"""Metrics that an endpoint picker reads say what its protocol asks for, from what the engine holds."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from phasewise.serving.engine.messages import EngineLoad
from phasewise.serving.http.monitoring.metrics import Gauges, Metrics
from phasewise.serving.pools.contract import ALIGNMENT
from tests.support.tiers import examples

Sample = tuple[dict[str, str], float]


def read(gauges: Gauges, models: tuple[str, ...] = ()) -> dict[str, list[Sample]]:
    """Labels and values of each metric, as a scraper reads them."""
    text = Metrics(gauges, models).exposition().decode()
    families = text_string_to_metric_families(text)
    return {
        family.name: [(dict(sample.labels), sample.value) for sample in family.samples] for family in families
    }


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 500), st.integers(0, 500))
@examples(50)
def test_use_is_a_share_and_blocks_are_whole_ones(
    used: int, free: int, n_waiting: int, n_running: int
) -> None:
    n_slots = used + free
    samples = read(Gauges(lambda: EngineLoad(n_waiting, n_running, used, n_slots)))

    assert samples["phasewise_requests_waiting"] == [({}, n_waiting)]
    assert samples["phasewise_requests_running"] == [({}, n_running)]
    ((_, use),) = samples["phasewise_kv_use"]
    assert 0 <= use <= 1
    assert abs(use * n_slots - used) < 1e-6 * max(1, n_slots)
    ((labels, value),) = samples["phasewise_kv_cache_info"]
    assert value == 1
    n_blocks = int(labels["num_gpu_blocks"])
    assert int(labels["block_size"]) == ALIGNMENT
    assert n_blocks * ALIGNMENT <= n_slots < (n_blocks + 1) * ALIGNMENT


def test_each_of_several_models_has_its_own_cache() -> None:
    loads = {name: EngineLoad(0, 0, number, 160 * number) for number, name in enumerate(("one", "other"), 1)}
    samples = read(Gauges(lambda: EngineLoad(0, 0, 3, 480, by_model=loads)), ("one", "other"))

    blocks = {labels["model"]: labels["num_gpu_blocks"] for labels, _ in samples["phasewise_kv_cache_info"]}
    assert blocks == {"one": "10", "other": "20"}
    assert {labels["model"] for labels, _ in samples["phasewise_kv_use"]} == {"one", "other"}


def test_adapters_in_memory_are_told_by_every_name_of_theirs() -> None:
    before_s = time.time()
    samples = read(Gauges(adapters=lambda: [("m:poet", "poet"), ("m:coder",)]))

    ((labels, at_s),) = samples["phasewise_lora_requests_info"]
    assert labels == {
        "max_lora": "2",
        "running_lora_adapters": "m:poet,poet,m:coder",
        "waiting_lora_adapters": "",
    }
    assert before_s - 1 <= at_s <= time.time() + 1


def test_without_adapters_nothing_is_said_of_them() -> None:
    assert "phasewise_lora_requests_info" not in read(Gauges(lambda: EngineLoad(0, 0, 0, 160)))
