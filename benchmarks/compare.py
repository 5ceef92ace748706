"""phasewise beside llama.cpp on the same GGUF file, in turn, in one run: `make compare`, or

    python benchmarks/compare.py MODEL.gguf --peer-python PATH [--threads 2] [--rounds 9] [--json]

Both engines stay loaded in processes of their own and sleep while the other is timed. Every round times A
then B, so a drift of the machine meets both; the ratio is taken round by round, and its median and quartiles
are printed.
PATH is an interpreter that has `llama-cpp-python`, compiled for this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

PEERS = Path(__file__).resolve().parent / "peers"
PAUSE_S = 0.3  # lets the other engine's threads fall asleep
TESTS = (("prefill", 128), ("prefill", 512), ("decode", 128))


class Worker:
    """One engine in a process of its own, asked for one timing at a time."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def _answer(self) -> dict[str, int]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args} ended with exit code {self.process.wait()}")
        answer: dict[str, int] = json.loads(line)
        return answer

    def tokens_per_second(self, phase: str, n: int) -> float:
        assert self.process.stdin is not None
        time.sleep(PAUSE_S)
        self.process.stdin.write(json.dumps({"phase": phase, "n": n}) + "\n")
        self.process.stdin.flush()
        return n * 1e9 / self._answer()["ns"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@dataclass(frozen=True)
class Comparison:
    """Tokens per second of both engines, round by round."""

    phase: str
    n: int
    ours: list[float]
    theirs: list[float]

    def summary(self) -> dict[str, object]:
        ratios = [a / b for a, b in zip(self.ours, self.theirs, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        return {
            "test": f"{self.phase} {self.n}",
            "phasewise_tokens_per_s": round(statistics.median(self.ours), 1),
            "llama_cpp_tokens_per_s": round(statistics.median(self.theirs), 1),
            "ratio_median": round(middle, 2),
            "ratio_quartiles": [round(low, 2), round(high, 2)],
            "rounds": len(ratios),
        }


def compare(ours: Worker, theirs: Worker, phase: str, n: int, rounds: int) -> Comparison:
    """One warm-up each, then `rounds` pairs."""
    pairs = [
        (ours.tokens_per_second(phase, n), theirs.tokens_per_second(phase, n)) for _ in range(rounds + 1)
    ][1:]
    return Comparison(phase, n, [a for a, _ in pairs], [b for _, b in pairs])


def main() -> None:
    parser = argparse.ArgumentParser(description="phasewise beside llama.cpp, interleaved")
    parser.add_argument("model")
    parser.add_argument("--peer-python", default=os.environ.get("PHASEWISE_PEERS_PYTHON"), required=False)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--format", default="native")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not arguments.peer_python:
        parser.error("name an interpreter that has llama-cpp-python: --peer-python or PHASEWISE_PEERS_PYTHON")
    tail = [arguments.model, str(arguments.threads)]
    ours = Worker([sys.executable, str(PEERS / "phasewise_worker.py"), *tail, arguments.format])
    theirs = Worker([arguments.peer_python, str(PEERS / "llama_cpp_worker.py"), *tail])
    rows = [compare(ours, theirs, phase, n, arguments.rounds).summary() for phase, n in TESTS]
    ours.close()
    theirs.close()
    for row in rows:
        print(json.dumps(row) if arguments.json else _line(row))


def _line(row: dict[str, object]) -> str:
    return (
        f"{row['test']:12}  phasewise {row['phasewise_tokens_per_s']:>8} tok/s  "
        f"llama.cpp {row['llama_cpp_tokens_per_s']:>8} tok/s  "
        f"ratio {row['ratio_median']} {row['ratio_quartiles']}"
    )


if __name__ == "__main__":
    main()
