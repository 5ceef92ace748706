"""What each method of `phasewise prune` costs in perplexity, time and memory, by share of zeros.

    python benchmarks/pruning_table.py smollm2-135m-instruct --sparsities 0.3,0.5,0.7,2:4

The first tokens of benchmarks/data/alice.txt are measured (as bf16, in windows of 512), its second half
calibrates, so that no method has seen what it is judged by. Seconds and GB are those of the `phasewise
prune` command: wall clock, and the most memory that the process held.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from perplexity import english_text, model_perplexity

METHODS = ("magnitude", "wanda", "sparsegpt")


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
    from phasewise.serving.loaders import load_model
    from phasewise.serving.loaders.storage import StorageChoice

    return model_perplexity(load_model(model, "bf16", storage=StorageChoice("never")), None, n_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--sparsities", default="0.3,0.5,0.7,2:4")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--tokens", type=int, default=4096, help="measured; 0: time and memory alone")
    parser.add_argument("--calibration-tokens", type=int, default=8192)
    options = parser.parse_args()
    text = english_text()
    if options.tokens:
        print(f"not pruned: {perplexity(options.model, options.tokens):.2f}", flush=True)
    print(f"{'zeros':>6} {'method':10} {'perplexity':>11} {'seconds':>8} {'GB':>6}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        calibrating = Path(folder, "calibrating.txt")
        calibrating.write_text(text[len(text) // 2 :], encoding="utf-8")
        for sparsity in options.sparsities.split(","):
            for method in options.methods.split(","):
                out = Path(folder, f"{sparsity.replace(':', '-')}-{method}")
                arguments = [options.model, "-o", str(out), "--sparsity", sparsity, "--method", method]
                arguments += ["--calibration", str(calibrating)]
                arguments += ["--calibration-tokens", str(options.calibration_tokens)]
                seconds, gb = prune(arguments)
                found = f"{perplexity(str(out), options.tokens):.2f}" if options.tokens else "-"
                print(f"{sparsity:>6} {method:10} {found:>11} {seconds:8.1f} {gb:6.2f}", flush=True)


if __name__ == "__main__":
    main()
