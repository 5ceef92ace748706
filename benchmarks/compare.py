"""phasewise beside other engines on the same model, in turn, in one run: `make compare`, or

    python benchmarks/compare.py MODEL.gguf --peer llama_cpp --peer openvino --peer vllm=FOLDER@PYTHON

Engines stay loaded in processes of their own and sleep while another is timed. Every round times each of them
once, so a drift of the machine meets all; ratios are taken round by round, and their median and quartiles
are printed. A peer is `NAME[=FILE][@PYTHON]`: llama_cpp, ik_llama_cpp, openvino or vllm, what it loads
(MODEL, if nothing is said) and an interpreter that has it (PHASEWISE_PEERS_PYTHON). Other forms of MODEL:
peers/make_files.py. `--before CHECKOUT` sets another commit of phasewise beside this one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PEERS = Path(__file__).resolve().parent / "peers"
NAMES = ("llama_cpp", "ik_llama_cpp", "openvino", "vllm")
PAUSE_S = 0.3  # lets the other engine's threads fall asleep
PEER = re.compile(r"(?P<name>\w+)(?:=(?P<file>[^@]+))?(?:@(?P<python>.+))?")


@dataclass(frozen=True)
class Test:
    """`sequences` at once, each prefills or decodes `n` tokens."""

    phase: str
    n: int
    sequences: int = 1

    @property
    def name(self) -> str:
        several = f" x{self.sequences}" if self.sequences > 1 else ""
        return f"{self.phase} {self.n}{several}"


TESTS = (Test("prefill", 128), Test("prefill", 512), Test("decode", 128), Test("decode", 128, 8))


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

    def tokens_per_second(self, test: Test) -> float:
        assert self.process.stdin is not None
        time.sleep(PAUSE_S)
        request = {"phase": test.phase, "n": test.n, "sequences": test.sequences}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return test.n * test.sequences * 1e9 / self._answer()["ns"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@dataclass(frozen=True)
class Comparison:
    """Tokens per second of every engine, round by round; the first one is ours."""

    test: Test
    rates: Mapping[str, Sequence[float]]

    def summaries(self) -> list[dict[str, object]]:
        """A row for each peer."""
        ours, *peers = self.rates
        return [self._against(ours, peer) for peer in peers]

    def _against(self, ours: str, peer: str) -> dict[str, object]:
        ratios = [a / b for a, b in zip(self.rates[ours], self.rates[peer], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        return {
            "test": self.test.name,
            "peer": peer,
            "phasewise_tokens_per_s": round(statistics.median(self.rates[ours]), 1),
            "peer_tokens_per_s": round(statistics.median(self.rates[peer]), 1),
            "ratio_median": round(middle, 2),
            "ratio_quartiles": [round(low, 2), round(high, 2)],
            "rounds": len(ratios),
        }


def compare(workers: Mapping[str, Worker], test: Test, rounds: int) -> Comparison:
    """One warm-up each, then `rounds` rounds."""
    taken = [
        {name: worker.tokens_per_second(test) for name, worker in workers.items()} for _ in range(rounds + 1)
    ]
    return Comparison(test, {name: [rates[name] for rates in taken[1:]] for name in workers})


def peer_command(text: str, model: str, threads: int) -> tuple[str, list[str]]:
    """(label, command) of `NAME[=FILE][@PYTHON]`; SystemExit says what is missing."""
    match = PEER.fullmatch(text)
    if match is None or match["name"] not in NAMES:
        raise SystemExit(f"{text!r} is not NAME[=FILE][@PYTHON] with a name of {', '.join(NAMES)}")
    python = match["python"] or os.environ.get("PHASEWISE_PEERS_PYTHON")
    if python is None:
        raise SystemExit(f"name an interpreter that has {match['name']}: @PYTHON or PHASEWISE_PEERS_PYTHON")
    worker = str(PEERS / f"{match['name']}_worker.py")
    label = match["name"] if match["file"] is None else f"{match['name']} {Path(match['file']).name}"
    return label, [python, worker, match["file"] or model, str(threads)]


def before_command(checkout: Path, tail: list[str]) -> list[str]:
    """The worker of another checkout, by its own interpreter; SystemExit says what is missing."""
    python, worker = checkout / ".venv/bin/python", checkout / "benchmarks/peers/phasewise_worker.py"
    for needed in (python, worker):
        if not needed.exists():
            raise SystemExit(f"{needed} is not there: --before names a checkout after `make build`")
    return [str(python.absolute()), str(worker), *tail]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument(
        "--peer", action="append", metavar="NAME[=FILE][@PYTHON]", help="llama_cpp if not given"
    )
    parser.add_argument(
        "--before", metavar="CHECKOUT", type=Path, help="another commit of phasewise, built there, as a peer"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tests", help="names of tests, with commas between them; all if not given")
    parser.add_argument("--format", default="native", help="ours")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    known = [test.name for test in TESTS]
    wanted = arguments.tests.split(",") if arguments.tests else known
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"there is no test {unknown[0]!r}: {', '.join(known)}")
    tail = [arguments.model, str(arguments.threads)]
    commands = {"phasewise": [sys.executable, str(PEERS / "phasewise_worker.py"), *tail, arguments.format]}
    if arguments.before is not None:
        commands["before"] = before_command(arguments.before, [*tail, arguments.format])
    for text in arguments.peer or ([] if arguments.before else ["llama_cpp"]):
        label, command = peer_command(text, arguments.model, arguments.threads)
        commands[label] = command
    workers = {name: Worker(command) for name, command in commands.items()}
    comparisons = [compare(workers, test, arguments.rounds) for test in TESTS if test.name in wanted]
    for worker in workers.values():
        worker.close()
    for row in [row for comparison in comparisons for row in comparison.summaries()]:
        print(json.dumps(row) if arguments.json else _line(row))


def _line(row: Mapping[str, object]) -> str:
    return (
        f"{row['test']:14}  phasewise {row['phasewise_tokens_per_s']:>8} tok/s  "
        f"{row['peer']} {row['peer_tokens_per_s']:>8} tok/s  "
        f"ratio {row['ratio_median']} {row['ratio_quartiles']}"
    )


if __name__ == "__main__":
    main()
