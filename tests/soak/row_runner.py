"""The runner of tests/soak/hostile.py and tests/soak/faults.py: rows tried on real servers, a line each."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tests.soak.served_process import DEFAULT_MODEL, TINY, leave_no_server


class Missed(Exception):
    """Something that must hold does not; the message says it in one line."""


class Skipped(Exception):
    """This machine cannot try the row, and why."""


Setting = TypeVar("Setting")
Row = Callable[[Setting], str]
"""Returns a line that tells the measured values; raises Missed or Skipped."""


def run_rows(
    description: str,
    rows: Mapping[str, Row[Setting]],
    setting: Callable[[str, Path, bool], Setting],
    left_out_when_quick: Sequence[str] = (),
) -> int:
    """Parse the command line and try the rows that it names, or all. Exit code 1 if anything failed.

    setting: what rows are given, made from the model, a folder for their files, and `quick`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"`{TINY}`: a small random one, in float32")
    parser.add_argument("--quick", action="store_true", help="small numbers")
    parser.add_argument("--only", action="append", choices=rows, metavar="ROW", help=", ".join(rows))
    asked = parser.parse_args()
    leave_no_server()
    left_out = left_out_when_quick if asked.quick else ()
    names = asked.only or [name for name in rows if name not in left_out]
    with tempfile.TemporaryDirectory() as folder:
        given = setting(asked.model, Path(folder), asked.quick)
        held = [_holds(name, rows[name], given) for name in names]
    return 0 if all(held) else 1


def _holds(name: str, row: Row[Setting], setting: Setting) -> bool:
    """True unless a row fails; prints `ok`, `FAIL` or `skip`, and what was seen."""
    began = time.monotonic()
    try:
        verdict, seen = "ok  ", row(setting)
    except Skipped as reason:
        verdict, seen = "skip", str(reason)
    except (Missed, RuntimeError, OSError) as error:
        verdict, seen = "FAIL", f"{type(error).__name__}: {error}"
    print(f"{verdict} {name}: {' '.join(seen.split())} [{time.monotonic() - began:.0f} s]", flush=True)
    return verdict != "FAIL"
