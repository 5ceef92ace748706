"""Prompts computed on the cores that decode does not want, meanwhile, by the cost model (decision 0149):

    python benchmarks/both_phases.py planted        # machines of several sockets
    python benchmarks/both_phases.py here [MODEL]   # this machine, by the paces of its products

Undivided, each phase has the cores of each L3 that are best for it, and the phases take turns, as in one
engine. Divided, decode has some cores of each L3 and prompts have the others, at the division that serves
most requests. Decode then reads as slowly as it does beside cores that read all the time, for the share of
the time in which a prompt reads weights; at most, prompts take nothing from it. The time per token has,
undivided, its share of the prompts in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.harness import MODEL, Model, Row, Yielded, commands
from benchmarks.modelled_steps import TURNS, Rates, modelled_ns, rates_here
from phasewise.topology import Kind, Machine, read_machine
from phasewise.tuner.config.sharing import ReadSharing
from phasewise.tuner.config.steps import ModelShape, Step
from phasewise.tuner.plans import RankCores, default_plan, rank_on
from phasewise.tuner.topotree import Configuration
from phasewise.workflows.opening.model_shape import shape_of_model
from phasewise.workflows.opening.open_model import open_model
from tests.support.machines import planted as machines

if TYPE_CHECKING:
    from phasewise.tuner.config.hidden import HiddenResource

REQUESTS = ((512, 128), (128, 128), (128, 512))
"""Tokens of a prompt and of its answer."""
LOADS = (1, 8, 32)
"""Sequences that decode at once."""
Ranks = tuple[RankCores, ...]


@dataclass(frozen=True)
class Modelled:
    """A machine, a model, and how fast both are."""

    machine: Machine
    shape: ModelShape
    rates: Rates
    hidden: Sequence[HiddenResource] = ()

    def step_s(self, ranks: Ranks, step: Step) -> float:
        configuration = Configuration(ranks)
        return modelled_ns(self.machine, self.shape, self.rates, configuration, step, self.hidden) / 1e9

    def slowed(self, ranks: Ranks, others: Ranks, busy_s: float) -> float:
        """The factor by which ranks read more slowly while `others` read all weights once in `busy_s`."""
        sharing = ReadSharing(self.machine, self.rates.many, self.hidden)
        alone, together = sharing.rank_bytes_per_s(ranks), sharing.rank_bytes_per_s((*ranks, *others))
        reading = min(1.0, self.shape.weight_bytes / sum(together[len(ranks) :]) / busy_s)
        return 1 + reading * (sum(alone) / sum(together[: len(ranks)]) - 1)

    def most_cores(self) -> int:
        """Of an L3, or of the machine where it names none."""
        l3s = self.machine.nodes(Kind.L3)
        return len(l3s[0].cpus) if l3s else len(self.machine.allowed_pus)

    def cut(self, n_cores: int, *, is_rest: bool = False) -> Ranks:
        """A rank on each node with so many cores of each L3, or with the rest of them."""
        parts = [l3.cpus for l3 in self.machine.nodes(Kind.L3)] or [self.machine.allowed_pus]
        chosen = {pu for part in parts for pu in (part[n_cores:] if is_rest else part[:n_cores])}
        nodes = [tuple(pu for pu in node.cpus if pu in chosen) for node in self.machine.nodes(Kind.NUMA)]
        ranks = tuple(rank_on(self.machine, pus) for pus in nodes if pus)
        return ranks or (rank_on(self.machine, tuple(sorted(chosen))),)


def row_of(name: str, modelled: Modelled, prompt_tokens: int, answer_tokens: int, sequences: int) -> Row:
    """The best division for requests of these lengths."""
    most = modelled.most_cores()
    prompt, decode = Step("prefill", prompt_tokens), Step("decode", 1, sequences, prompt_tokens)
    decode_s = {n_cores: modelled.step_s(modelled.cut(n_cores), decode) for n_cores in range(1, most + 1)}
    best = min(decode_s, key=lambda n_cores: decode_s[n_cores])
    prompt_s = min(modelled.step_s(modelled.cut(n_cores), prompt) for n_cores in (most // 2, most))
    steps = answer_tokens / sequences  # of decode, for each request
    undivided_s = prompt_s + steps * decode_s[best]
    gains: dict[int, tuple[float, float]] = {}
    for n_cores in range(1, most):
        answering, asking = modelled.cut(n_cores), modelled.cut(n_cores, is_rest=True)
        asked_s, token_s = modelled.step_s(asking, prompt), steps * decode_s[n_cores]
        slower_s = token_s * modelled.slowed(answering, asking, max(asked_s, token_s))
        gains[n_cores] = undivided_s / max(asked_s, slower_s), undivided_s / max(asked_s, token_s)
    chosen = max(gains, key=lambda n_cores: gains[n_cores])
    asking = modelled.cut(chosen, is_rest=True)
    taken_s = max(modelled.step_s(asking, prompt), steps * decode_s[chosen])
    slowed = modelled.slowed(modelled.cut(chosen), asking, taken_s)
    return {
        "machine": name,
        "tokens": f"{prompt_tokens} + {answer_tokens}",
        "sequences": sequences,
        "decode wants": f"{best} of {most}",
        "has, divided": f"{chosen} of {most}",
        "requests/s, divided over undivided": "{:.2f}, at most {:.2f}".format(*gains[chosen]),
        "ms/token": f"{undivided_s / steps * 1e3:.1f}",
        "ms/token divided": f"{decode_s[chosen] * slowed * 1e3:.1f}",
    }


def rows_of(name: str, modelled: Modelled) -> Iterator[Row]:
    for prompt_tokens, answer_tokens in REQUESTS:
        for sequences in LOADS:
            yield row_of(name, modelled, prompt_tokens, answer_tokens, sequences)


def planted() -> Yielded:
    for case in (machines.saturated(), machines.epyc(), machines.kunpeng()):
        rates = Rates(case.rates, case.rates)
        yield from rows_of(case.name, Modelled(case.machine, case.shape, rates, case.hidden))


def here(model: Model = MODEL) -> Yielded:
    machine, packed = read_machine(), open_model(model).model
    rates = rates_here(packed, machine, default_plan(machine, "decode").cores, TURNS)
    yield from rows_of(machine.cpu.name or "here", Modelled(machine, shape_of_model(packed), rates))


app = commands(__doc__, planted, here)

if __name__ == "__main__":
    app()
