"""Peers whose matrix products are compared with ours: one process each, for the length of the run.

Several systems are timed in turns, so each peer keeps its weights packed in a process of its own and sleeps
while another system is timed. The process runs the package `peer_worker` under the interpreter that
PHASEWISE_PEERS_PYTHON names, or under this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phasewise.workflows.report import Report, silent

NAMES = ("torch", "mkl", "openblas", "openvino", "ggml")
WORKER = ("-m", "peer_worker")
"""The code that the interpreter runs, with this folder on PYTHONPATH."""

FORMAT_OF = {"int8c": "int8", "int8m": "int8", "int8g16": "int8"}
"""The peers' format to compare with a format of ours: their 8 bits with each of our three."""


class PeerError(Exception):
    """A peer that was asked for by name is not installed, or its process has died."""

    exit_code = 1


@dataclass(frozen=True)
class PeerCell:
    """The product that a peer is to compute: y[m, n] = x[m, k] W[n, k]^T over `copies` weights in turn."""

    format: str
    n: int
    k: int
    m: int
    copies: int


@dataclass(frozen=True)
class Prepared:
    """A peer's choice for a cell."""

    setting: str
    ns: int
    """Nanoseconds a product, roughly."""
    error: float
    """Largest deviation of the first row of y from float32, relative to its largest element."""


class Peer:
    """One peer's process."""

    def __init__(self, name: str, cores: Sequence[int], report: Report = silent) -> None:
        self.name = name
        self._report = report
        self._lacking: set[str] = set()
        """Formats of which it has been told that they are left out."""
        self._process = subprocess.Popen(
            [_interpreter(), *WORKER, name, ",".join(map(str, cores))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **_environment(cores)},
        )
        hello = self._read()
        self.absent: str | None = hello.get("absent")
        """The reason that the peer cannot run here; None: it can."""
        self._formats: Sequence[str] = hello.get("formats", ())
        if self.absent is None:
            report(f"peer {name} {hello['version']}")

    def prepare(self, cell: PeerCell) -> Prepared | None:
        """Pack the weights and choose a setting; None for a format that the peer lacks.

        A peer whose process has failed or died is left out from then on, and `report` is told; the others go
        on.
        """
        if cell.format not in self._formats:
            if cell.format not in self._lacking:
                self._lacking.add(cell.format)
                self._report(f"peer {self.name} has no {cell.format}: its columns are empty there")
            return None
        answer: dict[str, Any]
        try:
            answer = self._ask(asdict(cell))
        except PeerError as error:
            self._lacking.update(self._formats)  # it is told once
            self._formats = ()
            answer = {"refused": f"{error}; it is left out from here on"}
        if "refused" in answer:
            self._report(f"{self.name}, {cell.format} {cell.n}x{cell.k}, m = {cell.m}: {answer['refused']}")
            return None
        return Prepared(**answer)

    def time(self, calls: int) -> float:
        """Nanoseconds of a product, over about `calls` products. Raises PeerError if the peer fails now."""
        answer = self._ask({"calls": calls})
        if "refused" in answer:
            raise PeerError(f"{self.name} prepared a product and then failed: {answer['refused']}")
        return float(answer["ns"] / answer["products"])

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has died: _read raises
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"peer {self.name} ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def opened_peers(
    names: Sequence[str] | None, cores: Sequence[int], report: Report = silent
) -> Iterator[list[Peer]]:
    """The peers of these names; None: all that are installed. Raises PeerError if a named one is not."""
    with ExitStack() as stack:
        peers = [
            stack.enter_context(closing(Peer(name, cores, report)))
            for name in (NAMES if names is None else names)
        ]
        if names is not None:
            _check_present(peers)
        yield [peer for peer in peers if peer.absent is None]


def _check_present(peers: Sequence[Peer]) -> None:
    for peer in peers:
        if peer.absent is not None:
            raise PeerError(
                f"peer {peer.name} is not installed for {_interpreter()}: {peer.absent}; "
                "PHASEWISE_PEERS_PYTHON may name an interpreter that has it"
            )


def _interpreter() -> str:
    return os.environ.get("PHASEWISE_PEERS_PYTHON") or sys.executable


def _environment(cores: Sequence[int]) -> dict[str, str]:
    """The path to the worker; one thread per core, which spins within a turn and sleeps after it."""
    threads = str(len(cores))
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": threads,
        "OMP_PLACES": ",".join(f"{{{core}}}" for core in cores),
        "OMP_PROC_BIND": "true",
        "GOMP_SPINCOUNT": "20000",
        "KMP_BLOCKTIME": "2",
        "MKL_NUM_THREADS": threads,
        "MKL_DYNAMIC": "FALSE",
        "MKL_THREADING_LAYER": "INTEL",
        "OPENBLAS_NUM_THREADS": threads,
        "OPENBLAS_THREAD_TIMEOUT": "20",
    }
