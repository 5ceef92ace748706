"""Records of kernels that users bring: timings of their parameters, and the parameters in use.

No code is kept. `kernel_abi` holds a hash over the kernel's text and its lowered C: parameters are used for
the very source that they were found with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from phasewise.kerneldb import records
from phasewise.kerneldb.errors import RecordError
from phasewise.kerneldb.records import SINGLE_CORE, Comparison, Origin

MAX_NUMBERS = 32


@dataclass(frozen=True, slots=True)
class UserProblem:
    """One kernel, in one build, on one shape: the values of its whole numbers."""

    name: str
    """Name of its function."""
    kernel_abi: str
    shape: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        records._check_line("the name of a kernel", self.name)
        records._check_line("kernel_abi", self.kernel_abi)
        _check_numbers("shape", self.shape)

    def describe(self) -> str:
        """A few words for people, e.g. `dot n=64`."""
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.shape)])


Choice: TypeAlias = tuple[tuple[str, int], ...]
"""A value for each parameter, in the order of the text."""


@dataclass(frozen=True, slots=True)
class UserTiming:
    """One timing of one choice of parameters."""

    problem: UserProblem
    choice: Choice
    samples_ns: tuple[int, ...]
    estimate_ns: int
    origin: Origin
    conditions: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def kernel_abi(self) -> str:
        """The build that was timed."""
        return self.problem.kernel_abi

    def __post_init__(self) -> None:
        _check_numbers("choice", self.choice)
        _check_placement(self.origin)
        records._check_samples(self.samples_ns)
        records._check_int("estimate_ns", self.estimate_ns, 1, records.MAX_NS)
        conditions = records._checked_numbers("conditions", self.conditions, records.MAX_CONDITIONS)
        object.__setattr__(self, "conditions", conditions)


@dataclass(frozen=True, slots=True)
class UserPromotion:
    """The parameters that came into use, or stayed so, after a duel."""

    problem: UserProblem
    choice: Choice
    incumbent: Choice
    comparison: Comparison
    origin: Origin

    @property
    def kernel_abi(self) -> str:
        """The build that was compared."""
        return self.problem.kernel_abi

    def __post_init__(self) -> None:
        _check_numbers("choice", self.choice)
        _check_numbers("incumbent", self.incumbent)
        _check_placement(self.origin)


def _check_placement(origin: Origin) -> None:
    if origin.machine.placement_sig != SINGLE_CORE:
        raise RecordError(f"a user's kernel runs on {SINGLE_CORE}, not {origin.machine.placement_sig!r:.40}")


def _check_numbers(name: str, numbers: object) -> None:
    if not isinstance(numbers, tuple):
        raise RecordError(f"{name} must be a list of pairs")
    if len(numbers) > MAX_NUMBERS:
        raise RecordError(f"{name} must be at most {MAX_NUMBERS} names with whole numbers")
    for pair in numbers:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) or len(pair[0]) > 32:
            raise RecordError(f"{name} must be names of at most 32 characters with whole numbers")
        records._check_int(f"{pair[0]!s:.32} in {name}", pair[1], -(2**31), records.MAX_DIMENSION)
