"""Records of kernels that users bring: timings of their parameters, and the parameters in use.

No code is kept. `kernel_abi` holds a hash over the kernel's text and its lowered C: parameters are used for
the very source that they were found with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from phasewise.kerneldb import records
from phasewise.kerneldb.errors import RecordError
from phasewise.kerneldb.models import UserKernelPromotionRow, UserKernelTimingRow
from phasewise.kerneldb.records import Comparison, MachineKey, Origin

if TYPE_CHECKING:
    from phasewise.kerneldb.queries import AnySelect
    from phasewise.kerneldb.rows import AnyRow

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


Choice = tuple[tuple[str, int], ...]
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
        _check_numbers("parameters", self.choice)
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
        _check_numbers("parameters", self.choice)
        _check_numbers("parameters", self.incumbent)


def _check_numbers(name: str, numbers: object) -> None:
    if not isinstance(numbers, tuple) or len(numbers) > MAX_NUMBERS:
        raise RecordError(f"{name} must be at most {MAX_NUMBERS} names with whole numbers")
    for one in numbers:
        if not isinstance(one, tuple) or len(one) != 2 or not isinstance(one[0], str) or len(one[0]) > 32:
            raise RecordError(f"{name} must be names of at most 32 characters with whole numbers")
        records._check_int(f"{one[0]!s:.32} in {name}", one[1], -(2**31), records.MAX_DIMENSION)


def timing_row(one: UserTiming) -> UserKernelTimingRow:
    """A new row."""
    return UserKernelTimingRow(
        name=one.problem.name,
        kernel_abi=one.problem.kernel_abi,
        shape=[*map(list, one.problem.shape)],
        parameters=[*map(list, one.choice)],
        samples_ns=list(one.samples_ns),
        estimate_ns=one.estimate_ns,
        conditions=dict(one.conditions),
        **_origin_columns(one.origin),
    )


def promotion_row(one: UserPromotion) -> UserKernelPromotionRow:
    """A new row."""
    found = one.comparison
    return UserKernelPromotionRow(
        name=one.problem.name,
        kernel_abi=one.problem.kernel_abi,
        shape=[*map(list, one.problem.shape)],
        parameters=[*map(list, one.choice)],
        incumbent=[*map(list, one.incumbent)],
        gain=found.gain,
        gain_low=found.gain_low,
        gain_high=found.gain_high,
        confidence=found.confidence,
        pairs=found.pairs,
        **_origin_columns(one.origin),
    )


def _origin_columns(origin: Origin) -> dict[str, object]:
    return {
        "core_sig": origin.machine.core_sig,
        "program_version": origin.program_version,
        "created_at_ms": origin.created_at_ms,
        "verified": origin.verified,
    }


def same_key_as(
    row: UserTiming | UserPromotion, instants: Collection[int]
) -> tuple[AnySelect, Callable[[AnyRow], Any]]:
    """The query for stored rows of a row's build and kind of core, of these instants, and their reader."""
    is_timing = isinstance(row, UserTiming)
    model: Any = UserKernelTimingRow if is_timing else UserKernelPromotionRow
    query = select(model).where(
        model.core_sig == row.origin.machine.core_sig,
        model.kernel_abi == row.kernel_abi,
        model.created_at_ms.in_(instants),
    )
    build: Any = timing_of if is_timing else promotion_of
    return query, lambda found: build(found[0])


def timing_of(row: UserKernelTimingRow) -> UserTiming:
    """The record of a row."""
    samples = tuple(row.samples_ns) if isinstance(row.samples_ns, list) else ()
    return UserTiming(
        _problem_of(row), _numbers(row.parameters), samples, row.estimate_ns, _origin_of(row), row.conditions
    )


def promotion_of(row: UserKernelPromotionRow) -> UserPromotion:
    """The record of a row."""
    found = Comparison(row.gain, row.gain_low, row.gain_high, row.confidence, row.pairs)
    return UserPromotion(
        _problem_of(row), _numbers(row.parameters), _numbers(row.incumbent), found, _origin_of(row)
    )


def _problem_of(row: UserKernelTimingRow | UserKernelPromotionRow) -> UserProblem:
    return UserProblem(row.name, row.kernel_abi, _numbers(row.shape))


def _numbers(stored: object) -> Choice:
    if not isinstance(stored, list) or not all(isinstance(one, list) for one in stored):
        raise RecordError("names with whole numbers must be a list of pairs")
    return tuple(tuple(one) for one in stored)


SINGLE_CORE = "1 core"
"""The placement of kernels that one thread runs."""


def _origin_of(row: UserKernelTimingRow | UserKernelPromotionRow) -> Origin:
    machine = MachineKey(row.core_sig, SINGLE_CORE)
    return Origin(machine, row.program_version, row.created_at_ms, row.verified)
