"""The Splitwise paper's provisioning results, its authors' simulator, and the fits of their profile."""

from __future__ import annotations

import csv
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from typer import Argument, Option

from benchmarks.harness import Broken, Row, Yielded, note
from phasewise.cluster.simulated.arrivals import poisson
from phasewise.cluster.simulated.metrics import TABLE_VI, summarise
from phasewise.cluster.simulated.simulate import ClusterSpec, Pool, simulate
from phasewise.cluster.simulated.simulated_requests import Arrival
from phasewise.cluster.simulated.spec_file import MachineCatalogue, StepSources, parse_pools
from phasewise.cluster.simulated.steps import read_profile
from phasewise.workflows.capacity.load import lengths_of
from phasewise.workflows.capacity.provision import (
    Design,
    Provisioned,
    Question,
    parse_designs,
    provision_for_budget,
    provision_for_rate,
)

ALL = "baseline,split-homogeneous,split-heterogeneous,capped"
NAMES = {
    "mixed:a100": "Baseline-A100",
    "mixed:h100": "Baseline-H100",
    "split:a100/a100": "Splitwise-AA",
    "split:h100/h100": "Splitwise-HH",
    "split:h100/a100": "Splitwise-HA",
    "split:h100/h100-capped": "Splitwise-HHcap",
}
RATE, RATE_STEP, MOST_RATE = 70.0, 10.0, 400.0
"""Requests/s: of iso-throughput, and of the paper's sweeps."""
LOADS = (70.0, 100.0, 130.0)
BATCH_RATE, BATCH_SHARE = 300.0, 0.25
N_H100 = 40
"""Baseline-H100's machines, whose power and cost are the budgets (VI-B)."""

PAPER_CELLS = {
    "code": {"Baseline-A100": "70", "Baseline-H100": "40", "Splitwise-AA": "55+15", "Splitwise-HH": "35+5"},
    "conv": {
        "Baseline-A100": "70",
        "Baseline-H100": "40",
        "Splitwise-AA": "45+25",
        "Splitwise-HH": "25+15",
        "Splitwise-HA": "25+26",
        "Splitwise-HHcap": "25+21",
    },
}
"""Iso-power designs: the paper's text and the artifact's scripts."""
BATCH_POOLS = {
    "Baseline-A100": "mixed=70*a100",
    "Baseline-H100": "mixed=40*h100",
    "Splitwise-AA": "prompt=45*a100,token=25*a100",
    "Splitwise-HH": "prompt=25*h100,token=15*h100",
    "Splitwise-HA": "prompt=25*h100,token=26*a100",
}
TOLERANCE_S = 1e-6
Lengths = list[tuple[int, int]]


@dataclass(frozen=True)
class Asked:
    """The question to every part, and the machines, designs and trace that it is about."""

    question: Question
    catalogue: MachineCatalogue
    designs: list[Design]
    trace: str


def for_rate(asked: Asked, designs: Sequence[Design], measure: str) -> Iterator[Row]:
    """The least cost or power at 70 requests/s."""
    answers = provision_for_rate(asked.question, list(designs), RATE, measure, note)
    return (_provisioned(one, f"least {measure}", {}) for one in answers)


def for_budget(asked: Asked, measure: str) -> Iterator[Row]:
    """The highest rate within what 40 H100 machines take."""
    h100 = asked.catalogue["h100"]
    budget = N_H100 * (h100.power_w if measure == "power" else h100.cost)
    answers = provision_for_budget(asked.question, asked.designs, measure, budget, RATE_STEP, MOST_RATE, note)
    paper = PAPER_CELLS.get(asked.trace, {}) if measure == "power" else {}
    return (_provisioned(one, f"within {measure}", paper) for one in answers)


def iso_rate(asked: Asked) -> Iterator[Row]:
    """Figs. 19a and 19b. Where both kinds of machines are of one type, least cost is least power."""
    yield from for_rate(asked, asked.designs, "cost")
    different = [one for one in asked.designs if len({kind.power_w / kind.cost for _, kind in one.axes}) > 1]
    yield from for_rate(asked, different, "power")


def batch(asked: Asked) -> Iterator[Row]:
    """VI-E: requests/s for a dollar of a GPU's hour, at 300 requests/s for a quarter of the duration."""
    question = asked.question
    for name, pools in BATCH_POOLS.items():
        spec = ClusterSpec(parse_pools(pools, asked.catalogue), question.policy)
        duration_s = question.duration_s * BATCH_SHARE
        arrivals = poisson(question.lengths, BATCH_RATE, duration_s, 0, question.draw)
        summary = summarise(simulate(spec, arrivals), None)
        served = summary.n_requests / summary.duration_s
        yield {
            "design": name,
            "pools": pools,
            "requests/s": served,
            "for a GPU's $": served / (spec.cost / 8),
        }


def latencies(asked: Asked) -> Iterator[Row]:
    """Fig. 16: slowdowns over load for the paper's own iso-power clusters."""
    question = asked.question
    for written, name in NAMES.items():
        cell = PAPER_CELLS.get(asked.trace, {}).get(name)
        if cell is None:
            continue
        pools = parse_designs(written, asked.catalogue)[0].pools(tuple(map(int, cell.split("+"))))
        for rate in LOADS:
            arrivals = poisson(question.lengths, rate, question.duration_s, 0, question.draw)
            summary = summarise(simulate(ClusterSpec(pools, question.policy), arrivals), question.reference)
            assert summary.slowdowns is not None
            slowdowns = {
                f"{metric} P{p}": f"{summary.slowdowns[metric][p]:.2f}"
                for metric in ("ttft", "tbt", "e2e")
                for p in (50, 90, 99)
            }
            yield {"design": f"{name} ({cell})", "requests/s": rate} | slowdowns


PARTS: dict[str, Callable[[Asked], Iterator[Row]]] = {
    "fig12": lambda asked: for_rate(asked, parse_designs("split:h100/h100", asked.catalogue), "cost"),
    "iso-power": lambda asked: for_budget(asked, "power"),
    "iso-cost": lambda asked: for_budget(asked, "cost"),
    "iso-rate": iso_rate,
    "batch": batch,
    "latencies": latencies,
}


def splitwise(
    trace: Annotated[list[str], Option(metavar="NAME=CSV", help="code and conv are the paper's")],
    perf_model: Annotated[Path, Option(help="data/perf_model.csv of splitwise-sim")],
    part: Annotated[str, Option(help=", ".join(PARTS))],
    policy: str = "splitwise-sim",
    duration: Annotated[float, Option(help="seconds of requests")] = 120.0,
    designs: str = ALL,
) -> Yielded:
    """The paper's provisioning results beside ours: Figs. 12, 16, 18, 19 and section VI-E.

        python benchmarks/figures.py splitwise --trace code=CODE.csv --trace conv=CONV.csv \\
            --perf-model PERF.csv --part fig12

    The traces are AzureLLMInferenceTrace_code.csv and _conv.csv (Azure/AzurePublicDataset). Requests are
    drawn as the authors' generator draws them: Poisson arrivals, prompts and answers independently.
    """
    if part not in PARTS:
        raise SystemExit(f"there is no part {part!r}: {', '.join(PARTS)}")
    catalogue = MachineCatalogue(sources=StepSources(read_profile(perf_model)))
    begun = time.perf_counter()
    for pair in trace:
        name, _, path = pair.partition("=")
        steps = catalogue["a100"].steps
        question = Question(_lengths(path), TABLE_VI, steps, policy, duration, draw="columns", most=140)
        yield f"{part}, {name} trace, policy {policy}, {duration:g} s of requests"
        yield from PARTS[part](Asked(question, catalogue, parse_designs(designs, catalogue), name))
    yield f"{time.perf_counter() - begun:.0f} s"


def _lengths(path: str) -> Lengths:
    return [(one.prompt_tokens, one.output_tokens) for one in lengths_of(path)]


def _provisioned(one: Provisioned, sought: str, paper: dict[str, str]) -> Row:
    name, spec = NAMES.get(one.design.name, one.design.name), one.spec
    return {
        "design": name,
        "sought": sought,
        "machines": "+".join(map(str, one.cell)) if spec else one.reason,
        "total": spec and spec.n_machines,
        "requests/s": one.rate if spec else None,
        "$/h": spec and f"{spec.cost:.0f}",
        "kW": spec and f"{spec.power_w / 1000:.1f}",
        "bound used": f"{one.tightness:.0%}" if spec else None,
        "runs": one.n_runs,
        "paper's machines": paper.get(name),
    }


# ---- the authors' simulator ------------------------------------------------------------------------------

FIELDS = (
    *("request_id", "request_type", "application_id", "arrival_timestamp"),
    *("batch_size", "prompt_size", "token_size"),
)


def splitwise_sim(
    checkout: Annotated[Path, Argument(help="of Mutinifni/splitwise-sim, its launcher set to basic")],
    lengths: Annotated[str, Option(help="a trace")],
    python: Annotated[str, Option(help="an interpreter with its requirements")] = sys.executable,
    rate: float = RATE,
    duration: float = 120.0,
    cell: Annotated[list[str] | None, Option(help="H100s: mixed:N, or PROMPT+TOKEN")] = None,
) -> Yielded:
    """The authors' simulator and policy `splitwise-sim` on one trace: the largest difference, and the time.

    CHECKOUT's launcher is set to basic: in configs/config.yaml, leave out the line with hydra/launcher and
    the launcher's settings. Its requirements: hydra-core, omegaconf, networkx, pandas, scipy, requests.
    Times are CPU seconds of one process each; those of the checkout without its start, which is timed with a
    trace of one request. Exit code 1 where any request differs.
    """
    arrivals = poisson(_lengths(lengths), rate, duration, seed=0, draw="columns")
    profile = read_profile(checkout / "data/perf_model.csv")
    h100 = MachineCatalogue(sources=StepSources(profile))["h100"]
    for one in cell or ["mixed:40", "27+3"]:
        start_s, _ = _theirs(checkout, python, arrivals[:1], one)
        theirs_s, reference = _theirs(checkout, python, arrivals, one)
        begun = time.process_time()
        result = simulate(ClusterSpec(_pools(one, h100), "splitwise-sim"), arrivals)
        ours_s = time.process_time() - begun
        own = {life.arrival.request_id: (life.e2e_s, life.ttft_s) for life in result.lives}
        pairs = [(own[name], reference[name]) for name in own.keys() & reference.keys()]
        apart_s = max(abs(a - b) for mine, other in pairs for a, b in zip(mine, other, strict=True))
        yield {
            "cell": one,
            "requests": len(arrivals),
            "ended there, here": f"{len(reference)}, {len(own)}",
            "largest difference, s": f"{apart_s:.3g}",
            "CPU s there": theirs_s - start_s,
            "to start": start_s,
            "CPU s here": ours_s,
            "times as fast": (theirs_s - start_s) / ours_s,
        }
        if apart_s > TOLERANCE_S or own.keys() != reference.keys():
            yield Broken(f"{one}: not the same requests at the same times")


def _pools(cell: str, machine: Any) -> tuple[Pool, ...]:
    kind, _, count = cell.partition(":")
    if kind == "mixed":
        return (Pool("mixed", machine, int(count)),)
    prompts, tokens = map(int, cell.split("+"))
    return Pool("prompt", machine, prompts), Pool("token", machine, tokens)


def _theirs(
    checkout: Path, python: str, arrivals: Sequence[Arrival], cell: str
) -> tuple[float, dict[int, tuple[float, float]]]:
    """CPU seconds, and response time and TTFT of every request that ended."""
    pools = _pools(cell, None)
    options = [f"cluster.servers.1.count={sum(pool.count for pool in pools)}"]
    if len(pools) == 1:
        options += ["applications.0.scheduler=token_jsq", "start_state=baseline"]
    else:
        options += ["applications.0.scheduler=mixed_pool", "start_state=splitwise"]
        options += [f"start_state.prompt.num_instances={pools[0].count}"]
        options += [f"start_state.token.num_instances={pools[1].count}"]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.csv")
        with open(trace, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(FIELDS)
            for one in arrivals:
                sizes = (one.prompt_tokens, one.output_tokens)
                writer.writerow([one.request_id, 2, 0, repr(one.at_s), 1, *sizes])
        command = [python, "run.py", "cluster=half_half", "cluster.servers.0.count=0", "performance_model=db"]
        command += [f"trace.path={trace}", f"output_dir={folder}/out", "seed=0", *options]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        subprocess.run(command, cwd=checkout, check=True, stdout=subprocess.DEVNULL, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        with open(Path(folder, "out/detailed/0.csv"), encoding="utf-8", newline="") as file:
            return spent_s, {
                int(float(row["request_ids"])): (float(row["response_times"]), float(row["ttft_times"]))
                for row in csv.DictReader(file)
            }


# ---- the shipped machine types ---------------------------------------------------------------------------

KNOTS = {"prompt_time": (128, 512, 2048, 4096, 8192, 32768), "token_time": (128, 4096, 8192, 32768)}
OURS = {"prompt_time": "prefill_ms", "token_time": "decode_ms"}


def machine_types(
    perf_model: Annotated[Path, Argument(help="data/perf_model.csv of splitwise-sim")],
) -> Yielded:
    """Fit the step times of the shipped machine types from a profile, with how far they are off.

    Each curve has its knots where the profile bends; the values there are a least-squares fit to the
    logarithms' neighbourhood (weights 1 / time), rounded to three digits. `curve` is as TOML has it.
    """
    rows: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    with open(perf_model, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["tensor_parallel"] == "8":
                rows[row["model"], row["hardware"]].append(row)
    for (model, hardware), own in sorted(rows.items()):
        for column, field in OURS.items():
            tokens = np.array([int(row["prompt_size"]) * int(row["batch_size"]) for row in own], float)
            times_ms = np.array([float(row[column]) for row in own])
            knots = np.array([knot for knot in KNOTS[column] if knot <= tokens.max()], float)
            hats = np.array([np.interp(tokens, knots, unit) for unit in np.eye(len(knots))]).T
            fit, *_ = np.linalg.lstsq(hats / times_ms[:, None], np.ones(len(times_ms)), rcond=None)
            fit = np.array([float(f"{value:.3g}") for value in fit])
            off = np.abs(hats @ fit - times_ms) / times_ms
            curve = ", ".join(f"[{int(knot)}, {value:g}]" for knot, value in zip(knots, fit, strict=True))
            yield {
                "model": model,
                "hardware": hardware,
                "field": field,
                "curve": f"[{curve}]",
                "mean error": f"{off.mean():.1%}",
                "largest": f"{off.max():.1%}",
            }
