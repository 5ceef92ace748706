"""How far the modelled evaluator is from this machine: the same steps, measured on its cores and modelled.

    python benchmarks/modelled_steps.py [MODEL] [--format native] [--json]

The model of the machine gets measured limits (multiplying, reading by all cores and by one), and nothing is
fitted to the measured steps. What matters for a search is that both rank configurations alike.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from tabulate import tabulate

from phasewise.serving.loaders import load_model
from phasewise.serving.throughput import compute_kind
from phasewise.topology import Machine, read_machine
from phasewise.tuner.config.modelled import ModelledEvaluator
from phasewise.tuner.config.rates import MachineRates
from phasewise.tuner.config.steps import Step, StepEvaluator
from phasewise.tuner.machine_limits import peak_flops, read_bandwidth
from phasewise.tuner.plans import list_cores, rank_on
from phasewise.tuner.topotree import Configuration, OperatorLimits, configurations, fundamental
from phasewise.workflows.model_shape import shape_of_model
from phasewise.workflows.tune_config.measured_evaluator import MeasuredEvaluator, Room
from tests.support.measured_rates import measured_rates

STEPS = (
    *(Step("prefill", tokens) for tokens in (16, 128, 512)),
    *(Step("decode", 1, context=context) for context in (16, 512)),
    Step("decode", 1, 8, 128),
)


def rates_here(machine: Machine, kind: str) -> MachineRates:
    """This machine's limits, as the model of a machine wants them."""
    cores = machine.allowed_pus
    return measured_rates(machine, peak_flops(kind, cores), read_bandwidth(cores), read_bandwidth(cores[:1]))


def few_configurations(machine: Machine, limits: OperatorLimits) -> list[Configuration]:
    """One core, and those of the whole machine."""
    one_core = Configuration((rank_on(machine, machine.allowed_pus[:1]),))
    return [one_core, *configurations(fundamental(machine).tree, limits)]


def rows(evaluators: list[StepEvaluator], chosen: list[Configuration]) -> Iterator[dict[str, Any]]:
    for configuration in chosen:
        for step in STEPS:
            times_ms = {}
            for evaluator in evaluators:
                with evaluator.open(configuration, step.phase) as timer:
                    times_ms[f"{evaluator.kind}_ms"] = timer(step) / 1e6
            yield {
                "ranks": " | ".join(list_cores(rank.cores) for rank in configuration.ranks),
                "step": step.describe(),
                **times_ms,
                "measured / modelled": times_ms["measured_ms"] / times_ms["modelled_ms"],
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--format", default="native")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    machine, model = read_machine(), load_model(asked.model, asked.format)
    shape = shape_of_model(model)
    limits = OperatorLimits(shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.ffn)
    evaluators: list[StepEvaluator] = [
        MeasuredEvaluator(model, machine, Room.for_steps(STEPS)),
        ModelledEvaluator(machine, shape, rates_here(machine, compute_kind(model))),
    ]
    found = [*rows(evaluators, few_configurations(machine, limits))]
    print(json.dumps(found, indent=1) if asked.json else tabulate(found, headers="keys", floatfmt=".3f"))


if __name__ == "__main__":
    main()
