"""The tuning database in words and tables: what `phasewise db` prints, and the same as JSON."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from phasewise._words import counted
from phasewise.cli.commands.topo.text import core_words
from phasewise.cli.present import on_one_line, say
from phasewise.workflows.database.listing import ListedSchedules, Section

if TYPE_CHECKING:
    from phasewise.kerneldb.records import MachineKey
    from phasewise.kerneldb.upkeep import ScheduleVerdict

    Machines: TypeAlias = dict[MachineKey, str]

WIDTH = 80
MAX_MODEL_CHARS = 30
MAX_KERNEL_CHARS = 18
MAX_PATH_CHARS = 12
MAX_SCHEDULE_CHARS = 23
MAX_BUILD_CHARS = 40
MAX_ROWS = 12


def print_contents(fields: dict[str, Any], listed: ListedSchedules) -> None:
    """The summary, the plans, and the schedules that were read of each section."""
    sections = {Section.IN_USE: listed.counts[Section.IN_USE], **listed.counts}
    counts = [f"{counted(len(fields['plans']), 'plan')}"]
    counts += [f"{title}: {sections[title]}" for title in Section if title in sections]
    say(textwrap.fill("; ".join(counts), WIDTH))
    say("")
    plans = [
        {
            "model": _shortened(plan["model"], MAX_MODEL_CHARS),
            "phase": plan["phase"],
            "cores": _cores(plan),
            "on": plan["machine"],
            "in use": "yes" if plan["in_use"] else "no",
            "created": time.strftime("%Y-%m-%d", time.gmtime(plan["created_at_ms"] / 1000)),
        }
        for plan in fields["plans"]
    ]
    print_table("Service plans", plans)
    for title in Section:
        if title not in sections:
            continue
        lines = zip(listed.shown, fields["schedules"], strict=True)
        chosen = [_schedule_line(one) for (section, _), one in lines if section is title]
        print_table(title, chosen)
        if (left := sections[title] - len(chosen)) > 0:
            say(f"... and {left} more: --wide prints all, --m N those for N rows\n")
    print_machines(fields["machines"])
    shipped = counted(fields["shipped"], "schedule")
    say(textwrap.fill(f"Beside it, in the package: {shipped}, lowest in trust and timed before use", WIDTH))


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


def _schedule_line(one: dict[str, Any]) -> dict[str, Any]:
    """A line of 80 columns; `--json` has the rest."""
    return {
        "kernel": _shortened(f"{one['family']} {one['format']}", MAX_KERNEL_CHARS),
        "n x k x m": _size(one),
        "tile": _tile(one),
        "grid": _grid(one),
        "path": _shortened(one["compute_path"], MAX_PATH_CHARS),
        "us": f"{one['estimate_ns'] / 1000:.1f}",
        "on": one["machine"],
    }


def print_diff(differences: Sequence[dict[str, Any]]) -> None:
    """A line for each key that differs."""
    lines = [
        {
            "kernel": _shortened(f"{one['family']} {one['format']}", MAX_PATH_CHARS),
            "n x k x m": _size(one),
            "here": _schedule_words(one["here"]),
            "there": _schedule_words(one["there"]),
        }
        for one in differences
    ]
    print_table("Schedules that differ", lines)


def print_plan_diff(plans: Sequence[dict[str, Any]]) -> None:
    """A line for each phase of a model."""
    lines = [
        {
            "model": _shortened(one["model"], MAX_MODEL_CHARS),
            "phase": one["phase"],
            "on": one["machine"],
            "here": "none" if one["here"] is None else "a plan",
            "there": "none" if one["there"] is None else "another" if one["here"] else "a plan",
        }
        for one in plans
    ]
    print_table("Plans that differ", lines)


def _schedule_words(schedule: dict[str, Any] | None) -> str:
    if schedule is None:
        return "none"
    return _shortened(f"{_tile(schedule)} {_grid(schedule)} {schedule['compute_path']}", MAX_SCHEDULE_CHARS)


def verdict_line(one: ScheduleVerdict) -> str:
    """The line of a schedule's measurement, for the progress."""
    found = one.comparison
    gain = (
        f"{found.gain:.2f} times as fast as what was in use ({found.gain_low:.2f} to {found.gain_high:.2f})"
    )
    return f"{one.problem.describe()}: {gain}; {one.outcome}"


def print_verdicts(verdicts: Sequence[dict[str, Any]]) -> None:
    """A line for each schedule that was compared."""
    lines = [
        {
            "kernel": _shortened(f"{one['family']} {one['format']}", MAX_KERNEL_CHARS),
            "n x k x m": _size(one),
            "claimed us": f"{one['claimed_ns'] / 1000:.1f}",
            "here us": f"{one['measured_ns'] / 1000:.1f}",
            "gain": f"{one['gain']:.2f} ({one['gain_low']:.2f}..{one['gain_high']:.2f})",
            "verdict": one["outcome"],
        }
        for one in verdicts
    ]
    print_table("Verified", lines)


def _size(one: dict[str, Any]) -> str:
    return f"{one['n']}x{one['k']}x{one['m']}"


def _tile(one: dict[str, Any]) -> str:
    return f"{one['mr']}x{16 * one['panels']}"


def _grid(one: dict[str, Any]) -> str:
    return f"{one['threads_m']}x{one['threads_n']}x{one['threads_k']}"


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
    from tabulate import tabulate

    cells = [{name: on_one_line(value) for name, value in row.items()} for row in rows]
    say(
        f"{title}: none" if not rows else f"{title}\n{tabulate(cells, headers='keys', disable_numparse=True)}"
    )
    say("")


def print_machines(machines: list[dict[str, str]]) -> None:
    for machine in machines:
        # The list of instruction sets would not wrap.
        core = core_words(machine["core"]).replace("+", " ")
        line = on_one_line(f"{machine['machine']}  {machine['placement']}; {core}")
        say(textwrap.fill(line, WIDTH, subsequent_indent="    "))
