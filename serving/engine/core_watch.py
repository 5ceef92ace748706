"""Watch over the cores of a running engine, which taskset, a cpuset, a cgroup quota or a CPU going offline
may change. A thread looks twice a second at the cores that this process may use and plans for the cores left;
the engine's thread takes the plans between two steps. Until then threads of a lost core run elsewhere."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from phasewise.cython_kernels.schedules import ScheduleLookup
from phasewise.serving.errors import ServingError
from phasewise.topology import TopologyError
from phasewise.tuner.plans import Phase, ServicePlan

LOOK_S = 0.5
"""Seconds between two looks at the cores, each of which reads some small files."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CorePlans:
    """Plans of both phases for the present cores. `schedules`: kernel schedules, same arithmetic."""

    plans: Mapping[Phase, ServicePlan]
    schedules: Mapping[Phase, ScheduleLookup] | None = None

    @property
    def cores(self) -> dict[Phase, tuple[object, ...]]:
        """Cores of each phase: the starts of its bands, and the cores of each band's ranks."""
        return {
            phase: (plan.starts, *(tuple(rank.cores for rank in each.ranks) for each in plan.each))
            for phase, plan in self.plans.items()
        }


class CoreChanges:
    """Changes of the cores that this process may use. `look`: reads them, changed if the value differs;
    ValueError or OSError: not readable now. `kept`: says what stays while a change cannot be followed."""

    def __init__(self, look: Callable[[], object], kept: str) -> None:
        self._look, self._kept = look, kept
        self._seen = look()
        self._said = ""

    def follow(self, change: Callable[[], None]) -> None:
        """Call `change` if the cores have changed since it last succeeded; its error is logged, but not twice
        in succession."""
        try:
            seen = self._look()
            if seen == self._seen:
                return
            change()
        except (ServingError, TopologyError, OSError, ValueError) as error:
            line = f"the cores of this process have changed, and {self._kept} for now: {error}"
            if line != self._said:
                self._said = line
                log.warning("%s", line)
            return
        self._seen, self._said = seen, ""


class CoreWatch:
    """Watches the cores of one engine. `take` and `moved` are called on its thread, `look` (as for
    `CoreChanges`) and `replan`, which makes plans or raises ServingError, on the watch's."""

    def __init__(
        self,
        plans: Mapping[Phase, ServicePlan],
        look: Callable[[], object],
        replan: Callable[[], CorePlans],
        every_s: float = LOOK_S,
    ) -> None:
        self._replan = replan
        self._every_s = every_s
        self._changes = CoreChanges(look, "the plans stay")
        self._in_use = CorePlans(plans)
        self.waiting: CorePlans | None = None
        """Plans that the engine has not taken yet; readable from any thread."""
        self._lock = threading.Lock()
        self._on_change: Callable[[], None] = lambda: None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phasewise-cores", daemon=True)
        self.n_moves = 0
        """Number of times that the engine changed to other plans."""

    @property
    def plans(self) -> Mapping[Phase, ServicePlan]:
        return self._in_use.plans

    def watch(self, on_change: Callable[[], None]) -> None:
        """Start watching. `on_change`: called on the watch's thread when new plans wait."""
        self._on_change = on_change
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def take(self) -> CorePlans | None:
        """Remove and return the waiting plans; None: there are none, or their cores are those in use."""
        with self._lock:
            waiting, self.waiting = self.waiting, None
        return None if waiting is None or waiting.cores == self._in_use.cores else waiting

    def moved(self, to: CorePlans) -> None:
        """Record that the engine runs by these plans now."""
        self._in_use = to
        self.n_moves += 1
        for plan in to.plans.values():
            log.warning("the cores of this process have changed: %s", plan.describe())

    def _run(self) -> None:
        while not self._ending.wait(self._every_s):
            self._changes.follow(self._plan)

    def _plan(self) -> None:
        planned = self._replan()
        with self._lock:
            self.waiting = planned
        self._on_change()
