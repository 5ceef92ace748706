"""Simulated and provisioned clusters as text, JSON and charts."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from phasewise._words import counted, number, percent
from phasewise.cli.present import on_one_line
from phasewise.cli.tables import WIDTH, RowTable
from phasewise.cluster.simulated.metrics import METRICS, PERCENTILES, Slo, Summary, broken

if TYPE_CHECKING:
    from phasewise.cluster.simulated.simulate import ClusterSpec
    from phasewise.workflows.capacity.embeddings import EmbeddingDay
    from phasewise.workflows.capacity.provision import Provisioned

OCCUPANCY_MARKS = (1, 4, 16, 64, 256, 1024, 2048)
"""Batch sizes, in tokens, whose share of busy time the text states."""


def simulation_text(spec: ClusterSpec, summary: Summary, slo: Slo | None) -> list[str | RowTable]:
    """The text of one simulation, for people."""
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
    return [*parts, *_slo_lines(summary, slo)]


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


def _slo_lines(summary: Summary, slo: Slo | None) -> list[str]:
    if slo is None:
        return []
    failures = broken(summary, slo)
    if not failures:
        return [f"SLO {slo.name}: kept"]
    return [f"SLO {slo.name}: broken: {'; '.join(failures)}"]


def occupancy_chart(summary: Summary) -> str:
    """Cumulative distribution of busy time over batch sizes, a line a pool (Splitwise, Fig. 17), as SVG."""
    from phasewise.workflows.line_chart import Chart, Panel, draw_chart

    lines = {f"{use.role} ({use.machine})": list(use.occupancy) for use in summary.uses if use.occupancy}
    return draw_chart(
        Chart(
            title="Time by tokens of a batch",
            caption=f"{counted(summary.n_requests, 'request')}; share of busy time in batches of at most N "
            "tokens",
            x_name="tokens of a batch",
            y_name="share of busy time",
            limit_name="",
            emphasised=None,
            panels=[Panel("busy time", lines, ())],
            y_is_share=True,
        )
    )


DESIGN_COLUMNS = ("design", "machines", "requests/s", "cost/h", "bound used")
"""Columns of a narrow table; `--wide` prints the others too."""


def provision_text(answers: Sequence[Provisioned], slo: Slo, *, wide: bool = False) -> list[str | RowTable]:
    """Each design's answer in a row, for people."""
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
    spec = answer.spec
    return {
        "design": on_one_line(answer.design.name),
        "machines": "-" if spec is None else " + ".join(f"{pool.count} {pool.role}" for pool in spec.pools),
        "requests/s": "-" if spec is None else number(answer.rate),
        "total": "-" if spec is None else str(spec.n_machines),
        "cost/h": "-" if spec is None else f"{spec.cost:.2f}",
        "power, kW": "-" if spec is None else f"{spec.power_w / 1000:.1f}",
        "bound used": "-" if spec is None else percent(answer.tightness),
        "runs": str(answer.n_runs),
    }


DEPLOYED_FOR = {"peak": "the peak (eq. 6)", "mean": "the mean (eq. 5)", "by hour": "each hour"}


def embedding_text(answer: EmbeddingDay) -> list[str | RowTable]:
    """Each way to deploy in a row, for people."""
    day = answer.day
    rows = [
        {
            "machines for": DEPLOYED_FOR[fleet.deployed],
            "CPUs": "used" if fleet.uses_cpus else "idle",
            "each": fleet.concurrency,
            "machines": fleet.machines,
            "accelerators": fleet.accelerators,
            "cost/day": f"{fleet.cost:.2f}",
            "saved": percent(answer.saved(fleet.deployed), 1) if fleet.uses_cpus else "",
            "over": counted(fleet.parts_over, "part") if fleet.parts_over else "",
        }
        for fleet in answer.fleets
    ]
    return [
        f"{number(day.mean, 4)} queries/s on average, {number(day.peak, 4)} at the peak, each within "
        f"{number(answer.slo_s)} s",
        RowTable(rows, ("machines for", "CPUs")),
        textwrap.fill(
            f"(each: queries at once on one machine; over: of {counted(len(day.rates), 'part')} of the "
            f"day, those with more than the machines answer in time; without whole machines CPUs save "
            f"{percent(answer.saved_at_most, 1)})",
            WIDTH,
        ),
    ]


def frontier_chart(answers: Sequence[Provisioned]) -> str:
    """Frontiers of the designs with two kinds of machines, as SVG."""
    from phasewise.workflows.line_chart import Chart, Panel, draw_chart

    lines = {
        answer.design.name: [(float(cell[0]), float(cell[1])) for cell in answer.frontier]
        for answer in answers
        if answer.frontier and len(answer.frontier[0]) > 1
    }
    return draw_chart(
        Chart(
            title="Fewest machines that keep the promises",
            caption="cells that were run and that no other undercuts",
            x_name="prompt machines",
            y_name="token machines",
            limit_name="",
            emphasised=None,
            panels=[Panel("frontiers", lines, ())],
        )
    )
