"""Instances on two Ray nodes in network namespaces of this machine, under load: besides the changes of
`changing_instances`, a node is lost with all that runs on it, or is cut off for a while, and joins again.

As there, no request is lost, no begun answer is lost, every answer is that of an undisturbed engine, and no
keys and values stay. It needs root, `ip` and Ray; else it says so and ends with 0.

    python -m tests.soak.changing_nodes                  # two and four instances, 30 seconds each
    python -m tests.soak.changing_nodes --seconds 600    # ten minutes each
"""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from phasewise.cluster.routing import Role
from tests.soak.changing_instances import (
    Asked,
    Changes,
    change_under_load,
    options_of,
    roomy,
    run_all_roles,
)
from tests.support.servers.pools import PoolServer
from tests.support.servers.ray_hosts import RayHosts, is_inside, missing, ray_pools, run_inside

N_HOSTS = 2
AWAY_S = (3.0, 7.0)
"""A node is away for so long."""
ENDS_S = 3.0
"""A node that was cut off learns within so long that it is counted as lost, and ends."""


class NodeChanges(Changes):
    """Changes of instances, and of one node at a time."""

    pauses_s = (0.5, 3.0)

    def __init__(self, server: PoolServer, draw: random.Random, hosts: RayHosts) -> None:
        super().__init__(server, draw)
        self._hosts = hosts
        self._due: deque[tuple[float, Callable[[], None]]] = deque()
        """Steps by which the node that is away comes back, and when each is due."""

    def act(self) -> None:
        """One event, to an instance or a node."""
        if self._due and time.monotonic() >= self._due[0][0]:
            self._due.popleft()[1]()
        elif not self._due and self._draw.random() < 0.3:
            self._lose(self._draw.randrange(N_HOSTS))
        else:
            super().act()

    def all_come_back(self) -> None:
        while self._due:
            due_s, step = self._due.popleft()
            time.sleep(max(0.0, due_s - time.monotonic()))
            step()
        super().all_come_back()
        self._hosts.wait_for(N_HOSTS)

    def _lose(self, number: int) -> None:
        back_s = time.monotonic() + self._draw.uniform(*AWAY_S)
        if self._draw.random() < 0.6:
            self._hosts.kill(number)
            self.counts["nodes lost"] += 1
        else:
            self._hosts.cut(number)
            self._due.append((back_s, partial(self._hosts.mend, number)))
            back_s += ENDS_S
            self.counts["nodes cut off"] += 1
        self._due.append((back_s, partial(self._join, number)))

    def _join(self, number: int) -> None:
        self._hosts.kill(number)
        self._hosts.start(number)
        self.counts["nodes joined"] += 1


def main() -> int:
    options = options_of(__doc__)
    if (reason := missing()) is not None:
        print(f"skip nodes that change: {reason}")
        return 0
    if not is_inside():
        return run_inside(["-m", "tests.soak.changing_nodes", *sys.argv[1:]])
    hosts = RayHosts(N_HOSTS)

    def run(
        model: Path, roles: Sequence[Role], asked: Asked, seconds: float, n_at_once: int, seed: int
    ) -> str:
        with ray_pools(hosts, model, roles, roomy(model), again_s=3.0) as server:
            changes = NodeChanges(server, random.Random(f"{seed} {roles}"), hosts)
            return change_under_load(server, changes, asked, seconds, n_at_once)

    try:
        return run_all_roles(run, options)
    finally:
        hosts.close()


if __name__ == "__main__":
    sys.exit(main())
