"""The ranks of the systems under comparison: one process each, all asked the same at the same time."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from phasewise.cython_kernels import _native
from phasewise.workflows.bench.allreduce.rank import COPY, shared_bytes


class RankError(Exception):
    """A rank of a system under comparison has ended, or never began."""

    exit_code = 1


@dataclass(frozen=True)
class System:
    """Something that adds up messages, or copies them."""

    name: str
    time: Callable[[int, int], list[int]]
    """(floats of a message, times) -> nanoseconds of the slowest rank, each time."""


class RankProcesses:
    """One process per rank; each answers a line of JSON with a line of JSON (see `rank`)."""

    def __init__(self, name: str, commands: Sequence[Sequence[str]], descriptors: Sequence[int] = ()) -> None:
        self.name = name
        self._processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C ends this process; ranks end when their stdin closes
            )
            for command in commands
        ]
        try:
            self._answers()
        except RankError:
            self.close()
            raise

    def system(self, name: str) -> System:
        def time(floats: int, times: int) -> list[int]:
            self._ask({"system": name, "floats": floats, "times": times})
            return [max(ns) for ns in zip(*(answer["ns"] for answer in self._answers()), strict=True)]

        return System(name, time)

    def close(self) -> None:
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

    def _ask(self, request: dict[str, Any]) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # the rank has died: _answer raises
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()

    def _answers(self) -> list[dict[str, Any]]:
        return [self._answer(rank, process) for rank, process in enumerate(self._processes)]

    def _answer(self, rank: int, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RankError(f"rank {rank} of {self.name} ended with exit code {process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def our_systems(cores: Sequence[int], kinds: Sequence[str], most_floats: int) -> Iterator[list[System]]:
    """All-reduces of these kinds with one rank per core, and plain copying, over memory freed at the end."""
    ranks = len(cores)
    size = shared_bytes(ranks, most_floats)
    descriptor = os.memfd_create("phasewise-bench-allreduce")
    try:
        os.ftruncate(descriptor, size)
        _initialise_group(descriptor, ranks)
        commands = [
            [sys.executable, "-m", "phasewise.workflows.bench.allreduce.rank"]
            + [str(number) for number in (descriptor, rank, ranks, cpu, most_floats)]
            for rank, cpu in enumerate(cores)
        ]
        with closing(RankProcesses("phasewise", commands, [descriptor])) as processes:
            yield [processes.system(name) for name in (*kinds, COPY)]
    finally:
        os.close(descriptor)


def _initialise_group(descriptor: int, ranks: int) -> None:
    _native.Group(mmap.mmap(descriptor, _native.group_bytes(ranks)), ranks).initialise()
