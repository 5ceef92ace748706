"""Rows of metrics, and those by instance, where a server has several: labelled by `instance` and `role`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from phasewise.serving.engine.engine_host import InstanceState
from phasewise.serving.engine.messages import EngineLoad

Family = CounterMetricFamily | GaugeMetricFamily
Labels = tuple[str, ...]
Row = tuple[str, str, str, type[Family]]
"""A metric's name and meaning, the field that it is read from, and its type."""
LABELS = ("instance", "role")
INFO_LABELS = (
    *LABELS,
    "node",
    "label",
    "format",
    "kv_format",
    "sparse_weights",
    "prefill_plan",
    "decode_plan",
)
_NO_LOAD = EngineLoad(0, 0, 0, 0)
_OF_LOADS: tuple[Row, ...] = (
    ("requests_waiting", "its requests without KV slots", "n_waiting", GaugeMetricFamily),
    ("requests_running", "its requests with KV slots", "n_running", GaugeMetricFamily),
    ("kv_slots_used", "its KV slots in use", "kv_slots_used", GaugeMetricFamily),
    ("kv_slots", "its KV slots in all", "kv_slots", GaugeMetricFamily),
    (
        "prefix_tokens_reused",
        "tokens that it did not compute again",
        "prefix_tokens_reused",
        CounterMetricFamily,
    ),
)
_OF_STATES: tuple[Row, ...] = (
    (
        "prefix_tokens_held",
        "tokens of beginnings of prompts that it holds",
        "prefix_tokens_held",
        GaugeMetricFamily,
    ),
    ("prompts", "prompts routed to it", "prompts", CounterMetricFamily),
    ("prompt_tokens", "tokens of prompts routed to it", "prompt_tokens", CounterMetricFamily),
    (
        "prefix_tokens_expected",
        "those of them that it was expected to have",
        "prefix_tokens_expected",
        CounterMetricFamily,
    ),
    ("answers", "answers routed to it", "answers", CounterMetricFamily),
    ("pool_changes", "times that it changed its pool", "pool_changes", CounterMetricFamily),
    (
        "handing_over",
        "prompts on their way from it, and blocks of it being filled",
        "handing_over",
        GaugeMetricFamily,
    ),
    ("hand_overs", "its prompts that arrived elsewhere", "hand_overs", CounterMetricFamily),
    (
        "hand_over_seconds",
        "time from the ends of such prompts to their arrivals",
        "hand_over_seconds",
        CounterMetricFamily,
    ),
    ("hand_over_bytes", "bytes of their keys and values", "hand_over_bytes", CounterMetricFamily),
    ("restarts", "times that it was started anew", "restarts", CounterMetricFamily),
    (
        "prefix_reports_refused",
        "what it said of prefixes and could not be true",
        "reports_refused",
        CounterMetricFamily,
    ),
)


def families(rows: Sequence[Row], states: Mapping[Labels, object], names: Labels) -> Iterator[Family]:
    """The metrics of some rows, each with the values of all states. names: of the labels of a state."""
    for name, meaning, read_from, kind in rows if states else ():
        family = kind(f"phasewise_{name}", meaning, labels=names)
        for labels, state in states.items():
            family.add_metric(labels, getattr(state, read_from))
        yield family


def _gauge(
    name: str, meaning: str, values: Mapping[Labels, float], names: Sequence[str] = LABELS
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"phasewise_instance_{name}", meaning, labels=names)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def instance_families(instances: Sequence[InstanceState]) -> Iterator[Family]:
    """Nothing where one engine does everything. One that does not run has no `info`."""
    if not instances:
        return
    states: dict[Labels, InstanceState] = {(state.name, state.role): state for state in instances}
    loads = {labels: state.load or _NO_LOAD for labels, state in states.items()}
    ready = {labels: float(state.load is not None) for labels, state in states.items()}
    yield _gauge("ready", "1 where it can be given requests", ready)
    yield from families(_named(_OF_LOADS), loads, LABELS)
    kv_bytes = {labels: state.info.kv_bytes if state.info else 0 for labels, state in states.items()}
    yield _gauge("kv_bytes", "bytes of its memory for keys and values", kv_bytes)
    token_s = {labels: load.prompt_token_ns / 1e9 for labels, load in loads.items()}
    meaning = "time that a prompt goes on there for each of its tokens, of late"
    yield _gauge("prompt_token_seconds", meaning, token_s)
    yield from families(_named(_OF_STATES), states, LABELS)
    pools: dict[Labels, float] = {(*labels, state.pool): 1 for labels, state in states.items()}
    yield _gauge("pool", "1 for the pool that it is in now", pools, (*LABELS, "pool"))
    infos: dict[Labels, float] = {}
    for labels, state in states.items():
        if (info := state.info) is not None:
            told = (info.node, info.label, info.weight_format, info.kv_format, str(info.n_sparse_weights))
            infos[*labels, *told, info.prefill_plan, info.decode_plan] = 1
    meaning = "always 1; where and how an instance that runs does so"
    yield _gauge("info", meaning, infos, INFO_LABELS)


def _named(rows: Sequence[Row]) -> list[Row]:
    return [(f"instance_{name}", *rest) for name, *rest in rows]  # type: ignore[misc]
