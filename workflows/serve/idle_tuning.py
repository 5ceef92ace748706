"""Tuning in the idle time of a server: a process of its own, which is stopped while a request runs.

What it finds comes into use between two steps; where the model has several ranks, whose processes keep the
schedules that they began with, from the next start on. Its schedules are of the arithmetic that the server
computes by, so no answer changes.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from phasewise._words import counted
from phasewise.workflows.report import Report

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phasewise.serving.engine.core_watch import CoreWatch
    from phasewise.serving.engine.engine import Engine
    from phasewise.serving.engine.engine_host import Deliver, OpenHost, SharedCores
    from phasewise.tuner.plans import Phase, ServicePlan
    from phasewise.workflows.opening.open_model import OpenModel
    from phasewise.workflows.serve.settings import ServeSettings
    from phasewise.workflows.tune_kernels.idle_process import IdleTask

    Plans = Mapping[Phase, ServicePlan]

log = logging.getLogger(__name__)

AFTER_S = 2.0
"""Seconds without any request before tuning goes on."""
MOMENT_S = 0.005
"""A process that was stopped has stopped by then."""
LOCKS = Path("/proc/locks")
"""A line for each: number, POSIX, ADVISORY, READ or WRITE, the process, the file, the bytes."""


class IdleTuning:
    """The process, from its first turn on. `go_on` and `pause` are for one thread; the process ends with it.

    won: is called, on another thread, with the number of products that run by another schedule than before.
    """

    after_s = AFTER_S

    def __init__(self, task: IdleTask, won: Callable[[int], None]) -> None:
        self._task = task
        self._won = won
        self._process: subprocess.Popen[str] | None = None
        self._signals = threading.Lock()
        """Held while the process is told to stop, or to go on."""
        self._is_paused = False

    def go_on(self) -> None:
        """Start the process, or let it go on; nothing where it has ended."""
        with self._signals:
            self._is_paused = False
            if self._process is not None:
                self._process.send_signal(signal.SIGCONT)
                return
        try:
            self._process = self._start()
        except OSError as error:  # another time
            log.warning("tuning in idle time cannot begin: %s", error)

    def pause(self) -> None:
        """Stop the process at once, whatever it does. Where it holds a lock, such as that of a database which
        it writes to, it goes on until it has none: others wait for that.
        """
        if self._process is None:
            return
        with self._signals:
            self._is_paused = True
            self._process.send_signal(signal.SIGSTOP)
        letting = threading.Thread(target=self._let_go, args=(self._process,), name="phasewise-idle-locks")
        letting.daemon = True
        letting.start()

    def _let_go(self, process: subprocess.Popen[str]) -> None:
        """Until it is stopped and holds no lock, or may go on anyway."""
        while True:
            time.sleep(MOMENT_S)
            with self._signals:
                if not (self._is_paused and holds_lock(process.pid)):
                    return
                process.send_signal(signal.SIGCONT)
            while holds_lock(process.pid):  # its class is the idle one: it may have to wait for a core
                time.sleep(MOMENT_S)
            with self._signals:
                if self._is_paused:
                    process.send_signal(signal.SIGSTOP)

    def _start(self) -> subprocess.Popen[str]:
        from phasewise.serving.processes.secrets import environment_for_children
        from phasewise.serving.sandbox.confined import ONE_THREAD
        from phasewise.workflows.tune_kernels.idle_process import MODULE

        process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment_for_children(), **ONE_THREAD},
        )
        threading.Thread(target=self._listen, args=(process,), name="phasewise-idle", daemon=True).start()
        return process

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        with process:
            try:
                process.stdin.write(self._task.to_json())
                process.stdin.close()
            except BrokenPipeError:
                return  # it has said why
            for line in process.stdout:
                self._won(int(line))


def holds_lock(pid: int) -> bool:
    """True if a process holds part of a file for itself, as whoever writes to a SQLite database does."""
    with suppress(OSError):
        fields = map(str.split, LOCKS.read_text().splitlines())
        return any("WRITE" in each and str(pid) in each[4:5] for each in fields)
    return False


def reschedule_under(plans: Plans, cores: CoreWatch | None, reschedule: Callable[[], None]) -> None:
    """Call `reschedule`, whose schedules were looked up for `plans`; not where the engine runs by other plans
    by now, which came with schedules of their own.
    """
    if cores is None or cores.plans is plans:
        reschedule()


def host_that_tunes(
    engine: Engine, model: str, opened: OpenModel, settings: ServeSettings, report: Report
) -> OpenHost:
    """The host of an engine which tunes while no request runs."""
    from phasewise.kerneldb.errors import KernelDbError
    from phasewise.serving.engine.engine_thread import EngineThread
    from phasewise.serving.ranks.open_ranks import LocalRanks
    from phasewise.topology import TopologyError, read_machine
    from phasewise.tuner.errors import TunerError
    from phasewise.workflows.opening.open_model import schedules_under
    from phasewise.workflows.tune_kernels.idle_process import IdleTask

    threads: list[EngineThread] = []

    def won(changed: int) -> None:
        tuned = f"tuned while idle: {counted(changed, 'product')} of {opened.model.name} run by new schedules"
        ranks, cores = engine.ranks, engine.cores
        if not isinstance(ranks, LocalRanks):
            report(f"{tuned} from the next start on")
            return
        plans = opened.plans if cores is None else cores.plans
        try:
            schedules = schedules_under(plans, settings.weights, settings.db, read_machine(), report)
        except (KernelDbError, TopologyError, TunerError) as error:
            report(f"{tuned} from the next start on: {error}")
            return
        reschedule = partial(ranks.reschedule, schedules)
        threads[0].between_steps(partial(reschedule_under, plans, cores, reschedule))
        report(tuned)

    task = IdleTask(model, settings.weights, opened.plans, settings.db, os.getpid())

    def open_host(deliver: Deliver, on_lost: Callable[[], None], cores: SharedCores) -> EngineThread:
        threads.append(EngineThread(engine, deliver, on_lost, cores, idle=IdleTuning(task, won)))
        return threads[0]

    return open_host
