"""The process in which a function for a slot is checked and timed before anything else calls it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phasewise.cython_kernels._native import SLOT_SYMBOL, isa_active
from phasewise.ir.errors import CheckError
from phasewise.ir.running.limited import ChildLimits, LimitedProcess
from phasewise.tuner import timing
from phasewise.workflows.user_kernels.turns import take_of

COMMAND = (sys.executable, "-m", "phasewise.cython_kernels.user_slots.process")
LIMITS = ChildLimits(seconds=3600, memory_bytes=8 << 30, file_bytes=16 << 20)
"""Rows lie in memory that counts as a file."""
CHECK_SECONDS = 300
"""Processor time; every float32 of an activation takes thirty."""

_TOLD = {
    "differs": "element {index} has other bits than the built-in function's",
    "repeats": "the same row gives other bits when it comes again",
    "writes_beyond": "it writes beside the row",
    "changes_modes": "it leaves the modes of floating point changed",
    "faults": "it touches what it was not given, or has no such instruction (signal {signal})",
    "is_late": "it is not done in time",
    "threads_differ": "it gives other bits while other threads call it",
    "no_memory": "there is no memory to check it in",
}


class SlotProcess(LimitedProcess):
    """Checks and timings of functions for slots, each answered by the process that calls them."""

    def __init__(self, core: int | None = None) -> None:
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PHASEWISE_ISA": isa_active()}
        super().__init__(COMMAND, LIMITS, core, environment)

    def problem(
        self,
        slot: str,
        library: Path,
        seed: int,
        *,
        symbol: str = SLOT_SYMBOL,
        every_float: bool = False,
        seconds: int = CHECK_SECONDS,
    ) -> str | None:
        """The way a function breaks the contract of its slot, in words; None: it keeps it."""
        verdict = self._ask(
            "check", slot=slot, library=str(library), symbol=symbol, seed=seed, every_float=every_float,
            seconds=seconds,
        )  # fmt: skip
        if verdict["outcome"] == "agrees":
            return None
        place = f"n = {verdict['n']}, {verdict['way']}" if verdict["n"] else "before the first call"
        return f"{place}: {_TOLD[verdict['outcome']].format(**verdict)}"

    def built_in_digest(self, slot: str, library: Path, seed: int) -> int:
        """The digest that a process's own check has to find. CheckError where the library fails."""
        verdict = self._ask("recheck", slot=slot, library=str(library), symbol=SLOT_SYMBOL, seed=seed)
        if verdict["outcome"] != "agrees":
            raise CheckError(f"{slot}: {_TOLD[verdict['outcome']].format(index=0, signal=0)}")
        return int(verdict["digest"])

    def take(self, slot: str, library: Path | None, lengths: Sequence[int]) -> timing.Take:
        """Turns of rounds over rows of these lengths; of the built-in function without a library."""
        name = None if library is None else str(library)

        def call_ns(loops: int, calls: int) -> list[int]:
            rows = {"lengths": list(lengths), "loops": loops, "calls": calls}
            answer = self._ask("time", slot=slot, library=name, symbol=SLOT_SYMBOL, **rows)
            return [int(ns) for ns in answer["loop_ns"]]

        return take_of(call_ns)

    def _ask(self, do: str, **asked: Any) -> dict[str, Any]:
        line = self.answer_to(json.dumps({"do": do, **asked}))
        if not line:
            raise CheckError(f"{asked['slot']}: the process that calls the kernel has ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise CheckError(f"{asked['slot']}: {answer['error']}")
        return answer
