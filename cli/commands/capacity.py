"""`phasewise simulate` and `phasewise provision`: traces through clusters on simulated time, and the smallest
cluster that keeps its promises."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phasewise._options import REQUIRED, option
from phasewise._words import NOTHING, counted, number, percent
from phasewise.cli.options import TRACE, JsonOption, WideOption
from phasewise.cli.present import EXIT_FAILURE, fail, note, on_one_line
from phasewise.cli.tables import WIDTH, RowTable, present
from phasewise.cluster.simulated.metrics import METRICS, PERCENTILES, Slo, Summary, broken
from phasewise.workflows.capacity.settings import ClusterInputs, ProvisionWish, SimulationWish

if TYPE_CHECKING:
    from phasewise.cluster.simulated.simulate import ClusterSpec
    from phasewise.workflows.capacity.provision import Provisioned


def simulate(
    *,
    trace: str = TRACE(REQUIRED),
    pools: str = option(
        REQUIRED,
        "the cluster: a TOML file, or pools in a line such as prompt=27*h100,token=3*h100",
        metavar="FILE|POOLS",
    ),
    wish: SimulationWish,
    inputs: ClusterInputs,
    as_json: JsonOption = False,
) -> None:
    """Simulate a cluster: latencies, slowdowns, utilisation, batch sizes and KV transfers of a trace.

    $ phasewise simulate lognormal:1500,0.8/30,0.8 --pools mixed=4*h100 --rate 6
    $ phasewise simulate trace.csv --pools prompt=3*h100,token=1*h100 --slo table6

    Every machine runs the scheduler, KV pool and pacing of phasewise serve; only the time of a step is
    modelled. The same input gives the same output. Machine types a100, h100 and h100-capped are built in;
    a cluster file may describe others. See docs/guide/planning-capacity.md.
    """
    from phasewise.workflows.capacity.simulate import simulate_cluster

    what = simulate_cluster(trace, pools, wish, inputs, note)
    present(as_json, simulation_fields(*what), simulation_text(*what))


def provision(
    *,
    trace: str = TRACE(REQUIRED),
    wish: ProvisionWish,
    inputs: ClusterInputs,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the smallest cluster for a rate, or the fastest one for a budget, that keeps its promises.

    $ phasewise provision lognormal:1500,0.8/30,0.8 --rate 6 --minimise machines
    $ phasewise provision trace.csv --cost 100 --design mixed:h100,split:h100/h100

    With --rate each design's cheapest cluster is found; with --cost or --power its highest rate. Clusters are
    judged by simulation (phasewise simulate): those near the border between numbers of machines that keep
    the promises and numbers that do not, and every neighbour of the answer. Exit code 1 if no design has an
    answer.
    """
    from phasewise.workflows.capacity.provision import provision_cluster

    answers, slo = provision_cluster(trace, wish, inputs, note)
    fields = {"slo": slo.name, "designs": [_answer_fields(answer, slo) for answer in answers]}
    present(as_json, fields, provision_text(answers, slo, wide=wide))
    if all(answer.spec is None for answer in answers):
        fail(f"no design has an answer: {answers[0].reason}", EXIT_FAILURE)


OCCUPANCY_MARKS = (1, 4, 16, 64, 256, 1024, 2048)
"""Batch sizes, in tokens, whose share of busy time the text states."""


def simulation_text(spec: ClusterSpec, summary: Summary, slo: Slo | None) -> list[str | RowTable]:
    """Text of one simulation for people."""
    rate = summary.n_requests / summary.duration_s if summary.duration_s else 0.0
    tokens = summary.output_tokens / summary.duration_s if summary.duration_s else 0.0
    parts: list[str | RowTable] = [
        f"{counted(summary.n_requests, 'request')} in {summary.duration_s:.1f} s on "
        f"{counted(spec.n_machines, 'machine')}, policy {spec.policy}:",
        f"{rate:.2f} requests/s, {tokens:.0f} tokens/s",
        RowTable(list(_time_rows(summary)), ("",)),
        RowTable(
            [
                {
                    "pool": use.role,
                    "machine": use.machine,
                    "count": use.count,
                    "busy": percent(use.utilisation),
                    **_occupancy_cells(use.occupancy),
                }
                for use in summary.uses
            ],
            ("pool", "machine"),
        ),
        "(columns <=N: share of busy time in batches of at most N tokens)",
    ]
    if summary.n_transfers:
        waits = ", ".join(
            f"P{percentile} {seconds * 1000:.1f} ms" for percentile, seconds in summary.transfer_s.items()
        )
        text = f"KV transfers: {summary.n_transfers}; from a prompt's end to arrival {waits}"
        parts.append(textwrap.fill(text, WIDTH))
    parts.append(f"preemptions: {summary.n_preemptions}")
    if slo is not None:
        failures = broken(summary, slo)
        parts.append(f"SLO {slo.name}: " + (f"broken: {'; '.join(failures)}" if failures else "kept"))
    return parts


def _time_rows(summary: Summary) -> Iterable[dict[str, str]]:
    for metric in METRICS:
        yield _percentiles(f"{metric.upper()}, s", summary.times_s[metric].values(), 4)
    for metric in METRICS if summary.slowdowns is not None else ():
        assert summary.slowdowns is not None
        yield _percentiles(f"{metric.upper()} slowdown", summary.slowdowns[metric].values(), 3)


def _percentiles(name: str, values: Iterable[float], digits: int) -> dict[str, str]:
    cells = (number(value, digits) for value in values)
    return {"": name, **dict(zip((f"P{share}" for share in PERCENTILES), cells, strict=True))}


def _occupancy_cells(occupancy: Sequence[tuple[int, float]]) -> dict[str, str]:
    cells = {}
    for mark in OCCUPANCY_MARKS:
        within = [share for tokens, share in occupancy if tokens <= mark]
        cells[f"<={mark}"] = percent(within[-1] if within else 0.0)
    return cells


DESIGN_COLUMNS = ("design", "machines", "requests/s", "cost/h", "bound used")
"""Columns of the narrow table of designs; `--wide` prints the others too."""


def provision_text(answers: Sequence[Provisioned], slo: Slo, *, wide: bool = False) -> list[str | RowTable]:
    """Text of `provision` for people: a row for each design's answer."""
    rows = [_provision_row(answer) for answer in answers]
    names = list(rows[0]) if wide and rows else DESIGN_COLUMNS
    table = RowTable([{name: row[name] for name in names} for row in rows], ("design", "machines"))
    parts: list[str | RowTable] = [f"SLO {slo.name}", table]
    for answer in answers:
        name = on_one_line(answer.design.name)
        if answer.spec is None and answer.reason:
            parts.append(textwrap.fill(f"{name}: {answer.reason}", WIDTH))
        if len(answer.frontier) > 1:
            lines = ", ".join("+".join(map(str, cell)) for cell in answer.frontier)
            parts.append(textwrap.fill(f"frontier of {name}: {lines}", WIDTH))
    return parts


def _provision_row(answer: Provisioned) -> dict[str, str]:
    name, spec = on_one_line(answer.design.name), answer.spec
    if spec is None:
        titles = ("machines", "requests/s", "total", "cost/h", "power, kW", "bound used")
        cells: dict[str, str] = dict.fromkeys(titles, NOTHING)
    else:
        cells = {
            "machines": " + ".join(f"{pool.count} {pool.role}" for pool in spec.pools),
            "requests/s": number(answer.rate),
            "total": str(spec.n_machines),
            "cost/h": f"{spec.cost:.2f}",
            "power, kW": f"{spec.power_w / 1000:.1f}",
            "bound used": percent(answer.tightness),
        }
    return {"design": name, **cells, "runs": str(answer.n_runs)}


def simulation_fields(spec: ClusterSpec, summary: Summary, slo: Slo | None) -> dict[str, Any]:
    """JSON fields of one simulation."""
    return {
        "policy": spec.policy,
        "pools": _pool_fields(spec),
        "cost": spec.cost,
        "power_w": spec.power_w,
        **_summary_fields(summary, slo),
    }


def _pool_fields(spec: ClusterSpec) -> list[dict[str, Any]]:
    return [{"role": pool.role, "machine": pool.machine.name, "count": pool.count} for pool in spec.pools]


def _summary_fields(summary: Summary, slo: Slo | None) -> dict[str, Any]:
    kept, slowdowns = None, None
    if slo is not None:
        failures = broken(summary, slo)
        kept = {"name": slo.name, "kept": not failures, "broken": failures}
    if summary.slowdowns is not None:
        slowdowns = {metric: _named(values) for metric, values in summary.slowdowns.items()}
    return {
        "n_requests": summary.n_requests,
        "output_tokens": summary.output_tokens,
        "duration_s": summary.duration_s,
        "times_s": {metric: _named(values) for metric, values in summary.times_s.items()},
        "slowdowns": slowdowns,
        "machines": list(summary.uses),
        "kv_transfers": {"count": summary.n_transfers, "wait_s": _named(summary.transfer_s)},
        "n_preemptions": summary.n_preemptions,
        "slo": kept,
    }


def _named(values: Mapping[int, float]) -> dict[str, float]:
    return {f"p{percentile}": value for percentile, value in values.items()}


def _answer_fields(answer: Provisioned, slo: Slo) -> dict[str, Any]:
    fields: dict[str, Any] = {"design": answer.design.name, "n_runs": answer.n_runs, "reason": answer.reason}
    if answer.spec is None or answer.summary is None:
        return fields
    return {
        **fields,
        "pools": _pool_fields(answer.spec),
        "rate": answer.rate,
        "cost": answer.spec.cost,
        "power_w": answer.spec.power_w,
        "n_machines": answer.spec.n_machines,
        "bound_used": answer.tightness,
        "frontier": [list(cell) for cell in answer.frontier],
        **_summary_fields(answer.summary, slo),
    }
