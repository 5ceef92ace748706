"""Text of a load report: tables, CSV, JSON with vLLM's flat fields, and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from phasewise._version import SCHEMA_VERSION
from phasewise._words import counted, number, percent
from phasewise.cli import tables
from phasewise.cli.present import on_one_line
from phasewise.loadtest.metrics import (
    GOAL,
    METRICS,
    attainment,
    failures,
    flat_result,
    hit_rate,
    latencies_ms,
)
from phasewise.loadtest.session import LoadReport, RateProbe
from phasewise.workflows.line_chart import Chart, Panel, draw_chart

STATISTICS = ("mean", "median", "std", "p50", "p90", "p99")
MOST_REASON_CHARS = 100
MOST_POINTS = 50
"""Most points of one distribution, since each point is marked."""

LEAST_MS = 0.01
"""Least milliseconds in the picture: tokens of one event are 0 ms apart, and the axis is logarithmic."""


def fields_of(report: LoadReport) -> dict[str, Any]:
    """The report's JSON fields: vLLM's fields first, in its order and with its meaning, then our own."""
    return {**_header(report), **flat_result(report.measured, report.test.slo), **_own_fields(report)}


def _header(report: LoadReport) -> dict[str, Any]:
    target, pace = report.test.target, report.test.pace
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
    measured, slo = report.measured, report.test.slo
    fields: dict[str, Any] = {
        "arrivals": arrivals_of(report),
        "prompts": report.prompts,
        "failures": failures(measured.outcomes),
        "cache_hit_rate": hit_rate(measured.outcomes),
        "client_cpu_share": measured.client_cpu_share,
        "was_interrupted": report.was_stopped,
    }
    if slo is not None:
        fields["goodput_slo_ms"] = slo.named()
        fields["slo_attainment"] = attainment(measured.outcomes, slo)
    if report.test.promises.find_rate:
        fields["goodput_rate"] = report.found_rate
        fields["probes"] = [_probe_fields(probe) for probe in report.probes]
    return fields


def arrivals_of(report: LoadReport) -> str:
    """The kind of arrivals: `closed-loop`, `trace` or `poisson`."""
    pace = report.test.pace
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


def as_json(report: LoadReport) -> str:
    """Write the report as one JSON object."""
    return json.dumps(fields_of(report), indent=2, ensure_ascii=False) + "\n"


def as_csv(report: LoadReport) -> str:
    """Write the report as CSV: one row of every field that is a number or a text."""
    fields = {name: value for name, value in fields_of(report).items() if not isinstance(value, dict | list)}
    return tables.as_csv(fields, [fields.values()])


def as_md(report: LoadReport) -> str:
    """Write the report as Markdown tables."""
    fields = fields_of(report)
    parts = [_totals(report, fields)]
    if fields["completed"]:
        parts.append(_latencies(fields))
    if report.test.promises.find_rate:
        parts.append(_probes(report))
    if fields["failures"]:
        parts.append(_failures(report))
    return "\n".join(parts)


FORMATS: dict[str, Callable[..., str]] = {"md": as_md, "csv": as_csv, "json": as_json}


def _totals(report: LoadReport, fields: dict[str, Any]) -> str:
    rate, cached = fields["request_rate"], fields["cache_hit_rate"]
    how = arrivals_of(report) + (f", {number(rate)} requests/s" if rate != "inf" else "")
    if fields["max_concurrency"] is not None:
        how += f", at most {fields['max_concurrency']} at once"
    rows = [
        ("load", how),
        ("requests completed, failed", f"{fields['completed']}, {fields['failed']}"),
        ("duration", f"{fields['duration']:.2f} s"),
        ("prompt, answer tokens", f"{fields['total_input_tokens']}, {fields['total_output_tokens']}"),
        ("requests/s", f"{fields['request_throughput']:.3f}"),
        ("answer tokens/s", f"{fields['output_throughput']:.1f}"),
        ("all tokens/s", f"{fields['total_token_throughput']:.1f}"),
        *([] if cached is None else [("prompt tokens from the cache", percent(cached, 1))]),
        ("this client's CPU", f"{percent(fields['client_cpu_share'], 1)} of a core"),
    ]
    if report.test.slo is not None:
        rows += _goodput(report, fields)
    return _table(rows, [on_one_line(report.test.target.model), "measured"])


def _goodput(report: LoadReport, fields: dict[str, Any]) -> list[tuple[str, str]]:
    promise = report.test.slo.describe() if report.test.slo else ""
    rows = [
        (f"goodput at {promise} ms", f"{fields['request_goodput']:.3f} requests/s"),
        ("SLO attainment", percent(fields["slo_attainment"], 1)),
    ]
    if report.test.promises.find_rate:
        rate = report.found_rate
        shown = "none that was tried" if rate is None else f"{rate:.3f} requests/s"
        rows.append((f"highest rate that keeps P{100 * GOAL:.0f}", shown))
    return rows


def _latencies(fields: dict[str, Any]) -> str:
    rows = [
        [name.upper(), *(f"{fields[f'{statistic}_{name}_ms']:.1f}" for statistic in STATISTICS)]
        for name in METRICS
        if fields[f"p99_{name}_ms"] > 0
    ]
    return _table(rows, ["ms", *STATISTICS])


def _probes(report: LoadReport) -> str:
    rows = []
    for probe in sorted(report.probes, key=lambda probe: probe.rate):
        verdict, count = "kept" if probe.is_kept else "missed", len(probe.measured.outcomes)
        rows.append([f"{probe.rate:.3f}", verdict, percent(probe.attainment, 1), str(count)])
    return _table(rows, ["probe, requests/s", "promises", "attainment", "requests"])


def _failures(report: LoadReport) -> str:
    reasons: dict[str, list[str]] = {}
    for outcome in report.measured.outcomes:
        if outcome.failure is not None:
            reasons.setdefault(outcome.failure.value, []).append(outcome.error)
    rows = [
        [kind, str(len(all_)), on_one_line(all_[0])[:MOST_REASON_CHARS]] for kind, all_ in reasons.items()
    ]
    return _table(rows, ["failure", "requests", "the first of them"], ["the first of them"])


def _table(rows: Sequence[Sequence[str]], headers: Sequence[str], left: Sequence[str] = ()) -> str:
    return f"{tables.table_of(rows, headers, left, 'github')}\n"


def draw_report(report: LoadReport) -> str | None:
    """Draw the distributions of the latencies (Sandwich, Fig. 13) and, after a search, attainment over the
    rate (Fig. 12). None where there is nothing to draw."""
    panels = [_rates_panel(report)] if report.probes else []
    if report.measured.complete:
        panels.append(_latencies_panel(report))
    if not panels:
        return None
    promises = "" if report.test.slo is None else f"promises: {report.test.slo.describe()} ms; "
    return draw_chart(
        Chart(
            title=f"Latencies of {_short(report)}",
            caption=f"{promises}{counted(len(report.measured.complete), 'answer')}; {report.date:%Y-%m-%d}",
            x_name="requests/s",
            y_name="share of requests",
            limit_name=f"P{100 * GOAL:.0f}" if report.test.slo is None else f"goal: {percent(GOAL)}",
            emphasised=_short(report),
            panels=panels,
        )
    )


def _latencies_panel(report: LoadReport) -> Panel:
    lines = {
        name.upper(): distribution(samples)
        for name, samples in latencies_ms(report.measured.complete).items()
        if max(samples, default=0.0) > 0
    }
    instants = [ms for line in lines.values() for ms, _ in line]
    goal = _goal([(min(instants), GOAL), (max(instants), GOAL)])
    at_rate = "" if report.test.pace.rate is None else f", {number(report.test.pace.rate, 3)} requests/s"
    return Panel(f"latencies{at_rate}", lines, goal, x_name="milliseconds, at most")


def distribution(samples_ms: Sequence[float]) -> list[tuple[float, float]]:
    """Points (milliseconds, share of samples up to them), at most MOST_POINTS; the last share is 1."""
    ordered = sorted(samples_ms)
    n_points = min(len(ordered), MOST_POINTS)
    ranks = [-(-len(ordered) * point // n_points) for point in range(1, n_points + 1)]
    return [(max(LEAST_MS, ordered[rank - 1]), rank / len(ordered)) for rank in ranks]


def _rates_panel(report: LoadReport) -> Panel:
    points = sorted((probe.rate, probe.attainment) for probe in report.probes)
    return Panel("attainment over the rate", {_short(report): points}, _goal(points))


def _short(report: LoadReport) -> str:
    """The model's name, or the last part of a path: some servers name a model by its file."""
    return on_one_line(report.test.target.model.rstrip("/").rpartition("/")[2])


def _goal(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(points[0][0], GOAL), (points[-1][0], GOAL)]
