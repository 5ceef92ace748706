"""Facts of a machine and of how a model runs on it: a picture of plans, schedules in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phasewise.topology import Machine
from phasewise.topology.picture import GROUP_FILLS, PuGroup, draw_svg
from phasewise.tuner.plans import Phase
from phasewise.workflows.topo.plan_json import Plans

if TYPE_CHECKING:
    from phasewise.workflows.opening.tuned_schedules import ScheduleUse


def picture_of_plans(machine: Machine, plans: Plans) -> str:
    """The machine as SVG, the cores of every rank of each phase coloured."""
    return draw_svg(machine, picture_groups(plans))


def picture_groups(plans: Plans) -> tuple[PuGroup, ...]:
    """Every rank of every phase; no colour means one phase here and another there."""
    groups = []
    for phase, fills in _fills(plans).items():
        for number, rank in enumerate(plans[phase].ranks):
            fill = fills[number % len(fills)]
            groups.append(PuGroup(f"{phase}, rank {number}", frozenset(rank.cores), fill))
    return tuple(groups)


def _fills(plans: Plans) -> dict[Phase, Sequence[str]]:
    """The colours of each phase: a fair share for both where there are not enough."""
    first, *others = plans
    if not others:
        return {first: GROUP_FILLS}
    (second,) = others
    half = len(GROUP_FILLS) // 2
    n_first = min(len(plans[first].ranks), len(GROUP_FILLS) - min(len(plans[second].ranks), half))
    return {first: GROUP_FILLS[:n_first], second: GROUP_FILLS[n_first:]}


def schedule_rows(uses: Iterable[ScheduleUse]) -> Iterator[dict[str, str]]:
    """A row of texts for each entry of `tuned_schedules.explain`."""
    for use in uses:
        yield {
            "phase": use.phase if use.from_sequences == 1 else f"{use.phase} from {use.from_sequences}",
            "used_for": use.used_for,
            "problem": f"{use.format} {use.n} x {use.k}",
            "rows": str(use.first_m) if use.first_m == use.last_m else f"{use.first_m}-{use.last_m}",
            "why": use.why,
            "schedule": schedule_words(use.schedule),
        }


def schedule_words(schedule: Mapping[str, Any] | None) -> str:
    """A schedule in one line: tile and block as rows x columns, grid as threads over m, n and k."""
    if schedule is None:
        return "by the step"
    s = schedule
    return (
        f"tile {s['mr']}x{16 * s['panels']}, block {s['block_m']}x{s['block_n']}x{s['block_k']}, "
        f"grid {s['threads_m']}x{s['threads_n']}x{s['threads_k']}, {s['loop_order']}, "
        f"prefetch {s['prefetch_bytes']}"
    )
