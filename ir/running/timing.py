"""The process that times kernels: libraries are loaded there, and one case's arguments lie ready."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

from phasewise.ir import nodes as ir
from phasewise.ir.errors import CheckError
from phasewise.ir.running.cases import Case
from phasewise.ir.running.compiling import compile_c
from phasewise.ir.running.harness import timing_program
from phasewise.ir.targets import TARGETS, IsaTarget

CPU_SECONDS = 3600
MEMORY_BYTES = 8 << 30


class TimingProcess:
    """Kernels of one signature, called with one case's arguments on one core. Use it in a `with` block."""

    def __init__(self, function: ir.FunctionDefinition, cases: list[Case], folder: Path, core: int) -> None:
        self._function = function
        main, program, data = folder / "timing.c", folder / "timing", folder / "timing.in"
        main.write_text(timing_program(function))
        compile_c([main], program, TARGETS["portable"], ("-ldl",))
        data.write_bytes(b"".join(case.encoded(function, is_at_end=True) for case in cases))

        def confine() -> None:
            os.setsid()
            os.sched_setaffinity(0, {core})
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        self._process = subprocess.Popen(
            [str(program), str(data)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            preexec_fn=confine,
        )

    def load(self, library: Path) -> int:
        """Number of a kernel, for `call_ns`."""
        return int(self._ask(f"l {library}"))

    def use_case(self, number: int) -> None:
        """Call with another case's arguments from now on."""
        self._ask(f"c {number}")

    def call_ns(self, kernel: int, loops: int, calls_a_loop: int) -> list[int]:
        """Nanoseconds of each loop of calls."""
        return [int(word) for word in self._ask(f"t {kernel} {loops} {calls_a_loop}").split()]

    def _ask(self, line: str) -> str:
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline().strip()
        except BrokenPipeError:
            answer = ""
        if not answer or answer.startswith(("fault", "error")):
            raise CheckError(f"{self._function.name} cannot be timed: {answer or 'its process ended'}")
        return answer

    def __enter__(self) -> TimingProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()


def library_of(text: str, name: str, folder: Path, target: IsaTarget) -> Path:
    """A shared library of one C file."""
    source, out = folder / f"{name}.c", folder / f"{name}.so"
    if not out.exists():
        source.write_text(text)
        compile_c([source], out, target, is_library=True)
    return out
