"""Traces through a described cluster on simulated time: its arrivals, the run, and its summary."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from phasewise._files import open_input
from phasewise._json import read_json
from phasewise._options import changed, refuse_unused
from phasewise.cluster.errors import ClusterError
from phasewise.cluster.simulated.metrics import Slo, Summary, parse_slo, summarise
from phasewise.cluster.simulated.simulate import ClusterSpec, simulate
from phasewise.cluster.simulated.simulated_requests import Arrival, poisson
from phasewise.cluster.simulated.spec_file import (
    DEFAULT_MODEL,
    MachineCatalogue,
    TimedTypes,
    names_a_file,
    parse_pools,
    read_cluster,
)
from phasewise.cluster.simulated.steps import TimedStep, steps_of
from phasewise.tuner.config.trace import load_trace, read_trace
from phasewise.tuner.config.trace_files import MAX_ROW_CHARS
from phasewise.workflows.capacity.settings import ClusterInputs, SimulationWish
from phasewise.workflows.errors import UsageError
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.cluster.simulated.steps import StepTimes
    from phasewise.kerneldb.records import StepTime
    from phasewise.tuner.config.lengths import Trace

LENGTHS_FROM_DISTRIBUTION = 10_000
"""Requests drawn from a distribution such as lognormal:..., to draw arrivals from."""


DB_MACHINE, XML_MACHINE = "db", "xml"
"""Names of the machine types that `machine_from_db` and `machine_from_xml` give step times."""


def arrivals_of(text: str, rate: float | None = None, seconds: float = 120.0, seed: int = 0) -> list[Arrival]:
    """Read the arrivals of a trace, or draw `rate` requests/s with its lengths. TraceError, ClusterError."""
    trace = lengths_of(text)
    if rate is not None:
        lengths = [(request.prompt_tokens, request.output_tokens) for request in trace]
        return poisson(lengths, rate, seconds, seed)
    if any(request.arrival_s is None for request in trace):
        raise ClusterError(f"{text} states no arrivals: draw some with --rate")
    prefixes = _prefix_ids(text)
    rows = [
        (request.arrival_s or 0.0, request.prompt_tokens, request.output_tokens, prefixes.get(index, ()))
        for index, request in enumerate(trace)
    ]
    rows.sort(key=lambda row: row[0])
    return [Arrival(index, *row) for index, row in enumerate(rows)]


def lengths_of(text: str) -> Trace:
    """Lengths of every request of a file, or of LENGTHS_FROM_DISTRIBUTION requests of a distribution."""
    if ":" in text and "/" in text.partition(":")[2] and not text.endswith((".csv", ".json", ".jsonl")):
        return load_trace(text, LENGTHS_FROM_DISTRIBUTION)
    return read_trace(text)


def _prefix_ids(path: str) -> dict[int, tuple[int, ...]]:
    """Ids of the blocks of each prompt of a Mooncake trace, by index among the served requests."""
    if not path.endswith(".jsonl"):
        return {}
    try:
        with io.TextIOWrapper(open_input(path), encoding="utf-8-sig") as file:
            if not file.readline(MAX_ROW_CHARS).lstrip().startswith("{"):  # a list, or CSV
                return {}
            file.seek(0)
            return _block_ids(file, path)
    except OSError as error:
        raise ClusterError(f"{path} cannot be read again for its hash_ids: {error.strerror}") from None


def _block_ids(lines: Iterable[str], path: str) -> dict[int, tuple[int, ...]]:
    """Block ids of the served requests, from lines that `read_trace` has bounded."""
    prefixes: dict[int, tuple[int, ...]] = {}
    served = 0
    for line in lines:
        entry = read_json(line) if line.strip() else None
        if not isinstance(entry, dict) or not (entry.get("input_length") and entry.get("output_length")):
            continue
        ids = entry.get("hash_ids", [])
        if not isinstance(ids, list) or not all(
            type(block_id) is int and 0 <= block_id < 1 << 40 for block_id in ids
        ):
            raise ClusterError(f"{path}: hash_ids must be whole numbers from 0 on")
        prefixes[served] = tuple(ids)
        served += 1
    return prefixes


def steps_from_db(db: str | None, signature: str, report: Report) -> StepTimes:
    """Step times that a tuning database keeps for a kind of machine.

    signature: the beginning of its core signature, or `CORE@PLACEMENT`. Of several models or plans the one
    with the most timed steps counts, and `report` is told. ClusterError where nothing fits.
    """
    from phasewise.kerneldb.records import StepTime
    from phasewise.kerneldb.store import open_store

    core, _, placement = signature.partition("@")
    with open_store(db) as store:
        rows = [
            row
            for row in store.stream(StepTime)
            if row.origin.machine.core_sig.startswith(core)
            and row.origin.machine.placement_sig.startswith(placement)
        ]
    if not rows:
        raise ClusterError(
            f"the tuning database has no timed steps of a machine {signature!r:.60}: run phasewise "
            "tune-config there, or import its database"
        )
    chosen, count = Counter(map(_kind_of, rows)).most_common(1)[0]
    steps = [row for row in rows if _kind_of(row) == chosen]
    others = len({_kind_of(row) for row in rows}) - 1
    beside = f"; {others} other combinations are left out" if others else ""
    report(f"step times of {chosen[2]} on {chosen[0]} @ {chosen[1]}: {count} timed steps{beside}")
    return steps_of(
        TimedStep(
            row.step.phase, row.step.tokens, row.step.sequences, row.step.context, row.estimate_ns / 1e9
        )
        for row in steps
    )


def _kind_of(row: StepTime) -> tuple[str, str, str]:
    machine = row.origin.machine
    return machine.core_sig, machine.placement_sig, row.model_key


PREFILL_TOKENS = (16, 64, 256, 512)
DECODE_SEQUENCES = (1, 8, 32, 128)
CONTEXTS = (64, 4096)
MODELLED_STEPS = (
    *(("prefill", tokens, 1, context) for tokens in PREFILL_TOKENS for context in (0, CONTEXTS[-1])),
    *(("decode", 1, sequences, context) for sequences in DECODE_SEQUENCES for context in CONTEXTS),
)
"""Phase, tokens, sequences and context of the steps that stand for a described machine."""


def steps_from_xml(xml: str, model: str, report: Report) -> StepTimes:
    """Step times that the modelled evaluator computes for a machine that need not exist.

    xml: from lstopo. model: a model's name or file, or a `config.json`. The default plan is used: one rank
    over all cores. TopologyError, ModelError or EvaluationError, one line each.
    """
    from pathlib import Path

    from phasewise.topology import read_lstopo
    from phasewise.tuner.config.modelled import ModelledEvaluator
    from phasewise.tuner.config.steps import Step
    from phasewise.tuner.plans import PHASES, default_plan
    from phasewise.tuner.topotree import Configuration
    from phasewise.workflows.opening.model_shape import shape_of_reference

    machine, timed = read_lstopo(Path(xml)), []
    shape = shape_of_reference(model, "native", report)
    evaluator = ModelledEvaluator(machine, shape)
    for phase in PHASES:
        with evaluator.open(Configuration(default_plan(machine, phase).ranks), phase) as timer:
            timed += [
                TimedStep(*step, timer(Step(phase, *step[1:])) / 1e9)
                for step in MODELLED_STEPS
                if step[0] == phase
            ]
    report(
        f"step times of {shape.name} on {xml} are modelled; weight_bytes = {shape.weight_bytes}, "
        f"kv_bytes_per_token = {shape.kv_bytes_per_slot}, n_layers = {shape.n_layers}"
    )
    return steps_of(timed)


def simulate_cluster(
    trace: str, pools: str, wish: SimulationWish, inputs: ClusterInputs, report: Report = silent
) -> tuple[ClusterSpec, Summary, Slo | None]:
    """Simulate the cluster `pools` (a TOML file, or pools in a line) under `trace`.

    Returns the cluster, the summary, and the promises to judge by. Raises ClusterError, TraceError and
    KernelDbError for input that cannot be read.
    """
    if wish.rate is None:
        refuse_unused("without --rate", changed(inputs, "duration_s", "seed"))
    elif wish.prefix_reuse:
        refuse_unused("with --rate", ["prefix_reuse"], "drawn requests have no prompts in common")
    slo = None if wish.slo is None else parse_slo(wish.slo)
    spec, catalogue = _cluster(pools, step_sources(inputs, report), inputs.model)
    spec = replace(spec, policy=wish.policy or spec.policy, prefix_reuse=wish.prefix_reuse)
    arrivals = arrivals_of(trace, wish.rate, inputs.duration_s, inputs.seed)
    reference = reference_steps(inputs.reference, catalogue, report)
    return spec, summarise(simulate(spec, arrivals), reference), slo


def _cluster(text: str, timed: TimedTypes, model: str | None) -> tuple[ClusterSpec, MachineCatalogue]:
    if names_a_file(text):
        return read_cluster(text, timed, model)
    catalogue = MachineCatalogue(model or DEFAULT_MODEL, timed)
    return ClusterSpec(parse_pools(text, catalogue)), catalogue


def step_sources(inputs: ClusterInputs, report: Report = silent) -> TimedTypes:
    """The source of step times, besides the machine types' own curves. ClusterError or KernelDbError."""
    timed: dict[str, StepTimes] = {}
    if inputs.machine_from_db is not None:
        timed[DB_MACHINE] = steps_from_db(inputs.db, inputs.machine_from_db, report)
    if inputs.machine_from_xml is not None:
        xml, _, model = inputs.machine_from_xml.partition(":")
        if not xml or not model:
            raise UsageError(f"--machine-from-xml takes XML:MODEL, not {inputs.machine_from_xml!r:.60}")
        timed[XML_MACHINE] = steps_from_xml(xml, model, report)
    return timed


def reference_steps(name: str, catalogue: MachineCatalogue, report: Report) -> StepTimes | None:
    """Step times of the machine type that slowdowns are relative to; None, and a report, where unknown."""
    try:
        return catalogue[name].steps
    except ClusterError as error:
        report(f"no slowdowns: {error}")
        return None
