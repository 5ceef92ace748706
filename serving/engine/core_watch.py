"""Cores that come and go under a running engine: taskset, a cpuset, a cgroup quota, a CPU that goes offline.

A thread looks twice a second at what this process may use and asks for plans for what is left. The engine's
thread takes them between two steps. Until then nothing stops: threads of a core that is gone run elsewhere.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from phasewise.cython_kernels.schedules import ScheduleLookup
from phasewise.serving.errors import ServingError
from phasewise.tuner.plans import Phase, ServicePlan

LOOK_S = 0.5
"""Seconds between two looks, each of which reads some small files."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CorePlans:
    """The plans of both phases for the cores there are. `schedules` are of the arithmetic in use."""

    plans: Mapping[Phase, ServicePlan]
    schedules: Mapping[Phase, ScheduleLookup] | None = None

    @property
    def cores(self) -> dict[Phase, tuple[object, ...]]:
        """The cores of each phase, rank by rank, and those of its bands."""
        return {
            phase: (plan.starts, *(tuple(rank.cores for rank in each.ranks) for each in plan.each))
            for phase, plan in self.plans.items()
        }


class CoreWatch:
    """Watches for one engine that runs by `plans`. `take` and `moved` are for its thread. look: what this
    process may use; another value than the last one: it has changed. ValueError, OSError: not now. replan:
    the plans for the cores there are then, or ServingError. Both are called on a thread of the watch's."""

    def __init__(
        self,
        plans: Mapping[Phase, ServicePlan],
        look: Callable[[], object],
        replan: Callable[[], CorePlans],
        every_s: float = LOOK_S,
    ) -> None:
        self._replan = replan
        self._look = look
        self._every_s = every_s
        self._seen = look()
        self._in_use = CorePlans(plans)
        self.waiting: CorePlans | None = None
        """Plans to take; any thread may look."""
        self._lock = threading.Lock()
        self._said = ""
        self._on_change: Callable[[], None] = lambda: None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phasewise-cores", daemon=True)
        self.n_moves = 0
        """Times that the engine has gone on by other plans."""

    @property
    def plans(self) -> Mapping[Phase, ServicePlan]:
        """The plans that the engine runs by."""
        return self._in_use.plans

    def watch(self, on_change: Callable[[], None]) -> None:
        """Begin. `on_change` is called, on the watch's thread, when there is something to take."""
        self._on_change = on_change
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def take(self) -> CorePlans | None:
        """Plans that differ from those in use, once; None: there are no others."""
        with self._lock:
            waiting, self.waiting = self.waiting, None
        return None if waiting is None or waiting.cores == self._in_use.cores else waiting

    def moved(self, to: CorePlans) -> None:
        """The engine runs by these from now on."""
        self._in_use = to
        self.n_moves += 1
        for plan in to.plans.values():
            log.warning("the cores of this process have changed: %s", plan.describe())

    def _run(self) -> None:
        while not self._ending.wait(self._every_s):
            try:
                seen = self._look()
                if seen == self._seen:
                    continue
                planned = self._replan()
            except (ServingError, OSError, ValueError) as error:
                self._say(f"the cores of this process have changed, and the plans stay for now: {error}")
                continue
            self._seen, self._said = seen, ""
            with self._lock:
                self.waiting = planned
            self._on_change()

    def _say(self, line: str) -> None:
        """Once, however often it fails."""
        if line != self._said:
            self._said = line
            log.warning("%s", line)
