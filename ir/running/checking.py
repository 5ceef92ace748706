"""Comparison of a kernel with its original, a check that it touches no other memory, and the process that
times kernels. Each runs in a limited process."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phasewise._words import number
from phasewise.ir import nodes as ir
from phasewise.ir.errors import CheckError
from phasewise.ir.running import cases as drawing
from phasewise.ir.running.cases import DTYPES, Case
from phasewise.ir.running.compiling import compile_c, emulator_for
from phasewise.ir.running.harness import FAULT, check_program, timing_program
from phasewise.ir.running.limited import ChildLimits, LimitedProcess, run
from phasewise.ir.targets import TARGETS, IsaTarget
from phasewise.ir.types import Pointer, Scalar, Type, Void, innermost

RUN_LIMITS = ChildLimits(seconds=60, memory_bytes=8 << 30, file_bytes=1 << 30)
BATCH_BYTES = 64 << 20
BATCH_CASES = 2000
REASSOCIATED_BOUND = 2.0**-14
"""Largest allowed difference if sums have another order, relative to the original's result for absolute
values. Twice 2^-24 for each of the at most 512 additions that one lane of a sum of 4096 numbers takes."""


@dataclass(frozen=True)
class KernelOutputs:
    """The outcome of one call: the result's bits, and the buffers that are not const, in order."""

    result: bytes
    buffers: tuple[bytes, ...]


@dataclass(frozen=True)
class Verdict:
    """The number of calls that agreed, and the largest distance of a result from the original's."""

    cases: int
    worst: float
    """Largest difference relative to the bound's scale; 0.0 if all bits are equal."""
    is_exact: bool


class Program:
    """A kernel built with the harness, ready to run cases. Its folder is removed by the caller."""

    def __init__(
        self,
        function: ir.FunctionDefinition,
        sources: Sequence[Path],
        folder: Path,
        target: IsaTarget,
        flags: Sequence[str] = (),
    ) -> None:
        self._function = function
        self._folder = folder
        self._emulator = emulator_for(target)
        self._name = f"{sources[0].stem}-{target.name}"
        main = folder / f"{self._name}-main.c"
        main.write_text(check_program(function))
        self._path = folder / self._name
        compile_c([main, *sources], self._path, target, flags)

    def run(self, cases: Sequence[Case]) -> list[KernelOutputs]:
        """Run all cases in one process. CheckError for a kernel that touches other memory or never ends."""
        data, out = self._folder / f"{self._name}.in", self._folder / f"{self._name}.out"
        with data.open("wb") as file:
            for number, case in enumerate(cases):
                file.write(case.encoded(self._function, is_at_end=number % 2 == 0))
        command = [*self._emulator, str(self._path), str(data), str(out)]
        done = run(command, RUN_LIMITS)
        if done.code == FAULT:
            raise CheckError(self._explained(done.output, cases))
        if done.code != 0:
            raise CheckError(f"{self._function.name} ended with {done.signal_name or f'code {done.code}'}")
        return self._read(out, cases)

    def _explained(self, output: str, cases: Sequence[Case]) -> str:
        words = output.split()
        number = int(words[1]) if len(words) > 1 else 0
        sizes = {
            name: value
            for (name, _), value in zip(self._function.args, cases[number].values, strict=True)
            if not isinstance(value, bytes)
        }
        call = ", ".join(f"{name}={value}" for name, value in sizes.items())
        if "argument" in words:
            index, offset = int(words[3]), int(words[5])
            name, of = self._function.args[index]
            size = len(cases[number].values[index])  # type: ignore[arg-type]
            if 0 <= offset < size:
                return f"{self._function.name}({call}) writes to `{name}`, which is const"
            return (
                f"{self._function.name}({call}) touches byte {offset} of `{name}`, which has {size} bytes "
                f"(as described); {of.to.size if isinstance(of, Pointer) else 1} bytes an element"
            )
        signal = words[-1] if words else "?"
        return f"{self._function.name}({call}) ended with signal {signal} far from its arguments"

    def _read(self, out: Path, cases: Sequence[Case]) -> list[KernelOutputs]:
        data, offset, outputs = out.read_bytes(), 0, []
        for case in cases:
            result, offset = data[offset : offset + 8], offset + 8
            buffers = []
            for value, (_, of) in zip(case.values, self._function.args, strict=True):
                if isinstance(value, bytes) and isinstance(of, Pointer) and not of.is_const:
                    buffers.append(data[offset : offset + len(value)])
                    offset += len(value)
            outputs.append(KernelOutputs(result, tuple(buffers)))
        return outputs


def check(
    original: Program,
    other: Program,
    function: ir.FunctionDefinition,
    n_cases: int,
    bound: float | None = None,
    seed: int = 0,
    where: str = "kernel",
) -> Verdict:
    """Call a kernel and its original with the same arguments. bound: largest allowed difference; None: bits
    must be equal. CheckError for the first call that differs, naming its numbers."""
    rng, done, worst, is_exact = np.random.default_rng(seed), 0, 0.0, True
    while done < n_cases:
        batch: list[Case] = []
        n_bytes = 0
        while len(batch) < BATCH_CASES and done + len(batch) < n_cases and n_bytes < BATCH_BYTES:
            batch.append(drawing.draw(function, rng, edge=done + len(batch), where=where))
            n_bytes += sum(len(value) for value in batch[-1].values if isinstance(value, bytes))
        expected, got = original.run(batch), other.run(batch)
        scales = expected
        if bound is not None:
            scales = original.run([drawing.magnitudes(case, function) for case in batch])
        for case, wanted, given, scale in zip(batch, expected, got, scales, strict=True):
            difference = _difference(function, wanted, given, scale)
            is_exact &= wanted == given
            if difference > (bound or 0.0):
                raise CheckError(_told(function, case, difference, bound))
            worst = max(worst, difference)
        done += len(batch)
    return Verdict(done, worst, is_exact)


def _told(function: ir.FunctionDefinition, case: Case, difference: float, bound: float | None) -> str:
    named = zip(function.args, case.values, strict=True)
    call = ", ".join(f"{name}={value}" for (name, _), value in named if not isinstance(value, bytes))
    if bound is None:
        return (
            f"{function.name}({call}): bits differ from the original's, by {number(difference, 3)} relative"
        )
    return (
        f"{function.name}({call}): {number(difference, 3)} from the original,"
        f" more than the bound {number(bound, 3)}"
    )


def _difference(
    function: ir.FunctionDefinition, expected: KernelOutputs, got: KernelOutputs, scale: KernelOutputs
) -> float:
    """The largest difference of two results relative to `scale`: 0.0 for equal bits; infinite where values
    differ that cannot be close, such as whole numbers."""
    worst = 0.0
    if not isinstance(function.result, Void):
        assert isinstance(function.result, Scalar)
        size = function.result.size
        triple = (outputs.result[:size] for outputs in (expected, got, scale))
        worst = _of_numbers(function.result, *triple)
    out = [of for _, of in function.args if isinstance(of, Pointer) and not of.is_const]
    for of, expected_buffer, got_buffer, scale_buffer in zip(
        out, expected.buffers, got.buffers, scale.buffers, strict=True
    ):
        worst = max(worst, _of_buffer(of.to, expected_buffer, got_buffer, scale_buffer))
    return worst


def _of_buffer(of: Type, expected: bytes, got: bytes, scale: bytes) -> float:
    if expected == got:
        return 0.0
    inner = innermost(of)
    if isinstance(inner, Scalar):
        return _of_numbers(inner, expected, got, scale)
    return float("inf")  # structs within structs


def _of_numbers(of: Scalar, expected: bytes, got: bytes, scale: bytes) -> float:
    if expected == got:
        return 0.0
    if not of.is_float:
        return float("inf")
    a, b, s = (
        np.frombuffer(outputs, DTYPES[of.name]).astype(np.float64) for outputs in (expected, got, scale)
    )
    same = (a == b) & (np.signbit(a) == np.signbit(b)) | np.isnan(a) & np.isnan(b)
    if same.all():
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        size = max(
            float(np.abs(s[np.isfinite(s)]).max(initial=0.0)),
            float(np.abs(a[np.isfinite(a)]).max(initial=0.0)),
        )
        worst = float(np.abs(a - b)[~same].max())
    if np.isnan(worst) or size == 0.0:
        return float("inf")
    return max(worst / size, float(np.finfo(np.float64).tiny))


def in_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder for programs and cases, for a `with` block, which removes it at the end."""
    return tempfile.TemporaryDirectory(prefix="phasewise-kernel-")


LIMITS = ChildLimits(seconds=3600, memory_bytes=8 << 30, file_bytes=0)


class TimingProcess(LimitedProcess):
    """Process that times kernels of one signature with one case's arguments on one core, in `with`."""

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
        """Use another case's arguments for the calls from now on."""
        self._ask(f"c {number}")

    def call_ns(self, kernel: int, loops: int, calls_a_loop: int) -> list[int]:
        """Time a kernel; returns the nanoseconds of each loop of calls."""
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
