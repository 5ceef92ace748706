"""The gain of a mixed step: a chunk of a prompt and one token of each answer in one pass, beside two passes.

    python benchmarks/mixed_step.py [MODEL] [--chunk 128,512] [--answers 4,8,16,32] [-r 15]

Splitwise's mixed continuous batching (section V-A) reads the weights once for both. A round times the chunk
alone, the decode step alone and both in one batch, in alternating order; the gain is the time of the two
passes over the time of one, with the 95 % interval of its median. A share of a server's time is not a gain of
the whole server: a prompt of 128 tokens has one such chunk and its answers have many decode steps.
"""

from __future__ import annotations

import contextlib
from typing import Annotated

from benchmarks.switch import interval, named_model
from typer import Option

from benchmarks.harness import (
    MODEL,
    Model,
    Rounds,
    Threads,
    Yielded,
    commands,
    cores_of,
    in_turns,
    numbers,
    seconds_of,
)
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.ranks.open_ranks import KvSettings, RankOptions, open_ranks
from phasewise.topology import read_machine
from phasewise.tuner.plans import PHASES, ServicePlan, rank_on

CONTEXT = 256


def mixed_step(
    model: Model = MODEL,
    chunk: Annotated[str, Option(help="tokens of a prompt in a step")] = "128,512",
    answers: Annotated[str, Option(help="sequences that decode")] = "4,8,16,32",
    rounds: Rounds = 15,
    threads: Threads = 2,
) -> Yielded:
    rank = rank_on(read_machine(), tuple(cores_of(threads)))
    plans = {phase: ServicePlan(phase, (rank,), "flag") for phase in PHASES}
    chunks, counts = numbers(chunk), numbers(answers)
    room = CONTEXT + 1
    n_slots = -(-(max(counts) * room + max(chunks)) // 128) * 128
    options = RankOptions(KvSettings(n_slots), max(chunks) + max(counts), max(counts) + 1)
    with contextlib.closing(open_ranks(named_model(model), plans, options)) as ranks:
        for sequence in range(max(counts)):
            ranks.forward(Batch("prefill", (SequenceSlice([1] * CONTEXT, 0, sequence * room, False),)))
        for n_chunk in chunks:
            for n_answers in counts:
                prompt = SequenceSlice([1] * n_chunk, 0, max(counts) * room, True)
                rows = tuple(SequenceSlice([1], CONTEXT, each * room, True) for each in range(n_answers))
                batches = {
                    "chunk": Batch("prefill", (prompt,)),
                    "decode": Batch("decode", rows),
                    "mixed": Batch("prefill", (prompt, *rows)),
                }
                calls = {
                    name: (lambda batch=batch: seconds_of(lambda: ranks.forward(batch)))
                    for name, batch in batches.items()
                }
                taken = in_turns(calls, rounds)
                gains = [
                    (alone + decode) / mixed
                    for alone, decode, mixed in zip(*(taken[name] for name in batches), strict=True)
                ]
                gain, low, high = interval(gains)
                yield {
                    "chunk": n_chunk,
                    "answers": n_answers,
                    **{f"{name}, ms": sorted(times)[rounds // 2] * 1e3 for name, times in taken.items()},
                    "two passes over one": f"{gain:.3f} ({low:.3f} to {high:.3f})",
                }


app = commands(__doc__, mixed_step)

if __name__ == "__main__":
    app()
