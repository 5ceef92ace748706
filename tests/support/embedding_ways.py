"""Every way of computing the same embeddings, and how many of them are equal in every bit.

`python -m tests.support.embedding_ways` prints the table for a tiny random encoder in each format, by
`--arithmetic canonical`: alone, in company, on any threads, from several processes, and by the lower
instruction sets of this machine.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phasewise.cython_kernels import isa
from phasewise.serving.embedding.encoder.embedder import Embedder
from phasewise.serving.embedding.encoder.input_tokens import Tokens, names_of_tasks
from phasewise.serving.embedding.open_embedding import open_embedding
from phasewise.serving.embedding.plan import EmbeddingPlan, Instance
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.topology import read_machine
from tests.support.models.encoder_models import write_encoder

FORMATS = ("f32", "bf16", "int8", "int4")
N_INPUTS = 12
_N_INSTANCES = 2

Vectors = list[bytes]
"""Of each input, every bit."""


@dataclass(frozen=True)
class Asked:
    """A model and the inputs of which it makes vectors."""

    folder: Path
    model: PackedModel
    inputs: tuple[Tokens, ...]


def asked(folder: Path, name: str, weight_format: str, n_inputs: int = N_INPUTS) -> Asked:
    """A tiny encoder of one of `encoder_models.CASES`, written where it is not there yet."""
    path = folder / name
    if not path.exists():
        write_encoder(path, name)
    model = load_model(str(path), weight_format, folder / "cache")
    assert model.embedding is not None
    rng, most = random.Random(41), model.embedding.max_tokens
    lengths = [round(most ** (index / (n_inputs - 1))) for index in range(n_inputs)]
    n_tasks, vocab_size = len(names_of_tasks(model)), model.config.vocab_size
    inputs = [
        Tokens([rng.randrange(5, vocab_size) for _ in range(n)], task=index % (n_tasks + 1))
        for index, n in enumerate(lengths)
    ]
    return Asked(path, model, tuple(rng.sample(inputs, n_inputs)))


def embedded(asked: Asked, inputs: Sequence[Tokens], threads: int = 2, step_tokens: int = 512) -> Vectors:
    with Embedder(
        asked.model, range(threads), pinned=False, step_tokens=step_tokens, is_canonical=True
    ) as embedder:
        return [vector.tobytes() for vector in embedder.embed(inputs)]


def alone(asked: Asked) -> Vectors:
    with Embedder(asked.model, range(2), pinned=False, is_canonical=True) as embedder:
        return [embedder.embed([each])[0].tobytes() for each in asked.inputs]


def reversed_order(asked: Asked) -> Vectors:
    return embedded(asked, asked.inputs[::-1])[::-1]


def from_instances(asked: Asked) -> Vectors:
    """From processes, as a server has them, which share the inputs."""
    core = (min(read_machine().allowed_pus),)
    plan = EmbeddingPlan(tuple(Instance(f"cpu:{index}", core) for index in range(_N_INSTANCES)))
    opened = open_embedding(
        asked.model,
        str(asked.folder),
        asked.model.format,
        plan,
        asked.folder.parent / "cache",
        is_canonical=True,
    )

    async def use() -> list[np.ndarray]:
        opened.client.attach(asyncio.get_running_loop())
        answers = await asyncio.gather(*(opened.client.embed([each]) for each in asked.inputs))
        return [vectors[0] for vectors in answers]

    with opened:
        return [vector.tobytes() for vector in asyncio.run(use())]


def by(name: str) -> Callable[[Asked], Vectors]:
    """By another instruction set."""

    def compute(asked: Asked) -> Vectors:
        with isa.using(name):
            return alone(asked)

    return compute


WAYS: dict[str, Callable[[Asked], Vectors]] = {
    "together": lambda asked: embedded(asked, asked.inputs),
    "together, in another order": reversed_order,
    "in small steps": lambda asked: embedded(asked, asked.inputs, step_tokens=1),
    "one thread": lambda asked: embedded(asked, asked.inputs, threads=1),
    "three threads": lambda asked: embedded(asked, asked.inputs, threads=3),
}
INSTANCES = {"two instances": from_instances}


def lower_ways() -> dict[str, Callable[[Asked], Vectors]]:
    """Instruction sets below the one in use, the nearest first."""
    names = isa.usable()
    lower = reversed(names[: names.index(isa.active())])
    return {f"{name} for {isa.active()}": by(name) for name in lower}


def rows(asked: Asked, ways: dict[str, Callable[[Asked], Vectors]]) -> Iterator[tuple[str, int, int]]:
    """Of each way its name, how many vectors have every bit of those alone, and how many do not."""
    wanted = alone(asked)
    for name, compute in ways.items():
        n_equal = sum(a == b for a, b in zip(compute(asked), wanted, strict=True))
        yield name, n_equal, len(wanted) - n_equal


def main() -> None:
    """Print the table."""
    print("| way | " + " | ".join(FORMATS) + " |\n|---|" + "---|" * len(FORMATS))
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:
        ways = WAYS | INSTANCES | lower_ways()
        by_format = [
            list(rows(asked(Path(folder), "bert", weight_format), ways)) for weight_format in FORMATS
        ]
        for of_way in zip(*by_format, strict=True):
            cells = " | ".join(f"{equal} of {equal + unequal}" for _, equal, unequal in of_way)
            print(f"| {of_way[0][0]} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
