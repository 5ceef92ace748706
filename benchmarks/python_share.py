"""Python's share of a decode step.

Run as `python benchmarks/python_share.py [MODEL] [-n 128] [-b 1] [--format native]`. Counted is everything
of `Engine.step` that is neither the native forward pass nor the native argmax over its logits: choosing the
batch, describing it, sampling (greedy), detokenising, making the message. Steps are timed one by one; the
median step is printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import cast

import numpy as np

from phasewise.cli.opening import open_model
from phasewise.cli.options import WeightFormat
from phasewise.serving import sampling
from phasewise.serving.messages import Submit
from phasewise.serving.ranks import LocalRanks
from phasewise.serving.start import EngineSize, OpenEngine, open_engine

PROMPT = "The history of the steam engine begins"


def count_argmax_ns() -> list[int]:
    """From now on, the time of every native argmax is appended to the list returned."""
    spent_ns: list[int] = []
    native_argmax = sampling.argmax

    def timed(row: np.ndarray) -> int:
        started_ns = time.perf_counter_ns()
        index: int = native_argmax(row)
        spent_ns.append(time.perf_counter_ns() - started_ns)
        return index

    sampling.argmax = timed
    return spent_ns


def step_times_ns(opened: OpenEngine, n_gen: int, n_sequences: int) -> list[tuple[int, int]]:
    """(whole step, native part) of each decode step."""
    ids = tuple(opened.text.encode(PROMPT, True))
    for index in range(n_sequences):
        greedy = sampling.SamplingParams(temperature=0.0)
        opened.engine.submit(Submit(str(index), ids, sampling=greedy, max_tokens=n_gen, ignore_eos=True))
    ranks = cast(LocalRanks, opened.engine.ranks)
    argmax_ns = count_argmax_ns()
    times = []
    while opened.engine.has_work:
        native_ns, started_ns = ranks.native_ns + sum(argmax_ns), time.perf_counter_ns()
        delivery = opened.engine.step()
        step_ns = time.perf_counter_ns() - started_ns
        if delivery.stats is not None and delivery.stats.phase == "decode":
            times.append((step_ns, ranks.native_ns + sum(argmax_ns) - native_ns))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="Python's share of a decode step")
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("-n", type=int, default=128)
    parser.add_argument("-b", type=int, default=1)
    parser.add_argument("--format", default="native")
    arguments = parser.parse_args()
    found = open_model(arguments.model, WeightFormat(arguments.format), None, None)
    size = EngineSize.for_many(found.model, arguments.b, arguments.n + 64, None)
    with open_engine(found.model, found.plans, size, schedules=found.schedules) as opened:
        times = step_times_ns(opened, arguments.n, arguments.b)
    step_us = statistics.median(step for step, _ in times) / 1e3
    python_us = statistics.median(step - native for step, native in times) / 1e3
    print(f"decode step {step_us:.0f} us, Python {python_us:.0f} us: {python_us / step_us:.1%}")


if __name__ == "__main__":
    main()
