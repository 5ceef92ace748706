"""The Splitwise paper's provisioning results beside ours: Figs. 12, 16, 18, 19 and section VI-E.

    python benchmarks/splitwise_paper.py --trace code=CODE.csv --trace conv=CONV.csv --perf-model PERF.csv \\
        --part fig12 [--policy splitwise-sim] [--duration 120]

The traces are AzureLLMInferenceTrace_code.csv and _conv.csv (Azure/AzurePublicDataset), the profile is
data/perf_model.csv of splitwise-sim. Requests are drawn as the authors' generator draws them (Poisson
arrivals, prompts and answers independently), for `--duration` seconds. Prints a Markdown table for each part.
"""

from __future__ import annotations

import argparse
import sys
import time

from tabulate import tabulate

from phasewise.cluster.arrivals import poisson
from phasewise.cluster.metrics import TABLE_VI, summarise
from phasewise.cluster.simulate import ClusterSpec, simulate
from phasewise.cluster.spec_file import MachineCatalogue, StepSources, parse_pools
from phasewise.cluster.steps import read_profile
from phasewise.workflows.cluster_load import lengths_of
from phasewise.workflows.plan_cluster import (
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
RATE_STEP = 10.0
"""As in the paper's sweeps."""

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", action="append", required=True, metavar="NAME=CSV")
    parser.add_argument("--perf-model", required=True)
    parser.add_argument(
        "--part", required=True, choices=["fig12", "iso-power", "iso-cost", "iso-rate", "batch", "latencies"]
    )
    parser.add_argument("--policy", default="splitwise-sim")
    parser.add_argument("--duration", type=float, default=120.0)
    parser.add_argument("--designs", default=ALL)
    asked = parser.parse_args()
    catalogue = MachineCatalogue(sources=StepSources(read_profile(asked.perf_model)))
    begun = time.perf_counter()
    for pair in asked.trace:
        name, _, path = pair.partition("=")
        lengths = [(one.prompt_tokens, one.output_tokens) for one in lengths_of(path)]
        question = Question(
            lengths, TABLE_VI, catalogue["a100"].steps, asked.policy, asked.duration, draw="columns", most=140
        )
        print(f"\n{asked.part}, {name} trace, policy {asked.policy}, {asked.duration:g} s of requests\n")
        print(PARTS[asked.part](question, catalogue, asked.designs, name))
    print(f"\n{time.perf_counter() - begun:.0f} s")


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def fig12(question: Question, catalogue: MachineCatalogue, designs: str, trace: str) -> str:
    found = parse_designs("split:h100/h100", catalogue)
    answers = provision_for_rate(question, found, 70.0, "cost", report)
    return _table(answers, {}, trace)


def iso_power(question: Question, catalogue: MachineCatalogue, designs: str, trace: str) -> str:
    power = N_H100 * catalogue["h100"].power_w
    found = parse_designs(designs, catalogue)
    answers = provision_for_budget(question, found, "power", power, RATE_STEP, 400.0, report)
    return _table(answers, PAPER_CELLS.get(trace, {}), trace)


def iso_cost(question: Question, catalogue: MachineCatalogue, designs: str, trace: str) -> str:
    cost = N_H100 * catalogue["h100"].cost
    found = parse_designs(designs, catalogue)
    answers = provision_for_budget(question, found, "cost", cost, RATE_STEP, 400.0, report)
    return _table(answers, {}, trace)


def iso_rate(question: Question, catalogue: MachineCatalogue, designs: str, trace: str) -> str:
    """Figs. 19a and 19b: the least cost and the least power at 70 requests/s.

    Where both kinds of machines are of one type the two are the same.
    """
    found = parse_designs(designs, catalogue)
    answers = provision_for_rate(question, found, 70.0, "cost", report)
    different = [one for one in found if len({kind.power_w / kind.cost for _, kind in one.axes}) > 1]
    powers = provision_for_rate(question, different, 70.0, "power", report)
    return f"least cost\n\n{_table(answers, {}, trace)}\n\nleast power\n\n{_table(powers, {}, trace)}"


def batch(question: Question, catalogue: MachineCatalogue, designs: str, trace: str) -> str:
    """VI-E: requests/s for a dollar of a GPU's hour, at 300 requests/s for a quarter of the duration."""
    rows = []
    for name, pools in (
        ("Baseline-A100", "mixed=70*a100"),
        ("Baseline-H100", "mixed=40*h100"),
        ("Splitwise-AA", "prompt=45*a100,token=25*a100"),
        ("Splitwise-HH", "prompt=25*h100,token=15*h100"),
        ("Splitwise-HA", "prompt=25*h100,token=26*a100"),
    ):
        spec = ClusterSpec(parse_pools(pools, catalogue), question.policy)
        arrivals = poisson(question.lengths, 300.0, question.duration_s / 4, 0, question.draw)
        summary = summarise(simulate(spec, arrivals), None)
        served = summary.n_requests / summary.duration_s
        rows.append([name, pools, f"{served:.1f}", f"{served / (spec.cost / 8):.2f}"])
    return tabulate(
        rows, headers=["design", "pools", "requests/s", "requests/s for $ (GPU)"], tablefmt="github"
    )


def latencies(question: Question, catalogue: MachineCatalogue, designs: str, trace: str) -> str:
    """Fig. 16: slowdowns over load for the paper's own iso-power clusters."""
    rows = []
    for written, name in NAMES.items():
        cell = PAPER_CELLS.get(trace, {}).get(name)
        if cell is None:
            continue
        design = parse_designs(written, catalogue)[0]
        pools = design.pools(tuple(map(int, cell.split("+"))))
        for rate in (70.0, 100.0, 130.0):
            arrivals = poisson(question.lengths, rate, question.duration_s, 0, question.draw)
            summary = summarise(simulate(ClusterSpec(pools, question.policy), arrivals), question.reference)
            assert summary.slowdowns is not None
            values = [summary.slowdowns[metric][p] for metric in ("ttft", "tbt", "e2e") for p in (50, 90, 99)]
            rows.append([f"{name} ({cell})", f"{rate:g}", *(f"{value:.2f}" for value in values)])
    headers = ["cluster", "requests/s", *(f"{m} P{p}" for m in ("TTFT", "TBT", "E2E") for p in (50, 90, 99))]
    return tabulate(rows, headers=headers, tablefmt="github")


def _table(answers: list[Provisioned], paper: dict[str, str], trace: str) -> str:
    rows = []
    for one in answers:
        name = NAMES.get(one.design.name, one.design.name)
        if one.spec is None:
            rows.append([name, one.reason, "", "", "", "", "", one.n_runs, paper.get(name, "")])
            continue
        rows.append(
            [
                name,
                "+".join(map(str, one.cell)),
                one.spec.n_machines,
                f"{one.rate:g}",
                f"{one.spec.cost:.0f}",
                f"{one.spec.power_w / 1000:.1f}",
                f"{one.tightness:.0%}",
                one.n_runs,
                paper.get(name, ""),
            ]
        )
    headers = [
        "design",
        "machines",
        "total",
        "requests/s",
        "$/h",
        "kW",
        "bound used",
        "runs",
        "paper's machines",
    ]
    return tabulate(rows, headers=headers, tablefmt="github")


PARTS = {
    "fig12": fig12,
    "iso-power": iso_power,
    "iso-cost": iso_cost,
    "iso-rate": iso_rate,
    "batch": batch,
    "latencies": latencies,
}

if __name__ == "__main__":
    main()
