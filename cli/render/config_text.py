"""How a run of `tune-config` looks when it has ended: its tables, and the same as JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import fill
from typing import TYPE_CHECKING, Any

from phasewise._version import __version__
from phasewise.tuner.config.references import PER_NODE, same_cores
from phasewise.tuner.config.trace import describe
from phasewise.tuner.plans import Phase, ServicePlan, list_cores
from phasewise.workflows.tune_config.search import objective_words

if TYPE_CHECKING:
    from phasewise.workflows.tune_config.run import Found
    from phasewise.workflows.tune_config.search import Searched
    from phasewise.workflows.tune_config.subject import Subject, Wish
    from phasewise.workflows.tune_config.verdict import Finalist, Verdict, Versus

SHORT_NAMES = {PER_NODE: "one per NUMA node"}
"""In a table of eighty columns."""

WIDTH = 79
MOST_RANKS_SHOWN = 16
DISTURBED_LAPS = 0.1
"""Share of disturbed timings from which on the result carries a warning."""


def plan_words(plan: ServicePlan) -> str:
    """How many ranks of how many cores: `2 ranks of 12 cores`, unequal ones `2 ranks of 12 and 11 cores`."""
    sizes = list(dict.fromkeys(len(rank.cores) for rank in plan.ranks))
    cores = " and ".join(map(str, sizes[:3])) + (" .." if len(sizes) > 3 else "")
    ranks = f"{len(plan.ranks)} rank{'s' if len(plan.ranks) > 1 else ''}"
    return f"{ranks} of {cores} core{'s' if sizes != [1] else ''}"


def milliseconds(value: float) -> str:
    """Four digits, or what it takes."""
    return f"{value:.3g} ms" if value < 100 else f"{value:.0f} ms"


def found_text(found: Found) -> str:
    """What a run ends with, for people."""
    parts = ["\n".join(_heading(found))]
    parts += ["\n".join(_phase_lines(found, one)) for one in found.searched]
    parts.append("\n".join(_run_lines(found)))
    return "\n\n".join(parts)


def _heading(found: Found) -> Iterator[str]:
    subject = found.subject
    yield f"{subject.model_key} on {subject.key.placement_sig}, {found.wish.evaluator}"
    yield f"{objective_words(subject.objective)}; {describe(subject.trace)}"


def _phase_lines(found: Found, one: Searched) -> Iterator[str]:
    verdict = found.verdicts.get(one.phase)
    if verdict is None:
        best = one.outcome.best
        if best is None:
            tried = "no configuration could be run" if one.failures else "no configuration was tried yet"
            yield f"{one.phase}: {tried}"
            for reason, count in sorted(one.failures.items(), key=lambda pair: -pair[1])[:3]:
                yield fill(f"{count} x {reason}", WIDTH, initial_indent="  ", subsequent_indent="  ")
        else:
            configuration, cost_ms = best
            yield f"{one.phase}: {plan_words(configuration.plan(one.phase))}, {milliseconds(cost_ms)} so far"
            yield from _rank_lines(configuration.plan(one.phase))
            yield "Not compared with the references yet: nothing is stored."
        return
    yield f"{one.phase}: {plan_words(verdict.plan)}, {milliseconds(verdict.latency_ms)}"
    yield from _rank_lines(verdict.plan)
    yield ""
    yield _against_table(verdict)
    yield ""
    yield _verdict_line(verdict, found.wish.evaluator == "measured")


def _rank_lines(plan: ServicePlan) -> Iterator[str]:
    for number, rank in enumerate(plan.ranks[:MOST_RANKS_SHOWN]):
        node = "" if rank.numa_node is None else f" (NUMA node {rank.numa_node})"
        yield f"  rank {number}: {list_cores(rank.cores)}{node}"
    if len(plan.ranks) > MOST_RANKS_SHOWN:
        yield f"  and {len(plan.ranks) - MOST_RANKS_SHOWN} more"


def _against_table(verdict: Verdict) -> str:
    from tabulate import tabulate

    rows = [_against_row(one) for one in verdict.against]
    headers = ("reference", "plan", "latency", "speed-up", "interval")
    aligned = ("left", "left", "right", "right", "right")
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=aligned)


def _against_row(one: Versus) -> tuple[str, ...]:
    name = SHORT_NAMES.get(one.reference.name, one.reference.name)
    plan = plan_words(one.reference.plan) if one.reference.plan else "-"
    latency = "-" if one.latency_ms is None else milliseconds(one.latency_ms)
    if one.is_same:
        return name, plan, latency, "same plan", ""
    if one.gain is None:
        return name, plan, latency, "-", ""
    interval = ""
    if one.comparison is not None:
        interval = f"{one.comparison.gain_low:.3f} to {one.comparison.gain_high:.3f}"
    return name, plan, latency, f"{one.gain:.3f}x", interval


def _verdict_line(verdict: Verdict, is_measured: bool) -> str:
    named: dict[str, list[str]] = {}
    for one in verdict.against:
        if one.reason:
            named.setdefault(one.reason, []).append(one.reference.name)
    reasons = [f"{', '.join(names)}: {reason}." for reason, names in named.items()]
    match verdict.standing:
        case "faster" if is_measured:
            text = "Faster than every reference, beyond doubt of the interval."
        case "faster":
            text = "Faster than every reference, by the model alone: nothing was timed."
        case "not slower":
            text = "No difference to the closest reference is proven: tuning gained nothing for sure."
        case "reference" if not same_cores(verdict.winner, verdict.plan):
            looked = f"{plan_words(verdict.winner)} looked faster, but is not in pairs of turns"
            text = f"Tuning gained nothing over {_kept_name(verdict)}: {looked}."
        case "reference":
            text = f"Tuning gained nothing: the best plan is {_kept_name(verdict)}."
        case "not compared":
            kept = "" if verdict.is_settled else ": what was in use stays in use"
            text = f"Not compared with a reference{kept}."
    return "\n".join(fill(line, WIDTH) for line in (text, *reasons))


def _kept_name(verdict: Verdict) -> str:
    """Of the reference that the plan is."""
    names = [
        one.reference.name
        for one in verdict.against
        if one.reference.plan and same_cores(one.reference.plan, verdict.plan)
    ]
    return names[0] if names else "a reference"


def _run_lines(found: Found) -> Iterator[str]:
    sums = totals(found)
    minutes, seconds = divmod(round(found.elapsed_s), 60)
    yield (
        f"{sums['evaluations']} of {sums['configurations']} configurations evaluated, "
        f"{sums['replayed']} known before, {sums['failed']} failed,"
    )
    yield f"{sums['pruned']} stopped early, {sums['trees_cut']} trees cut; {minutes}:{seconds:02}."
    if any(one.outcome.gains for one in found.kernels):
        tuned = sum(not gain.is_default for one in found.kernels for gain in one.outcome.gains)
        count = sum(len(one.outcome.gains) for one in found.kernels)
        yield f"Kernels: {tuned} of {count} products run faster than by default on the finalists' cores."
    if found.disturbed > DISTURBED_LAPS * max(1, found.laps):
        yield f"The machine was busy during {found.disturbed} of {found.laps} timings."
    yield from _closing_lines(found)


def _closing_lines(found: Found) -> Iterator[str]:
    if found.end != "complete":
        yield "Interrupted." if found.end == "interrupted" else "The budget is used up."
        if found.wish.evaluator == "measured" or found.wish.storage:
            yield "The same command goes on from here."
    if found.stored:
        phases = [phase for phase in found.verdicts if phase in found.stored]
        yield f"Stored: the plan{'s' if len(phases) > 1 else ''} for {' and '.join(phases)}."
    elif found.wish.evaluator != "measured" and found.verdicts:
        yield "Not stored: only plans that were measured on a machine come into use there."


def totals(found: Found) -> dict[str, int]:
    """Counts over the phases."""
    names = ("configurations", "evaluations", "replayed", "pruned", "trees_cut", "failed")
    return {name: sum(getattr(one.outcome, name) for one in found.searched) for name in names}


# ---- JSON --------------------------------------------------------------------------------------------------


def found_fields(found: Found) -> dict[str, Any]:
    """A run as JSON values; `plans`, the counts and `references` come first because scripts want those."""
    return {
        "plans": {phase: _plan_fields(found, verdict) for phase, verdict in found.verdicts.items()},
        **totals(found),
        "references": {
            phase: [_reference_fields(one) for one in verdict.against]
            for phase, verdict in found.verdicts.items()
        },
        "phases": {one.phase: _search_fields(found, one) for one in found.searched},
        "end": found.end,
        "elapsed_s": found.elapsed_s,
        "timings": found.laps,
        "disturbed": found.disturbed,
        "kernels": [_kernel_fields(found, number) for number in range(len(found.kernels))],
        **settings_fields(found),
    }


def settings_fields(found: Found) -> dict[str, Any]:
    """Under what a run can be compared with another one."""
    wish, subject = found.wish, found.subject
    return {
        "version": __version__,
        "model": subject.model_key,
        "machine": {
            "core": subject.key.core_sig,
            "placement": subject.key.placement_sig,
            "source": subject.machine.source,
            "allowed_pus": list(subject.machine.allowed_pus),
        },
        "settings": {
            "phases": list(wish.phases),
            "evaluator": wish.evaluator,
            "objective": objective_words(subject.objective),
            "requests": wish.requests,
            "n_requests": len(subject.trace),
            "trace_digest": subject.trace_digest,
            "budget_s": wish.budget_s,
            "top_k": wish.top_k,
            "seed": wish.seed,
            "ranks": wish.ranks,
            "cores": wish.cores,
            "hints": [tree.notation for tree in subject.hints],
            "hidden": None if wish.hidden_file is None else str(wish.hidden_file),
            "resume": wish.resume,
        },
    }


def ranks_fields(plan: ServicePlan) -> list[dict[str, Any]]:
    return [{"cores": list(rank.cores), "numa_node": rank.numa_node} for rank in plan.ranks]


def _plan_fields(found: Found, verdict: Verdict) -> dict[str, Any]:
    return {
        "ranks": ranks_fields(verdict.plan),
        "latency_ms": verdict.latency_ms,
        "standing": verdict.standing,
        "stored": verdict.phase in found.stored,
    }


def _reference_fields(one: Versus) -> dict[str, Any]:
    comparison = one.comparison
    return {
        "name": one.reference.name,
        "ranks": ranks_fields(one.reference.plan) if one.reference.plan else None,
        "latency_ms": one.latency_ms,
        "same_plan": one.is_same,
        "gain": one.gain,
        "gain_low": comparison.gain_low if comparison else None,
        "gain_high": comparison.gain_high if comparison else None,
        "confidence": comparison.confidence if comparison else None,
        "pairs": comparison.pairs if comparison else None,
        "reason": one.reason,
    }


def _search_fields(found: Found, one: Searched) -> dict[str, Any]:
    outcome, verdict = one.outcome, found.verdicts.get(one.phase)
    return {
        "end": outcome.end,
        "elapsed_s": one.elapsed_s,
        "configurations": outcome.configurations,
        "evaluations": outcome.evaluations,
        "replayed": outcome.replayed,
        "pruned": outcome.pruned,
        "trees_cut": outcome.trees_cut,
        "groups_stopped": outcome.groups_stopped,
        "failed": outcome.failed,
        "failures": dict(one.failures),
        "top": [
            {"ranks": ranks_fields(configuration.plan(one.phase)), "latency_ms": cost_ms}
            for configuration, cost_ms in outcome.top
        ],
        "finalists": [_finalist_fields(final) for final in verdict.finalists] if verdict else [],
    }


def _finalist_fields(final: Finalist) -> dict[str, Any]:
    return {
        "ranks": ranks_fields(final.plan),
        "search_ms": final.search_ms,
        "latency_ms": final.final_ms,
        "reason": final.reason,
    }


def _kernel_fields(found: Found, number: int) -> dict[str, Any]:
    from phasewise.cli.render.tuning_text import mean_gain

    tuned = found.kernels[number]
    gains = tuned.outcome.gains
    return {
        "phases": list(tuned.round.phases),
        "cores": list(tuned.round.cores),
        "end": tuned.outcome.end,
        "products": tuned.outcome.products,
        "timed": tuned.outcome.timed,
        "settled": len(gains),
        "mean_gain": mean_gain(gains) if gains else None,
    }


def stored_fields(plans: Mapping[Phase, ServicePlan]) -> dict[str, Any]:
    """Plans that are in the database already."""
    return {phase: {"ranks": ranks_fields(plan), "stored": True} for phase, plan in plans.items()}


# ---- dry run -----------------------------------------------------------------------------------------------


def dry_run_text(wish: Wish, subject: Subject) -> str:
    """What would be searched and timed."""
    fields = dry_run_fields(wish, subject)
    lines = [f"{subject.model_key} on {subject.key.placement_sig}", f"requests: {fields['requests']}"]
    lines.append(f"{fields['configurations']} configurations, from the tree {fields['tree']}")
    lines += [
        f"CPUs {one['pus']} are left to the operating system: {one['reason']}" for one in fields["left_out"]
    ]
    for phase, steps in fields["steps"].items():
        lines.append(f"{phase}: each is timed by at most {len(steps)} steps, e.g. {steps[0]}")
    for one in fields["references"]:
        lines.append(f"reference {one['name']}: {one['plan'] or one['reason']}")
    return "\n".join(lines)


def dry_run_fields(wish: Wish, subject: Subject) -> dict[str, Any]:
    """As JSON values."""
    from phasewise.tuner.topotree import fundamental
    from phasewise.workflows.tune_config.search import space_of
    from phasewise.workflows.tune_config.verdict import habits_of

    found = fundamental(subject.machine)
    return {
        "model": subject.model_key,
        "tree": " > ".join(f"{level.arity} {level.kind}" for level in found.tree.levels) or "one PU",
        "left_out": [{"pus": list_cores(one.pus), "reason": one.reason} for one in found.left_out],
        "configurations": sum(1 for _ in space_of(subject).partitions()),
        "requests": describe(subject.trace),
        "steps": {phase: [step.describe() for step in subject.grid(phase).steps] for phase in wish.phases},
        "references": [
            {"name": one.name, "plan": plan_words(one.plan) if one.plan else None, "reason": one.reason}
            for one in habits_of(subject, wish.phases[0])
        ],
    }
