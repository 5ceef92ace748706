"""A load test's report as JSON values, under the field names of vLLM's bench serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phasewise._version import SCHEMA_VERSION
from phasewise.loadtest.metrics import (
    attainment,
    attainment_by_scale,
    failures,
    flat_result,
    hit_rate,
)
from phasewise.loadtest.outcome import RequestOutcome
from phasewise.loadtest.session import LoadReport, RateProbe


def fields_of(report: LoadReport, *, is_detailed: bool = False) -> dict[str, Any]:
    """vLLM's fields first, in its order and with its meaning; ours after them."""
    measured = report.measured
    fields = {
        **_header(report),
        **flat_result(measured, report.slo),
        **_own_fields(report),
    }
    return {**fields, **detailed_fields(measured.outcomes)} if is_detailed else fields


def _header(report: LoadReport) -> dict[str, Any]:
    target, pace = report.target, report.pace
    backend = "openai-chat" if target.is_chat else "openai"
    return {
        "schema_version": SCHEMA_VERSION,
        "date": report.date.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": None,
        "model_id": target.model,
        "tokenizer_id": target.model,
        "num_prompts": report.n_requests,
        "request_rate": "inf" if pace.rate is None else pace.rate,
        "burstiness": 1.0,
        "max_concurrency": pace.most_at_once,
    }


def _own_fields(report: LoadReport) -> dict[str, Any]:
    measured, slo = report.measured, report.slo
    fields: dict[str, Any] = {
        "arrivals": arrivals_of(report),
        "prompts": report.prompts,
        "failures": failures(measured.outcomes),
        "cache_hit_rate": hit_rate(measured.outcomes),
        "client_cpu_share": measured.client_cpu_share,
        "was_interrupted": report.was_stopped,
    }
    if slo is not None:
        fields["goodput_slo_ms"] = slo.promises()
        fields["slo_attainment"] = attainment(measured.outcomes, slo)
        fields["slo_attainment_by_scale"] = [
            {"slo_scale": scale, "slo_attainment": share}
            for scale, share in attainment_by_scale(measured.outcomes, slo).items()
        ]
    if report.is_search:
        fields["goodput_rate"] = report.found_rate
        fields["probes"] = [_probe_fields(probe) for probe in report.probes]
    return fields


def arrivals_of(report: LoadReport) -> str:
    """closed-loop, trace or poisson."""
    pace = report.pace
    if pace.is_closed_loop:
        return "closed-loop"
    return "trace" if pace.instants_s is not None else "poisson"


def _probe_fields(probe: RateProbe) -> dict[str, Any]:
    return {
        "request_rate": probe.rate,
        "is_kept": probe.is_kept,
        "slo_attainment": probe.attainment,
        "num_prompts": len(probe.measured.outcomes),
        "failed": sum(not outcome.is_complete for outcome in probe.measured.outcomes),
        "duration": probe.measured.duration_s,
    }


def detailed_fields(outcomes: Sequence[RequestOutcome]) -> dict[str, Any]:
    """One entry a request, in the order of their starts."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.start_s)
    return {
        "input_lens": [outcome.prompt_tokens for outcome in ordered],
        "output_lens": [outcome.output_tokens for outcome in ordered],
        "ttfts": [outcome.ttft_s for outcome in ordered],
        "itls": [outcome.itls_s for outcome in ordered],
        "generated_texts": [outcome.text for outcome in ordered],
        "errors": [outcome.error for outcome in ordered],
        "latencies": [outcome.latency_s for outcome in ordered],
        "start_times": [outcome.start_s for outcome in ordered],
        "cached_tokens": [outcome.cached_tokens for outcome in ordered],
    }
