"""The rows that `phasewise db` lists: JSON values, and tables in 80 columns."""

from __future__ import annotations

import textwrap
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from phasewise._rows import Row, column
from phasewise._words import counted, percent
from phasewise.cli.commands.topo.text import core_words
from phasewise.cli.explain_text import grid, tile
from phasewise.cli.present import on_one_line
from phasewise.cli.tables import WIDTH, RowTable, table_of_rows
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.kerneldb.counts import StoreStats
    from phasewise.kerneldb.diff import Diff, Difference
    from phasewise.kerneldb.records import MachineKey, PlanRecord, PredictorScore
    from phasewise.kerneldb.store import Store
    from phasewise.kerneldb.upkeep import Preferred
    from phasewise.topology import Machine

    Machines: TypeAlias = dict[MachineKey, str]
    Cores: TypeAlias = list[list[int]] | None

Parts: TypeAlias = Iterator[str | RowTable]
"""Texts and tables, one below the other."""
MAX_ROWS = 12
"""Most rows of each table without `--wide`."""


def labels(machines: Iterable[MachineKey]) -> Machines:
    """Make a short label for each kind of machine, the same in every listing of a database."""
    return {machine: f"#{number}" for number, machine in enumerate(sorted(set(machines), key=str), start=1)}


def machine_fields(machines: Machines) -> list[dict[str, str]]:
    """The legend of the machines' labels: signatures are too long for a table."""
    return [
        {"machine": label, "core": key.core_sig, "placement": key.placement_sig}
        for key, label in machines.items()
    ]


def shortened(limit: int) -> Callable[[object], str]:
    """Make a function that cuts a name to its last characters, since a model's name ends in the format."""

    def cell(text: object) -> str:
        line = on_one_line(text)
        return line if len(line) <= limit else "..." + line[3 - limit :]

    return cell


def table_text(title: str, rows: Sequence[Row] | Sequence[Mapping[str, object]]) -> Parts:
    """Yield a table of rows, all of whose columns are aligned to the left, and an empty line."""
    lines = [row for row in rows if isinstance(row, Mapping)]
    lines += table_of_rows([row for row in rows if isinstance(row, Row)]).rows
    yield from (RowTable(lines, [*lines[0]], title) if lines else f"{title}: none", "")


def machines_text(machines: list[dict[str, str]]) -> Parts:
    for machine in machines:
        # The list of instruction sets would not wrap.
        core = core_words(machine["core"]).replace("+", " ")
        line = on_one_line(f"{machine['machine']}  {machine['placement']}; {core}")
        yield textwrap.fill(line, WIDTH, subsequent_indent="    ")


# ---- plans and scores --------------------------------------------------------------------------------------


def _cores(plan: PlanRow | BandRow) -> str:
    """The cores of each rank as a cell; for a plan of another machine its places."""
    from phasewise.tuner.plans import list_cores

    if plan.ranks is not None:
        return " | ".join(map(list_cores, plan.ranks))
    return "?" if plan.places is None else "places " + " | ".join(map(list_cores, plan.places))


def _day(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at_ms / 1000))


class BandRow(Row):
    """The cores of a decode plan from a number of sequences on."""

    sequences: int = column("phase", "from {}".format)
    ranks: Cores = column("cores", of_row=_cores)
    places: Cores


class PlanRow(Row):
    """A stored plan as a row.

    ranks: the cores of each rank, or instance; None where they are unknown here. places: the places that the
    plan names. Both are None for a plan that cannot be read.
    """

    model: str = column("model", shortened(30))
    phase: str = column("phase")
    ranks: Cores = column("cores", of_row=_cores)
    places: Cores
    bands: list[BandRow]
    machine: str = column("on")
    in_use: bool = column("in use", ("no", "yes").__getitem__)
    """True for the plan that a start takes, verified or imported."""
    verified: bool
    objectives: Mapping[str, float]
    created_at_ms: int = column("created", _day)
    program_version: str


def _shares(score: ScoreRow) -> Mapping[str, str]:
    named = {"held": "accuracy", "used": "utilisation"}
    return {
        title: percent(score.figures[name], 1) if name in score.figures else ""
        for title, name in named.items()
    }


class ScoreRow(Row):
    """A score of a predictor of lengths as a row; a score belongs to no machine."""

    model: str = column("model", shortened(22))
    reads: str = column("reads", shortened(12))
    answers_key: str
    judged_by: str
    learnt_answers: int
    judged_answers: int = column("by answers")
    hold: float
    figures: Mapping[str, float] = column("held", of_row=_shares)
    verified: bool
    created_at_ms: int = column("judged", _day)
    program_version: str


def plan_rows(plans: Sequence[PlanRecord], machines: Machines, report: Report = silent) -> list[PlanRow]:
    """Make the rows of plans, oldest first."""
    from phasewise.kerneldb.upkeep import newest_plans
    from phasewise.topology import read_machine

    machine, newest, rows = read_machine(), newest_plans(plans), []
    for plan in plans:
        ranks, places, bands = _ranks(plan, machine, report)
        key = (plan.model_key, plan.phase, plan.origin.machine)
        own = {"ranks": ranks, "places": places, "bands": bands, "machine": machines[plan.origin.machine]}
        rows.append(
            PlanRow.made_of(plan, plan.origin, model=plan.model_key, in_use=newest.get(key) is plan, **own)
        )
    return rows


def score_rows(scores: Sequence[PredictorScore]) -> list[ScoreRow]:
    """Make the rows of scores, oldest first."""
    return [ScoreRow.made_of(score, score.origin, model=score.model_name) for score in scores]


def _ranks(record: PlanRecord, machine: Machine, report: Report) -> tuple[Cores, Cores, list[BandRow]]:
    """The ranks, places and bands of a plan."""
    from phasewise.serving.embedding import plan as embedding
    from phasewise.serving.errors import ServingError
    from phasewise.tuner import plans
    from phasewise.tuner.errors import PlanError

    is_here = record.origin.machine == plans.machine_key(machine)
    try:
        if record.phase == embedding.PHASE:
            of_instances = embedding.stored_places(record.plan_json)
            if not is_here:
                return None, of_instances, []
            instances = embedding.stored_plan(record.plan_json, machine).instances
            return [list(instance.cores) for instance in instances], of_instances, []
        places = plans.stored_places(record.plan_json)
        if places is not None and not is_here:
            (_, first), *others = places
            return None, first, [BandRow(n, None, own) for n, own in others]
        plan = plans.stored_plan(record.plan_json, machine)
        cores = [[list(rank.cores) for rank in own.ranks] for own in plan.each]
        named = [None] * len(cores) if places is None else [own for _, own in places]
        return cores[0], named[0], list(map(BandRow, plan.starts, cores[1:], named[1:]))
    except (PlanError, ServingError) as error:
        report(f"the {record.phase} plan for {record.model_key} cannot be read: {error}")
        return None, None, []


# ---- schedules ---------------------------------------------------------------------------------------------


class Section(StrEnum):
    """Titles of the sections of listed schedules, by the schedules' use."""

    IN_USE = "Schedules in use"
    MEASURED = "Fastest measured, nothing promoted"
    IMPORTED = "Imported, to be timed here by `tune-kernels`"
    STALE = "Of an earlier build of the kernels, not used"


@dataclass
class ListedSchedules:
    """The number of schedules in each section, and the listed schedules in the order of problems."""

    counts: Counter[Section] = field(default_factory=Counter)
    shown: list[tuple[Section, Preferred]] = field(default_factory=list)
    machines: set[MachineKey] = field(default_factory=set)


def list_schedules(
    store: Store, builds: Collection[str], m: int | None, limit: int | None
) -> ListedSchedules:
    """List the schedules for m rows, or all; of each section the first `limit`, or all.

    builds: builds of this program's kernels.
    """
    from phasewise.kerneldb.records import PlanRecord, StepTime
    from phasewise.kerneldb.upkeep import is_stale, preferred_of, standings

    listed = ListedSchedules(machines=store.machines(PlanRecord, StepTime))
    for key, standing in standings(store).items():
        listed.machines.add(key.machine)
        if m not in (None, key.problem.m):
            continue
        section = Section.STALE if is_stale(key.kernel_abi, builds) else Section[standing.name]
        listed.counts[section] += 1
        if limit is None or listed.counts[section] <= limit:
            preferred = preferred_of(store, key, standing)
            if preferred is not None:
                listed.shown.append((section, preferred))
    return listed


def schedule_fields(preferred: Preferred, machines: Machines, stale: bool) -> dict[str, Any]:
    """JSON fields of a schedule, flat: its problem, the schedule and its measurement."""
    timing = preferred.measurement
    return {
        **asdict(timing.problem),
        **asdict(timing.sample.schedule),
        "estimate_ns": timing.sample.estimate_ns,
        "samples": len(timing.sample.samples_ns),
        "kernel_abi": timing.kernel_abi,
        "standing": preferred.standing.value,
        "stale": stale,
        "machine": machines[timing.origin.machine],
    }


def _schedule_line(schedule: dict[str, Any]) -> dict[str, Any]:
    return {
        "kernel": shortened(18)(f"{schedule['family']} {schedule['format']}"),
        "n x k x m": _size(schedule),
        "tile": tile(schedule),
        "grid": grid(schedule),
        "path": shortened(12)(schedule["compute_path"]),
        "us": f"{schedule['estimate_ns'] / 1000:.1f}",
        "on": schedule["machine"],
    }


def _size(problem: dict[str, Any]) -> str:
    return f"{problem['n']}x{problem['k']}x{problem['m']}"


def contents_text(fields: dict[str, Any], listed: ListedSchedules, wide: bool) -> Parts:
    """Yield the summary, the plans, the listed schedules of each section, and the scores of predictors."""
    sections = {Section.IN_USE: listed.counts[Section.IN_USE], **listed.counts}
    counts = [f"{counted(len(fields['plans']), 'plan')}"]
    counts += [f"{title}: {sections[title]}" for title in Section if title in sections]
    yield from (textwrap.fill("; ".join(counts), WIDTH), "")
    yield from table_text("Service plans", [row for plan in fields["plans"] for row in (plan, *plan.bands)])
    for title in Section:
        if title not in sections:
            continue
        lines = zip(listed.shown, fields["schedules"], strict=True)
        chosen = [_schedule_line(schedule) for (section, _), schedule in lines if section is title]
        yield from table_text(title, chosen)
        if (left := sections[title] - len(chosen)) > 0:
            yield f"... and {left} more: --wide prints all, --m N those for N rows\n"
    scores = fields["predictor_scores"]
    shown = scores if wide else scores[-MAX_ROWS:]
    if shown:
        yield from table_text("Predictors of lengths", shown)
    if len(scores) > len(shown):
        yield f"... and {len(scores) - len(shown)} older: --wide prints all\n"
    yield from machines_text(fields["machines"])
    shipped = counted(fields["shipped"], "schedule")
    told = f"Beside it, in the package: {shipped}, lowest in trust and timed before use"
    if kinds := fields["shipped_kinds"]:
        told += f", for {'; '.join(kinds)}"
    yield textwrap.fill(told, WIDTH)


# ---- differences -------------------------------------------------------------------------------------------


class OtherDiff(Row):
    """A plan, storage, predictor or user's kernel that differs; None where a database has no verdict."""

    kind: str = column("kind")
    of: str = column("of", shortened(23))
    kernel_abi: str
    machine: str = column("on")
    here: str | None = column("here", of_row=lambda row: _verdict(row.here))
    there: str | None = column(
        "there", of_row=lambda row: _verdict(row.there).replace("a plan", "another" if row.here else "a plan")
    )


def _verdict(words: str | None) -> str:
    return "a plan" if words and words.startswith("{") else words or "none"


def diff_fields(diff: Diff) -> dict[str, Any]:
    """JSON fields of all differences; null for a database that knows nothing of the key."""
    keys = [difference.key.machine for difference in diff.differences]
    machines = labels([*keys, *(difference.machine for difference in diff.others)])
    return {
        "same": diff.same,
        "differences": [_difference(difference, machines) for difference in diff.differences],
        "others": [OtherDiff.made_of(own, machine=machines[own.machine]) for own in diff.others],
        "step_times": {"here_alone": diff.steps_here, "there_alone": diff.steps_there},
        "machines": machine_fields(machines),
    }


def _difference(difference: Difference, machines: Machines) -> dict[str, Any]:
    return {
        **asdict(difference.key.problem),
        "kernel_abi": difference.key.kernel_abi,
        "machine": machines[difference.key.machine],
        "here": difference.here and asdict(difference.here.schedule),
        "there": difference.there and asdict(difference.there.schedule),
        "here_standing": difference.here and difference.here.standing.value,
        "there_standing": difference.there and difference.there.standing.value,
    }


def diff_text(diff: Diff, fields: dict[str, Any]) -> Parts:
    """Yield counts, a line for each key that differs, grouped by standings, and all other differences."""
    yield f"the same: {diff.same}; different: {len(diff.differences) + len(diff.others)}"
    if diff.steps_here or diff.steps_there:
        yield f"step times: {diff.steps_here} here alone, {diff.steps_there} there alone"
    by_standing: dict[tuple[str | None, str | None], list[dict[str, Any]]] = {}
    for difference in fields["differences"]:
        here, there = (_schedule_words(difference[side]) for side in ("here", "there"))
        line = {
            "kernel": shortened(12)(f"{difference['family']} {difference['format']}"),
            "n x k x m": _size(difference),
            "here": here,
            "there": "the same" if difference["here"] == difference["there"] else there,
        }
        sides = difference["here_standing"], difference["there_standing"]
        by_standing.setdefault(sides, []).append(line)
    for (mine, others), lines in by_standing.items():
        yield from table_text(
            f"Schedules that differ: {mine or 'none'} here, {others or 'none'} there", lines
        )
    if fields["others"]:
        yield from table_text("Others that differ", fields["others"])


def _schedule_words(schedule: dict[str, Any] | None) -> str:
    if schedule is None:
        return "none"
    return shortened(23)(f"{tile(schedule)} {grid(schedule)} {schedule['compute_path']}")


# ---- counts ------------------------------------------------------------------------------------------------


def stats_fields(name: str, stats: StoreStats, current_builds: Collection[str]) -> dict[str, Any]:
    """The JSON that `db stats` prints."""
    from phasewise.kerneldb.upkeep import is_stale

    def state(build: str) -> str:
        if build in current_builds:
            return "current"
        return "stale" if is_stale(build, current_builds) else "elsewhere"

    machines = labels(signature.machine for signature in stats.signatures)
    return {
        "database": name,
        "exists": True,
        "schema": stats.revision,
        "file_bytes": stats.file_bytes,
        "rows": dict(stats.rows),
        "by_machine": [
            {**asdict(signature), "machine": machines[signature.machine]} for signature in stats.signatures
        ],
        "by_build": [
            {
                "build": build.kernel_abi,
                "measurements": build.measurements,
                "unverified": build.unverified,
                "state": state(build.kernel_abi),
            }
            for build in stats.builds
        ],
        "machines": machine_fields(machines),
    }


def stats_text(fields: dict[str, Any]) -> Parts:
    yield f"database  {fields['database']}\nschema    {fields['schema']} (current)"
    if fields["file_bytes"] is not None:
        yield f"size      {fields['file_bytes'] / 1024:.0f} KiB"
    yield ""
    yield from table_text("Rows", [{"table": name, "rows": count} for name, count in fields["rows"].items()])
    by_machine = [
        {name.replace("_", " "): value for name, value in row.items()} for row in fields["by_machine"]
    ]
    yield from table_text("By machine", by_machine)
    by_build = [{**row, "build": shortened(40)(row["build"])} for row in fields["by_build"]]
    yield from table_text("By build of the kernels", by_build)
    yield from machines_text(fields["machines"])
