"""From how many machines on prompt and token pools serve more than the same machines mixed, by the simulator.

    python benchmarks/splitting_pays.py TRACE.csv [--xml lstopo.xml:config.json] [--machines 2,4,8,16]

The machine is one core of this host with the default model, its steps timed first; or, with --xml, a machine
that is modelled. For each number of machines the highest rate is searched that keeps the promises of the
Splitwise paper's Table VI, as slowdowns against one idle machine of the kind: mixed, and in every division
into a prompt and a token pool that the walk tries. `--tbt-only` judges by the time between tokens alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from benchmarks.harness import MODEL, Yielded, commands, note, numbers
from benchmarks.simulated_server import MAX_SEQUENCES, timed_machine
from phasewise.cluster.simulated.kv_transfer import Link
from phasewise.cluster.simulated.metrics import TABLE_VI, Slo
from phasewise.cluster.simulated.simulate import MachineType
from phasewise.workflows.capacity.load import lengths_of, steps_from_xml
from phasewise.workflows.capacity.provision import Design, Question, provision_for_budget
from phasewise.workflows.opening.model_shape import shape_of_reference
from phasewise.workflows.opening.open_model import open_model

REQUESTS_OF_WORK = 400
"""Requests are drawn for as long as one machine needs for N of them, so that every rate meets enough."""
STEPS = 40
"""Rates are multiples of a fortieth of what the machines could compute with no promise to keep."""
MEMORY_BYTES = 128 << 30


def splitting_pays(
    trace: Annotated[str, Argument(help="a trace, or a distribution such as fixed:512/64")],
    xml: Annotated[str, Option(metavar="XML:MODEL", help="model the machine that lstopo described")] = "",
    machines: str = "2,3,4,6,8,12,16",
    link: Annotated[float, Option(help="bytes/s between machines")] = 1.25e9,
    longest: Annotated[int, Option(help="tokens; longer requests are left out")] = 2048,
    tbt_only: Annotated[bool, Option("--tbt-only")] = False,
    tpot_ms: Annotated[float, Option(help="what a mixed machine paces prompts by")] = 100.0,
) -> Yielded:
    kind = replace(modelled(xml, link) if xml else timed(longest, link), tpot_ms=tpot_ms)
    lengths = [(request.prompt_tokens, request.output_tokens) for request in lengths_of(trace)]
    lengths = [length for length in lengths if sum(length) <= longest]
    slo = TABLE_VI
    if tbt_only:
        slo = Slo("tbt", tuple(bound for bound in TABLE_VI.bounds if bound.metric == "tbt"), is_slowdown=True)
    alone_s = mean_s(kind, lengths)
    yield f"{kind.name}, {trace}: {len(lengths)} lengths, {alone_s:.3g} s of one machine for each"
    designs = [Design("mixed", (("mixed", kind),)), Design("split", (("prompt", kind), ("token", kind)))]
    for count in numbers(machines):
        capacity = count / alone_s
        question = Question(lengths, slo, kind.steps, "splitwise", REQUESTS_OF_WORK * alone_s / count**0.5)
        mixed, split = provision_for_budget(
            question, designs, "cost", count, capacity / STEPS, 2 * capacity, note
        )
        yield {
            "machines": count,
            "mixed, requests/s": mixed.rate,
            "split, requests/s": split.rate,
            "prompt + token": "+".join(map(str, split.cell)),
            "split / mixed": split.rate / mixed.rate if mixed.rate and split.rate else None,
        }


def timed(longest: int, link: float) -> MachineType:
    config = open_model(MODEL, threads=1).model.config
    kind = timed_machine(MODEL, 1, longest)
    kv_bytes = 2 * 2 * config.n_layers * config.n_kv_heads * config.head_dim
    own = MachineType(
        "one core", kind.steps, kind.memory_bytes * kv_bytes, 0, kv_bytes, config.n_layers, Link(link), cost=1
    )
    return replace(own, max_batch_tokens=kind.max_batch_tokens, max_sequences=MAX_SEQUENCES)


def modelled(source: str, link: float) -> MachineType:
    xml, _, model = source.partition(":")
    shape = shape_of_reference(model, "native", note)
    name, steps = f"{shape.name} on {Path(xml).stem}", steps_from_xml(xml, model, "native", note)
    sizes = (MEMORY_BYTES, shape.weight_bytes, shape.kv_bytes_per_slot, shape.n_layers)
    return MachineType(name, steps, *sizes, Link(link), cost=1, max_sequences=128)


def mean_s(kind: MachineType, lengths: list[tuple[int, int]]) -> float:
    """Mean time that a request takes of a machine that decodes sixteen at a time."""
    prompts = sum(prompt for prompt, _ in lengths) / len(lengths)
    outputs = sum(output for _, output in lengths) / len(lengths)
    decode_s = kind.steps.decode_s(16, round(16 * (prompts + outputs / 2))) / 16
    return kind.steps.prefill_s(round(prompts)) + decode_s * outputs


app = commands(__doc__, splitting_pays)

if __name__ == "__main__":
    app()
