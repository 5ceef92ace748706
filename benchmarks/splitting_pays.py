"""From how many machines on prompt and token pools serve more than the same machines mixed, by the simulator.

    python benchmarks/splitting_pays.py TRACE.csv [--xml lstopo.xml:config.json] [--machines 2,4,8,16]

The machine is one core of this host with the default model, its steps timed first; or, with --xml, a machine
that is modelled. For each number of machines the highest rate is searched that keeps the promises of the
Splitwise paper's Table VI, as slowdowns against one idle machine of the kind: mixed, and in every division
into a prompt and a token pool that the walk tries. `--tbt-only` judges by the time between tokens alone.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from simulated_server import MAX_SEQUENCES, timed_steps
from tabulate import tabulate

from phasewise.cluster.links import Link
from phasewise.cluster.metrics import TABLE_VI, Slo
from phasewise.cluster.simulate import MachineType
from phasewise.cluster.timed_steps import steps_of
from phasewise.serving.engine_size import EngineSize
from phasewise.serving.open_engine import open_engine
from phasewise.workflows.cluster_load import lengths_of, steps_from_xml
from phasewise.workflows.model_shape import shape_of_reference
from phasewise.workflows.open_model import open_model
from phasewise.workflows.plan_cluster import Design, Provisioned, Question, provision_for_budget

REQUESTS_OF_WORK = 400
"""Requests are drawn for as long as one machine needs for N of them, so that every rate meets enough."""
STEPS = 40
"""Rates are multiples of a fortieth of what the machines could compute with no promise to keep."""
MEMORY_BYTES = 128 << 30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", help="a trace, or a distribution such as fixed:512/64")
    parser.add_argument("--xml", metavar="XML:MODEL", help="model the machine that lstopo described")
    parser.add_argument("--machines", default="2,3,4,6,8,12,16")
    parser.add_argument("--link", type=float, default=1.25e9, help="bytes/s between machines")
    parser.add_argument("--longest", type=int, default=2048, help="tokens; longer requests are left out")
    parser.add_argument("--tbt-only", action="store_true")
    parser.add_argument("--tpot-ms", type=float, default=100.0, help="what a mixed machine paces prompts by")
    asked = parser.parse_args()
    kind = replace(modelled(asked) if asked.xml else timed(asked), tpot_ms=asked.tpot_ms)
    lengths = [(one.prompt_tokens, one.output_tokens) for one in lengths_of(asked.trace)]
    lengths = [one for one in lengths if sum(one) <= asked.longest]
    slo = TABLE_VI
    if asked.tbt_only:
        slo = Slo("tbt", tuple(one for one in TABLE_VI.bounds if one.metric == "tbt"), is_slowdown=True)
    alone_s = mean_s(kind, lengths)
    mixed = Design("mixed", (("mixed", kind),))
    split = Design("split", (("prompt", kind), ("token", kind)))
    rows = []
    for count in map(int, asked.machines.split(",")):
        capacity = count / alone_s
        question = Question(lengths, slo, kind.steps, "splitwise", REQUESTS_OF_WORK * alone_s / count**0.5)
        answers = provision_for_budget(
            question, [mixed, split], "cost", count, capacity / STEPS, 2 * capacity, report
        )
        rows.append(row_of(count, answers))
        report(str(rows[-1]))
    print(f"{kind.name}, {asked.trace}: {len(lengths)} lengths, {alone_s:.3g} s of one machine for each")
    headers = ["machines", "mixed, requests/s", "split, requests/s", "prompt + token", "split / mixed"]
    print(tabulate(rows, headers=headers, tablefmt="github"))


def timed(asked: argparse.Namespace) -> MachineType:
    found = open_model("smollm2-135m-instruct", threads=1)
    size = EngineSize.for_many(found.model, MAX_SEQUENCES, asked.longest, None)
    size = replace(size, limits=replace(size.limits, prefix_reuse=False), kv=replace(size.kv, touched=True))
    with open_engine(found.model, found.plans, size, schedules=found.schedules) as opened:
        steps = steps_of(timed_steps(opened))
    config = found.model.config
    kv_bytes = 2 * 2 * config.n_layers * config.n_kv_heads * config.head_dim
    n_bytes = size.kv.slots * kv_bytes
    kind = MachineType("one core", steps, n_bytes, 0, kv_bytes, config.n_layers, Link(asked.link), cost=1)
    return replace(kind, max_batch_tokens=size.limits.max_batch_tokens, max_sequences=MAX_SEQUENCES)


def modelled(asked: argparse.Namespace) -> MachineType:
    xml, _, model = asked.xml.partition(":")
    shape = shape_of_reference(model, "native", report)
    steps = steps_from_xml(xml, model, "native", report)
    return MachineType(
        f"{shape.name} on {Path(xml).stem}",
        steps,
        MEMORY_BYTES,
        shape.weight_bytes,
        shape.kv_bytes_per_slot,
        shape.n_layers,
        Link(asked.link),
        cost=1,
        max_sequences=128,
    )


def mean_s(kind: MachineType, lengths: list[tuple[int, int]]) -> float:
    """What one request takes of a machine that decodes sixteen at a time."""
    prompts = sum(prompt for prompt, _ in lengths) / len(lengths)
    outputs = sum(output for _, output in lengths) / len(lengths)
    decode_s = kind.steps.decode_s(16, round(16 * (prompts + outputs / 2))) / 16
    return kind.steps.prefill_s(round(prompts)) + decode_s * outputs


def row_of(count: int, answers: list[Provisioned]) -> list[str]:
    mixed, split = answers
    ratio = f"{split.rate / mixed.rate:.2f}" if mixed.rate and split.rate else ""
    cell = "+".join(map(str, split.cell))
    return [str(count), f"{mixed.rate:.3g}", f"{split.rate:.3g}", cell, ratio]


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
