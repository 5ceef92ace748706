"""The authors' simulator and policy `splitwise-sim` on one trace: the largest difference, and the time.

    python benchmarks/splitwise_sim.py CHECKOUT --lengths AzureLLMInferenceTrace_code.csv \\
        [--python PYTHON] [--rate 70] [--duration 120] [--cell mixed:40 --cell 27+3]

CHECKOUT is a checkout of Mutinifni/splitwise-sim with its launcher set to basic: in configs/config.yaml,
leave out the line with hydra/launcher and the launcher's settings. PYTHON has its requirements: hydra-core,
omegaconf, networkx, pandas, scipy, requests. Times are CPU seconds of one process each; those of the checkout
are told without its start, which is timed with a trace of one request.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from phasewise.cluster.arrivals import poisson
from phasewise.cluster.requests import Arrival
from phasewise.cluster.simulate import ClusterSpec, Pool, simulate
from phasewise.cluster.spec_file import MachineCatalogue, StepSources
from phasewise.cluster.steps import read_profile
from phasewise.workflows.cluster_load import lengths_of

FIELDS = (
    "request_id",
    "request_type",
    "application_id",
    "arrival_timestamp",
    "batch_size",
    "prompt_size",
    "token_size",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--lengths", required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--rate", type=float, default=70.0)
    parser.add_argument("--duration", type=float, default=120.0)
    parser.add_argument("--cell", action="append", help="H100s: mixed:N, or PROMPT+TOKEN")
    asked = parser.parse_args()
    lengths = [(one.prompt_tokens, one.output_tokens) for one in lengths_of(asked.lengths)]
    arrivals = poisson(lengths, asked.rate, asked.duration, seed=0, draw="columns")
    profile = read_profile(asked.checkout / "data/perf_model.csv")
    h100 = MachineCatalogue(sources=StepSources(profile))["h100"]
    worst = 0.0
    for cell in asked.cell or ["mixed:40", "27+3"]:
        start_s, _ = theirs(asked.checkout, asked.python, arrivals[:1], cell)
        theirs_s, reference = theirs(asked.checkout, asked.python, arrivals, cell)
        begun = time.process_time()
        result = simulate(ClusterSpec(pools_of(cell, h100), "splitwise-sim"), arrivals)
        ours_s = time.process_time() - begun
        found = {life.arrival.request_id: (life.e2e_s, life.ttft_s) for life in result.lives}
        same = found.keys() == reference.keys()
        apart = max(
            abs(mine - other)
            for request_id in found.keys() & reference.keys()
            for mine, other in zip(found[request_id], reference[request_id], strict=True)
        )
        worst = max(worst, apart if same else float("inf"))
        print(
            f"{cell}: {len(arrivals)} requests, {len(reference)} ended there and {len(found)} here, largest "
            f"difference {apart:.3g} s; CPU {theirs_s - start_s:.2f} s there (and {start_s:.2f} s to start), "
            f"{ours_s:.2f} s here: {(theirs_s - start_s) / ours_s:.1f} times as fast"
        )
    sys.exit(worst > 1e-6)


def pools_of(cell: str, machine) -> tuple[Pool, ...]:  # type: ignore[no-untyped-def]
    kind, _, count = cell.partition(":")
    if kind == "mixed":
        return (Pool("mixed", machine, int(count)),)
    prompts, tokens = map(int, cell.split("+"))
    return Pool("prompt", machine, prompts), Pool("token", machine, tokens)


def theirs(
    checkout: Path, python: str, arrivals: Sequence[Arrival], cell: str
) -> tuple[float, dict[int, tuple[float, float]]]:
    """CPU seconds, and response time and TTFT of every request that ended."""
    pools = pools_of(cell, None)
    options = [f"cluster.servers.1.count={sum(pool.count for pool in pools)}"]
    if len(pools) == 1:
        options += ["applications.0.scheduler=token_jsq", "start_state=baseline"]
    else:
        options += ["applications.0.scheduler=mixed_pool", "start_state=splitwise"]
        options += [f"start_state.prompt.num_instances={pools[0].count}"]
        options += [f"start_state.token.num_instances={pools[1].count}"]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.csv")
        with open(trace, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(FIELDS)
            for one in arrivals:
                writer.writerow(
                    [one.request_id, 2, 0, repr(one.at_s), 1, one.prompt_tokens, one.output_tokens]
                )
        command = [python, "run.py", "cluster=half_half", "cluster.servers.0.count=0", "performance_model=db"]
        command += [f"trace.path={trace}", f"output_dir={folder}/out", "seed=0", *options]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        subprocess.run(command, cwd=checkout, check=True, stdout=subprocess.DEVNULL, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        with open(Path(folder, "out/detailed/0.csv"), encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            return spent_s, {
                int(float(row["request_ids"])): (float(row["response_times"]), float(row["ttft_times"]))
                for row in rows
            }


if __name__ == "__main__":
    main()
