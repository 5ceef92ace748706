"""Number of inputs at once that a host embeds within an SLO: by WindVE's line, and by trying.

    python benchmarks/embedding_depths.py MODEL WAY [WAY ..] [--tokens 75] [--slo 1,2] [--task 1]

WAY: cores of each instance, `0,1` for one instance of two cores, `0+1` for two of one core each. For every
way a line is fitted through the times of five loads, and loads around its depth are tried (the best of three
rounds of each). Inputs go through the production queues to worker processes, without HTTP. At the end: what
the queues' own decision costs an input. --task: the number of the task that inputs are for, of a model that
has some.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

from typer import Argument, Option

from benchmarks.harness import Model, Yielded, commands, listed
from phasewise.serving.embedding.client import EmbeddingClient
from phasewise.serving.embedding.depth import predict_and_try
from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.embedding.lane import Lane
from phasewise.serving.embedding.open_embedding import open_embedding
from phasewise.serving.embedding.plan import EmbeddingPlan, Instance
from phasewise.serving.embedding.queues import Depth, DeviceQueue, QueueManager
from phasewise.serving.embedding.worker_process import WorkerProcess
from phasewise.serving.loaders import load_model

ROUNDS = 3


def plan_of(way: str) -> EmbeddingPlan:
    cores = [tuple(map(int, own.split(","))) for own in way.split("+")]
    return EmbeddingPlan(tuple(Instance(f"cpu:{index}", own) for index, own in enumerate(cores)))


async def depths(
    client: EmbeddingClient, tokens: int, slos_s: list[float], task: int
) -> list[tuple[int, int]]:
    """(predicted, tried) for each SLO."""
    client.attach(asyncio.get_running_loop())

    async def once(n: int) -> float:
        ids = [[1000 + (index + j) % 20000 for j in range(tokens)] for index in range(n)]
        inputs = [Tokens(own, task=task) for own in ids]
        began = time.perf_counter()
        await asyncio.gather(*(client.embed([text_tokens]) for text_tokens in inputs))
        return time.perf_counter() - began

    async def seconds(n: int) -> float:
        return min([await once(n) for _ in range(ROUNDS)])

    await once(2)
    attempts = [await predict_and_try(seconds, slo_s) for slo_s in slos_s]
    return [(attempt.predicted, attempt.tried) for attempt in attempts]


def dispatch_us(devices: int = 2, n: int = 20_000) -> float:
    """Time that an input's forecasts, its place, and letting it go again take, with queues half full."""
    queues = [DeviceQueue(f"cpu:{index}", 1, Depth(100, 10_000)) for index in range(devices)]
    worker = WorkerProcess.__new__(WorkerProcess)  # of a lane that never asks it
    lanes = [Lane.over(queue, lambda: worker, worker, 1.0) for queue in queues]
    manager = QueueManager(queues)
    for _ in range(40 * devices):
        manager.place([75])
    began = time.perf_counter()
    for _ in range(n):
        for lane in lanes:
            lane.heed(1.0, 1.9)
        places = manager.place([75])
        assert places is not None
        lanes[places[0]].end_of_all(1.0)
        manager.release(places[0], 75)
    return 1e6 * (time.perf_counter() - began) / n


def embedding_depths(
    model: Model,
    ways: Annotated[list[str], Argument(metavar="WAY..", help="cores of each instance: 0,1 or 0+1")],
    weights: Annotated[str, Option("--format")] = "int8",
    tokens: int = 75,
    slo: Annotated[str, Option(help="seconds")] = "1,2",
    task: int = 0,
) -> Yielded:
    loaded, slos_s = load_model(model, weights), [float(text) for text in listed(slo)]
    for way in ways:
        with open_embedding(loaded, model, loaded.format, plan_of(way)) as opened:
            taken = asyncio.run(depths(opened.client, tokens, slos_s, task))
        for slo_s, (predicted, tried) in zip(slos_s, taken, strict=True):
            row = {"model": loaded.name, "format": loaded.format, "cores": way, "SLO, s": slo_s}
            yield row | {"tokens": tokens, "by the line": predicted, "tried": tried}
    yield f"a decision of the queues: {dispatch_us():.1f} us an input"


app = commands(__doc__, embedding_depths)

if __name__ == "__main__":
    app()
