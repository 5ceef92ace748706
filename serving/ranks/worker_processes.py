"""The processes of all ranks but the first, and the thread that starts and watches them.

The kernel kills a worker when the thread that started it ends, so that no worker outlives the engine. That
thread lives as long as the workers, and is not the caller's. A worker reports through a pipe, whose end of
file, which the kernel ensures, reveals its death.
"""

from __future__ import annotations

import os
import pickle
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phasewise._words import ending_of
from phasewise.serving.errors import RanksError
from phasewise.serving.processes.behind_others import keep_to
from phasewise.serving.processes.children import END_S, end_children, start_child
from phasewise.serving.ranks.rank_instructions import Instructions, Report
from phasewise.serving.ranks.rank_memory import ByNode
from phasewise.serving.ranks.rank_teams import keeping_affinity

START_S = 300.0
"""Seconds within which a worker must be ready. Most of the time is copying a large model's weights."""

MODULE = "phasewise.serving.ranks.rank_worker"
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""One thread for numpy's libraries, which compute nothing in a worker."""


@dataclass(slots=True)
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    said: bytes = b""
    report: Report | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank} (pid {self.process.pid})"


class WorkerProcesses:
    """Starts and watches a process for each of `instructions`. `on_death`: called on another thread when one
    is lost. `start_s`: seconds within which every process must be ready."""

    def __init__(
        self, instructions: Sequence[Instructions], on_death: Callable[[], None], start_s: float = START_S
    ) -> None:
        self._told = instructions
        self._start_s = start_s
        self._on_death = on_death
        self._owner = os.getpid()
        self._workers: list[_Worker] = []
        self._settled = threading.Event()
        """Set when all workers are ready, or one is lost."""
        self.lost: str | None = None
        """One line on why these ranks can compute no more; None: all work."""
        self._followed = False
        """True if `lost` is about a rank that ended because of another one, whose end is not known yet."""
        self._closing, self._close_now = os.pipe2(os.O_CLOEXEC)
        if not instructions:  # the first rank is alone
            self._settled.set()
        self._thread = threading.Thread(target=self._live, name="phasewise-ranks", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the workers, by rank."""
        return {worker.rank: worker.process.pid for worker in self._workers}

    @property
    def copied_by_node(self) -> dict[int, ByNode | None]:
        """Bytes by NUMA node of the weights that each rank has copied, by rank."""
        return {worker.rank: worker.report.weights for worker in self._workers if worker.report}

    def wait_until_ready(self) -> dict[int, int]:
        """Wait for all workers; return errno or 0 of each memory policy. RanksError: one cannot start."""
        self._settled.wait()
        if self.lost is not None:
            raise RanksError(self.lost)
        return {worker.rank: worker.report.policy_errno for worker in self._workers if worker.report}

    def reason(self, wait_s: float) -> str | None:
        """The reason of a failure that other ranks have noticed already. If no process dies within `wait_s`,
        those that remain hang: ranks that work leave a failed group."""
        deadline = time.monotonic() + wait_s
        while (self.lost is None or self._followed) and time.monotonic() < deadline:
            time.sleep(0.005)
        if self.lost is not None and not self._followed:
            return self.lost
        hanging = ", ".join(worker.name for worker in self._workers if worker.process.poll() is None)
        return f"{hanging} did not come to meet the other ranks" if hanging else self.lost

    def kill(self) -> None:
        """Kill the processes, stopped ones too. Call `close` afterwards."""
        for worker in self._workers:
            worker.process.kill()

    def close(self) -> None:
        """Wait for workers that were told to stop, and kill those that do not end. May be called twice."""
        if os.getpid() != self._owner or self._close_now < 0:
            return
        os.close(self._close_now)
        self._close_now = -1
        self._thread.join()
        os.close(self._closing)
        self._on_death = lambda: None  # which held the memory of the closed ranks

    # ---- on the thread -----------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            for told in self._told:
                self._workers.append(_start(told))
            self._watch()
        except (OSError, RanksError) as error:
            self._lose(f"the processes of the ranks cannot be started: {error}")
        except BaseException as error:
            self._lose(f"the ranks are not watched any more: {error!r}")
            raise
        finally:
            end_children(worker.process for worker in self._workers)
            for worker in self._workers:
                if worker.process.stdout is not None:
                    worker.process.stdout.close()

    def _watch(self) -> None:
        """Watch the workers until `close`."""
        deadline = time.monotonic() + self._start_s
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._closing, selectors.EVENT_READ)
            for worker in self._workers:
                assert worker.process.stdout is not None
                waiting.register(worker.process.stdout, selectors.EVENT_READ, worker)
            while True:
                left_s = None if self._settled.is_set() else max(0.0, deadline - time.monotonic())
                ready = waiting.select(left_s)
                if any(key.data is None for key, _ in ready):
                    return
                if not ready:
                    late = ", ".join(worker.name for worker in self._workers if worker.report is None)
                    self._lose(f"{late} did not start within {self._start_s:.0f} s")
                for key, _ in ready:
                    if not self._hear(key.data):
                        waiting.unregister(key.fileobj)
                        words = _last_words(key.data)
                        # One that ended with status 0 has noticed that the group failed.
                        self._lose(words, followed=key.data.process.poll() == 0)

    def _hear(self, worker: _Worker) -> bool:
        """Read a worker's message. False: the worker has died, or reported that it cannot start."""
        assert worker.process.stdout is not None
        said = os.read(worker.process.stdout.fileno(), 1 << 16)
        worker.said += said
        if said and worker.said.endswith(b"\n"):
            worker.report = Report.from_line(worker.said)
        if all(each_worker.report and not each_worker.report.error for each_worker in self._workers):
            self._settled.set()
        return bool(said) and not (worker.report and worker.report.error)

    def _lose(self, reason: str, followed: bool = False) -> None:
        """Record a loss. The first reason stays, unless it was only a consequence of another rank's end."""
        first = self.lost is None
        if first or (self._followed and not followed):
            self.lost, self._followed = reason, followed
        if first:
            self._on_death()
        self._settled.set()


def _start(told: Instructions) -> _Worker:
    with keeping_affinity():
        if told.pinned:  # from its first import on: other cores may be those of engines that answer
            keep_to({core for cores in told.cores.values() for core in cores})
        process = start_child(
            MODULE,
            pickle.dumps(told),
            more=ONE_THREAD,
            stdout=subprocess.PIPE,
            pass_fds=told.descriptors,
            bufsize=0,
        )
    return _Worker(told.division.rank, process)


def _last_words(worker: _Worker) -> str:
    """One line about a worker that has ended, or is about to."""
    if worker.report and worker.report.error:
        return f"rank {worker.rank} cannot start: {worker.report.error}"
    try:
        how = ending_of(worker.process.wait(END_S))
    except subprocess.TimeoutExpired:
        return f"{worker.name} closed its pipe and hangs"
    if worker.report is None:
        return f"{worker.name} {how} while it started"
    return f"{worker.name} {how}"
