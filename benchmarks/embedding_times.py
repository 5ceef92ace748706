"""Measure times of batches of embeddings on one core, two and more, fit them, and say how far off the fit is.

    python benchmarks/embedding_times.py MODEL [--cores 1,2] [--format int8] [--tokens 2048] [--rounds 3]

Batches of 32 to 1,024 tokens an input and at most --tokens in all are measured (the least of the rounds,
which visit them in turns). Some lengths and numbers of inputs fit the coefficients (`papers/batch_times.py`),
others are held out; the last line fails where one of these is off by more than 10 %. Before it stand the
inputs that the fit says end within a second and two, by length and cores: WindVE's Figs. 5 and 6 of this
machine.

A model with a context of 1,024: python benchmarks/random_bert.py FOLDER --layers 12 --hidden 768 --heads 12
--context 1024
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated

from typer import Option

from benchmarks.harness import (
    Broken,
    Model,
    Rounds,
    Yielded,
    commands,
    cores_of,
    in_turns,
    numbers,
    seconds_of,
)
from benchmarks.papers.batch_times import Batch, BatchTimes, fit
from phasewise.serving.embedding.encoder.embedder import Embedder
from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.loaders import load_model

FITTED = ((32, 64, 128, 256, 512, 1024), (1, 4, 16, 64))
HELD_OUT = ((48, 75, 100, 192, 384, 768), (1, 2, 3, 8, 24))
ASKED = 0.10
SHOWN = (75, 150, 250, 500, 1000)
TERMS = ("a batch", "an input", "a token", "weights of a step", "a token's products", "a pair of tokens")


def batches_of(
    grid: tuple[Sequence[int], Sequence[int]], cores: Sequence[int], most_tokens: int
) -> Iterator[Batch]:
    lengths, counts = grid
    for length in lengths:
        for inputs in counts:
            if inputs * length <= most_tokens:
                yield from (Batch(inputs, length, own) for own in cores)


def inputs_of(batch: Batch) -> list[Tokens]:
    return [Tokens([1000 + (i + j) % 20000 for j in range(batch.length)]) for i in range(batch.inputs)]


def _timed(embedder: Embedder, batch: Batch) -> float:
    inputs = inputs_of(batch)
    return seconds_of(lambda: embedder.embed(inputs))


def embedding_times(
    model: Model,
    cores: str = "1,2",
    weights: Annotated[str, Option("--format")] = "int8",
    tokens: Annotated[int, Option(help="of the largest batch")] = 2048,
    rounds: Rounds = 3,
) -> Yielded:
    loaded, counts = load_model(model, weights), numbers(cores)
    assert loaded.embedding is not None
    longest = loaded.embedding.max_tokens
    fitted, held_out = (
        [batch for batch in batches_of(grid, counts, tokens) if batch.length <= longest]
        for grid in (FITTED, HELD_OUT)
    )
    with ExitStack() as stack:
        embedders = {own: stack.enter_context(Embedder(loaded, cores_of(own))) for own in counts}
        times = in_turns(
            {str(batch): partial(_timed, embedders[batch.cores], batch) for batch in (*fitted, *held_out)},
            rounds,
        )
    measured = {name: min(taken) for name, taken in times.items()}
    formula = fit(fitted, [measured[str(batch)] for batch in fitted])
    yield from _rows(formula, held_out, measured)
    yield ", ".join(
        f"{term} {1e6 * value:.3g} us" for term, value in zip(TERMS, formula.coefficients, strict=True)
    )
    yield from _capacities(formula, counts, longest)
    errors = {
        what: [abs(formula.error(batch, measured[str(batch)])) for batch in own]
        for what, own in (("fitted", fitted), ("held out", held_out))
    }
    said = "; ".join(
        f"{what} ({len(own)}): median error {statistics.median(own):.1%}, largest {max(own):.1%}"
        for what, own in errors.items()
    )
    yield said if max(errors["held out"]) <= ASKED else Broken(f"{said}: asked for at most {ASKED:.0%}")


def _rows(formula: BatchTimes, batches: Sequence[Batch], measured: dict[str, float]) -> Yielded:
    for batch in batches:
        taken = measured[str(batch)]
        yield {
            "cores": batch.cores,
            "tokens": batch.length,
            "inputs": batch.inputs,
            "measured, ms": 1e3 * taken,
            "fit, ms": 1e3 * formula.seconds(batch),
            "error": f"{100 * formula.error(batch, taken):+.1f} %",
        }


def _capacities(formula: BatchTimes, cores: Sequence[int], longest: int) -> Yielded:
    for length in SHOWN:
        if length <= longest:
            yield {"tokens of an input": length} | {
                f"inputs in {slo_s} s, cores {own}": formula.most_inputs(slo_s, length, own)
                for slo_s in (1, 2)
                for own in cores
            }


app = commands(__doc__, embedding_times)

if __name__ == "__main__":
    app()
