"""A load report as tables, CSV, JSON with vLLM's flat fields, and as a picture."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

from tabulate import tabulate

from phasewise._version import SCHEMA_VERSION
from phasewise.loadtest.arrivals import Arrivals
from phasewise.loadtest.metrics import (
    GOAL,
    METRICS,
    attainment,
    attainment_by_scale,
    failures,
    flat_result,
)
from phasewise.loadtest.outcome import RequestOutcome
from phasewise.loadtest.session import LoadReport, RateProbe
from phasewise.workflows.line_chart import Chart, Panel, draw_chart

STATISTICS = ("mean", "median", "std", "p50", "p90", "p99")
MOST_REASON_CHARS = 100
TABLED_SCALES = {2.0**step for step in range(-3, 4)}


def fields_of(report: LoadReport, *, is_detailed: bool = False) -> dict[str, Any]:
    """vLLM's fields first, in its order and with its meaning; ours after them."""
    measured = report.measured
    fields = {
        **_header(report),
        **flat_result(measured, report.slo),
        **_own_fields(report),
    }
    return {**fields, **_detailed(measured.outcomes)} if is_detailed else fields


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
        "burstiness": pace.burstiness if pace.arrivals is Arrivals.gamma else 1.0,
        "max_concurrency": pace.most_at_once,
    }


def _own_fields(report: LoadReport) -> dict[str, Any]:
    measured, slo = report.measured, report.slo
    fields: dict[str, Any] = {
        "arrivals": arrivals_of(report),
        "prompts": report.prompts,
        "failures": failures(measured.outcomes),
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
    """closed-loop, trace, or the process that drew them."""
    pace = report.pace
    if pace.is_closed_loop:
        return "closed-loop"
    return "trace" if pace.instants_s is not None else pace.arrivals.value


def _probe_fields(probe: RateProbe) -> dict[str, Any]:
    return {
        "request_rate": probe.rate,
        "is_kept": probe.is_kept,
        "slo_attainment": probe.attainment,
        "num_prompts": len(probe.measured.outcomes),
        "failed": sum(not one.is_complete for one in probe.measured.outcomes),
        "duration": probe.measured.duration_s,
    }


def _detailed(outcomes: Sequence[RequestOutcome]) -> dict[str, Any]:
    """One entry a request, in the order of their starts."""
    ordered = sorted(outcomes, key=lambda one: one.start_s)
    return {
        "input_lens": [one.prompt_tokens for one in ordered],
        "output_lens": [one.output_tokens for one in ordered],
        "ttfts": [one.ttft_s for one in ordered],
        "itls": [one.itls_s for one in ordered],
        "generated_texts": [one.text for one in ordered],
        "errors": [one.error for one in ordered],
        "latencies": [one.latency_s for one in ordered],
        "start_times": [one.start_s for one in ordered],
    }


def as_json(report: LoadReport, *, is_detailed: bool = False) -> str:
    """One object."""
    return json.dumps(fields_of(report, is_detailed=is_detailed), indent=2, ensure_ascii=False) + "\n"


def as_csv(report: LoadReport, *, is_detailed: bool = False) -> str:
    """One row of every field that is a number or a text; detailed: one row a request."""
    if is_detailed:
        columns = _detailed(report.measured.outcomes)
        columns = {name: column for name, column in columns.items() if name != "itls"}
        return _csv(list(columns), list(zip(*columns.values(), strict=True)))
    fields = {name: value for name, value in fields_of(report).items() if not isinstance(value, dict | list)}
    return _csv(list(fields), [list(fields.values())])


def _csv(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([names, *rows])
    return out.getvalue()


def as_md(report: LoadReport, *, is_detailed: bool = False) -> str:
    """Tables for people; `is_detailed` adds nothing that a person would read."""
    fields = fields_of(report)
    parts = [_totals(report, fields), _latencies(fields)]
    if report.is_search:
        parts.append(_probes(report))
    if report.slo is not None and report.measured.outcomes:
        parts.append(_scales(report))
    if fields["failures"]:
        parts.append(_failures(report))
    return "\n".join(parts)


FORMATS: dict[str, Callable[..., str]] = {"md": as_md, "csv": as_csv, "json": as_json}


def _totals(report: LoadReport, fields: dict[str, Any]) -> str:
    rate = fields["request_rate"]
    how = arrivals_of(report) + (f", {rate:g} requests/s" if rate != "inf" else "")
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
        ("this client's CPU", f"{fields['client_cpu_share']:.1%} of a core"),
    ]
    if report.slo is not None:
        rows += _goodput(report, fields)
    return _table(rows, [report.target.model, "measured"])


def _goodput(report: LoadReport, fields: dict[str, Any]) -> list[tuple[str, str]]:
    promise = report.slo.describe() if report.slo else ""
    rows = [
        (f"goodput at {promise} ms", f"{fields['request_goodput']:.3f} requests/s"),
        ("SLO attainment", f"{fields['slo_attainment']:.1%}"),
    ]
    if report.is_search:
        found = report.found_rate
        shown = "none that was tried" if found is None else f"{found:.3f} requests/s"
        rows.append((f"highest rate that keeps P{100 * GOAL:.0f}", shown))
    return rows


def _latencies(fields: dict[str, Any]) -> str:
    rows = [
        [name.upper(), *(f"{fields[f'{statistic}_{name}_ms']:.1f}" for statistic in STATISTICS)]
        for name in METRICS
    ]
    return _table(rows, ["ms", *STATISTICS])


def _probes(report: LoadReport) -> str:
    rows = [
        [
            f"{probe.rate:.3f}",
            "kept" if probe.is_kept else "missed",
            f"{probe.attainment:.1%}",
            str(len(probe.measured.outcomes)),
        ]
        for probe in sorted(report.probes, key=lambda probe: probe.rate)
    ]
    return _table(rows, ["probe, requests/s", "promises", "attainment", "requests"])


def _scales(report: LoadReport) -> str:
    assert report.slo is not None
    found = attainment_by_scale(report.measured.outcomes, report.slo)
    rows = [[f"{scale:g}", f"{share:.1%}"] for scale, share in found.items() if scale in TABLED_SCALES]
    return _table(rows, ["SLO scale", "attainment"])


def _failures(report: LoadReport) -> str:
    reasons: dict[str, list[str]] = {}
    for one in report.measured.outcomes:
        if one.failure is not None:
            reasons.setdefault(one.failure.value, []).append(one.error)
    rows = [[kind, str(len(found)), found[0][:MOST_REASON_CHARS]] for kind, found in reasons.items()]
    return _table(rows, ["failure", "requests", "the first of them"], right=(1,))


def _table(rows: Sequence[Sequence[str]], headers: Sequence[str], right: Sequence[int] | None = None) -> str:
    numbers = range(1, len(headers)) if right is None else right
    aligned = ["right" if at in numbers else "left" for at in range(len(headers))]
    table = tabulate(rows, headers=headers, tablefmt="github", colalign=aligned, disable_numparse=True)
    return table + "\n"


def draw_report(report: LoadReport) -> str:
    """Attainment over the rate, where there was a search, and over the promises' scale (Fig. 9 and 12)."""
    assert report.slo is not None
    panels = [_rates_panel(report)] if report.probes else []
    if report.measured.outcomes:
        panels.append(_scales_panel(report))
    return draw_chart(
        Chart(
            title=f"SLO attainment of {_short(report)}",
            caption=f"promises: {report.slo.describe()} ms; {report.date:%Y-%m-%d}",
            x_name="SLO scale",
            y_name="requests that keep them",
            limit_name=f"goal: {GOAL:.0%}",
            emphasised=_short(report),
            panels=panels,
            y_is_share=True,
        )
    )


def _rates_panel(report: LoadReport) -> Panel:
    points = sorted((probe.rate, probe.attainment) for probe in report.probes)
    return Panel("attainment over the rate", {_short(report): points}, _goal(points), x_name="requests/s")


def _scales_panel(report: LoadReport) -> Panel:
    assert report.slo is not None
    points = list(attainment_by_scale(report.measured.outcomes, report.slo).items())
    rate = report.pace.rate
    at = "" if rate is None else f", {rate:.3g} requests/s"
    return Panel(f"attainment over the scale{at}", {_short(report): points}, _goal(points))


def _short(report: LoadReport) -> str:
    """The model's name; some servers call it by its file's path."""
    return report.target.model.rstrip("/").rpartition("/")[2]


def _goal(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(points[0][0], GOAL), (points[-1][0], GOAL)]
