"""Cost of each method of `phasewise prune` in perplexity, time and memory, by share of zeros.

    python benchmarks/pruning_table.py smollm2-135m-instruct --sparsities 0.3,0.5,0.7,2:4

The first tokens of workflows/evaluate/alice.txt are measured (as bf16, in windows of 512), its second half
calibrates, so that no method has seen what it is judged by. Seconds and GB are those of the `phasewise
prune` command: wall clock, and the most memory that the process held. `METHOD+recover` fits the weights that
are kept.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
from typer import Option

from benchmarks.harness import Model, Yielded, commands, listed
from benchmarks.perplexity import WINDOW_TOKENS, english_text
from phasewise.workflows.evaluate import figures
from phasewise.workflows.evaluate.scorer import Scorer, losses_of, windows
from phasewise.workflows.opening.open_model import Weights, open_model

METHODS = ("magnitude", "wanda", "sparsegpt")
RECOVERED = "+recover"


def method_options(method: str, text: Path, calibration_tokens: int) -> list[str]:
    """Options of `phasewise prune` for `METHOD` or `METHOD+recover`; what reads none gets no text."""
    options = ["--method", method.removesuffix(RECOVERED)]
    if method != "magnitude":
        options += ["--calibration", str(text), "--calibration-tokens", str(calibration_tokens)]
    return [*options, "--recover"] if method.endswith(RECOVERED) else options


def prune(arguments: list[str]) -> tuple[float, float]:
    """Wall-clock seconds of the command, and its largest memory in GB."""
    began = time.monotonic()
    command = [sys.executable, "-m", "phasewise", "prune", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"phasewise prune {' '.join(arguments)} ended with {process.returncode}")
    return time.monotonic() - began, usage.ru_maxrss * 1024 / 1e9


def perplexity(model: str, n_tokens: int) -> float:
    """As bf16; zeros stored as numbers, which changes no bit."""
    opened = open_model(model, Weights("bf16", "never"))
    with Scorer(opened, WINDOW_TOKENS) as scorer:
        ids = scorer.tokenizer.encode(english_text(), False)[:n_tokens]
        losses = np.concatenate(list(losses_of(scorer, windows(ids, WINDOW_TOKENS))))
    return figures.perplexity(losses).value


def pruning_table(
    model: Model,
    sparsities: str = "0.3,0.5,0.7,2:4",
    methods: str = ",".join(METHODS),
    tokens: Annotated[int, Option(help="measured; 0: time and memory alone")] = 4096,
    calibration_tokens: int = 8192,
) -> Yielded:
    text = english_text()
    if tokens:
        yield f"not pruned: {perplexity(model, tokens):.2f}"
    with tempfile.TemporaryDirectory() as folder:
        calibrating = Path(folder, "calibrating.txt")
        calibrating.write_text(text[len(text) // 2 :], encoding="utf-8")
        for sparsity, method in itertools.product(listed(sparsities), listed(methods)):
            out = Path(folder, f"{sparsity.replace(':', '-')}-{method}")
            options = method_options(method, calibrating, calibration_tokens)
            seconds, gb = prune([model, "-o", str(out), "--sparsity", sparsity, *options])
            perplexity_text = f"{perplexity(str(out), tokens):.2f}" if tokens else None
            yield {
                "zeros": sparsity,
                "method": method,
                "perplexity": perplexity_text,
                "seconds": seconds,
                "GB": gb,
            }


app = commands(__doc__, pruning_table)

if __name__ == "__main__":
    app()
