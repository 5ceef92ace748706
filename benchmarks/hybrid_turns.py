"""First tokens of a conversation's turns with a model whose layers keep states, over those of its new tokens
alone.

    python benchmarks/hybrid_turns.py MODEL [--turns 8] [--new 128] [--answer 32] [--rounds 3]

Each round is a conversation of its own: a turn's prompt is all that was said and answered before, and
`--new` tokens. Behind it prompts of its new tokens alone are timed, each in a cache space of its own.
`reused`: tokens of the turn's prompt that were not computed again. The ratio is taken round by round; a
second turn within 1.2 of its new tokens alone is what is asked.
"""

from __future__ import annotations

import random
import time
from typing import Annotated

from typer import Option

from benchmarks.harness import MODEL, Model, Spread, Yielded, commands, ratios
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.engine.open_engine import OpenEngine, open_engine
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.workflows.opening.open_model import Weights, open_model


def answered(opened: OpenEngine, name: str, ids: list[int], n_tokens: int) -> tuple[float, int, list[int]]:
    """Milliseconds to the first token, tokens of the prompt that were reused, and the answer."""
    engine, answer = opened.engine, list[int]()
    began_ns = time.perf_counter_ns()
    space = name.partition(" ")[0]
    message = Submit(name, tuple(ids), n_tokens, GREEDY, ignore_eos=True, cache_space=space, receipt=True)
    engine.submit(message)
    first_ns = n_reused = 0
    while engine.has_work:
        for out in engine.step().outs:
            assert isinstance(out, Answer), out
            first_ns, n_reused = first_ns or out.at_ns, max(n_reused, out.n_cached)
            if out.evidence is not None:  # text may hold tokens back, and lacks control tokens
                answer = list(out.evidence.token_ids)
    return (first_ns - began_ns) / 1e6, n_reused, answer


def hybrid_turns(
    model: Model = MODEL,
    turns: Annotated[int, Option(help="of each conversation")] = 8,
    new: Annotated[int, Option(help="tokens of the user in each turn")] = 128,
    answer: Annotated[int, Option(help="tokens of each answer")] = 32,
    rounds: Annotated[int, Option(help="conversations")] = 3,
) -> Yielded:
    loaded = open_model(model, Weights())
    size = EngineSize.for_many(loaded.model, 4, turns * (new + answer) + 64, None)
    alone: list[list[float]] = [[] for _ in range(turns)]
    first: list[list[float]] = [[] for _ in range(turns)]
    reused = [0] * turns
    with open_engine(loaded.model, loaded.plans, size, schedules=loaded.schedules) as opened:
        answered(opened, "warm", list(range(10, 10 + new)), 2)
        for number in range(rounds):
            rng, said = random.Random(number), list[int]()
            asked = [
                [rng.randrange(10, loaded.model.config.vocab_size // 2) for _ in range(new)] for _ in alone
            ]
            for turn, own in enumerate(asked):
                ms, reused[turn], told = answered(opened, f"talk-{number} {turn}", said + own, answer)
                first[turn].append(ms)
                said += own + told
            for turn, own in enumerate(asked):  # behind it: a block that is free is written over
                alone[turn].append(answered(opened, f"alone-{number}-{turn}", own, 1)[0])
    for turn in range(turns):
        yield {
            "turn": turn + 1,
            "prompt": turn * (new + answer) + new,
            "reused": reused[turn],
            "first token, ms": Spread.of(first[turn]).median,
            "new tokens alone, ms": Spread.of(alone[turn]).median,
            "ratio": str(ratios(first[turn], alone[turn])),
        }


app = commands(__doc__, hybrid_turns)

if __name__ == "__main__":
    app()
