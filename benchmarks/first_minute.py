"""Speed of a model after a first start of a minute, over its speed after a full tuning.

    python benchmarks/first_minute.py 1b-Q4_K_M.gguf --full 3600
    python benchmarks/first_minute.py 1b-Q4_K_M.gguf                 in 8 minutes, on a quiet machine

A full tuning goes into a database of its own, which is pushed to a remote in a folder. Then two new databases
get a minute each: one pulls from that remote and fights over what it brings, as `serve --remote` does before
it takes requests; the other one has no remote, and `tune-kernels` searches. The model is timed by the
schedules of each against those of the full tuning, in pairs. At least 0.97 is wanted with the remote.

The last lines have a prompt of 512 tokens and steps of 1, 4, 8 and 16 sequences as one ratio, their geometric
mean, with its interval: of a bootstrap over the pairs of each.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Option

from benchmarks.harness import Model, Yielded, commands, note
from phasewise.topology import read_machine
from phasewise.tuner.first_duels import FIRST_S
from phasewise.workflows.database.remote import Leaving, push
from phasewise.workflows.database.signed_index import Trust
from phasewise.workflows.opening.first_start import Remote, fight_first, pull_what_fits
from phasewise.workflows.opening.open_model import NATIVE, open_model
from phasewise.workflows.opening.tuned_schedules import schedules_for
from phasewise.workflows.tune_kernels.speed_change import SpeedChange, measured_change


def first_minute(
    model: Model,
    full: Annotated[float, Option(help="seconds of the full tuning")] = 240.0,
    minute: Annotated[float, Option(help="seconds of a first start")] = FIRST_S,
    compare: Annotated[float, Option(help="seconds of each comparison of two databases")] = 45.0,
) -> Yielded:
    with tempfile.TemporaryDirectory() as folder:
        tuned, pulled, alone = (str(Path(folder) / f"{name}.db") for name in ("tuned", "pulled", "alone"))
        _tune(model, tuned, full)
        pushed = push(str(Path(folder) / "remote"), tuned, Leaving(), Trust())
        _start(model, pulled, Remote(str(Path(folder) / "remote"), pushed.digest), minute)
        _tune(model, alone, minute)
        best, machine = open_model(model, db=tuned), read_machine()
        yield (
            f"Compared: {best.model.name} by the schedules of {full:.0f} s of tuning, and by those of "
            f"{minute:.0f} s, in pairs"
        )
        remarks = []
        for name, db in (("a minute, with the remote", pulled), ("a minute, without", alone)):
            changes = measured_change(best, schedules_for(db, machine, best.plans), compare, note)
            for change in changes:
                yield {
                    "after": name,
                    "step": f"{change.phase} of {change.n_sequences}",
                    "pairs": change.comparison.pairs,
                    "tokens/s, full tuning": change.before_tokens_per_s,
                    "tokens/s": change.after_tokens_per_s,
                    "ratio": f"{change.comparison.gain:.3f}",
                }
            middle, low, high = overall(changes)
            remarks.append(f"{name}: {middle:.3f} of the full tuning's speed ({low:.3f} to {high:.3f}, 95 %)")
        yield from remarks


def overall(changes: Sequence[SpeedChange], resamples: int = 2000) -> tuple[float, float, float]:
    """The geometric mean over steps of the median ratio of pairs, and its interval over the pairs."""
    dice = random.Random(0)
    pairs = [[old / new for old, new in zip(*change.samples_ns, strict=True)] for change in changes]

    def mean(drawn: Sequence[Sequence[float]]) -> float:
        return statistics.geometric_mean(statistics.median(ratios) for ratios in drawn)

    means = sorted(mean([dice.choices(ratios, k=len(ratios)) for ratios in pairs]) for _ in range(resamples))
    return mean(pairs), means[resamples // 40], means[-resamples // 40]


def _tune(model: str, db: str, seconds: float) -> None:
    """`tune-kernels`, in a process of its own."""
    budget = ["--budget", f"{seconds:.0f}s"]
    subprocess.run(
        [sys.executable, "-m", "phasewise", "tune-kernels", model, *budget, "--db", db],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def _start(model: str, db: str, remote: Remote, seconds: float) -> None:
    """The part of a server's start that pulls and fights."""
    deadline_s, machine = time.monotonic() + seconds, read_machine()
    pull_what_fits(remote, db, seconds, note)
    opened = open_model(model, db=db)
    fight_first(opened, [opened.plans], NATIVE, db, machine, deadline_s - time.monotonic(), note)


app = commands(__doc__, first_minute)

if __name__ == "__main__":
    app()
