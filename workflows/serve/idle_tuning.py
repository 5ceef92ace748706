"""Tuning in the idle time of a server: a process of its own, which is stopped while a request runs.

What it finds comes into use between two steps; where the model has several ranks, whose processes keep the
schedules that they began with, from the next start on. Its schedules are of the arithmetic that the server
computes by, so no answer changes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from phasewise._words import counted
from phasewise.workflows.report import Report

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phasewise.cython_kernels.schedules import ScheduleLookup
    from phasewise.serving.engine.engine import Engine
    from phasewise.serving.engine.engine_host import OpenHost
    from phasewise.tuner.plans import Phase
    from phasewise.workflows.opening.open_model import OpenModel
    from phasewise.workflows.serve.settings import ServeSettings
    from phasewise.workflows.tune_kernels.idle_process import IdleTask

    Schedules = Mapping[Phase, ScheduleLookup]

AFTER_S = 2.0
"""Seconds without any request before tuning goes on."""


class IdleTuning:
    """The process, from its first turn on. `go_on` and `pause` are for one thread; the process ends with it.

    won: is called, on another thread, with the number of products that run by another schedule than before.
    """

    after_s = AFTER_S

    def __init__(self, task: IdleTask, won: Callable[[int], None]) -> None:
        self._task = task
        self._won = won
        self._process: subprocess.Popen[str] | None = None

    def go_on(self) -> None:
        """Start the process, or let it go on; nothing where it has ended."""
        if self._process is None:
            self._process = self._start()
        else:
            self._process.send_signal(signal.SIGCONT)

    def pause(self) -> None:
        """Stop the process at once, whatever it does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

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


def host_that_tunes(
    engine: Engine, model: str, opened: OpenModel, settings: ServeSettings, report: Report
) -> OpenHost:
    """The host of an engine which tunes while no request runs."""
    from phasewise.serving.engine.engine_thread import EngineThread
    from phasewise.serving.ranks.open_ranks import LocalRanks
    from phasewise.topology import read_machine
    from phasewise.workflows.opening.open_model import schedules_under
    from phasewise.workflows.tune_kernels.idle_process import IdleTask

    threads: list[EngineThread] = []

    def won(changed: int) -> None:
        tuned = f"tuned while idle: {counted(changed, 'product')} of {opened.model.name} run by new schedules"
        if not isinstance(engine.ranks, LocalRanks):
            report(f"{tuned} from the next start on")
            return
        plans = opened.plans if engine.cores is None else engine.cores.plans
        schedules = schedules_under(plans, settings.weights, settings.db, read_machine(), report)
        threads[0].between_steps(partial(engine.ranks.reschedule, schedules))
        report(tuned)

    task = IdleTask(model, settings.weights, opened.plans, settings.db, os.getpid())

    def open_host(deliver: Callable[..., None], on_lost: Callable[[], None]) -> EngineThread:
        threads.append(EngineThread(engine, deliver, on_lost, idle=IdleTuning(task, won)))
        return threads[0]

    return open_host
