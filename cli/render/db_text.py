"""The tuning database in words and tables: what `phasewise db` prints, and the same as JSON."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from phasewise.cli.present import note, say

if TYPE_CHECKING:
    from phasewise.kerneldb.records import MachineKey, PlanRecord
    from phasewise.kerneldb.store import StoreStats
    from phasewise.kerneldb.upkeep import Diff, Preferred, Verdict

    Machines: TypeAlias = dict[MachineKey, str]

WIDTH = 80
MAX_MODEL_CHARS = 30
MAX_KERNEL_CHARS = 18
MAX_PATH_CHARS = 12
MAX_SCHEDULE_CHARS = 23
MAX_BUILD_CHARS = 40
IN_USE = "Schedules in use"


def plan_fields(plans: Sequence[PlanRecord], machines: Machines) -> list[dict[str, Any]]:
    """One object a plan, oldest first. `in_use`: the newest verified one of its model, phase and machine."""
    newest = {(one.model_key, one.phase, one.origin.machine): one for one in plans if one.origin.verified}
    return [
        {
            "model": plan.model_key,
            "phase": plan.phase,
            "ranks": _ranks(plan),
            "machine": machines[plan.origin.machine],
            "in_use": newest.get((plan.model_key, plan.phase, plan.origin.machine)) is plan,
            "verified": plan.origin.verified,
            "objectives": dict(plan.objectives),
            "created_at_ms": plan.origin.created_at_ms,
            "program_version": plan.origin.program_version,
        }
        for plan in plans
    ]


def _ranks(plan: PlanRecord) -> list[list[int]] | None:
    """The cores of each rank; None where the stored plan cannot be read."""
    from phasewise.tuner.errors import PlanError
    from phasewise.tuner.plans import ServicePlan

    try:
        return [list(rank.cores) for rank in ServicePlan.from_json(plan.plan_json).ranks]
    except PlanError as error:
        note(f"the {plan.phase} plan for {plan.model_key} cannot be read: {error}")
        return None


def schedule_fields(one: Preferred, machines: Machines, stale: bool) -> dict[str, Any]:
    """The problem, its schedule and what was measured, flat."""
    from dataclasses import asdict

    timing = one.measurement
    return {
        **asdict(timing.problem),
        **asdict(timing.sample.schedule),
        "estimate_ns": timing.sample.estimate_ns,
        "samples": len(timing.sample.samples_ns),
        "kernel_abi": timing.kernel_abi,
        "standing": one.standing.value,
        "stale": stale,
        "machine": machines[timing.origin.machine],
    }


def stats_fields(name: str, found: StoreStats, current_builds: Collection[str]) -> dict[str, Any]:
    """What `--json` prints."""
    machines = labels(one.machine for one in found.signatures)
    return {
        "database": name,
        "exists": True,
        "schema": found.revision,
        "file_bytes": found.file_bytes,
        "rows": dict(found.rows),
        "by_machine": [
            {
                "machine": machines[one.machine],
                "measurements": one.measurements,
                "service_plans": one.service_plans,
                "step_times": one.step_times,
            }
            for one in found.signatures
        ],
        "by_build": [
            {
                "build": one.kernel_abi,
                "measurements": one.measurements,
                "unverified": one.unverified,
                "state": _build_state(one.kernel_abi, current_builds),
            }
            for one in found.builds
        ],
        "machines": machine_fields(machines),
    }


def _build_state(kernel_abi: str, current_builds: Collection[str]) -> str:
    from phasewise.kerneldb.upkeep import is_stale

    if kernel_abi in current_builds:
        return "current"
    return "stale" if is_stale(kernel_abi, current_builds) else "elsewhere"


def diff_fields(found: Diff, machines: Machines) -> list[dict[str, Any]]:
    """One object a key that differs; null where a side knows nothing of it."""
    from dataclasses import asdict

    return [
        {
            **asdict(one.key.problem),
            "kernel_abi": one.key.kernel_abi,
            "machine": machines[one.key.machine],
            "here": one.here and asdict(one.here.schedule),
            "there": one.there and asdict(one.there.schedule),
        }
        for one in found.differences
    ]


def verdict_fields(one: Verdict) -> dict[str, Any]:
    """The problem, the schedule, what was claimed and what was found, flat."""
    from dataclasses import asdict

    return {
        **asdict(one.problem),
        **asdict(one.schedule),
        "claimed_ns": one.claimed_ns,
        "measured_ns": one.measured_ns,
        **asdict(one.comparison),
        "promoted": one.promoted,
    }


def machine_fields(machines: Machines) -> list[dict[str, str]]:
    """The signatures are too long for a table, so tables name machines by number and this is the legend."""
    return [
        {"machine": label, "core": key.core_sig, "placement": key.placement_sig}
        for key, label in machines.items()
    ]


def labels(machines: Iterable[MachineKey]) -> Machines:
    """A short label for each kind of machine, in order of appearance."""
    return {machine: f"#{number}" for number, machine in enumerate(dict.fromkeys(machines), start=1)}


def print_contents(fields: dict[str, Any]) -> None:
    plans = [
        {
            "model": _shortened(plan["model"], MAX_MODEL_CHARS),
            "phase": plan["phase"],
            "cores": _cores(plan["ranks"]),
            "on": plan["machine"],
            "in use": "yes" if plan["in_use"] else "no",
            "created": time.strftime("%Y-%m-%d", time.gmtime(plan["created_at_ms"] / 1000)),
        }
        for plan in fields["plans"]
    ]
    print_table("Service plans", plans)
    for title, chosen in _sections(fields["schedules"]).items():
        print_table(title, [_schedule_line(one) for one in chosen])
    print_machines(fields["machines"])


def _sections(schedules: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """By what may be done with them; only the first section is shown when it is empty."""
    sections = {
        IN_USE: [one for one in schedules if not one["stale"] and one["standing"] == "in use"],
        "Fastest measured, nothing promoted": [
            one for one in schedules if not one["stale"] and one["standing"] == "measured"
        ],
        "Imported, to be measured by `phasewise db verify`": [
            one for one in schedules if not one["stale"] and one["standing"] == "imported"
        ],
        "Of an earlier build of the kernels, not used": [one for one in schedules if one["stale"]],
    }
    return {title: chosen for title, chosen in sections.items() if chosen or title == IN_USE}


def _shortened(text: str, limit: int) -> str:
    """The end of a long name tells more than its beginning: a model's has the format."""
    return text if len(text) <= limit else "..." + text[3 - limit :]


def _cores(ranks: list[list[int]] | None) -> str:
    from phasewise.tuner.plans import list_cores

    return "?" if ranks is None else " | ".join(list_cores(cores) for cores in ranks)


def _schedule_line(one: dict[str, Any]) -> dict[str, Any]:
    """What fits in 80 columns; `--json` has the rest."""
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


def _schedule_words(schedule: dict[str, Any] | None) -> str:
    if schedule is None:
        return "none"
    return _shortened(f"{_tile(schedule)} {_grid(schedule)} {schedule['compute_path']}", MAX_SCHEDULE_CHARS)


def verdict_line(one: Verdict) -> str:
    """What measuring a schedule gave, for the progress."""
    found = one.comparison
    gain = (
        f"{found.gain:.2f} times as fast as what was in use ({found.gain_low:.2f} to {found.gain_high:.2f})"
    )
    return f"{one.problem.describe()}: {gain}; {'now in use' if one.promoted else 'not promoted'}"


def print_verdicts(verdicts: Sequence[dict[str, Any]]) -> None:
    """A line for each schedule that was compared."""
    lines = [
        {
            "kernel": _shortened(f"{one['family']} {one['format']}", MAX_KERNEL_CHARS),
            "n x k x m": _size(one),
            "claimed us": f"{one['claimed_ns'] / 1000:.1f}",
            "here us": f"{one['measured_ns'] / 1000:.1f}",
            "gain": f"{one['gain']:.2f} ({one['gain_low']:.2f}..{one['gain_high']:.2f})",
            "in use": "yes" if one["promoted"] else "no",
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

    say(f"{title}: none" if not rows else f"{title}\n{tabulate(rows, headers='keys', disable_numparse=True)}")
    say("")


def print_machines(machines: list[dict[str, str]]) -> None:
    for machine in machines:
        core = machine["core"].replace("+", " ")  # the list of instruction sets would not wrap
        line = f"{machine['machine']}  {machine['placement']}; {core}"
        say(textwrap.fill(line, WIDTH, subsequent_indent="    "))
