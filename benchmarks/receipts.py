"""The price of receipts, and of checking them: `python benchmarks/receipts.py MODEL`.

An answer is generated with and without a receipt in turns, and its receipt is replayed. Prints all seconds,
and two shares of the least: a replay of generating, and what a receipt adds to generating.
"""

from __future__ import annotations

import time

from benchmarks.harness import Model, Rounds, Yielded, commands
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.engine.open_engine import OpenEngine, open_engine
from phasewise.serving.engine.receipts import Receipt, receipt_of
from phasewise.serving.sampling.sampling import SamplingParams
from phasewise.workflows.opening.open_model import open_model
from phasewise.workflows.replay.run import replay_receipts

PROMPT = tuple(100 + 7 * at for at in range(64))


def generated(opened: OpenEngine, request: Submit) -> tuple[float, Receipt | None]:
    """Seconds, and the receipt where one was asked for."""
    began_s = time.perf_counter()
    opened.engine.submit(request)
    last = None
    while opened.engine.has_work:
        for out in opened.engine.step().outs:
            last = out
    took_s = time.perf_counter() - began_s
    assert isinstance(last, Answer)
    assert last.finish_reason is not None
    if last.evidence is None:
        return took_s, None
    return took_s, receipt_of(request, last.evidence, last.finish_reason, opened.fingerprint, "model")


def receipts(model: Model, tokens: int = 500, rounds: Rounds = 5) -> Yielded:
    found = open_model(model)
    size = EngineSize.for_many(found.model, 1, 2048, None)
    times_s: dict[bool, list[float]] = {False: [], True: []}
    given: list[Receipt] = []
    with open_engine(found.model, found.plans, size, schedules=found.schedules) as opened:
        for number in range(rounds):
            for has_receipt in (False, True) if number % 2 else (True, False):
                params = SamplingParams(temperature=0.8, seed=number)
                name = f"{number} {has_receipt}"
                request = Submit(name, PROMPT, tokens, params, ignore_eos=True, receipt=has_receipt)
                took_s, receipt = generated(opened, request)
                times_s[has_receipt].append(took_s)
                given += [] if receipt is None else [receipt]
    replay_s = []
    for number in range(1, rounds + 1):  # the first receipt of each run pays for opening the ranks
        began_s = time.perf_counter()
        verdicts = replay_receipts(found, given[:number])
        replay_s.append((time.perf_counter() - began_s) / number)
        assert all(one.is_confirmed for one in verdicts)
    for name, values in (("without", times_s[False]), ("with", times_s[True]), ("replay", replay_s)):
        yield f"{name}: {', '.join(f'{one:.2f}' for one in values)} s"
    yield f"a replay takes {min(replay_s) / min(times_s[False]):.3f} of generating"
    yield f"a receipt adds {min(times_s[True]) / min(times_s[False]) - 1:+.3f} to generating"


app = commands(__doc__, receipts)

if __name__ == "__main__":
    app()
