"""Everything that can go wrong with a running server, done to a real one, and what must hold afterwards.

Each row starts its own `phasewise serve` (rows about ranks: with a plan of two), does its harm from outside,
and checks answers, exit codes, KV slots, descriptors, shared memory, processes and memory. A line for each:
`ok`, `FAIL` or `skip`, and what was seen. Exit code 1 if anything failed.

    python -m tests.soak.faults                        # the default model, everything: about ten minutes
    python -m tests.soak.faults --model tiny --quick   # about a minute, as the test suite does
    python -m tests.soak.faults --only disk_full --only kv_exhausted
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.soak.fault_rows import clients, ranks, service
from tests.soak.fault_rows.setting import Setting
from tests.soak.row_runner import run_rows

ROWS: dict[str, Callable[[Setting], str]] = {
    "killed_while_starting": ranks.killed_while_starting,
    "killed_in_each_phase": ranks.killed_in_each_phase,
    "killed_under_migration": ranks.killed_under_migration,
    "again_and_again": ranks.again_and_again,
    "gone_mid_stream": clients.gone_mid_stream,
    "slow_readers": clients.slow_readers,
    "disk_full": service.disk_full,
    "kv_exhausted": service.kv_exhausted,
}
SLOW = ("again_and_again",)
"""Bounded by waits that are seconds long, whatever the model: not part of --quick."""


def main() -> int:
    return run_rows(__doc__ or "", ROWS, Setting, SLOW)


if __name__ == "__main__":
    sys.exit(main())
