"""A promised time under three times overload, by simulation: devices and a front that are as late as drawn.

    python benchmarks/embedding_noise.py

The production client of embeddings runs on simulated time for 60 s; every kind of noise with several seeds.
Printed are the worst of the seeds. Busy: the share of the time in which devices computed.
"""

from __future__ import annotations

from typing import Annotated

from typer import Option

from benchmarks.harness import Yielded, commands
from tests.support.noisy_embedding import DEVICES, NOISES, SECONDS, SLO_S, overload


def embedding_noise(seeds: Annotated[int, Option(help="of each kind of noise")] = 3) -> Yielded:
    for devices, own in DEVICES.items():
        for name, noise in NOISES.items():
            outcomes = [
                overload(own, noise, seed=seed, slo_s=SLO_S, seconds=SECONDS) for seed in range(seeds)
            ]
            yield {
                "devices": devices,
                "noise": name,
                "answered": min(len(outcome.latencies_s) for outcome in outcomes),
                "in time, %": 100 * min(outcome.share_within(SLO_S) for outcome in outcomes),
                "P99, s": max(outcome.percentile_s(99) for outcome in outcomes),
                "busy, %": 100 * min(outcome.busy for outcome in outcomes),
                "median refusal after, s": max(outcome.median_refusal_s for outcome in outcomes),
            }


app = commands(__doc__, embedding_noise)

if __name__ == "__main__":
    app()
