"""Metrics by instance, where a server has several: each with the labels `instance` and `role`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from phasewise.serving.engine.engine_host import InstanceState
from phasewise.serving.engine.messages import EngineLoad

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

Family = CounterMetricFamily | GaugeMetricFamily


class _Row(NamedTuple):
    name: str
    meaning: str
    value: Callable[[InstanceState], float]
    kind: type[Family] = GaugeMetricFamily


def _load(state: InstanceState) -> EngineLoad:
    return state.load or EngineLoad(0, 0, 0, 0)


_ROWS = (
    _Row("ready", "1 where it can be given requests", lambda state: state.load is not None),
    _Row("requests_waiting", "its requests without KV slots", lambda state: _load(state).n_waiting),
    _Row("requests_running", "its requests with KV slots", lambda state: _load(state).n_running),
    _Row("kv_slots_used", "its KV slots in use", lambda state: _load(state).kv_slots_used),
    _Row("kv_slots", "its KV slots in all", lambda state: _load(state).kv_slots),
    _Row(
        "kv_bytes",
        "bytes of its memory for keys and values",
        lambda state: state.info.kv_bytes if state.info else 0,
    ),
    _Row(
        "prompt_token_seconds",
        "time that a prompt goes on there for each of its tokens, of late",
        lambda state: _load(state).prompt_token_ns / 1e9,
    ),
    _Row(
        "prefix_tokens_held",
        "tokens of beginnings of prompts that it holds",
        lambda state: state.prefix_tokens_held,
    ),
    _Row(
        "prefix_tokens_reused",
        "tokens that it did not compute again",
        lambda state: _load(state).prefix_tokens_reused,
        CounterMetricFamily,
    ),
    _Row("prompts", "prompts routed to it", lambda state: state.prompts, CounterMetricFamily),
    _Row(
        "prompt_tokens",
        "tokens of prompts routed to it",
        lambda state: state.prompt_tokens,
        CounterMetricFamily,
    ),
    _Row(
        "prefix_tokens_expected",
        "those of them that it was expected to have",
        lambda state: state.prefix_tokens_expected,
        CounterMetricFamily,
    ),
    _Row("answers", "answers routed to it", lambda state: state.answers, CounterMetricFamily),
    _Row(
        "pool_changes",
        "times that it changed its pool",
        lambda state: state.pool_changes,
        CounterMetricFamily,
    ),
    _Row(
        "handing_over",
        "prompts on their way from it, and blocks of it being filled",
        lambda state: state.handing_over,
    ),
    _Row(
        "hand_overs",
        "its prompts that arrived elsewhere",
        lambda state: state.hand_overs,
        CounterMetricFamily,
    ),
    _Row(
        "hand_over_seconds",
        "time from the ends of such prompts to their arrivals",
        lambda state: state.hand_over_seconds,
        CounterMetricFamily,
    ),
    _Row(
        "hand_over_bytes",
        "bytes of their keys and values",
        lambda state: state.hand_over_bytes,
        CounterMetricFamily,
    ),
    _Row("restarts", "times that it was started anew", lambda state: state.restarts, CounterMetricFamily),
    _Row(
        "prefix_reports_refused",
        "what it said of prefixes and could not be true",
        lambda state: state.reports_refused,
        CounterMetricFamily,
    ),
)


def instance_families(states: Sequence[InstanceState]) -> Iterator[Family]:
    """Nothing where one engine does everything."""
    if not states:
        return
    for row in _ROWS:
        family = row.kind(f"phasewise_instance_{row.name}", row.meaning, labels=LABELS)
        for state in states:
            family.add_metric((state.name, state.role), float(row.value(state)))
        yield family
    pools = GaugeMetricFamily(
        "phasewise_instance_pool", "1 for the pool that it is in now", labels=(*LABELS, "pool")
    )
    for state in states:
        pools.add_metric((state.name, state.role, state.pool), 1)
    yield pools
    yield _infos(states)


def _infos(states: Sequence[InstanceState]) -> Family:
    """One that does not run has none."""
    family = GaugeMetricFamily(
        "phasewise_instance_info", "always 1; where and how an instance that runs does so", labels=INFO_LABELS
    )
    for state in states:
        if (info := state.info) is not None:
            told = (info.node, info.label, info.weight_format, info.kv_format, str(info.n_sparse_weights))
            family.add_metric((state.name, state.role, *told, info.prefill_plan, info.decode_plan), 1)
    return family
