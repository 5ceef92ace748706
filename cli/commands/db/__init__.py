"""`phasewise db`: the tuning database's place and contents, and plans put into it by hand."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal

from phasewise._options import REQUIRED, argument, option
from phasewise._version import __version__
from phasewise.cli.command_app import CommandApp
from phasewise.cli.commands.db import rows as db_rows
from phasewise.cli.commands.db.rows import ListedSchedules, Section
from phasewise.cli.commands.db.sharing import diff, export, gc, import_, merge, pull, push
from phasewise.cli.options import JsonOption, complete_name
from phasewise.cli.present import note
from phasewise.cli.tables import present
from phasewise.workflows.options import DB, FORMAT

if TYPE_CHECKING:
    from phasewise.kerneldb.records import PlanRecord, PredictorScore

HELP = """The tuning database: plans, schedules, measurements.

$ phasewise db show
$ phasewise db export --in-use > tuned.jsonl"""

app = CommandApp(help=HELP)
for command in (export, import_, merge, diff, push, pull, gc):
    app.command(command.__name__.rstrip("_"))(command)


PhaseName = Literal["prefill", "decode"]
"""The two phases of a request."""


@app.command()
def path(db: str | None = DB(None), as_json: JsonOption = False) -> None:
    """Print the file or URL of the database that the other commands would use.

    $ phasewise db path
    $ phasewise db path --json
    """
    name, exists = _where(db)
    present(as_json, {"database": name, "exists": exists}, [name])


@app.command()
def show(
    model: str | None = option(None, "only plans and scores of models whose name has TEXT", metavar="TEXT"),
    phase: PhaseName | None = option(None, "only plans of this phase"),
    m: int | None = option(None, "only schedules for N rows", min=1, metavar="N"),
    wide: bool = option(False, "print every schedule"),
    db: str | None = DB(None),
    as_json: JsonOption = False,
) -> None:
    """List the service plans, and for each problem the schedule in use, or the best one known.

    $ phasewise db show
    $ phasewise db show --phase decode --m 1

    A summary comes first. Of each kind of schedule the first dozen are
    printed, of predictors' scores the newest dozen; --wide prints all, --json
    too.
    """
    name, exists = _where(db, told=True)
    plans: list[PlanRecord] = []
    scores: list[PredictorScore] = []
    listed = ListedSchedules()
    if exists is not False:
        from phasewise.cython_kernels._native import kernel_abis
        from phasewise.kerneldb.records import PlanRecord, PredictorScore
        from phasewise.kerneldb.store import open_store

        limit = None if wide or as_json else db_rows.MAX_ROWS
        with open_store(db, note) as store:
            stored = [plan for plan in store.rows(PlanRecord) if phase in (None, plan.phase)]
            plans = [plan for plan in stored if (model or "") in plan.model_key]
            scores = [score for score in store.rows(PredictorScore) if (model or "") in score.model_name]
            listed = db_rows.list_schedules(store, kernel_abis(), m, limit)
    fields = _contents(name, plans, scores, listed)
    present(as_json, fields, db_rows.contents_text(fields, listed, wide))


def _contents(
    name: str, plans: list[PlanRecord], scores: list[PredictorScore], listed: ListedSchedules
) -> dict[str, Any]:
    from phasewise.kerneldb.shipped import shipped_kinds, shipped_measurements

    machines = db_rows.labels([*listed.machines, *(plan.origin.machine for plan in plans)])
    return {
        "database": name,
        "plans": db_rows.plan_rows(plans, machines, note),
        "predictor_scores": db_rows.score_rows(scores),
        "schedules": [
            db_rows.schedule_fields(schedule, machines, section is Section.STALE)
            for section, schedule in listed.shown
        ],
        "machines": db_rows.machine_fields(machines),
        "shipped": len(shipped_measurements()),
        "shipped_kinds": list(shipped_kinds()),
    }


@app.command()
def stats(db: str | None = DB(None), as_json: JsonOption = False) -> None:
    """Count the rows by table, machine and build of the kernels; say the file's size and its schema.

    $ phasewise db stats
    $ phasewise db stats --db other.db
    """
    name, exists = _where(db, told=True)
    fields: dict[str, Any] = {"database": name, "exists": False}
    if exists is not False:
        from phasewise.cython_kernels._native import kernel_abis
        from phasewise.kerneldb.store import open_store

        with open_store(db, note) as store:
            fields = db_rows.stats_fields(store.name, store.stats(), kernel_abis())
    present(as_json, fields, db_rows.stats_text(fields) if "rows" in fields else ())


@app.command()
def upgrade(db: str | None = DB(None), as_json: JsonOption = False) -> None:
    """Bring the database to this program's schema, creating it if there is none.

    $ phasewise db upgrade
    $ phasewise db upgrade --db new.db

    A file is upgraded by any command that opens it, and copied to
    NAME.before-upgrade before. A server's database is upgraded by this command
    alone: dump it first. Hosts with an older phasewise cannot read it from then
    on: upgrade them before.
    """
    from phasewise.kerneldb.schema import HEAD
    from phasewise.kerneldb.store import open_store

    with open_store(db, note, upgrades_server=True) as store:
        change, name = store.schema_change, store.name
    if change.before is None:
        told = f"created with schema {change.after}"
    elif change.after != HEAD:
        told = f"schema {change.after} is newer than this phasewise's {HEAD}: nothing is done"
    elif change.before == change.after:
        told = f"schema {change.after} is current"
    else:
        told = f"upgraded from schema {change.before} to {change.after}"
    present(as_json, {"database": name, "from": change.before, "to": change.after}, [f"{name}: {told}"])


@app.command("set-plan")
def set_plan(
    model: str = argument(
        REQUIRED,
        "a known model: a name that `models list` prints, or a file or folder",
        "MODEL",
        autocompletion=complete_name,
    ),
    phase: PhaseName = option(REQUIRED, "the phase that the plan is for"),
    cores: list[str] = option(
        REQUIRED,
        "cores to pin threads to, e.g. 0,1 or 0-3,8; once for each rank [repeatable]",
        metavar="LIST",
    ),
    from_sequences: int | None = option(
        None,
        "only for decode steps of N sequences or more: the plan in use keeps its cores for fewer",
        "--from",
        min=2,
        max=4096,
        metavar="N",
    ),
    weight_format: str = FORMAT("native"),
    db: str | None = DB(None),
    as_json: JsonOption = False,
) -> None:
    """Append a plan for one phase of MODEL on this machine; from now on it is the one in use.

    $ phasewise db set-plan model.gguf --phase decode --cores 0-3
    $ phasewise db set-plan model.gguf --phase prefill --cores 0-3 --cores 4-7

    With --from N only the cores for N sequences and more change; those of more bands than that go.
    A MODEL that is not known here is refused: no server would look its plan up.
    """
    from phasewise.kerneldb.location import locate
    from phasewise.kerneldb.records import Origin, PlanRecord
    from phasewise.kerneldb.store import open_store
    from phasewise.serving.loaders.fetching.resolve import cache_root, known_name
    from phasewise.topology import read_machine
    from phasewise.tuner import plans
    from phasewise.workflows.report import silent

    machine = read_machine()
    ranks = tuple(plans.rank_on(machine, plans.parse_cores(core_list)) for core_list in cores)
    key = plans.model_key(known_name(model, cache_root()), weight_format)
    plan = plans.ServicePlan(phase, ranks, "database")
    if from_sequences is not None:
        band = plans.LoadBand(from_sequences, ranks)
        told = silent if locate(db).is_absent else note
        in_use = plans.plans_for(db, machine, key, report=told)[phase]
        kept = tuple(other for other in in_use.bands if other.sequences < from_sequences)
        plan = plans.ServicePlan(phase, in_use.ranks, "database", (*kept, band))
    plans.check_fits(plan, machine)
    origin = Origin(plans.machine_key(machine), __version__, time.time_ns() // 1_000_000)
    record = PlanRecord(key, phase, plans.placed_json(plan, machine), origin)
    with open_store(db, note) as store:
        store.add([record])
    fields = {"model": key, "phase": plan.phase, "from": from_sequences or 1}
    fields["ranks"] = [list(rank.cores) for rank in ranks]
    present(as_json, fields, [f"{key}, {plan.describe()}"])


def _where(db: str | None, *, told: bool = False) -> tuple[str, bool | None]:
    """The database's name without its password, and whether it exists (None: a server). told: say if not."""
    from phasewise.kerneldb.location import locate

    location = locate(db)
    if told and location.is_absent:
        note(f"there is no database at {location.name} yet")
    return location.name, None if location.file is None else not location.is_absent
