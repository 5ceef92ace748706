"""Collectives of torch.distributed: the backend `phasewise` beside gloo, on the same cores, in turns.

    PHASEWISE_PEERS_PYTHON=/opt/peers/venv/bin/python python benchmarks/process_group.py --ranks 2,4,8
    PHASEWISE_PEERS_PYTHON=/opt/vllm/bin/python python benchmarks/process_group.py --vllm

Bytes are those of the message; of an all_gather, of what each rank gathers. A round's time is the median over
its calls of the slowest rank; rows have the medians of the rounds. More ranks than cores share them in turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from benchmarks.harness import Rounds, Spread, Yielded, commands, in_turns, listed, note, numbers, ratios

WORKER = Path(__file__).with_name("peers") / "process_group_rank.py"
BACKENDS = ("phasewise", "gloo")
OF_VLLM = ("all_reduce", "all_gather")
"""The collectives of tensors that vLLM's communicator over shared memory has."""
BYTES_A_ROUND = 64 << 20
MOST_TIMES = 200
LEAST_TIMES = 3
UNITS = {"K": 1 << 10, "M": 1 << 20}


class RankError(Exception):
    """A rank has ended, or never began."""


class RankProcesses:
    """One process per rank of a backend; each answers a line of JSON with a line of JSON."""

    def __init__(self, name: str, commands: Sequence[Sequence[str]]) -> None:
        self._name = name
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for command in commands
        ]
        try:
            self._answers()
        except RankError:
            self.close()
            raise

    def time(self, act: str, floats: int, times: int) -> list[int]:
        """Nanoseconds of the slowest rank, each of `times`."""
        request = json.dumps({"system": act, "floats": floats, "times": times}) + "\n"
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # the rank has died: `_answers` raises
                process.stdin.write(request)
                process.stdin.flush()
        return [max(ns) for ns in zip(*(answer["ns"] for answer in self._answers()), strict=True)]

    def close(self) -> None:
        """Ranks end when their input does."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _answers(self) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RankError(f"rank {rank} of {self._name} ended with exit code {process.wait()}")
            answers.append(json.loads(line))
        return answers


@contextmanager
def opened(ranks: int, backends: Sequence[str]) -> Iterator[Mapping[str, RankProcesses]]:
    """The ranks of every backend, in the peers' interpreter; those that are not asked wait for their line."""
    python = os.environ.get("PHASEWISE_PEERS_PYTHON") or sys.executable
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        groups = {}
        for backend in backends:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="group-"))
            commands_of_ranks = [
                [python, str(WORKER), folder, str(rank), str(ranks), str(cores[rank % len(cores)]), backend]
                for rank in range(ranks)
            ]
            groups[backend] = stack.enter_context(closing(RankProcesses(backend, commands_of_ranks)))
        yield groups


def size_bytes(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def times_a_round(size: int) -> int:
    return max(LEAST_TIMES, min(MOST_TIMES, BYTES_A_ROUND // size))


def measured(groups: Mapping[str, RankProcesses], act: str, size: int, rounds: int) -> dict[str, object]:
    """Microseconds of each backend, and how many times as fast ours is."""
    times = times_a_round(size)
    asked = {name: ranks for name, ranks in groups.items() if name != "vllm" or act in OF_VLLM}
    taken = in_turns(
        {
            backend: lambda ranks=ranks: statistics.median(ranks.time(act, size // 4, times)) / 1e3
            for backend, ranks in asked.items()
        },
        rounds,
    )
    row: dict[str, object] = {f"{backend}, us": Spread.of(us) for backend, us in taken.items()}
    own = taken.pop("phasewise")
    return row | {f"{other} / phasewise": ratios(us, own) for other, us in taken.items()}


def process_group(
    ranks: str = "2,4,8",
    sizes: str = "4K,64K,1M,4M,16M,64M",
    acts: str = "all_reduce,all_gather,broadcast",
    rounds: Rounds = 5,
    vllm: Annotated[bool, Option("--vllm", help="beside vLLM's communicator too")] = False,
) -> Yielded:
    backends = (*BACKENDS, "vllm") if vllm else BACKENDS
    for count in numbers(ranks):
        try:
            with opened(count, backends) as groups:
                for act in listed(acts):
                    for size in listed(sizes):
                        note(f"{count} ranks, {act}, {size}")
                        row = measured(groups, act, size_bytes(size), rounds)
                        yield {"collective": act, "ranks": count, "bytes": size_bytes(size)} | row
        except RankError as error:
            raise SystemExit(
                f"{error}; PHASEWISE_PEERS_PYTHON must name one that has PyTorch and phasewise"
            ) from None


app = commands(__doc__, process_group)

if __name__ == "__main__":
    app()
