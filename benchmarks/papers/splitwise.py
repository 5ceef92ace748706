"""The Splitwise paper's provisioning results and the fits of their profile."""

from __future__ import annotations

import csv
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from typer import Option

from benchmarks.harness import Row, Yielded, note
from benchmarks.papers.splitwise_profile import characterization, share_within
from phasewise.cluster.simulated.arrivals import poisson
from phasewise.cluster.simulated.kv_transfer import Prompt, transfer
from phasewise.cluster.simulated.metrics import TABLE_VI, Summary, broken, summarise
from phasewise.cluster.simulated.provision import highest_rate
from phasewise.cluster.simulated.simulate import ClusterSpec, MachineType, Pool, simulate
from phasewise.cluster.simulated.simulated_requests import Arrival
from phasewise.cluster.simulated.spec_file import (
    DEFAULT_MODEL,
    MachineCatalogue,
    Profile,
    StepSources,
    parse_pools,
)
from phasewise.cluster.simulated.steps import Curve, ProfileKey, StepTimes, read_profile
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
OWN_CELLS = {"Splitwise-HA": "29+19", "Splitwise-HHcap": "30+14"}
"""Iso-power designs for code of which the paper's text says nothing: those that `iso-power` found."""
BATCH_POOLS = {
    "Baseline-A100": "mixed=70*a100",
    "Baseline-H100": "mixed=40*h100",
    "Splitwise-AA": "prompt=45*a100,token=25*a100",
    "Splitwise-HH": "prompt=25*h100,token=15*h100",
    "Splitwise-HA": "prompt=25*h100,token=26*a100",
}
Lengths = list[tuple[int, int]]


@dataclass(frozen=True)
class Asked:
    """The question to every part, and the machines, designs and trace that it is about."""

    question: Question
    catalogue: MachineCatalogue
    designs: list[Design]
    trace: str
    machines: Machines
    perf_model: Path
    cells: Sequence[str] = ()
    rate: float | None = None

    @property
    def names(self) -> list[tuple[str, str]]:
        """The paper's designs that are asked for, as written and by their names."""
        asked_for = {design.name for design in self.designs}
        return [(written, name) for written, name in NAMES.items() if written in asked_for]

    def of_model(self, model: str) -> Asked:
        """The same about another model."""
        catalogue = _Catalogue(model, self.machines)
        reference = MachineCatalogue(model, StepSources(self.machines.profile))["a100"].steps
        question = replace(self.question, reference=reference)
        return replace(self, question=question, catalogue=catalogue)


class BySequences(StepTimes):
    """A profile read as the authors' simulator reads it: a decode step takes the time of its sequences."""

    def decode_s(self, n_sequences: int, context_tokens: int, since_prefill: int | None = None) -> float:
        return super().decode_s(n_sequences, n_sequences, since_prefill)


@dataclass(frozen=True)
class Machines:
    """Changes to the shipped types. `tpot_ms`: what production machines pace prompts by."""

    profile: Profile
    tpot_ms: float | None = None
    by_sequences: bool = False


class _Catalogue(MachineCatalogue):
    def __init__(self, model: str, machines: Machines) -> None:
        super().__init__(model, StepSources(machines.profile))
        self._machines = machines

    def __getitem__(self, name: str) -> MachineType:
        kind, changes = super().__getitem__(name), self._machines
        if changes.by_sequences:
            kind = replace(kind, steps=BySequences(kind.steps.prefill, kind.steps.decode))
        return kind if changes.tpot_ms is None else replace(kind, tpot_ms=changes.tpot_ms)


def for_rate(asked: Asked, designs: Sequence[Design], measure: str) -> Iterator[Row]:
    """The least cost or power at 70 requests/s."""
    answers = provision_for_rate(asked.question, list(designs), RATE, measure, note)
    return (_provisioned(answer, f"least {measure}", {}) for answer in answers)


def for_budget(asked: Asked, measure: str) -> Iterator[Row]:
    """The highest rate within what 40 H100 machines take."""
    h100 = asked.catalogue["h100"]
    budget = N_H100 * (h100.power_w if measure == "power" else h100.cost)
    answers = provision_for_budget(asked.question, asked.designs, measure, budget, RATE_STEP, MOST_RATE, note)
    paper = PAPER_CELLS.get(asked.trace, {}) if measure == "power" else {}
    return (_provisioned(answer, f"within {measure}", paper) for answer in answers)


def iso_rate(asked: Asked) -> Iterator[Row]:
    """Figs. 19a and 19b. Where both kinds of machines are of one type, least cost is least power."""
    yield from for_rate(asked, asked.designs, "cost")
    different = [
        design for design in asked.designs if len({kind.power_w / kind.cost for _, kind in design.axes}) > 1
    ]
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
    for written, name in asked.names:
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


def table_iv(asked: Asked) -> Iterator[Row]:
    """P50 of requests that have a machine to themselves; cost and energy of the median."""
    medians: dict[str, dict[str, float]] = {}
    for name in ("a100", "h100"):
        kind = asked.catalogue[name]
        alone = [_alone_s(kind.steps, *lengths) for lengths in asked.question.lengths]
        ttft_s, tbt_s, e2e_s = (float(np.median(times)) for times in zip(*alone, strict=True))
        energy_wh = e2e_s * kind.power_w / 3600
        cost = e2e_s * kind.cost / 3600
        own = {"TTFT, ms": 1e3 * ttft_s, "TBT, ms": 1e3 * tbt_s, "E2E, ms": 1e3 * e2e_s}
        medians[name] = own | {"cost, $": cost, "energy, Wh": energy_wh}
        yield {"machine": name} | medians[name]
    yield {"machine": "h100 / a100"} | {
        metric: value / medians["a100"][metric] for metric, value in medians["h100"].items()
    }


def _alone_s(steps: StepTimes, prompt: int, output: int) -> tuple[float, float, float]:
    """TTFT, mean TBT and E2E of a request on an idle machine."""
    ttft_s, tbt_s = steps.prefill_s(prompt), steps.decode_s(1, prompt + output // 2)
    return ttft_s, tbt_s, ttft_s + tbt_s * (output - 1)


def kv_transfer(asked: Asked) -> Iterator[Row]:
    """Fig. 15: what handing over adds to the second token and to E2E, without batching and without queues."""
    for name in ("a100", "h100"):
        kind = asked.catalogue[name]
        for way, above in (("serial", 1 << 30), ("as Splitwise", kind.link.layerwise_above_tokens)):
            link = replace(kind.link, layerwise_above_tokens=above)
            second, whole = [], []
            for prompt, output in asked.question.lengths:
                ttft_s, tbt_s, e2e_s = _alone_s(kind.steps, prompt, output)
                sent = Prompt(prompt, prompt * kind.kv_bytes_per_token, kind.n_layers, 0.0, ttft_s)
                late_s = transfer(link, sent, 0.0, 0.0).arrival_s - ttft_s
                second.append(100 * late_s / tbt_s)
                whole.append(100 * late_s / e2e_s)
            yield {"machine": name, "sent": way} | {
                f"{what}, {point}": f"{value:.2f} %"
                for what, values in (("second token later, of a TBT", second), ("E2E", whole))
                for point, value in (("mean", np.mean(values)), ("P99", np.percentile(values, 99)))
            }


TOKENS_OF_STEPS = (15, 100, 1000)


def batches(asked: Asked) -> Iterator[Row]:
    """Fig. 17: shares of the machines' busy time in steps of at most N tokens, at low and high load."""
    question = asked.question
    for written, name in asked.names:
        cell = PAPER_CELLS.get(asked.trace, {}).get(name)
        if cell is None:
            continue
        pools = parse_designs(written, asked.catalogue)[0].pools(tuple(map(int, cell.split("+"))))
        for rate in (LOADS[0], LOADS[-1]):
            arrivals = poisson(question.lengths, rate, question.duration_s, 0, question.draw)
            simulated = simulate(ClusterSpec(pools, question.policy), arrivals)
            for role in dict.fromkeys(use.role for use in simulated.machines):
                own = [use for use in simulated.machines if use.role == role]
                busy_s = sum(use.busy_s for use in own)
                yield {
                    "design": f"{name} ({cell})",
                    "requests/s": rate,
                    "pool": role,
                    "busy": f"{busy_s / (len(own) * simulated.end_s):.0%}",
                } | {f"at most {most}": f"{share_within(own, most, busy_s):.0%}" for most in TOKENS_OF_STEPS}


TRAIN_SHARE, SPLITS = 0.8, 20


def performance_model(asked: Asked) -> Iterator[Row]:
    """Fig. 13's performance model (V-B): lines through four fifths of a profile, judged by the rest.

    MAPE over the rows left out, the mean of twenty drawn divisions. The paper: below 3 %.
    """
    rows: dict[ProfileKey, list[tuple[float, ...]]] = defaultdict(list)
    with open(asked.perf_model, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = ProfileKey(row["model"], row["hardware"], int(row["tensor_parallel"]))
            tokens = int(row["prompt_size"]) * int(row["batch_size"])
            rows[key].append((tokens, float(row["prompt_time"]), float(row["token_time"])))
    for key, points in sorted(rows.items()):
        if key.tensor_parallel != 8:
            continue
        off: dict[str, list[float]] = {"prompts": [], "tokens": []}
        for seed in range(SPLITS):
            drawn = random.Random(seed).sample(points, len(points))
            n_train = round(TRAIN_SHARE * len(drawn))
            for column, name in enumerate(off, 1):
                off[name].append(_mape(drawn[:n_train], drawn[n_train:], column))
        yield {"model": key.model, "machine": key.hardware, "rows": len(points)} | {
            f"MAPE, {name}": f"{np.mean(values):.1%}" for name, values in off.items()
        }


def _mape(train: Sequence[tuple[float, ...]], test: Sequence[tuple[float, ...]], column: int) -> float:
    times: dict[float, list[float]] = defaultdict(list)
    for point in train:
        times[point[0]].append(point[column])
    curve = Curve((tokens, float(np.median(values))) for tokens, values in times.items())
    return float(np.mean([abs(curve.at(int(point[0])) / point[column] - 1) for point in test]))


PROMPTS = (128, 256, 512, 1024, 1536, 2048, 3072, 4096)


def transfer_by_length(asked: Asked) -> Iterator[Row]:
    """Fig. 14: what a hand-over adds to a prompt, by its length, of two machines and one request."""
    for name in ("a100", "h100"):
        kind = asked.catalogue[name]
        for n_tokens in PROMPTS:
            row: dict[str, object] = {"machine": name, "prompt, tokens": n_tokens}
            for way, above in (("serially", 1 << 30), ("as Splitwise", kind.link.layerwise_above_tokens)):
                sent = replace(kind, link=replace(kind.link, layerwise_above_tokens=above))
                pools = Pool("prompt", sent, 1), Pool("token", sent, 1)
                arrivals = [Arrival(0, 0.0, n_tokens, 2)]
                (life,) = simulate(ClusterSpec(pools, asked.question.policy), arrivals).lives
                prompt_s = life.prompt_end_s - life.prompt_start_s
                row |= {
                    f"{way}, ms": 1e3 * life.transfer_s,
                    f"{way}, of the prompt": life.transfer_s / prompt_s,
                }
            yield row


def other_trace(asked: Asked) -> Iterator[Row]:
    """Fig. 20a: conversation on clusters that are meant for code, beside those that are meant for it."""
    for written, name in asked.names:
        cells = {"conv": PAPER_CELLS["conv"][name], "code": (PAPER_CELLS["code"] | OWN_CELLS)[name]}
        rates = {meant: _highest(asked, written, cell) for meant, cell in cells.items()}
        for meant, cell in cells.items():
            change = rates[meant] / rates["conv"] - 1 if rates["conv"] else None
            yield {
                "design": name,
                "meant for": meant,
                "machines": cell,
                "requests/s": rates[meant],
                "change": change,
            } | _slowdowns(_run(asked, written, cell, LOADS[-1]), (50,))


def other_model(asked: Asked) -> Iterator[Row]:
    """Fig. 20b: Llama 2 70B on clusters that are meant for BLOOM-176B."""
    cells = PAPER_CELLS["code"] | OWN_CELLS if asked.trace == "code" else PAPER_CELLS["conv"]
    for written, name in asked.names:
        for model in ("bloom-176b", "llama2-70b"):
            of_model = asked.of_model(model)
            yield {
                "design": f"{name} ({cells[name]})",
                "model": model,
                "requests/s": _highest(of_model, written, cells[name]),
            } | _slowdowns(_run(of_model, written, cells[name], LOADS[-1]), (50, 99))


def _run(asked: Asked, written: str, cell: str, rate: float) -> Summary:
    question = asked.question
    pools = parse_designs(written, asked.catalogue)[0].pools(tuple(map(int, cell.split("+"))))
    arrivals = poisson(question.lengths, rate, question.duration_s, 0, question.draw)
    return summarise(simulate(ClusterSpec(pools, question.policy), arrivals), question.reference)


def _highest(asked: Asked, written: str, cell: str) -> float:
    """The highest rate, in half steps, at which a cluster keeps all promises; 0: none."""

    def is_kept(rate: float) -> bool:
        kept = not broken(_run(asked, written, cell, rate), asked.question.slo)
        note(f"{written} {cell} at {rate:g} requests/s: {'kept' if kept else 'broken'}")
        return kept

    middle, step = LOADS[1], RATE_STEP / 2
    if is_kept(middle):
        return highest_rate(is_kept, step, MOST_RATE, above=middle)
    return highest_rate(is_kept, step, middle - step)


def _slowdowns(summary: Summary, percentiles: Sequence[int]) -> dict[str, str]:
    """At the highest load of Fig. 16."""
    assert summary.slowdowns is not None
    return {
        f"{metric} P{p} at {LOADS[-1]:g}": f"{summary.slowdowns[metric][p]:.2f}"
        for metric in ("ttft", "tbt", "e2e")
        for p in percentiles
    }


def given_cells(asked: Asked) -> Iterator[Row]:
    """Machines that `--cell` names: the highest rate of each; with --rate the promises that it breaks."""
    for text in asked.cells:
        written, _, cell = text.partition("=")
        pools = parse_designs(written, asked.catalogue)[0].pools(tuple(map(int, cell.split("+"))))
        spec = ClusterSpec(pools, asked.question.policy)
        row: dict[str, object] = {
            "design": NAMES.get(written, written),
            "machines": cell,
            "$/h": f"{spec.cost:.0f}",
            "kW": f"{spec.power_w / 1000:.1f}",
        }
        if asked.rate is None:
            yield row | {"requests/s": _highest(asked, written, cell)}
        else:
            unkept = broken(_run(asked, written, cell, asked.rate), asked.question.slo)
            yield row | {"requests/s": asked.rate, "promises": "; ".join(unkept) or "kept"}


PARTS: dict[str, Callable[[Asked], Iterator[Row]]] = {
    "fig12": lambda asked: for_rate(asked, parse_designs("split:h100/h100", asked.catalogue), "cost"),
    "iso-power": lambda asked: for_budget(asked, "power"),
    "iso-cost": lambda asked: for_budget(asked, "cost"),
    "iso-rate": iso_rate,
    "batch": batch,
    "latencies": latencies,
    "table4": table_iv,
    "transfer": kv_transfer,
    "batches": batches,
    "fig13": performance_model,
    "fig14": transfer_by_length,
    "fig20a": other_trace,
    "fig20b": other_model,
    "cells": given_cells,
    "characterization": lambda asked: characterization(
        asked.catalogue["h100"], asked.question.lengths, asked.question.duration_s, asked.perf_model
    ),
}


def splitwise(
    trace: Annotated[list[str], Option(metavar="NAME=CSV", help="code and conv are the paper's")],
    perf_model: Annotated[Path, Option(help="data/perf_model.csv of splitwise-sim")],
    part: Annotated[str, Option(help=", ".join(PARTS))],
    policy: str = "splitwise",
    duration: Annotated[float, Option(help="seconds of requests")] = 120.0,
    designs: str = ALL,
    model: Annotated[str, Option(help="bloom-176b or llama2-70b")] = DEFAULT_MODEL,
    tpot: Annotated[
        float, Option(help="ms that production machines pace prompts by; 0: their default")
    ] = 0.0,
    most: Annotated[int, Option(help="machines of each kind")] = 140,
    by_sequences: Annotated[
        bool, Option("--by-sequences", help="decode steps cost by sequences, not by context, as theirs do")
    ] = False,
    cell: Annotated[
        list[str] | None, Option(metavar="DESIGN=N+M", help="of part cells, e.g. split:h100/a100=24+28")
    ] = None,
    rate: Annotated[float, Option(help="of part cells: at this rate alone; 0: the highest")] = 0.0,
) -> Yielded:
    """The paper's results beside ours: Figs. 3 to 8, Table IV, Figs. 12 to 20, and section VI-E.

        python benchmarks/figures.py splitwise --trace code=CODE.csv --trace conv=CONV.csv \\
            --perf-model PERF.csv --part fig12

    The traces are AzureLLMInferenceTrace_code.csv and _conv.csv (Azure/AzurePublicDataset). Requests are
    drawn as the authors' generator draws them: Poisson arrivals, prompts and answers independently. A trace
    may be a distribution, as `bench kv` reads them.
    """
    if part not in PARTS:
        raise SystemExit(f"there is no part {part!r}: {', '.join(PARTS)}")
    machines = Machines(read_profile(perf_model), tpot or None, by_sequences)
    catalogue = _Catalogue(model, machines)
    reference = MachineCatalogue(model, StepSources(machines.profile))["a100"].steps
    begun = time.perf_counter()
    for pair in trace:
        name, _, path = pair.partition("=")
        question = Question(_lengths(path), TABLE_VI, reference, policy, duration, draw="columns", most=most)
        yield f"{part}, {name} trace, {model}, policy {policy}, {duration:g} s of requests"
        chosen = parse_designs(designs, catalogue)
        asked = Asked(question, catalogue, chosen, name, machines, perf_model, cell or (), rate or None)
        yield from PARTS[part](asked)
    yield f"{time.perf_counter() - begun:.0f} s"


def _lengths(path: str) -> Lengths:
    return [(request.prompt_tokens, request.output_tokens) for request in lengths_of(path)]


def _provisioned(answer: Provisioned, sought: str, paper: dict[str, str]) -> Row:
    name, spec = NAMES.get(answer.design.name, answer.design.name), answer.spec
    return {
        "design": name,
        "sought": sought,
        "machines": "+".join(map(str, answer.cell)) if spec else answer.reason,
        "total": spec and spec.n_machines,
        "requests/s": answer.rate if spec else None,
        "$/h": spec and f"{spec.cost:.0f}",
        "kW": spec and f"{spec.power_w / 1000:.1f}",
        "bound used": f"{answer.tightness:.0%}" if spec else None,
        "runs": answer.n_runs,
        "paper's machines": paper.get(name),
    }
