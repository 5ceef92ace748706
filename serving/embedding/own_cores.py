"""An embedder on the cores of its worker, as these come and go: a cpuset, `taskset`, a CPU that goes offline,
a cgroup quota.

Between two batches, at most every LOOK_S, the worker looks at what it may use. It keeps to its own cores as
long as one is left, so that it takes none of another worker's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from phasewise.serving.embedding.devices import highest_cores
from phasewise.serving.embedding.encoder.embedder import Embedder, Floats
from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.errors import RanksError
from phasewise.topology import Machine, TopologyError, read_machine
from phasewise.topology.process_limits import read_limits

LOOK_S = 0.5
"""Seconds between two looks, each of which reads some small files."""

log = logging.getLogger(__name__)


def cores_now(own: Sequence[int], machine: Machine, n_others: int = 0) -> tuple[int, ...]:
    """Those of `own` that this process may use; where it may use none, as many others, the highest ones. No
    more than their share of a quota pays for. n_others: cores of all else that computes for the server.
    """
    allowed = frozenset(machine.allowed_pus)
    kept = tuple(core for core in own if core in allowed)
    now = kept or tuple(highest_cores(machine, n_cores=len(own)))
    return now[: machine.cores_paid(len(own), n_others)]


class OnOwnCores:
    """An embedder that follows its cores. For one thread at a time.

    It lives on a thread of its own: the process's first one, whose affinity `taskset` changes, is not pinned.
    """

    def __init__(
        self,
        open_embedder: Callable[[Sequence[int]], Embedder],
        own: Sequence[int],
        n_others: int = 0,
        look: Callable[[], object] = read_limits,
        machine_now: Callable[[], Machine] = read_machine,
        every_s: float = LOOK_S,
    ) -> None:
        """open_embedder: on these cores, with room for a thread on each of `own`. n_others: cores of all else
        that computes for the server. look: what this process may use; another value than the last one: it has
        changed. Raises as they do.
        """
        self._own, self._n_others = tuple(own), n_others
        self._look, self._machine_now = look, machine_now
        self._every_s, self._next_s = every_s, 0.0
        self._said = ""
        self._seen = look()
        self.cores = cores_now(self._own, machine_now(), n_others)
        """The cores that the next batch is computed on."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="phasewise-embedder")
        self._embedder = self._thread.submit(open_embedder, self.cores).result()

    @property
    def embedder(self) -> Embedder:
        """The computing part; its calls are for this object's thread."""
        return self._embedder

    def embed(self, inputs: Sequence[Tokens]) -> Floats:
        """As `Embedder.embed`, on the cores there are now."""
        self._follow()
        return self._thread.submit(self._embedder.embed, inputs).result()

    def close(self) -> None:
        """Ends the threads. Twice is harmless."""
        self._thread.shutdown()
        self._embedder.close()

    def _follow(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._every_s
        try:
            seen = self._look()
            if seen == self._seen:
                return
            self._move(cores_now(self._own, self._machine_now(), self._n_others))
        except (RanksError, TopologyError, OSError, ValueError) as error:
            self._say(f"the cores of this process have changed, and embeddings keep theirs for now: {error}")
            return
        self._seen, self._said = seen, ""

    def _move(self, cores: tuple[int, ...]) -> None:
        if cores == self.cores:
            return
        self._thread.submit(self._embedder.move, cores).result()
        self.cores = cores
        named = ",".join(map(str, cores))
        log.warning("the cores of this process have changed: embeddings on cores %s", named)

    def _say(self, line: str) -> None:
        """Once, however often it fails."""
        if line != self._said:
            self._said = line
            log.warning("%s", line)
