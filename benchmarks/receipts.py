"""The price of receipts, and of checking them: `python benchmarks/receipts.py MODEL`.

An answer is generated with and without a receipt in turns, and its receipt is replayed. Prints all seconds,
and two shares of the least: a replay of generating, and what a receipt adds to generating. Seconds of the CPU
are told as well, for machines that others use too.

Of the CPU time of a replay of 500 tokens of the default model four fifths are products: logits after every
token, 64 rows at a time, since a row of a large vocabulary takes a megabyte. Drawing 500 tokens from 49,152
weights takes an eighth, the prompt a tenth, digests one in a hundred. The model is opened before the clock
starts.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from benchmarks.harness import Model, Rounds, Yielded, commands
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.engine.open_engine import OpenEngine, open_engine
from phasewise.serving.engine.receipts import Receipt, receipt_of
from phasewise.serving.sampling.sampling import SamplingParams
from phasewise.workflows.opening.open_model import open_model
from phasewise.workflows.replay.run import replay_receipts

PROMPT = tuple(100 + 7 * position for position in range(64))


class Seconds(NamedTuple):
    """The wall's clock, and the CPU in all threads."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Seconds:
        return cls(time.perf_counter(), time.process_time())

    def since(self, began: Seconds, n: int = 1) -> Seconds:
        """Those of each of n."""
        return Seconds((self.wall - began.wall) / n, (self.cpu - began.cpu) / n)

    def __str__(self) -> str:
        return f"{self.wall:.2f} ({self.cpu:.2f})"


def generated(opened: OpenEngine, request: Submit) -> tuple[Seconds, Receipt | None]:
    """Seconds, and the receipt where one was asked for."""
    began = Seconds.now()
    opened.engine.submit(request)
    last = None
    while opened.engine.has_work:
        for out in opened.engine.step().outs:
            last = out
    took = Seconds.now().since(began)
    assert isinstance(last, Answer)
    assert last.finish_reason is not None
    if last.evidence is None:
        return took, None
    return took, receipt_of(request, last.evidence, last.finish_reason, opened.fingerprint, "model")


def receipts(model: Model, tokens: int = 500, rounds: Rounds = 5) -> Yielded:
    loaded = open_model(model)
    size = EngineSize.for_many(loaded.model, 1, 2048, None)
    times: dict[bool, list[Seconds]] = {False: [], True: []}
    given: list[Receipt] = []
    with open_engine(loaded.model, loaded.plans, size, schedules=loaded.schedules) as opened:
        for number in range(rounds):
            for has_receipt in (False, True) if number % 2 else (True, False):
                params = SamplingParams(temperature=0.8, seed=number)
                name = f"{number} {has_receipt}"
                request = Submit(name, PROMPT, tokens, params, ignore_eos=True, receipt=has_receipt)
                took, receipt = generated(opened, request)
                times[has_receipt].append(took)
                given += [] if receipt is None else [receipt]
    replays = []
    for number in range(1, rounds + 1):  # the first receipt of each run pays for opening the ranks
        began = Seconds.now()
        verdicts = replay_receipts(loaded, given[:number])
        replays.append(Seconds.now().since(began, number))
        assert all(verdict.is_confirmed for verdict in verdicts)
    for name, values in (("without", times[False]), ("with", times[True]), ("replay", replays)):
        yield f"{name}: {', '.join(map(str, values))} s (of the CPU)"
    for index, clock in enumerate(Seconds._fields):
        replay, without, with_one = (
            min(seconds[index] for seconds in of) for of in (replays, times[False], times[True])
        )
        yield f"{clock}: a replay takes {replay / without:.3f} of generating"
        yield f"{clock}: a receipt adds {with_one / without - 1:+.3f} to generating"


app = commands(__doc__, receipts)

if __name__ == "__main__":
    app()
