"""Does the cost model describe this engine? Steps as it predicts them beside steps that are timed.

    python benchmarks/modelled_steps.py MODEL [MODEL ...]       MODEL@FORMAT for weights of another format
    python benchmarks/modelled_steps.py MODEL --ranks 1 --step decode:1x1@512 --step prefill:256x1@0

The model is given what it cannot know of this machine: the pace of one product of the model on all cores and
on one (of 1 row, of 8 and of 512), of attention, of preparing rows, and of a barrier. None of those is a
step, and none has ranks: what is judged is how a step is put together of them. Steps:
PHASE:TOKENSxSEQUENCES@CONTEXT. All times are the least of some turns. The last line tells the median distance
from what was timed, and the largest; the exit code is 1 where the median is above the bound.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, get_args

from typer import Argument, BadParameter, Option

from benchmarks.harness import Broken, Rounds, Yielded, commands, note
from phasewise.cython_kernels import _native
from phasewise.kerneldb.records import Problem
from phasewise.serving.models.forward import tuned_attention
from phasewise.topology import Machine, read_machine
from phasewise.tuner.attention import TeamAttention, default_attention
from phasewise.tuner.config.modelled import ModelledEvaluator
from phasewise.tuner.config.rates import LineLatency, MachineRates, default_rates
from phasewise.tuner.config.steps import Step
from phasewise.tuner.plans import Phase, default_plan
from phasewise.tuner.topotree import Configuration
from phasewise.tuner.weights import copies_of
from phasewise.workflows.opening.model_shape import shape_of_model
from phasewise.workflows.opening.open_model import Weights, open_model
from phasewise.workflows.tune_config.measured_evaluator import MeasuredEvaluator, Room

if TYPE_CHECKING:
    from phasewise.cython_kernels.packing import PackedWeight
    from phasewise.serving.models.packed_model import PackedModel
    from phasewise.tuner.config.sharing import HiddenResource
    from phasewise.tuner.config.steps import ModelShape

STEPS = (
    "decode:1x1@64",
    "decode:1x1@512",
    "decode:1x8@128",
    "prefill:64x1@0",
    "prefill:256x1@0",
    "prefill:512x1@0",
)
BOUND = 0.15
FEW_ROWS = 8
MANY_ROWS = 512
TURNS = 21
ROUNDS = 2000


def step_of(text: str) -> Step:
    match = re.fullmatch(r"(\w+):(\d+)x(\d+)@(\d+)", text)
    if match is None or match[1] not in get_args(Phase):
        raise BadParameter(f"{text!r} is no PHASE:TOKENSxSEQUENCES@CONTEXT")
    phase: Phase = "prefill" if match[1] == "prefill" else "decode"
    return Step(phase, *map(int, match.groups()[1:]))


def least(call: Callable[[], float], turns: int) -> float:
    """The least of `turns` times, after a call to warm up: other processes can only make a call longer."""
    call()
    return min(call() for _ in range(turns))


def largest_products(model: PackedModel) -> list[PackedWeight]:
    """Copies of the largest product of a layer, which have as many bytes as one step reads.

    Fewer would lie in a cache that the weights of a step do not fit into.
    """
    products = model.products()
    layers = [weight for name, weight in products.items() if name.startswith("layers.")]
    largest = max(layers, key=lambda weight: weight.n * weight.k)
    return copies_of(largest, sum(weight.nbytes for weight in products.values()))


def product_ns(
    cores: Sequence[int], weights: list[PackedWeight], rows: int, turns: int, *, prepare: bool = False
) -> float:
    """Time of one product, each call after all the other copies of it."""
    team = _native.Team(cores)
    try:
        product = _native.TeamProduct(team, weights, rows)
        calls = len(weights)
        return least(lambda: float(product.time(None, calls, prepare).mean()), turns)
    finally:
        team.close()


def attention_flops(cores: Sequence[int], problem: tuple[str, int, int], turns: int) -> float:
    """The rate of attention in a prompt, of all cores together."""
    kv_format, n, k = problem
    team = _native.Team(cores)
    try:
        asked = Problem("gemm", kv_format, n, k, MANY_ROWS)
        attention = TeamAttention(team, replace(asked, family="attention"), 1 << 20)
        cut = default_attention(n, k, MANY_ROWS, len(cores)).walk
        ns = least(lambda: float(attention.run(cut, 1).mean()), turns)
        return 4.0 * (MANY_ROWS * (MANY_ROWS + 1) // 2) * n / ns * 1e9
    finally:
        team.close()


def line_ns(cores: Sequence[int], turns: int) -> float:
    """Time of a barrier, for each of its threads."""
    if len(cores) < 2:
        return LineLatency().l3_ns
    team = _native.Team(cores)

    def barrier_ns() -> float:
        began = time.perf_counter_ns()
        team.barriers(ROUNDS)
        return (time.perf_counter_ns() - began) / (2 * ROUNDS)

    try:
        return least(barrier_ns, turns) / len(cores)
    finally:
        team.close()


@dataclass(frozen=True)
class Rates:
    """Rates of this machine. few: for steps of up to FEW_ROWS rows, whose products do less in a second. many:
    for all other steps.
    """

    few: MachineRates
    many: MachineRates

    def of(self, step: Step) -> MachineRates:
        return self.few if step.rows <= FEW_ROWS else self.many


def rates_here(model: PackedModel, machine: Machine, cores: Sequence[int], turns: int) -> Rates:
    """The paces of this machine's cores with the weights of a model."""
    weights = largest_products(model)
    n_bytes, flops_a_row = weights[0].nbytes, 2.0 * weights[0].n * weights[0].k / len(cores)
    alone_ns, together_ns = (product_ns(some, weights, 1, turns) for some in (cores[:1], cores))
    few_ns, many_ns = (product_ns(cores, weights, rows, turns) for rows in (FEW_ROWS, MANY_ROWS))
    prepared_ns = product_ns(cores, weights, MANY_ROWS, turns, prepare=True) - many_ns
    rates = replace(
        default_rates(machine),
        flops_per_core=flops_a_row * MANY_ROWS / many_ns * 1e9,
        core_read_bytes_per_s=n_bytes / alone_ns * 1e9,
        numa_read_bytes_per_s=n_bytes / together_ns * 1e9,
        latency=LineLatency(l3_ns=line_ns(cores, turns)),
    )
    if prepared_ns > 0:
        per_core = 4.0 * MANY_ROWS * weights[0].k / prepared_ns * 1e9 / len(cores)
        rates = replace(rates, row_bytes_per_s=per_core)
    problem = tuned_attention(model)
    if problem is not None:
        rates = replace(rates, attention_flops_per_core=attention_flops(cores, problem, turns) / len(cores))
    few = min(rates.flops_per_core, flops_a_row * FEW_ROWS / few_ns * 1e9)
    return Rates(replace(rates, flops_per_core=few), rates)


def modelled_ns(
    machine: Machine,
    shape: ModelShape,
    rates: Rates,
    configuration: Configuration,
    step: Step,
    hidden: Sequence[HiddenResource] = (),
) -> float:
    evaluator = ModelledEvaluator(machine, shape, rates.of(step), hidden)
    with evaluator.open(configuration, step.phase) as timer:
        return timer(step)


def modelled_steps(
    models: Annotated[list[str], Argument(help="models, each as MODEL or MODEL@FORMAT")],
    ranks: Annotated[str, Option(help="numbers of ranks")] = "1,2",
    step: Annotated[list[str] | None, Option(help="steps [repeatable]; default: six")] = None,
    rounds: Rounds = TURNS,
    bound: Annotated[float, Option(help="of the median distance")] = BOUND,
) -> Yielded:
    machine = read_machine()
    steps = [step_of(text) for text in step or STEPS]
    off: list[tuple[float, str]] = []
    for ref in models:
        name, _, weight_format = ref.partition("@")
        model = open_model(name, Weights(weight_format or "native")).model
        rates = rates_here(model, machine, default_plan(machine, "decode").cores, rounds)
        note(f"{ref}: {rates}")
        told_ns = partial(modelled_ns, machine, shape_of_model(model), rates)
        measured = MeasuredEvaluator(model, machine, Room.for_steps(steps))
        for n_ranks in map(int, ranks.split(",")):
            for phase in get_args(Phase):
                configuration = Configuration(default_plan(machine, phase, ranks=n_ranks).ranks)
                own = [each for each in steps if each.phase == phase]
                with measured.open(configuration, phase) as timed:
                    for each in own:
                        is_ns = least(partial(timed.call_ns, timed.batch(each)), rounds)
                        said_ns = told_ns(configuration, each)
                        off.append((said_ns / is_ns - 1, f"{ref}, {n_ranks} ranks, {each.describe()}"))
                        yield {
                            "model": ref,
                            "ranks": n_ranks,
                            "step": each.describe(),
                            "timed, ms": is_ns / 1e6,
                            "modelled, ms": said_ns / 1e6,
                            "modelled over timed": said_ns / is_ns,
                        }
    median = statistics.median(abs(distance) for distance, _ in off)
    worst, where = max(off, key=lambda each: abs(each[0]))
    told_line = f"median distance {100 * median:.0f} %, largest {100 * worst:+.0f} % ({where})"
    yield Broken(f"{told_line}: above {100 * bound:.0f} %") if median > bound else told_line


app = commands(__doc__, modelled_steps)

if __name__ == "__main__":
    app()
