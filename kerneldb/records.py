"""The kinds of records that the database keeps, each declared once: frozen values, checked when made.

A `StoredRow` has a `RowKind`: the fields that name its subject, its indexes, its private fields, and the rule
by which one of several rows counts. Tables, lines of files, merging, diff, counts and clean-up follow from
that and from the fields. Nothing here knows SQL.

Rows may come from a stranger's database, so every record refuses what no honest measurement could hold. The
bounds here are sanity; a kernel still checks a schedule against its operands before any pointer moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, ClassVar, TypeVar, cast

from phasewise._words import is_proven, percent
from phasewise.kerneldb.errors import RecordError
from phasewise.kerneldb.fields import (
    MAX_DIMENSION,
    MAX_NS,
    MAX_SAMPLES,
    CheckedRecord,
    Choice,
    Conditions,
    EstimateNs,
    Figures,
    Finite,
    Key,
    Line,
    PlanJson,
    SamplesNs,
    Truth,
    Whole,
    Word,
)

PANEL_COLUMNS = 16
"""Output columns of one packed panel, in every format."""

GROUP = 32
"""Inputs that share a scale; packed weights are padded to a multiple of it."""

MAX_TIME_MS = 253_402_300_799_999  # the end of the year 9999: calendars go no further
MAX_ANSWERS = 2**31 - 1
MAX_STEP_TOKENS = 2**24
MAX_SEQUENCES = 2**16
MAX_GAIN = 1e6
MAX_K_PARTS = 64

SINGLE_CORE = "1 core"
"""The placement of kernels that one thread runs."""

LOOP_ORDERS = ("nm", "mn")
"""Orders of a kernel's loops: `nm` has panel blocks outside row blocks, `mn` row blocks outside."""


@dataclass(frozen=True, slots=True)
class MachineKey(CheckedRecord):
    """The kind of machine: topology's two signatures, never a host name."""

    core_sig: Line
    placement_sig: Line


@dataclass(frozen=True, slots=True)
class Problem(CheckedRecord):
    """The computation of a kernel: y[m, n] = x[m, k] W[n, k]^T over weights of one format."""

    has_table = True

    family: Word
    """Kernel family, e.g. `gemm`."""
    format: Word
    """Weight format, e.g. `bf16`, `int4`."""
    n: Annotated[int, Whole(1, MAX_DIMENSION)]
    k: Annotated[int, Whole(1, MAX_DIMENSION)]
    m: Annotated[int, Whole(1, MAX_DIMENSION)]

    def describe(self) -> str:
        """A few words for people, e.g. `gemm int4 1536x576, m 8`."""
        return f"{self.family} {self.format} {self.n}x{self.k}, m {self.m}"


_Block = Annotated[int, Whole(1, 2**24)]
_Threads = Annotated[int, Whole(1, 4096)]


@dataclass(frozen=True, slots=True)
class Schedule(CheckedRecord):
    """The way in which a kernel computes a `Problem`: only numbers, and the names of a compute path and of a
    loop order.

    The micro-kernel holds `mr` rows by `panels` panels of 16 columns. A computation slice is `block_m x
    block_n x block_k`; the thread grid is `threads_m x threads_n x threads_k`. `compute_path` and `k_parts`
    are the arithmetic and decide the bits of the result; the rest decides speed.
    """

    has_table = True

    mr: Annotated[int, Whole(1, 64)]
    panels: Annotated[int, Whole(1, 16)]
    block_m: _Block
    block_n: _Block
    block_k: _Block
    threads_m: _Threads
    threads_n: _Threads
    threads_k: _Threads
    compute_path: Word
    """The arithmetic of weights and activations, by a name that the kernel family knows, e.g. `fma`,
    `int8_dot`, `bf16_dot`."""
    k_parts: Annotated[int, Whole(1, MAX_K_PARTS)]
    """Number of parts in which the k inputs are summed; the parts' sums are added in order."""
    prefetch_bytes: Annotated[int, Whole(0, 65_536)]
    """Distance in bytes from a panel's reads to the lines that are prefetched; 0: no prefetching."""
    loop_order: Word

    def _check_whole(self) -> None:
        Whole(1, 4096)("the thread grid", self.threads)
        if self.loop_order not in LOOP_ORDERS:
            raise RecordError(f"loop_order must be {' or '.join(LOOP_ORDERS)}, not {self.loop_order!r:.80}")
        for name, step in (("block_m", self.mr), ("block_n", self.nr), ("block_k", GROUP)):
            if getattr(self, name) % step:
                raise RecordError(f"{name} must be a multiple of {step}, not {getattr(self, name)}")

    @property
    def nr(self) -> int:
        """Output columns of the micro-kernel."""
        return PANEL_COLUMNS * self.panels

    @property
    def walk(self) -> dict[str, int | str]:
        """The fields that kernels are told: all but the weight's, `compute_path` and `k_parts`."""
        return {
            name: value for name, value in asdict(self).items() if name not in ("compute_path", "k_parts")
        }

    @property
    def threads(self) -> int:
        """Threads of the whole grid."""
        return self.threads_m * self.threads_n * self.threads_k


@dataclass(frozen=True, slots=True)
class Sample(CheckedRecord):
    """One timing of one schedule, as an evaluator returns it."""

    schedule: Schedule
    samples_ns: SamplesNs
    estimate_ns: EstimateNs
    numeric_error: Annotated[float | None, Finite(0.0)]
    """Largest error seen against the reference, relative to its largest value; None if not compared."""
    effort_ns: Annotated[int, Whole(0, MAX_NS)]
    """Wall clock that this timing cost, warm-up included."""
    conditions: Conditions = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Origin(CheckedRecord):
    """The place and time at which a row was made, and whether it may be trusted here."""

    machine: MachineKey
    program_version: Line
    created_at_ms: Annotated[int, Whole(0, MAX_TIME_MS)]
    """Unix time at which the row was made, in milliseconds."""
    verified: Annotated[bool, Truth()] = True
    """Measured by this database's owner on a machine of this kind; imported rows start unverified."""


_Gain = Annotated[float, Finite(0.0, MAX_GAIN)]


@dataclass(frozen=True, slots=True)
class Comparison(CheckedRecord):
    """A paired A/B: how many times as fast the candidate was as the incumbent."""

    gain: _Gain
    """Incumbent's time / candidate's time, a robust estimate over the pairs."""
    gain_low: _Gain
    gain_high: _Gain
    confidence: Annotated[float, Finite(0.0, 1.0)]
    """Confidence level of the interval from `gain_low` to `gain_high`, e.g. 0.95."""
    pairs: Annotated[int, Whole(1, MAX_SAMPLES)]

    def _check_whole(self) -> None:
        if not self.gain_low <= self.gain <= self.gain_high:
            raise RecordError("gain must lie between gain_low and gain_high")

    @property
    def proves_faster(self) -> bool:
        """The candidate is faster than the incumbent, beyond doubt of the comparison's confidence."""
        return self.gain_low > 1.0 and is_proven(self.gain, self.gain_low, self.gain_high)

    @property
    def proves_slower(self) -> bool:
        """The candidate is slower than the incumbent, beyond doubt of the comparison's confidence."""
        return self.gain_high < 1.0 and is_proven(self.gain, self.gain_low, self.gain_high)


@dataclass(frozen=True, slots=True)
class ServedStep(CheckedRecord):
    """The step of the engine that was timed: `sequences` of `context` tokens take `tokens` new ones each."""

    phase: Word
    tokens: Annotated[int, Whole(1, MAX_STEP_TOKENS)]
    sequences: Annotated[int, Whole(1, MAX_SEQUENCES)]
    context: Annotated[int, Whole(0, MAX_STEP_TOKENS)]


@dataclass(frozen=True, slots=True)
class UserProblem(CheckedRecord):
    """A user's kernel, in one build, on one shape: the values of its whole numbers. No code is kept.
    `kernel_abi` holds a hash over the kernel's text and its lowered C: parameters are used only for the
    source that they were found with."""

    name: Line
    """Name of the kernel's function."""
    kernel_abi: Line
    shape: Choice

    def describe(self) -> str:
        """A few words for people, e.g. `dot n=64`."""
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.shape)])


# ---- kinds of rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowKind:
    """The declaration of a kind of rows beside its fields. Names are those of flat fields. To add a kind:
    declare it at the end of this file, and draft its migration (`phasewise.migrations`)."""

    word: str
    """The word that begins a row's line in a file."""
    table: str
    named_by: tuple[str, ...]
    """Fields that name the row's subject. Files are sorted by these fields, then by machine, build and time;
    in a merge, rows are compared with rows of the same subject and instant."""
    indexes: Mapping[str, tuple[str, ...]]
    """Columns of each index, by the last word of the index's name."""
    private: tuple[str, ...] = ()
    """Fields that may name something of the owner. Rows of a kind with such fields leave only on request, and
    a row whose private fields hold the host's name, the user's or a path is never pushed."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Names of columns that differ from their fields' names, by field."""
    on_one_core: bool = False
    """True if the placement of every row is SINGLE_CORE, which needs no column."""
    newest_of: tuple[str, ...] = ()
    """Fields of whose combinations clean-up with a limit keeps the newest rows; empty: deletes none."""
    is_used_imported: bool = False
    """True if the newest imported row counts where no row was made here."""


R = TypeVar("R", bound="StoredRow")


class StoredRow(CheckedRecord):
    """A row that tables and files keep: appended, never edited. The newest row of a subject counts."""

    __slots__ = ()
    kind: ClassVar[RowKind]
    origin: Origin

    @property
    def build(self) -> str:
        """The kernel's build; empty for a kind of row without one."""
        return getattr(self, "kernel_abi", "")

    @property
    def verdict(self) -> tuple[str, str, str] | None:
        """For a comparison of databases: kind of subject, subject, verdict in words; None: no verdict."""
        return None


def trusted(row: R, verified: bool) -> R:
    """Copy the row with another `verified`, which each database decides for itself."""
    if row.origin.verified is verified:
        return row
    changed: R = replace(cast(Any, row), origin=replace(row.origin, verified=verified))
    return changed


_KEY_COLUMNS = ("core_sig", "placement_sig", "kernel_abi", "problem_id")
_OF_PROBLEM = {"key": _KEY_COLUMNS, "problem": ("problem_id",)}
_OF_MODEL = ("model_key", "phase", "core_sig", "placement_sig")


@dataclass(frozen=True, slots=True)
class Measurement(StoredRow):
    """A timing of a schedule for a problem, by one build of the kernel, on one kind of machine."""

    kind = RowKind(
        "measurement",
        "measurement",
        named_by=("problem",),
        indexes={
            "key": (*_KEY_COLUMNS, "verified", "schedule_id", "estimate_ns"),
            "problem": ("problem_id",),
            "schedule": ("schedule_id",),
        },
    )
    problem: Problem
    sample: Sample
    kernel_abi: Line
    """Hash over the kernel family's body and flags: samples of different builds are not compared."""
    origin: Origin


@dataclass(frozen=True, slots=True)
class Promotion(StoredRow):
    """A schedule taken into use for a problem after a duel with the schedule in use until then. The newest
    verified promotion of a problem, machine and build counts."""

    kind = RowKind("promotion", "promotion", named_by=("problem",), indexes=_OF_PROBLEM)
    problem: Problem
    schedule: Schedule
    incumbent: Schedule | None
    """The schedule that the promoted one was compared with; None: the kernel's own default."""
    comparison: Comparison
    kernel_abi: Line
    origin: Origin


@dataclass(frozen=True, slots=True)
class StorageDuel(StoredRow):
    """A duel of a weight stored sparse with the same weight stored dense."""

    kind = RowKind("storage_duel", "storage_duel", named_by=("problem",), indexes=_OF_PROBLEM)
    problem: Problem
    """The product by the sparse weight, whose format names the sixteenths that are kept, e.g. `bf16s8`."""
    schedule: Schedule
    """The schedule of the product by the sparse weight."""
    dense_schedule: Schedule
    comparison: Comparison
    """The paired timings; `gain` is dense's time / sparse's time."""
    kernel_abi: Line
    origin: Origin

    @property
    def verdict(self) -> tuple[str, str, str]:
        """The faster one of two storages."""
        faster = "sparse" if self.comparison.proves_faster else "dense"
        return "storage", self.problem.describe(), faster


@dataclass(frozen=True, slots=True)
class PlanRecord(StoredRow):
    """A service plan for one phase of one model on one kind of machine."""

    kind = RowKind(
        "plan",
        "service_plan",
        named_by=("model_key", "phase"),
        indexes={"key": _OF_MODEL},
        private=("model_key", "plan_json"),
        columns={"plan_json": "plan"},
        newest_of=_OF_MODEL,
        is_used_imported=True,
    )
    model_key: Key
    phase: Word
    plan_json: PlanJson
    origin: Origin
    objectives: Figures = field(default_factory=dict, hash=False)
    """Figures measured for the plan, e.g. `tpot_ms`; empty for a plan set by hand."""

    @property
    def verdict(self) -> tuple[str, str, str]:
        return "plan", f"{self.model_key}, {self.phase}", self.plan_json


@dataclass(frozen=True, slots=True)
class StepTime(StoredRow):
    """One timing of one step of a model on one configuration of cores. A reader checks that
    `configuration_key` names the plan that it replays."""

    kind = RowKind(
        "step_time",
        "step_time",
        named_by=("model_key", "configuration_key", "step"),
        indexes={"key": _OF_MODEL},
        private=("model_key", "plan_json"),
        columns={"plan_json": "plan"},
    )
    model_key: Key
    configuration_key: Line
    """Hash over the cores of the plan's ranks, as `tuner.topotree.Configuration.key` computes it."""
    plan_json: PlanJson
    kernels: Word
    """The schedules of the products: `default` or `tuned`."""
    step: ServedStep
    samples_ns: SamplesNs
    estimate_ns: EstimateNs
    kernel_abi: Line
    """Build of the kernel family in which most of the time is spent."""
    origin: Origin
    conditions: Conditions = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class PredictorScore(StoredRow):
    """The worth of a predictor of answers' lengths, judged by answers that it did not learn from. The score
    says nothing of a machine: its origin is only where it was judged."""

    kind = RowKind(
        "predictor_score",
        "predictor_score",
        named_by=("model_name", "answers_key"),
        indexes={"key": ("model_name", "answers_key")},
        private=("model_name", "reads"),
        newest_of=("model_name", "reads", "answers_key", "judged_by"),
        is_used_imported=True,
    )
    model_name: Key
    """The model whose answers the predictor forecasts."""
    reads: Key
    """The predictor's input: `tokens`, or the name of the embedding model that reads prompts for it."""
    answers_key: Line
    """Hash over the answers that judged the predictor: scores with the same hash can be compared."""
    judged_by: Word
    """The way of judging: `held_out`, `folds` or `drift`."""
    learnt_answers: Annotated[int, Whole(1, MAX_ANSWERS)]
    judged_answers: Annotated[int, Whole(1, MAX_ANSWERS)]
    hold: Annotated[float, Finite(0.0, 1.0)]
    """The share of answers that the reserved lengths were to hold."""
    origin: Origin
    figures: Figures = field(default_factory=dict, hash=False)
    """Figures by name, e.g. `accuracy`, `utilisation`, and `coverage_90`: the share of answers within the
    forecast's 90 % interval."""

    @property
    def verdict(self) -> tuple[str, str, str]:
        of = f"{self.model_name}, {self.reads}, {self.judged_by}, answers {self.answers_key}"
        return "predictor", of, f"holds {percent(self.figures.get('accuracy', 0.0), 1)}"


class _UserRow(StoredRow):
    """A row about a user's kernel, which one thread runs."""

    __slots__ = ()
    problem: UserProblem

    @property
    def kernel_abi(self) -> str:
        return self.problem.kernel_abi

    def _check_whole(self) -> None:
        placement = self.origin.machine.placement_sig
        if placement != SINGLE_CORE:
            raise RecordError(f"a user's kernel runs on {SINGLE_CORE}, not {placement!r:.40}")


def _of_user(word: str, table: str) -> RowKind:
    return RowKind(
        word,
        table,
        named_by=("problem",),
        indexes={"key": ("core_sig", "kernel_abi")},
        private=("name",),
        columns={"choice": "parameters"},
        on_one_core=True,
    )


@dataclass(frozen=True, slots=True)
class UserTiming(_UserRow):
    """One timing of one choice of parameters for a user's kernel."""

    kind = _of_user("user_timing", "user_kernel_timing")
    problem: UserProblem
    choice: Choice
    samples_ns: SamplesNs
    estimate_ns: EstimateNs
    origin: Origin
    conditions: Conditions = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class UserPromotion(_UserRow):
    """The parameters of a user's kernel that came into use, or stayed so, after a duel."""

    kind = _of_user("user_promotion", "user_kernel_promotion")
    problem: UserProblem
    choice: Choice
    incumbent: Choice
    comparison: Comparison
    origin: Origin

    @property
    def verdict(self) -> tuple[str, str, str]:
        chosen = " ".join(f"{name}={value}" for name, value in self.choice)
        return "user kernel", self.problem.describe(), chosen or "default"


_KINDS: tuple[type[StoredRow], ...] = (
    *(Measurement, PlanRecord, PredictorScore, Promotion, StepTime, StorageDuel, UserPromotion, UserTiming),
)
KINDS = {record.kind.word: record for record in sorted(_KINDS, key=lambda record: record.kind.word)}
"""The types of rows by the word that begins a line of a file, in the order of a file."""
PRIVATE = frozenset(record for record in KINDS.values() if record.kind.private)
"""Types of rows that name something of their owner: models, or functions."""
