"""Do a model's whole steps keep the laws of rows, with experts, sparse weights and attention in them?

    python benchmarks/step_laws.py MODEL                    decode steps of 1 to 64 sequences
    python benchmarks/step_laws.py MODEL --m 1,2,4,8 --depth 512 --format q8_0

With t(m) the time of a step that decodes a token of each of m sequences, `row_laws.py`'s two laws: t(m) is at
most t(m') for every m' above m, and t(a + b) at most t(a) + t(b). Beside them what one more row costs: the
slope between m and the number of sequences before it, as a share of t(1). A row of a draft costs that.

Numbers of sequences take turns, round after round; t(m) is the least of its rounds. A law that looks broken
is asked about again. The exit code is 1 where one is broken.
"""

from __future__ import annotations

from typing import Annotated

from typer import Option

from benchmarks.harness import Broken, Model, Rounds, Yielded, commands, note, numbers
from benchmarks.row_laws import told, worst_of_laws
from phasewise.serving.engine.throughput import Workload, measure
from phasewise.tuner.task_division import ALLOWANCE, breaking
from phasewise.workflows.bench.model_speed import OpenRanks, check_context, open_ranks
from phasewise.workflows.opening.open_model import open_model
from phasewise.workflows.opening.settings import Weights

ROWS = "1,2,3,4,5,6,7,8,9,12,13,16,17,24,25,32,33,48,64"


class _Steps:
    """The least time of a step, by the number of sequences."""

    def __init__(self, opened: OpenRanks, workloads: dict[int, Workload]) -> None:
        self._opened, self._workloads = opened, workloads
        self.ns: dict[int, float] = {}

    def take_turns(self, counts: list[int], rounds: int) -> None:
        for number in range(rounds):
            for m in counts if number % 2 else counts[::-1]:
                workload = self._workloads[m]
                timed = measure(self._opened.ranks, workload, self._opened.model.config.vocab_size, 512, 1)
                self.ns[m] = min(self.ns.get(m, float("inf")), timed.samples_ns[0] / workload.n_gen)


def step_laws(
    model: Model,
    m: Annotated[str, Option(help="numbers of sequences")] = ROWS,
    n: Annotated[int, Option("-n", help="steps of one turn")] = 4,
    depth: Annotated[int, Option(help="positions before them")] = 0,
    weight_format: Annotated[str, Option("--format", help="of the weights")] = "native",
    kv_format: Annotated[str, Option(help="of keys and values")] = "auto",
    rounds: Rounds = 5,
    allow: Annotated[float, Option(help="above a ratio of 1")] = ALLOWANCE,
) -> Yielded:
    counts = numbers(m)
    workloads = {count: Workload(0, n, count, depth) for count in counts}
    loaded = open_model(model, Weights(weight_format))
    check_context([*workloads.values()], loaded.model.config.context_length)
    with open_ranks(loaded, [*workloads.values()], kv_format) as opened:
        steps = _Steps(opened, workloads)
        note(f"{len(counts)} numbers of sequences, {rounds} rounds ...")
        steps.take_turns(counts, rounds)
        for _ in range(rounds):
            again = sorted(
                {
                    each
                    for worst in worst_of_laws(steps.ns)
                    if worst.ratio > 1 + allow
                    for each in (worst.dearer, *worst.others)
                }
            )
            if not again:
                break
            steps.take_turns(again, rounds)
    before, first_ns = None, steps.ns[counts[0]]
    for count in counts:
        row_ns = None if before is None else (steps.ns[count] - steps.ns[before]) / (count - before)
        yield {
            "sequences": count,
            "step, ms": steps.ns[count] / 1e6,
            "tokens/s": count * 1e9 / steps.ns[count],
            "a row more, % of one": None if row_ns is None else 100 * row_ns / first_ns,
        }
        before = count
    less, two = worst_of_laws(steps.ns)
    yield {"more rows cost less": told(less), "slower than two": told(two)}
    cliffs = breaking(steps.ns, allow)
    yield Broken(f"a law is broken by {', '.join(map(str, cliffs))} sequences") if cliffs else "the laws hold"


app = commands(__doc__, step_laws)

if __name__ == "__main__":
    app()
