"""Results of `tune-config`: tables for people, and JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

from phasewise._version import __version__
from phasewise._words import NO_VERDICT, NOTHING, clock, counted, multiple, number, plural, proven
from phasewise.cli.present import goes_on, on_one_line
from phasewise.cli.tables import RowTable
from phasewise.tuner.config.references import ALL_CORES, FEWER, PER_NODE, PHYSICAL_CORES, same_cores
from phasewise.tuner.config.trace import describe
from phasewise.tuner.plans import ServicePlan, bands_fields, list_cores, ranks_fields
from phasewise.workflows.tune_config.subject import objective_words

if TYPE_CHECKING:
    from phasewise.topology import Machine
    from phasewise.tuner.config.references import Reference
    from phasewise.tuner.config.simulate import Objective
    from phasewise.workflows.tune_config.run import Found
    from phasewise.workflows.tune_config.subject import Searched
    from phasewise.workflows.tune_config.verdict import PhaseVerdict, Versus

SHORT_NAMES = {
    ALL_CORES: "all threads",
    PHYSICAL_CORES: "all cores",
    PER_NODE: "one per NUMA node",
    FEWER: "for fewer sequences",
}
"""Short names of references for a table of 80 columns; a thread is a hardware thread."""

WIDTH = 79
MOST_RANKS_SHOWN = 16
DISTURBED_LAPS = 0.1
"""Least share of disturbed timings for which the result carries a warning."""


def milliseconds(value: float) -> str:
    """Format milliseconds with four digits, or more before the point."""
    return f"{number(value, 3)} ms" if value < 100 else f"{value:.0f} ms"


def found_text(result: Found) -> Iterator[str | RowTable]:
    """Yield the text at the end of a run, for people."""
    yield from _heading(result)
    for searched in result.searched:
        yield ""
        yield from _phase_lines(result, searched)
    for band in result.bands:
        words = f"decode of {band.sequences} sequences at once"
        yield from ("", words, "-" * len(words))
        for searched in band.searched:
            yield ""
            yield from _phase_lines(band, searched)
    yield ""
    yield from _run_lines(result)


def _heading(result: Found) -> Iterator[str]:
    subject = result.subject
    yield f"{on_one_line(subject.model_key)} on {subject.key.placement_sig}, {result.wish.evaluator}"
    yield f"{objective_words(subject.objective)}; {describe(subject.trace)}"
    yield fill(covered_words(subject.objective), WIDTH)


def covered_words(objective: Objective) -> str:
    """The parts of a request whose time a configuration's milliseconds cover, in words."""
    if objective.kind == "goodput":
        return "ms: of a phase, over all requests, for each request that keeps the SLO"
    if objective.kind == "e2e":
        return "ms: mean time that a request spends in this phase, one request at a time"
    return "ms: mean time to the first token for prefill, per output token for decode, one request at a time"


def _phase_lines(result: Found, searched: Searched) -> Iterator[str | RowTable]:
    verdict, machine = result.verdicts.get(searched.phase), result.subject.machine
    if verdict is None:
        best = searched.outcome.best
        if best is None:
            tried = "no configuration could be run" if searched.failures else "no configuration was tried yet"
            yield f"{searched.phase}: {tried}"
            for reason, count in sorted(searched.failures.items(), key=lambda pair: -pair[1])[:3]:
                yield fill(f"{count} x {reason}", WIDTH, initial_indent="  ", subsequent_indent="  ")
        else:
            configuration, cost_ms = best
            words = plan_words(configuration.plan(searched.phase), machine)
            yield f"{searched.phase}: {words}, {milliseconds(cost_ms)} so far"
            yield from _rank_lines(configuration.plan(searched.phase))
            yield "Not compared with the references yet: nothing is stored."
        return
    if verdict.is_settled:
        yield f"{searched.phase}: {plan_words(verdict.plan, machine)}, {milliseconds(verdict.latency_ms)}"
        yield from _rank_lines(verdict.plan)
    else:
        yield f"{searched.phase}: not decided"
    yield ""
    yield from _against_table(verdict, machine, result.wish.evaluator == "measured")
    yield ""
    yield _verdict_line(verdict, machine, result.wish.evaluator == "measured")


def _rank_lines(plan: ServicePlan) -> Iterator[str]:
    for index, rank in enumerate(plan.ranks[:MOST_RANKS_SHOWN]):
        node = "" if rank.numa_node is None else f" (NUMA node {rank.numa_node})"
        yield f"  rank {index}: {list_cores(rank.cores)}{node}"
    if len(plan.ranks) > MOST_RANKS_SHOWN:
        yield f"  and {len(plan.ranks) - MOST_RANKS_SHOWN} more"


def _against_table(verdict: PhaseVerdict, machine: Machine, is_measured: bool) -> Iterator[str | RowTable]:
    """Yield the table of a verdict: a row for each plan; a reference equal to a plan adds only its name."""
    alike: list[list[Versus]] = []
    for versus in verdict.against:
        plan = versus.reference.plan
        same = [row for row in alike if plan and row[0].reference.has(plan)]
        if same:
            same[0].append(versus)
        else:
            alike.append([versus])
    rows = [row for own in alike for row in _against_rows(own, machine, is_measured)]
    yield RowTable(rows, ("reference", "plan"))
    if any(versus.comparison is not None for versus in verdict.against):
        yield "latency: of the last run; speed-up: median of pairs of turns, its interval"


def _short_name(reference: Reference) -> str:
    return SHORT_NAMES.get(reference.name, reference.name)


def _against_rows(alike: Sequence[Versus], machine: Machine, is_measured: bool) -> Iterator[dict[str, str]]:
    first = alike[0]
    plan = first.reference.plan
    row = {
        "reference": _short_name(first.reference),
        "plan": NOTHING if plan is None else plan_words(plan, machine),
        "latency": NOTHING if first.latency_ms is None else milliseconds(first.latency_ms),
        "speed-up": "same plan" if first.is_same else NOTHING,
        "interval": "",
    }
    comparison = first.comparison
    if not first.is_same and first.gain is not None and comparison is not None:
        low, high = comparison.gain_low, comparison.gain_high
        row |= {"speed-up": proven(first.gain, low, high, 3), "interval": f"{low:.3f} to {high:.3f}"}
    elif not first.is_same and first.gain is not None:
        # A calculation is exact; single timings have no interval.
        row["speed-up"] = NO_VERDICT if is_measured else multiple(first.gain, 3)
    yield row
    for versus in alike[1:]:
        yield {**dict.fromkeys(row, ""), "reference": _short_name(versus.reference)}


def _verdict_line(verdict: PhaseVerdict, machine: Machine, is_measured: bool) -> str:
    named: dict[str, list[str]] = {}
    for versus in verdict.against:
        if versus.reason:
            named.setdefault(versus.reason, []).append(_short_name(versus.reference))
    reasons = [f"{', '.join(names)}: {reason}." for reason, names in named.items()]
    match verdict.standing:
        case "faster" if is_measured:
            text = "Faster than every reference, beyond doubt of the interval."
        case "faster":
            text = "Faster than every reference, by the model alone: nothing was timed."
        case "not slower":
            text = "No difference to the closest reference is proven: tuning gained nothing for sure."
        case "reference" if not same_cores(verdict.winner, verdict.plan):
            looked = f"{plan_words(verdict.winner, machine)} looked faster, but is not in pairs of turns"
            text = f"Tuning gained nothing over {_kept_name(verdict)}: {looked}."
        case "reference":
            text = f"Tuning gained nothing: the best plan is {_kept_name(verdict)}."
        case "not compared":
            text = "No reference can run here, so that there is nothing to compare with."
            if not verdict.is_settled:
                text = "No time was left to compare; the plan in use is unchanged."
    return "\n".join(fill(line, WIDTH) for line in (text, *reasons))


def _kept_name(verdict: PhaseVerdict) -> str:
    """The name of the reference that has the plan's cores."""
    like = (versus.reference for versus in verdict.against if versus.reference.has(verdict.plan))
    return next(map(_short_name, like), "a reference")


def _run_lines(result: Found) -> Iterator[str]:
    sums = totals(result)
    for band in result.bands:
        sums = {name: count + sums[name] for name, count in totals(band).items()}
    yield (
        f"{sums['evaluations']} of {counted(sums['configurations'], 'configuration')} evaluated, "
        f"{sums['replayed']} known before, {sums['failed']} failed,"
    )
    yield f"{sums['pruned']} stopped early; {clock(round(result.elapsed_s))}."
    runs = (result, *result.bands)
    kernels = [tuned_round for run in runs for tuned_round in run.kernels]
    if any(tuned_round.outcome.gains for tuned_round in kernels):
        tuned = sum(not gain.is_default for tuned_round in kernels for gain in tuned_round.outcome.gains)
        count = sum(len(tuned_round.outcome.gains) for tuned_round in kernels)
        products = f"{tuned} of {counted(count, 'product')}"
        yield f"Kernels: {products} faster than by default on the finalists' cores."
    disturbed, laps = (sum(getattr(run, name) for run in runs) for name in ("disturbed", "laps"))
    if disturbed > DISTURBED_LAPS * max(1, laps):
        yield f"The machine was busy during {disturbed} of {counted(laps, 'timing')}."
    yield from _closing_lines(result)


def _closing_lines(result: Found) -> Iterator[str]:
    if result.end != "complete":
        yield "Interrupted." if result.end == "interrupted" else "The budget is used up."
        if result.wish.evaluator == "measured" or result.wish.storage:
            yield goes_on(result.wish.resume)
    yield from _band_lines(result)
    if result.stored:
        phases = [phase for phase in result.verdicts if phase in result.stored]
        yield f"Stored: the {plural(len(phases), 'plan')} for {' and '.join(phases)}."
    elif result.wish.evaluator != "measured" and result.verdicts:
        yield "Not stored: only plans that were measured on a machine come into use there."


def _band_lines(result: Found) -> Iterator[str]:
    """Yield lines with decode's cores by the number of sequences, where several numbers were asked for."""
    plan = result.bands[-1].decode_plan if result.bands else None
    if plan is not None and not plan.bands:
        yield "Decode: the same cores for every number of sequences at once."
    elif plan is not None:
        yield "Decode, by the sequences at once:"
        for sequences, own in zip((1, *plan.starts), plan.each, strict=True):
            yield f"  from {sequences}: {plan_words(own, result.subject.machine)}"


def totals(results: Found) -> dict[str, int]:
    """Sum the run's counts over the phases."""
    names = ("configurations", "evaluations", "replayed", "pruned", "failed")
    return {name: sum(getattr(searched.outcome, name) for searched in results.searched) for name in names}


SETTINGS = ("phases", "evaluator", "requests", "budget_s", "ranks", "bands", "cores")
"""Settings of a run that its JSON repeats."""


def found_fields(results: Found) -> dict[str, Any]:
    """JSON fields of a run; `plans`, the counts and `references` come first, since scripts want them most."""
    wish, subject = results.wish, results.subject
    return {
        "plans": {phase: _plan_fields(results, verdict) for phase, verdict in results.verdicts.items()},
        **totals(results),
        "bands": [{"sequences": band.sequences, **found_fields(band)} for band in results.bands],
        "references": {
            phase: [_reference_fields(versus) for versus in verdict.against]
            for phase, verdict in results.verdicts.items()
        },
        "end": results.end,
        "elapsed_s": results.elapsed_s,
        "timings": results.laps,
        "disturbed": results.disturbed,
        "version": __version__,
        "model": subject.model_key,
        "machine": {
            "core": subject.key.core_sig,
            "placement": subject.key.placement_sig,
            "source": subject.machine.source,
            "allowed_pus": list(subject.machine.allowed_pus),
        },
        "settings": {name: getattr(wish, name) for name in SETTINGS}
        | {"objective": objective_words(subject.objective)},
    }


def _plan_fields(results: Found, verdict: PhaseVerdict) -> dict[str, Any]:
    banded = results.bands[-1].decode_plan if results.bands else None
    return {
        "ranks": ranks_fields(verdict.plan.ranks),
        "latency_ms": verdict.latency_ms,
        "standing": verdict.standing,
        "stored": verdict.phase in results.stored,
        "bands": [] if banded is None or verdict.phase != "decode" else bands_fields(banded),
    }


def _reference_fields(versus: Versus) -> dict[str, Any]:
    compared = ("gain_low", "gain_high", "confidence", "pairs")
    return {
        "name": versus.reference.name,
        "ranks": ranks_fields(versus.reference.plan.ranks) if versus.reference.plan else None,
        "latency_ms": versus.latency_ms,
        "same_plan": versus.is_same,
        "gain": versus.gain,
        **{name: getattr(versus.comparison, name, None) for name in compared},
        "reason": versus.reason,
    }


def plan_words(plan: ServicePlan, machine: Machine) -> str:
    """Describe a plan's ranks and cores: `2 ranks of 12 cores`, unequal ones `2 ranks of 12 and 11 cores`, or
    with several hardware threads of a core `1 rank of 96 threads on 48 cores`."""
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
