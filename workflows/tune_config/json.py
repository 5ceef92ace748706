"""A run of `tune-config` as JSON values: what `--json` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from phasewise._version import __version__
from phasewise._words import counted, plural
from phasewise.tuner.config.references import same_cores
from phasewise.tuner.config.trace import describe
from phasewise.tuner.plans import Phase, ServicePlan, bands_fields, list_cores, ranks_fields
from phasewise.workflows.tune_config.search import objective_words

if TYPE_CHECKING:
    from phasewise.topology import Machine
    from phasewise.workflows.tune_config.run import Found
    from phasewise.workflows.tune_config.search import Searched
    from phasewise.workflows.tune_config.settings import TuneConfigSettings
    from phasewise.workflows.tune_config.subject import Subject
    from phasewise.workflows.tune_config.verdict import Finalist, PhaseVerdict, Versus


def totals(results: Found) -> dict[str, int]:
    """Counts over the phases."""
    names = ("configurations", "evaluations", "replayed", "pruned", "trees_cut", "failed")
    return {name: sum(getattr(searched.outcome, name) for searched in results.searched) for name in names}


def found_fields(results: Found) -> dict[str, Any]:
    """A run as JSON values; `plans`, the counts and `references` come first because scripts want those."""
    return {
        "plans": {phase: _plan_fields(results, verdict) for phase, verdict in results.verdicts.items()},
        **totals(results),
        "bands": [{"sequences": band.sequences, **found_fields(band)} for band in results.bands],
        "references": {
            phase: [_reference_fields(versus) for versus in verdict.against]
            for phase, verdict in results.verdicts.items()
        },
        "best_found": {
            searched.phase: best_found_fields(searched, results.verdicts.get(searched.phase))
            for searched in results.searched
        },
        "phases": {searched.phase: _search_fields(results, searched) for searched in results.searched},
        "end": results.end,
        "elapsed_s": results.elapsed_s,
        "timings": results.laps,
        "disturbed": results.disturbed,
        "kernels": [_kernel_fields(results, number) for number in range(len(results.kernels))],
        **settings_fields(results),
    }


def settings_fields(results: Found) -> dict[str, Any]:
    """Under what a run can be compared with another one."""
    wish, subject = results.wish, results.subject
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
            "bands": list(wish.bands),
            "cores": wish.cores,
            "hidden": None if wish.hidden is None else str(wish.hidden),
            "resume": wish.resume,
        },
    }


def _plan_fields(results: Found, verdict: PhaseVerdict) -> dict[str, Any]:
    return {
        "ranks": ranks_fields(verdict.plan.ranks),
        "latency_ms": verdict.latency_ms,
        "standing": verdict.standing,
        "stored": verdict.phase in results.stored,
        "bands": [] if verdict.phase != "decode" else _bands_of(results),
    }


def _bands_of(results: Found) -> list[dict[str, Any]]:
    """The cores that decode has from some numbers of sequences on."""
    plan = results.bands[-1].decode_plan if results.bands else None
    return [] if plan is None else bands_fields(plan)


def _reference_fields(versus: Versus) -> dict[str, Any]:
    comparison = versus.comparison
    return {
        "name": versus.reference.name,
        "ranks": ranks_fields(versus.reference.plan.ranks) if versus.reference.plan else None,
        "latency_ms": versus.latency_ms,
        "same_plan": versus.is_same,
        "gain": versus.gain,
        "gain_low": comparison.gain_low if comparison else None,
        "gain_high": comparison.gain_high if comparison else None,
        "confidence": comparison.confidence if comparison else None,
        "pairs": comparison.pairs if comparison else None,
        "reason": versus.reason,
    }


def _search_fields(results: Found, searched: Searched) -> dict[str, Any]:
    outcome, verdict = searched.outcome, results.verdicts.get(searched.phase)
    return {
        "end": outcome.end,
        "elapsed_s": searched.elapsed_s,
        "configurations": outcome.configurations,
        "evaluations": outcome.evaluations,
        "replayed": outcome.replayed,
        "pruned": outcome.pruned,
        "trees_cut": outcome.trees_cut,
        "groups_stopped": outcome.groups_stopped,
        "failed": outcome.failed,
        "failures": dict(searched.failures),
        "top": [
            {"ranks": ranks_fields(configuration.ranks), "latency_ms": cost_ms}
            for configuration, cost_ms in outcome.top
        ],
        "finalists": [_finalist_fields(final) for final in verdict.finalists] if verdict else [],
    }


def _finalist_fields(final: Finalist) -> dict[str, Any]:
    return {
        "ranks": ranks_fields(final.plan.ranks),
        "search_ms": final.search_ms,
        "latency_ms": final.final_ms,
        "reason": final.reason,
    }


def _kernel_fields(results: Found, number: int) -> dict[str, Any]:
    from phasewise.workflows.tune_kernels.json import mean_gain

    tuned = results.kernels[number]
    gains = tuned.outcome.gains
    return {
        "phases": list(tuned.round.phases),
        "cores": list(tuned.round.cores),
        "end": tuned.outcome.end,
        "products": tuned.outcome.products,
        "timed": tuned.outcome.timed,
        "settled": len(gains),
        "mean_gain": asdict(mean_gain(gains)) if gains else None,
    }


def stored_fields(plans: Mapping[Phase, ServicePlan]) -> dict[str, Any]:
    """Plans that are in use without a search: those of the database, and default ones."""
    return {
        phase: {
            "ranks": ranks_fields(plan.ranks),
            "stored": plan.source == "database",
            "bands": bands_fields(plan),
        }
        for phase, plan in plans.items()
    }


def dry_run_fields(wish: TuneConfigSettings, subject: Subject) -> dict[str, Any]:
    """As JSON values."""
    from phasewise.tuner.topotree import fundamental
    from phasewise.workflows.tune_config.search import space_of
    from phasewise.workflows.tune_config.verdict import habits_of

    fundamental_tree = fundamental(subject.machine)
    return {
        "model": subject.model_key,
        "tree": " > ".join(f"{level.arity} {level.kind}" for level in fundamental_tree.tree.levels)
        or "one PU",
        "left_out": [
            {"pus": list_cores(left.pus), "reason": left.reason} for left in fundamental_tree.left_out
        ],
        "configurations": sum(1 for _ in space_of(subject).partitions()),
        "bands": list(wish.bands),
        "requests": describe(subject.trace),
        "budget_s": wish.budget_s,
        "resume": wish.resume,
        "steps": {phase: [step.describe() for step in subject.grid(phase).steps] for phase in wish.phases},
        "references": [
            {
                "name": habit.name,
                "plan": plan_words(habit.plan, subject.machine) if habit.plan else None,
                "reason": habit.reason,
            }
            for habit in habits_of(subject, wish.phases[0])
        ],
    }


def plan_words(plan: ServicePlan, machine: Machine) -> str:
    """The ranks and cores of a plan in words: `2 ranks of 12 cores`, unequal ones `2 ranks of 12 and 11
    cores`.

    Where a rank has several hardware threads of a core: `1 rank of 96 threads on 48 cores`.
    """
    core_of = {pu: number for number, core in enumerate(machine.allowed_cores()) for pu in core}
    sizes = [len(rank.cores) for rank in plan.ranks]
    cores = [len({core_of.get(pu, ("PU", pu)) for pu in rank.cores}) for rank in plan.ranks]
    ranks = counted(len(plan.ranks), "rank")
    if sizes == cores:
        return f"{ranks} of {_sizes_words(cores, 'core')}"
    return f"{ranks} of {_sizes_words(sizes, 'thread')} on {_sizes_words(cores, 'core')}"


def _sizes_words(sizes: Sequence[int], noun: str) -> str:
    distinct = list(dict.fromkeys(sizes))
    listed = " and ".join(map(str, distinct[:3])) + (" .." if len(distinct) > 3 else "")
    return f"{listed} {plural(1 if distinct == [1] else 2, noun)}"


def best_found_fields(searched: Searched, verdict: PhaseVerdict | None) -> dict[str, Any] | None:
    """The fastest plan of the search, what it cost there and when it was timed again, and its standing."""
    if searched.outcome.best is None:
        return None
    configuration, cost_ms = searched.outcome.best
    plan = configuration.plan(searched.phase)
    finals = [] if verdict is None else [final for final in verdict.finalists if same_cores(final.plan, plan)]
    final_ms = finals[0].final_ms if finals else None
    return {
        "ranks": ranks_fields(plan.ranks),
        "search_ms": cost_ms,
        "latency_ms": final_ms,
        "standing": _standing_of_best(plan, final_ms, verdict),
    }


def _standing_of_best(plan: ServicePlan, final_ms: float | None, verdict: PhaseVerdict | None) -> str:
    if verdict is None:
        return "not compared"
    if same_cores(plan, verdict.plan):
        return "the plan"
    if final_ms is None:
        return "not timed again"
    return "not proven faster" if same_cores(plan, verdict.winner) else "slower when timed again"
