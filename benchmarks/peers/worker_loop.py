"""The loop of every worker of compare.py: a line of JSON asks for a timing, a line of JSON gives it.

Needs nothing but Python, so that it runs under any peer's interpreter.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import TextIO


def answer(run: Callable[[str, int, int], int], out: TextIO | None = None) -> None:
    """Say that the worker is ready, then time what stdin asks for.

    run(phase, n tokens, sequences): nanoseconds. out: stdout if not given.
    """
    out = out or sys.stdout
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ns = run(request["phase"], request["n"], request["sequences"])
        print(json.dumps({"ns": ns}), file=out, flush=True)


def timed_ns(call: Callable[[], object]) -> int:
    began_ns = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - began_ns
