"""The report as one HTML page: no script, no file beside it, nothing fetched when it is opened."""

# ruff: noqa: E501  (the page's own lines)

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING

from phasewise._words import counted, number, percent, proven, share_of_limit
from phasewise.topology.picture import draw_svg
from phasewise.topology.svg import FAINT_INK, FONT, INK, SERIES, document, text
from phasewise.workflows.machine_report.worth import worth_by_machine
from phasewise.workflows.topo.plan_json import picture_of_plans

if TYPE_CHECKING:
    from phasewise._rows import Row
    from phasewise.tuner.config.storage import StudyFacts
    from phasewise.tuner.machine_limits import Roofline
    from phasewise.workflows.machine_report.facts import DatabaseReport, ScheduleFacts
    from phasewise.workflows.machine_report.worth import Worth

_STYLE = """
body{margin:2rem auto;max-width:70rem;padding:0 1rem;background:#fbfaf7;color:#1f2933;
font:15px/1.5 system-ui,-apple-system,"Segoe UI","DejaVu Sans",Arial,sans-serif}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}h3{font-size:1rem}
table{border-collapse:collapse;font-size:.88rem;width:100%}
th,td{text-align:left;padding:.2rem .8rem .2rem 0;border-bottom:1px solid #d5dbe1;vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.faint{color:#52606d}.scroll{overflow-x:auto;margin-bottom:1.2rem}svg{max-width:100%;height:auto}
"""
_MOST_TRIALS = 12
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 760.0, 380.0, 64.0, 48.0, 40.0, 16.0


def page(report: DatabaseReport, program_version: str, now_s: float) -> str:
    """The whole document. `now_s`: Unix time of its making."""
    date = datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    body = "\n".join(
        [
            "<h1>What phasewise knows of this machine</h1>",
            f'<p class="faint">Made {date} by phasewise {_e(program_version)}, from the tuning database.</p>',
            *_worth(report.worth),
            *_machine(report),
            *_schedules(report),
            *_studies(report.studies),
            *_history(report),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>phasewise report</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _worth(worth: Worth) -> Iterator[str]:
    yield "<h2>What tuning is worth</h2>"
    if not worth.products and not worth.models:
        yield "<p>Nothing was tuned yet: every product runs by its default schedule. tune-kernels finds others.</p>"
        return
    yield "<p>A gain is the default's time over the tuned one's, from duels in pairs of turns; a product that kept the "
    yield "default counts as 1. Means are geometric, over all that was tried; an interval's ends are the means of the "
    yield "duels' own. A whole model's speed is told in tokens/s, by the default schedules before and tuned ones after; its gain is the median ratio within a pair of turns.</p>"
    for machine_worth in worth_by_machine(worth):
        told = " (imported: measured elsewhere)" if machine_worth.is_imported else ""
        core = machine_worth.machine.core_sig.replace("+", " ")
        yield f'<h3>{_e(machine_worth.machine.placement_sig)}{told}</h3><p class="faint">{_e(core)}</p>'
        if machine_worth.models:
            yield from _table(machine_worth.models, n_words=2)
        if machine_worth.products:
            yield from _table(machine_worth.products, n_words=2)
        yield f"<ul>{''.join(f'<li>{_e(remark)}</li>' for remark in machine_worth.remarks)}</ul>"


def _table(rows: Sequence[Row], n_words: int) -> Iterator[str]:
    heads = [
        f"<th>{_e(name)}</th>" if index < n_words else f'<th class="n">{_e(name)}</th>'
        for index, name in enumerate(rows[0].texts())
    ]
    yield f'<div class="scroll"><table><thead><tr>{"".join(heads)}</tr></thead><tbody>'
    yield from (_row([*row.texts().values()], n_words=n_words) for row in rows)
    yield "</tbody></table></div>"


def _machine(report: DatabaseReport) -> Iterator[str]:
    yield "<h2>Machine and plans</h2>"
    if not report.plans:
        yield draw_svg(report.machine)
        yield "<p>No plan is stored for this machine: the default ones are used. tune-config finds others.</p>"
    for model, plans in report.plans.items():
        yield f"<h3>{_e(model)}</h3>"
        yield picture_of_plans(report.machine, plans)
        yield "<ul>"
        for phase, plan in plans.items():
            reached = report.objectives[model].get(phase, {})
            told = ", ".join(f"{name} {number(value, 4)}" for name, value in sorted(reached.items()))
            yield f"<li>{_e(plan.describe())}{f'; measured: {_e(told)}' if told else ''}</li>"
        yield "</ul>"


def _schedules(report: DatabaseReport) -> Iterator[str]:
    yield "<h2>Schedules in use</h2>"
    if not report.schedules:
        yield "<p>None was tuned: every product runs by its default schedule. tune-kernels finds others.</p>"
        return
    roofline = report.roofline
    if roofline is not None:
        yield "<p>The limits were measured while this report was made; the times are older. A share above 100 % "
        yield "means that the machine was faster then.</p>"
    yield roofline_plot(report.schedules, roofline)
    yield '<div class="scroll"><table><thead><tr><th>format</th><th class="n">n x k</th><th class="n">m</th>'
    yield '<th class="n">time, us</th><th class="n">GFLOP/s</th><th class="n">GB/s of weights</th>'
    yield '<th class="n">of the limit</th><th class="n">gain over the one before</th><th class="n">95 % interval</th>'
    yield '<th class="n">pairs</th><th>schedule</th></tr></thead><tbody>'
    for facts in report.schedules:
        yield _row(_schedule_cells(facts, roofline), n_words=1)
    yield "</tbody></table></div>"


def _schedule_cells(facts: ScheduleFacts, roofline: Roofline | None) -> list[str]:
    problem, sample = facts.problem, facts.measurement.sample
    share = _share(facts, roofline)
    duel = facts.promotion.comparison if facts.promotion else None
    schedule = sample.schedule
    words = (
        f"tile {schedule.mr}x{16 * schedule.panels}, block {schedule.block_m}x{schedule.block_n}x"
        f"{schedule.block_k}, threads {schedule.threads_m}x{schedule.threads_n}x{schedule.threads_k}, "
        f"{schedule.compute_path}"
    )
    return [
        f"{problem.family} {problem.format}",
        f"{problem.n} x {problem.k}",
        str(problem.m),
        f"{sample.estimate_ns / 1000:.1f}",
        f"{facts.flops / 1e9:.1f}" if facts.weight_bytes else "",
        f"{facts.bytes_per_s / 1e9:.1f}" if facts.weight_bytes else "",
        "" if share is None else percent(share),
        "" if duel is None else proven(duel.gain, duel.gain_low, duel.gain_high, 3),
        "" if duel is None else f"{duel.gain_low:.3f} to {duel.gain_high:.3f}",
        "" if duel is None else str(duel.pairs),
        words,
    ]


def _share(facts: ScheduleFacts, roofline: Roofline | None) -> float | None:
    if roofline is None or not facts.weight_bytes:
        return None
    problem = facts.problem
    bound_ns = roofline.bound_ns(problem.format, problem.n, problem.k, problem.m, facts.weight_bytes)
    return share_of_limit(bound_ns / facts.measurement.sample.estimate_ns)


def roofline_plot(schedules: Sequence[ScheduleFacts], roofline: Roofline | None) -> str:
    """GFLOP/s over FLOP per byte of weight, both logarithmic; the limits as lines."""
    with_weights = [facts for facts in schedules if facts.weight_bytes]
    if not with_weights:
        return ""
    points = [
        (facts.n_flops / facts.weight_bytes, facts.flops / 1e9, facts.problem.format)
        for facts in with_weights
    ]
    limits = _limits(roofline, max(x for x, _, _ in points))
    ys = [y for _, y, _ in points] + [y for line in limits.values() for _, y in line]
    xs = [x for x, _, _ in points] + [x for line in limits.values() for x, _ in line]
    across = _Log(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    upwards = _Log(min(ys), max(ys), _HEIGHT - _BOTTOM, _TOP)
    elements = [*_axes(across, upwards)]
    for name, line in limits.items():
        where = " ".join(f"{across.place(x):.1f},{upwards.place(y):.1f}" for x, y in line)
        elements.append(
            f'<polyline points="{where}" fill="none" stroke="{FAINT_INK}" stroke-dasharray="5 4"/>'
        )
        end = line[-1]
        elements.append(text(across.place(end[0]) - 130, upwards.place(end[1]) - 5, name, "d"))
    formats = sorted({name for _, _, name in points})
    for x, y, name in points:
        fill = SERIES[formats.index(name) % len(SERIES)]
        elements.append(
            f'<circle cx="{across.place(x):.1f}" cy="{upwards.place(y):.1f}" r="4" fill="{fill}" fill-opacity="0.8"/>'
        )
    for place, name in enumerate(formats):
        x = _LEFT + 110 * place
        elements.append(f'<circle cx="{x:.1f}" cy="18" r="4" fill="{SERIES[place % len(SERIES)]}"/>')
        elements.append(text(x + 9, 22, name, "s"))
    style = f"text{{font-family:{FONT}}}.s{{font-size:12px;fill:{INK}}}.d{{font-size:11px;fill:{FAINT_INK}}}"
    return document(_WIDTH, _HEIGHT, style, elements)


def _limits(roofline: Roofline | None, most_x: float) -> Mapping[str, list[tuple[float, float]]]:
    """Lines of the roofline by name: memory bandwidth alone, and each kind of arithmetic where it is
    reached."""
    if roofline is None:
        return {}
    bandwidth = roofline.read_bytes_per_s / 1e9
    out = {}
    for kind, peak in roofline.peak_flops.items():
        knee = peak / 1e9 / bandwidth
        line = [(0.5, 0.5 * bandwidth), (knee, peak / 1e9)]
        if most_x > knee:
            line.append((most_x, peak / 1e9))
        out[f"{kind}: {peak / 1e9:.0f} GFLOP/s, {bandwidth:.1f} GB/s"] = line
    return out


class _Log:
    """A logarithmic axis: values from `low` to `high` on pixels from `start` to `end`."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high = math.floor(math.log10(low)), math.ceil(math.log10(high * 1.0001))
        self.start, self.end = start, end

    def place(self, value: float) -> float:
        share = (math.log10(value) - self.low) / max(1, self.high - self.low)
        return self.start + share * (self.end - self.start)

    def marks(self) -> list[float]:
        return [10.0**power for power in range(self.low, self.high + 1)]


def _axes(across: _Log, upwards: _Log) -> Iterator[str]:
    for x in across.marks():
        left = across.place(x)
        yield f'<line x1="{left:.1f}" y1="{_TOP}" x2="{left:.1f}" y2="{_HEIGHT - _BOTTOM}" stroke="#dcdfe3"/>'
        yield text(left - 8, _HEIGHT - _BOTTOM + 16, number(x), "d")
    for y in upwards.marks():
        top = upwards.place(y)
        yield f'<line x1="{_LEFT}" y1="{top:.1f}" x2="{_WIDTH - _RIGHT}" y2="{top:.1f}" stroke="#dcdfe3"/>'
        yield text(8, top + 4, number(y), "d")
    yield text(_WIDTH / 2 - 110, _HEIGHT - 10, "operations for each byte of the weight", "s")
    yield text(8, _TOP - 10, "GFLOP/s", "s")


def _studies(studies: Sequence[StudyFacts]) -> Iterator[str]:
    yield "<h2>Searches for plans</h2>"
    if not studies:
        yield "<p>None was made on this machine with this database.</p>"
    for study in studies:
        best = study.best
        yield f"<h3>{_e(study.model)}, {_e(study.phase)}, {_e(study.objective)}</h3>"
        counts = ", ".join(f"{n} {state}" for state, n in _counted(trial.state for trial in study.trials))
        told = "" if best is None else f"; the best, number {best.number}, costs {best.cost_ms:.3f} ms"
        yield f'<p class="faint">{counted(len(study.trials), "trial")}: {counts}{told}</p>'
        costed = [trial for trial in study.trials if trial.cost_ms is not None]
        yield '<table><thead><tr><th>tree</th><th class="n">trial</th><th class="n">cost, ms</th><th>state</th>'
        yield "<th>ranks and cores</th></tr></thead><tbody>"
        for trial in sorted(costed, key=lambda run: run.cost_ms or 0.0)[:_MOST_TRIALS]:
            words = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in trial.parameters.items())
            cells = [trial.tree, str(trial.number), f"{trial.cost_ms:.3f}", trial.state, words]
            yield _row(cells, n_words=1, words_at=(3, 4))
        yield "</tbody></table>"


def _history(report: DatabaseReport) -> Iterator[str]:
    yield "<h2>History</h2>"
    yield '<table><thead><tr><th>version</th><th class="n">measurements</th><th class="n">schedules taken into use</th>'
    yield '<th class="n">plans</th><th>from</th><th>to</th></tr></thead><tbody>'
    for facts in report.history:
        days = [
            datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")
            for ms in (facts.first_ms, facts.last_ms)
        ]
        cells = [facts.version, str(facts.measurements), str(facts.promotions), str(facts.plans), *days]
        yield _row(cells, n_words=1, words_at=(4, 5))
    yield "</tbody></table>"
    if report.others:
        yield f"<p>The database has {counted(report.others, 'measurement')} of other kinds of machines, not shown.</p>"


def _row(cells: Sequence[str], n_words: int, words_at: Sequence[int] = (10,)) -> str:
    """A row of a table: the first cells are words, the others numbers but for those at `words_at`."""
    tags = [
        f"<td>{_e(cell)}</td>" if index < n_words or index in words_at else f'<td class="n">{_e(cell)}</td>'
        for index, cell in enumerate(cells)
    ]
    return f"<tr>{''.join(tags)}</tr>"


def _counted(states: Iterable[str]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for state in states:
        counts[state] = counts.get(state, 0) + 1
    return sorted(counts.items())


def _e(words: str) -> str:
    return escape(words)
