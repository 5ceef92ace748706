"""The process that times kernels: it loads their libraries and holds one case's arguments ready."""

from __future__ import annotations

from pathlib import Path

from phasewise.ir import nodes as ir
from phasewise.ir.errors import CheckError
from phasewise.ir.running.cases import Case
from phasewise.ir.running.compiling import compile_c
from phasewise.ir.running.harness import timing_program
from phasewise.ir.running.limited import ChildLimits, LimitedProcess
from phasewise.ir.targets import TARGETS, IsaTarget

LIMITS = ChildLimits(seconds=3600, memory_bytes=8 << 30, file_bytes=0)


class TimingProcess(LimitedProcess):
    """Kernels of one signature, called with one case's arguments on one core. Use it in a `with` block."""

    def __init__(self, function: ir.FunctionDefinition, cases: list[Case], folder: Path, core: int) -> None:
        self._function = function
        main, program, data = folder / "timing.c", folder / "timing", folder / "timing.in"
        main.write_text(timing_program(function))
        compile_c([main], program, TARGETS["portable"], ("-ldl",))
        data.write_bytes(b"".join(case.encoded(function, is_at_end=True) for case in cases))

        super().__init__([str(program), str(data)], LIMITS, core)

    def load(self, library: Path) -> int:
        """Load a kernel's library; returns the kernel's number, for `call_ns`."""
        return int(self._ask(f"l {library}"))

    def use_case(self, number: int) -> None:
        """Call with another case's arguments from now on."""
        self._ask(f"c {number}")

    def call_ns(self, kernel: int, loops: int, calls_a_loop: int) -> list[int]:
        """Time a kernel: nanoseconds of each loop of calls."""
        return [int(word) for word in self._ask(f"t {kernel} {loops} {calls_a_loop}").split()]

    def _ask(self, line: str) -> str:
        answer = self.answer_to(line).strip()
        if not answer or answer.startswith(("fault", "error")):
            raise CheckError(f"{self._function.name} cannot be timed: {answer or 'its process ended'}")
        return answer


def library_of(text: str, name: str, folder: Path, target: IsaTarget) -> Path:
    """Compile one C file to a shared library."""
    source, out = folder / f"{name}.c", folder / f"{name}.so"
    if not out.exists():
        source.write_text(text)
        compile_c([source], out, target, is_library=True)
    return out
