"""The tuning database in words and tables: what `phasewise db` prints, and the same as JSON."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from phasewise._words import counted, percent
from phasewise.cli.commands.topo.text import core_words
from phasewise.cli.present import on_one_line, say
from phasewise.cli.tables import WIDTH, RowTable, show
from phasewise.workflows.database.listing import ListedSchedules, Section

if TYPE_CHECKING:
    from phasewise.kerneldb.records import MachineKey

    Machines: TypeAlias = dict[MachineKey, str]

MAX_MODEL_CHARS = 30
MAX_SCORED_CHARS = 22
MAX_KERNEL_CHARS = 18
MAX_TIMED_CHARS = 14
MAX_SIZE_CHARS = 14
MAX_NUMBER_CHARS = 9
MAX_SPAN_CHARS = 13
MAX_PATH_CHARS = 12
MAX_SCHEDULE_CHARS = 23
MAX_BUILD_CHARS = 40
MAX_ROWS = 12


def print_contents(fields: dict[str, Any], listed: ListedSchedules, wide: bool) -> None:
    """The summary, the plans, the schedules that were read of each section, and the scores of predictors."""
    sections = {Section.IN_USE: listed.counts[Section.IN_USE], **listed.counts}
    counts = [f"{counted(len(fields['plans']), 'plan')}"]
    counts += [f"{title}: {sections[title]}" for title in Section if title in sections]
    say(textwrap.fill("; ".join(counts), WIDTH))
    say("")
    print_table("Service plans", [line for plan in fields["plans"] for line in _plan_lines(plan)])
    for title in Section:
        if title not in sections:
            continue
        lines = zip(listed.shown, fields["schedules"], strict=True)
        chosen = [_schedule_line(schedule) for (section, _), schedule in lines if section is title]
        print_table(title, chosen)
        if (left := sections[title] - len(chosen)) > 0:
            say(f"... and {left} more: --wide prints all, --m N those for N rows\n")
    _print_scores(fields["predictor_scores"], wide)
    print_machines(fields["machines"])
    shipped = counted(fields["shipped"], "schedule")
    told = f"Beside it, in the package: {shipped}, lowest in trust and timed before use"
    if kinds := fields["shipped_kinds"]:
        told += f", for {'; '.join(kinds)}"
    say(textwrap.fill(told, WIDTH))


def _print_scores(scores: Sequence[dict[str, Any]], wide: bool) -> None:
    """The newest ones; nothing where there are none."""
    shown = scores if wide else scores[-MAX_ROWS:]
    lines = [
        {
            "model": _shortened(score["model"], MAX_SCORED_CHARS),
            "reads": _shortened(score["reads"], MAX_PATH_CHARS),
            "by answers": score["judged_answers"],
            "held": _share(score["figures"], "accuracy"),
            "used": _share(score["figures"], "utilisation"),
            "judged": time.strftime("%Y-%m-%d", time.gmtime(score["created_at_ms"] / 1000)),
        }
        for score in shown
    ]
    if lines:
        print_table("Predictors of lengths", lines)
    if len(scores) > len(shown):
        say(f"... and {len(scores) - len(shown)} older: --wide prints all\n")


def _share(figures: dict[str, float], name: str) -> str:
    return percent(figures[name], 1) if name in figures else ""


def _plan_lines(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A line, and one for each of its bands of sequences."""
    line = {
        "model": _shortened(plan["model"], MAX_MODEL_CHARS),
        "phase": plan["phase"],
        "cores": _cores(plan),
        "on": plan["machine"],
        "in use": "yes" if plan["in_use"] else "no",
        "created": time.strftime("%Y-%m-%d", time.gmtime(plan["created_at_ms"] / 1000)),
    }
    yield line
    for band in plan["bands"]:
        yield {**dict.fromkeys(line, ""), "phase": f"from {band['sequences']}", "cores": _cores(band)}


def _shortened(text: str, limit: int) -> str:
    """The end of a long name tells more than its beginning: a model's has the format."""
    text = on_one_line(text)
    return text if len(text) <= limit else "..." + text[3 - limit :]


def _cores(plan: dict[str, Any]) -> str:
    """The cores of each rank; of another machine the places."""
    from phasewise.tuner.plans import list_cores

    if plan["ranks"] is not None:
        return " | ".join(list_cores(cores) for cores in plan["ranks"])
    return "?" if plan["places"] is None else "places " + " | ".join(map(list_cores, plan["places"]))


def _schedule_line(schedule: dict[str, Any]) -> dict[str, Any]:
    """A line of 80 columns; `--json` has the rest."""
    return {
        "kernel": _shortened(f"{schedule['family']} {schedule['format']}", MAX_KERNEL_CHARS),
        "n x k x m": _size(schedule),
        "tile": _tile(schedule),
        "grid": _grid(schedule),
        "path": _shortened(schedule["compute_path"], MAX_PATH_CHARS),
        "us": f"{schedule['estimate_ns'] / 1000:.1f}",
        "on": schedule["machine"],
    }


def print_diff(differences: Sequence[dict[str, Any]]) -> None:
    """A line for each key that differs, those of the same standings together."""
    by_standing: dict[tuple[str | None, str | None], list[dict[str, Any]]] = {}
    for difference in differences:
        sides = difference["here_standing"], difference["there_standing"]
        by_standing.setdefault(sides, []).append(difference)
    for (here, there), own in by_standing.items():
        lines = [
            {
                "kernel": _shortened(f"{difference['family']} {difference['format']}", MAX_PATH_CHARS),
                "n x k x m": _size(difference),
                "here": _schedule_words(difference["here"]),
                "there": "the same"
                if difference["here"] == difference["there"]
                else _schedule_words(difference["there"]),
            }
            for difference in own
        ]
        print_table(f"Schedules that differ: {here or 'none'} here, {there or 'none'} there", lines)


def print_other_diff(others: Sequence[dict[str, Any]]) -> None:
    """A line for each plan, storage, predictor or user's kernel."""
    lines = [
        {
            "kind": difference["kind"],
            "of": _shortened(difference["of"], MAX_SCHEDULE_CHARS),
            "on": difference["machine"],
            "here": _verdict_words(difference["here"]),
            "there": _verdict_words(difference["there"]),
        }
        for difference in others
    ]
    print_table("Others that differ", lines)


def _verdict_words(verdict: str | None) -> str:
    return "a plan" if verdict and verdict.startswith("{") else verdict or "none"


def _schedule_words(schedule: dict[str, Any] | None) -> str:
    if schedule is None:
        return "none"
    return _shortened(f"{_tile(schedule)} {_grid(schedule)} {schedule['compute_path']}", MAX_SCHEDULE_CHARS)


def _size(problem: dict[str, Any]) -> str:
    return f"{problem['n']}x{problem['k']}x{problem['m']}"


def _tile(schedule: dict[str, Any]) -> str:
    return f"{schedule['mr']}x{16 * schedule['panels']}"


def _grid(schedule: dict[str, Any]) -> str:
    return f"{schedule['threads_m']}x{schedule['threads_n']}x{schedule['threads_k']}"


def print_stats(fields: dict[str, Any]) -> None:
    say(f"database  {fields['database']}\nschema    {fields['schema']} (current)")
    if fields["file_bytes"] is not None:
        say(f"size      {fields['file_bytes'] / 1024:.0f} KiB")
    say("")
    print_table("Rows", [{"table": name, "rows": count} for name, count in fields["rows"].items()])
    by_machine = [
        {name.replace("_", " "): value for name, value in row.items()} for row in fields["by_machine"]
    ]
    print_table("By machine", by_machine)
    by_build = [{**row, "build": _shortened(row["build"], MAX_BUILD_CHARS)} for row in fields["by_build"]]
    print_table("By build of the kernels", by_build)
    print_machines(fields["machines"])


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    show(RowTable(rows, rows[0].keys(), title) if rows else f"{title}: none", "")


def print_machines(machines: list[dict[str, str]]) -> None:
    for machine in machines:
        # The list of instruction sets would not wrap.
        core = core_words(machine["core"]).replace("+", " ")
        line = on_one_line(f"{machine['machine']}  {machine['placement']}; {core}")
        say(textwrap.fill(line, WIDTH, subsequent_indent="    "))
