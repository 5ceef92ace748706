"""`phasewise db`: where the tuning database is, what it holds, and how to put a plan into it by hand."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasewise._version import __version__
from phasewise.cli.options import DbOption, FormatOption, JsonOption, WeightFormat
from phasewise.cli.present import note, print_json

if TYPE_CHECKING:
    from phasewise.kerneldb.records import MachineKey, Measurement, PlanRecord
    from phasewise.kerneldb.store import StoreStats

app = typer.Typer(no_args_is_help=True, help="The tuning database: plans, schedules, measurements.")

WIDTH = 80
MAX_MODEL_CHARS = 30
MAX_KERNEL_CHARS = 18
MAX_PATH_CHARS = 12


class PhaseName(StrEnum):
    """The two phases of a request."""

    prefill = "prefill"
    decode = "decode"


@app.command()
def path(db: DbOption = None, as_json: JsonOption = False) -> None:
    """Print the file or URL of the database that the other commands would use."""
    name, exists = _where(db)
    if as_json:
        print_json({"database": name, "exists": exists})
    else:
        typer.echo(name)


@app.command()
def show(db: DbOption = None, as_json: JsonOption = False) -> None:
    """List the service plans, and the best schedule measured for each problem."""
    name, exists = _where(db)
    plans: list[PlanRecord] = []
    best: list[Measurement] = []
    if exists is False:
        note(f"there is no database at {name} yet")
    else:
        from phasewise.kerneldb.store import open_store

        with open_store(db, note) as store:
            plans, best = store.plans(), store.best_measurements()
    machines = _labels([*(plan.origin.machine for plan in plans), *(one.origin.machine for one in best)])
    fields: dict[str, Any] = {
        "database": name,
        "plans": plan_fields(plans, machines),
        "schedules": [schedule_fields(one, machines) for one in best],
        "machines": machine_fields(machines),
    }
    if as_json:
        print_json(fields)
    else:
        _print_contents(fields)


@app.command()
def stats(db: DbOption = None, as_json: JsonOption = False) -> None:
    """Count the rows by table and by kind of machine; say the file's size and its schema."""
    name, exists = _where(db)
    fields: dict[str, Any] = {"database": name, "exists": False}
    if exists is False:
        note(f"there is no database at {name} yet")
    else:
        from phasewise.kerneldb.store import open_store

        with open_store(db, note) as store:
            fields = stats_fields(store.name, store.stats())
    if as_json:
        print_json(fields)
    elif "rows" in fields:
        _print_stats(fields)


@app.command()
def upgrade(db: DbOption = None, as_json: JsonOption = False) -> None:
    """Bring the database to this program's schema, creating it if there is none."""
    from phasewise.kerneldb.store import open_store

    with open_store(db) as store:
        change, name = store.schema_change, store.name
    if as_json:
        print_json({"database": name, "from": change.before, "to": change.after})
    elif change.before is None:
        typer.echo(f"{name}: created with schema {change.after}")
    elif change.before == change.after:
        typer.echo(f"{name}: schema {change.after} is current")
    else:
        typer.echo(f"{name}: upgraded from schema {change.before} to {change.after}")


@app.command("set-plan")
def set_plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="the model's name, as `models list` prints it")
    ],
    phase: Annotated[PhaseName, typer.Option(help="the phase that the plan is for")],
    cores: Annotated[str, typer.Option(metavar="LIST", help="cores to pin threads to, e.g. 0,1 or 0-3,8")],
    weight_format: FormatOption = WeightFormat.native,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Append a plan for one phase of MODEL on this machine; from now on it is the one in use."""
    from phasewise.kerneldb.records import Origin, PlanRecord
    from phasewise.kerneldb.store import open_store
    from phasewise.topology import read_machine
    from phasewise.tuner import plans

    machine = read_machine()
    rank = plans.rank_on(machine, plans.parse_cores(cores))
    plan = plans.ServicePlan(phase.value, (rank,), "database")
    plans.check_fits(plan, machine)
    key = plans.model_key(model, weight_format.value)
    origin = Origin(plans.machine_key(machine), __version__, time.time_ns() // 1_000_000)
    record = PlanRecord(key, phase.value, plan.to_json(), origin)
    with open_store(db, note) as store:
        store.add_plan(record)
    if as_json:
        print_json({"model": key, "phase": plan.phase, "ranks": [list(one.cores) for one in plan.ranks]})
    else:
        typer.echo(f"{key}, {plan.describe()}")


def plan_fields(plans: Sequence[PlanRecord], machines: dict[MachineKey, str]) -> list[dict[str, Any]]:
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


def schedule_fields(best: Measurement, machines: dict[MachineKey, str]) -> dict[str, Any]:
    """The problem, its schedule and what was measured, flat."""
    from dataclasses import asdict

    return {
        **asdict(best.problem),
        **asdict(best.sample.schedule),
        "estimate_ns": best.sample.estimate_ns,
        "samples": len(best.sample.samples_ns),
        "kernel_abi": best.kernel_abi,
        "machine": machines[best.origin.machine],
    }


def stats_fields(name: str, found: StoreStats) -> dict[str, Any]:
    """What `--json` prints."""
    labels = _labels(one.machine for one in found.signatures)
    return {
        "database": name,
        "exists": True,
        "schema": found.revision,
        "file_bytes": found.file_bytes,
        "rows": dict(found.rows),
        "by_machine": [
            {
                "machine": labels[one.machine],
                "measurements": one.measurements,
                "service_plans": one.service_plans,
            }
            for one in found.signatures
        ],
        "machines": machine_fields(labels),
    }


def machine_fields(machines: dict[MachineKey, str]) -> list[dict[str, str]]:
    """The signatures are too long for a table, so tables name machines by number and this is the legend."""
    return [
        {"machine": label, "core": key.core_sig, "placement": key.placement_sig}
        for key, label in machines.items()
    ]


def _where(db: str | None) -> tuple[str, bool | None]:
    """The database's name without its password, and whether it exists; None where only a server knows."""
    from phasewise.kerneldb.location import locate

    location = locate(db)
    return location.name, None if location.file is None else not location.is_absent


def _labels(machines: Iterable[MachineKey]) -> dict[MachineKey, str]:
    """A short label for each kind of machine, in order of appearance."""
    return {machine: f"#{number}" for number, machine in enumerate(dict.fromkeys(machines), start=1)}


def _print_contents(fields: dict[str, Any]) -> None:
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
    _print_table("Service plans", plans)
    _print_table("Best schedules", [_schedule_line(one) for one in fields["schedules"]])
    _print_machines(fields["machines"])


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
        "n x k x m": f"{one['n']}x{one['k']}x{one['m']}",
        "tile": f"{one['mr']}x{16 * one['panels']}",
        "grid": f"{one['threads_m']}x{one['threads_n']}x{one['threads_k']}",
        "path": _shortened(one["compute_path"], MAX_PATH_CHARS),
        "us": f"{one['estimate_ns'] / 1000:.1f}",
        "on": one["machine"],
    }


def _print_stats(fields: dict[str, Any]) -> None:
    typer.echo(f"database  {fields['database']}\nschema    {fields['schema']} (current)")
    if fields["file_bytes"] is not None:
        typer.echo(f"size      {fields['file_bytes'] / 1024:.0f} KiB")
    typer.echo("")
    _print_table("Rows", [{"table": name, "rows": count} for name, count in fields["rows"].items()])
    by_machine = [
        {name.replace("_", " "): value for name, value in row.items()} for row in fields["by_machine"]
    ]
    _print_table("By machine", by_machine)
    _print_machines(fields["machines"])


def _print_table(title: str, rows: list[dict[str, Any]]) -> None:
    from tabulate import tabulate

    typer.echo(
        f"{title}: none" if not rows else f"{title}\n{tabulate(rows, headers='keys', disable_numparse=True)}"
    )
    typer.echo("")


def _print_machines(machines: list[dict[str, str]]) -> None:
    for machine in machines:
        core = machine["core"].replace("+", " ")  # the list of instruction sets would not wrap
        line = f"{machine['machine']}  {machine['placement']}; {core}"
        typer.echo(textwrap.fill(line, WIDTH, subsequent_indent="    "))
