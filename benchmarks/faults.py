"""Everything that can go wrong with a running server, done to a real one, and what must hold afterwards.

Each row starts its own `phasewise serve` (rows about ranks: with a plan of two), does its harm from outside,
and checks answers, exit codes, KV slots, descriptors, shared memory, processes and memory. A line for each:
`ok`, `FAIL` or `skip`, and what was seen. Exit code 1 if anything failed.

    python benchmarks/faults.py                        # the default model, everything: about ten minutes
    python benchmarks/faults.py --model tiny --quick   # about a minute, as the test suite does
    python benchmarks/faults.py --only drained --only forced
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fault_rows import clients, ranks, service
from fault_rows.setting import Setting, Skipped, Wrong
from served_process import DEFAULT_MODEL, TINY, leave_no_server

ROWS: dict[str, Callable[[Setting], str]] = {
    "killed_while_starting": ranks.killed_while_starting,
    "killed_in_each_phase": ranks.killed_in_each_phase,
    "killed_under_migration": ranks.killed_under_migration,
    "again_and_again": ranks.again_and_again,
    "stopped": ranks.stopped,
    "gone_mid_stream": clients.gone_mid_stream,
    "slow_readers": clients.slow_readers,
    "idle_connections": clients.idle_connections,
    "drained": service.drained,
    "forced": service.forced,
    "disk_full": service.disk_full,
    "kv_exhausted": service.kv_exhausted,
}
SLOW = ("stopped", "again_and_again")
"""Bounded by waits that are seconds long, whatever the model: not part of --quick."""


def run(name: str, setting: Setting) -> bool:
    """Whether a row holds, or cannot be tried here."""
    began = time.monotonic()
    try:
        verdict, seen = "ok  ", ROWS[name](setting)
    except Skipped as reason:
        verdict, seen = "skip", str(reason)
    except (Wrong, RuntimeError, OSError) as error:
        verdict, seen = "FAIL", f"{type(error).__name__}: {error}"
    print(f"{verdict} {name}: {seen} [{time.monotonic() - began:.0f} s]", flush=True)
    return verdict != "FAIL"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"`{TINY}`: a small random one, in float32")
    parser.add_argument("--quick", action="store_true", help="small numbers")
    parser.add_argument("--only", action="append", choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    asked = parser.parse_args()
    leave_no_server()
    names = asked.only or [name for name in ROWS if not (asked.quick and name in SLOW)]
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(asked.model, Path(folder), asked.quick)
        held = [run(name, setting) for name in names]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
