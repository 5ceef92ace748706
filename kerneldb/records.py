"""The kinds of records that the database keeps, each declared once: frozen values, checked when made.

A field's annotation holds its check. A `Row` has a `Kind`: what names it, its indexes, what is private in it,
and which of several rows counts. Tables, lines of files, merging, diff, counts and clean-up follow from both.
Nothing here knows SQL.

Rows may come from a stranger's database, so every record refuses what no honest measurement could hold.
The bounds here are sanity; a kernel still checks a schedule against its operands before any pointer moves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache, lru_cache
from operator import attrgetter
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar, cast, get_args, get_type_hints

from phasewise._words import WIDEST, is_proven, number, percent
from phasewise.kerneldb.errors import RecordError

PANEL_COLUMNS = 16
"""Output columns of one packed panel, in every format."""

GROUP = 32
"""Inputs that share a scale; packed weights are padded to a multiple of it."""

MAX_DIMENSION = 2**31 - 1
MAX_NS = 2**63 - 1
MAX_TIME_MS = 253_402_300_799_999  # the end of the year 9999: calendars go no further
MAX_SAMPLES = 100_000
MAX_TEXT = 255
MAX_PLAN_CHARS = 100_000
MAX_ANSWERS = 2**31 - 1
MAX_STEP_TOKENS = 2**24
MAX_SEQUENCES = 2**16
MAX_GAIN = 1e6
MAX_K_PARTS = 64
MAX_PAIRS = 32
"""Most arguments, or parameters, of a user's kernel."""

SINGLE_CORE = "1 core"
"""The placement of kernels that one thread runs."""

LOOP_ORDERS = ("nm", "mn")
"""Outermost first: panel blocks outside row blocks, or the other way round."""

# ---- what a field may hold --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Whole:
    """A whole number within bounds."""

    low: int
    high: int

    def __call__(self, name: str, value: object) -> object:
        if type(value) is not int or not self.low <= value <= self.high:
            raise RecordError(
                f"{name} must be a whole number from {self.low} to {self.high}, not {value!r:.80}"
            )
        return value


@dataclass(frozen=True)
class Finite:
    """A finite float within bounds."""

    low: float = -math.inf
    high: float = math.inf

    def __call__(self, name: str, value: object) -> object:
        if not isinstance(value, float) or not math.isfinite(value) or not self.low <= value <= self.high:
            bounds = "" if self.low == -math.inf else f" of at least {number(self.low)}"
            bounds += "" if self.high == math.inf else f" and at most {number(self.high)}"
            raise RecordError(f"{name} must be a finite number{bounds}, not {value!r:.80}")
        return value


@dataclass(frozen=True)
class Truth:
    """True or false."""

    def __call__(self, name: str, value: object) -> object:
        if type(value) is not bool:
            raise RecordError(f"{name} must be true or false, not {value!r:.80}")
        return value


@dataclass(frozen=True)
class Text:
    """Text of one pattern, in at most so many characters."""

    most: int
    what: str
    """In words, for messages."""
    pattern: re.Pattern[str]

    def __call__(self, name: str, value: object) -> object:
        if not isinstance(value, str) or len(value) > self.most or not self.pattern.fullmatch(value):
            raise RecordError(f"{name} must be {self.what}, not {value!r:.80}")
        return value


@dataclass(frozen=True)
class Samples:
    """Nanoseconds a call or a step, raw, in the order taken."""

    def __call__(self, name: str, value: object) -> object:
        if not isinstance(value, tuple) or not 1 <= len(value) <= MAX_SAMPLES:
            raise RecordError(f"{name} must be a tuple of 1 to {MAX_SAMPLES} numbers")
        if set(map(type, value)) != {int} or min(value) < 1 or max(value) > MAX_NS:
            for sample in value:
                _NS(f"a sample in {name}", sample)
        return value


@dataclass(frozen=True)
class Numbers:
    """A mapping of words to finite numbers. What is kept is an own copy."""

    most: int

    def __call__(self, name: str, value: object) -> object:
        if not isinstance(value, Mapping) or len(value) > self.most:
            raise RecordError(f"{name} must be a mapping of at most {self.most} words to numbers")
        if not (all(map(_is_word, value)) and all(map(_is_finite, value.values()))):
            for word, figure in value.items():
                _WORD(f"a name in {name}", word)
                _FINITE(f"{word} in {name}", figure)
        return dict(value)


@dataclass(frozen=True)
class Pairs:
    """Names with whole numbers, in the order of a kernel's text."""

    def __call__(self, name: str, value: object) -> object:
        if not isinstance(value, tuple):
            raise RecordError(f"{name} must be a list of pairs")
        if len(value) > MAX_PAIRS:
            raise RecordError(f"{name} must be at most {MAX_PAIRS} names with whole numbers")
        for pair in value:
            if not isinstance(pair, tuple) or len(pair) != 2 or type(pair[0]) is not str or len(pair[0]) > 32:
                raise RecordError(f"{name} must be names of at most 32 characters with whole numbers")
            _PAIRED(f"{pair[0]} in {name}", pair[1])
        return value


Check: TypeAlias = Whole | Finite | Truth | Text | Samples | Numbers | Pairs

_NS, _FINITE, _PAIRED = Whole(1, MAX_NS), Finite(), Whole(-(2**31), MAX_DIMENSION)
_WORD = Text(32, "a lower-case word of at most 32 characters", re.compile(r"[a-z][a-z0-9_]*"))
_LINE = Text(MAX_TEXT, f"1 to {MAX_TEXT} printable ASCII characters", re.compile(r"[!-~](?:[ -~]*[!-~])?"))
# No half of a pair, which SQLite cannot keep, and no zero, which PostgreSQL cannot.
_KEY = re.compile(r"(?=[^\ud800-\udfff]*\Z)\S(?:[^\x00-\x1f\x7f-\x9f]*\S)?")
_PLAN = Text(
    MAX_PLAN_CHARS,
    f"text of 1 to {MAX_PLAN_CHARS} characters without zeros and halves of characters",
    re.compile(r"[^\x00\ud800-\udfff]+"),
)


@lru_cache(maxsize=1024)
def _is_word(word: object) -> bool:
    return isinstance(word, str) and len(word) <= _WORD.most and _WORD.pattern.fullmatch(word) is not None


def _is_finite(figure: object) -> bool:
    return type(figure) is float and math.isfinite(figure)


Word = Annotated[str, _WORD]
Line = Annotated[str, _LINE]
Key = Annotated[str, Text(MAX_TEXT, f"1 to {MAX_TEXT} characters in a line", _KEY)]
PlanJson = Annotated[str, _PLAN]
"""A service plan, opaque here: `tuner.plans` reads and checks it."""
SamplesNs = Annotated[tuple[int, ...], Samples()]
EstimateNs = Annotated[int, _NS]
"""The stated robust estimate over samples."""
Conditions = Annotated[Mapping[str, float], Numbers(16)]
"""The surroundings that the timer noticed, e.g. `steal_share`, `mhz`, `load`."""
Figures = Annotated[Mapping[str, float], Numbers(64)]
Choice: TypeAlias = Annotated[tuple[tuple[str, int], ...], Pairs()]
"""A value for each parameter of a user's kernel, in the order of the text."""


# ---- fields of records ------------------------------------------------------------------------------------


class Record:
    """A value whose fields are checked when it is made: RecordError, which names field, value and bounds."""

    __slots__ = ()

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, check, may_be_none in _checks(kind):
            value = getattr(self, name)
            if value is None and may_be_none:
                continue
            checked = check(name, value)
            if checked is not value:
                object.__setattr__(self, name, checked)
        self._check_whole()

    def _check_whole(self) -> None:
        """Check what is more than one field's business."""


@dataclass(frozen=True, slots=True)
class Part:
    """One field of a record."""

    name: str
    record: type | None
    """The record that the field holds; None: a plain value."""
    check: Check | None
    """Of a plain value."""
    may_be_none: bool

    @property
    def is_flat(self) -> bool:
        """The field is one value among a record's flat fields."""
        return self.record is None or self.record in KEYED


@cache
def parts(record: Any) -> tuple[Part, ...]:
    """The fields of a record's type, in order."""
    hints = get_type_hints(record, include_extras=True)
    return tuple(_part(own.name, hints[own.name]) for own in fields(record))


def _part(name: str, hint: Any) -> Part:
    choices = (hint, *get_args(hint))
    record = next((choice for choice in choices if is_dataclass(choice) and isinstance(choice, type)), None)
    check = next(iter(getattr(hint, "__metadata__", ())), None)
    return Part(name, record, check, type(None) in (*choices, *get_args(choices[1] if check else None)))


@cache
def _checks(record: Any) -> tuple[tuple[str, Check, bool], ...]:
    return tuple((part.name, part.check, part.may_be_none) for part in parts(record) if part.check)


@cache
def flat_parts(record: Any) -> tuple[Part, ...]:
    """The flat fields of a record and of the records within it, in order: the columns of its table."""
    return tuple(
        inner for part in parts(record) for inner in ((part,) if part.is_flat else flat_parts(part.record))
    )


def flattened(record: object) -> dict[str, Any]:
    """All values by the names of their flat fields."""
    kind: Any = type(record)
    names, read = _flat(kind)
    return dict(zip(names, read(record), strict=True))


@cache
def _flat(record: Any) -> tuple[tuple[str, ...], attrgetter[Any]]:
    """The names of a record's flat fields, and what reads them all; every record has two or more."""
    return tuple(part.name for part in flat_parts(record)), attrgetter(*_paths(record))


def _paths(record: Any) -> Iterator[str]:
    for part in parts(record):
        yield from (part.name,) if part.is_flat else (f"{part.name}.{path}" for path in _paths(part.record))


@cache
def is_shared(record: Any) -> bool:
    """True of records of words and whole numbers alone: many rows have the same, and equal ones are alike."""
    return all(isinstance(part.check, Text | Whole) for part in parts(record))


@lru_cache(maxsize=4096, typed=True)
def shared(record: Any, *values: Any) -> Any:
    """One record for all rows with the same values, such as a problem or a kind of machine: checked once."""
    return record(*values)


def made(record: Any, *values: Any) -> Any:
    """The record of these values, or why there is none."""
    try:
        return shared(record, *values)
    except RecordError as error:
        return error


# ---- records within rows ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MachineKey(Record):
    """The kind of machine: topology's two signatures. Never a host name."""

    core_sig: Line
    placement_sig: Line


@dataclass(frozen=True, slots=True)
class Problem(Record):
    """The computation that a kernel is asked for: y[m, n] = x[m, k] W[n, k]^T over weights of one format."""

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
class Schedule(Record):
    """The way in which a kernel computes it: only numbers, and the names of a compute path and of a loop
    order.

    The micro-kernel holds `mr` rows by `panels` panels of 16 columns. A computation slice is
    `block_m x block_n x block_k`; the thread grid is `threads_m x threads_n x threads_k`.
    `compute_path` and `k_parts` are the arithmetic and decide the bits of the result; the rest decides speed.
    """

    mr: Annotated[int, Whole(1, 64)]
    panels: Annotated[int, Whole(1, 16)]
    block_m: _Block
    block_n: _Block
    block_k: _Block
    threads_m: _Threads
    threads_n: _Threads
    threads_k: _Threads
    compute_path: Word
    """The arithmetic of weights and activations, e.g. `fma`, `int8_dot`, `bf16_dot`; known to the kernel
    family.
    """
    k_parts: Annotated[int, Whole(1, MAX_K_PARTS)]
    """Number of parts in which the k inputs are summed; the parts' sums are added in order."""
    prefetch_bytes: Annotated[int, Whole(0, 65_536)]
    """The distance ahead of a panel's reads at which its lines are asked for; 0: not at all."""
    loop_order: Word
    """One of LOOP_ORDERS."""

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
        """The fields that kernels are told: all but the arithmetic, which belongs to the weight."""
        return {
            name: value for name, value in asdict(self).items() if name not in ("compute_path", "k_parts")
        }

    @property
    def threads(self) -> int:
        """Threads of the whole grid."""
        return self.threads_m * self.threads_n * self.threads_k


KEYED = (Problem, Schedule)
"""Records that many rows share: they have tables of their own and stay whole among flat fields."""


@dataclass(frozen=True, slots=True)
class Sample(Record):
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
class Origin(Record):
    """The place and time at which a row was made, and whether it may be trusted here."""

    machine: MachineKey
    program_version: Line
    created_at_ms: Annotated[int, Whole(0, MAX_TIME_MS)]
    """Unix time in milliseconds."""
    verified: Annotated[bool, Truth()] = True
    """Measured by this database's owner on a machine of this kind; imported rows start unverified."""


_Gain = Annotated[float, Finite(0.0, MAX_GAIN)]


@dataclass(frozen=True, slots=True)
class Comparison(Record):
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
        return self.gain_low > 1.0 and self._is_proven

    @property
    def is_undecided(self) -> bool:
        """The interval is so wide that the timings say little: the machine was busy."""
        return not self._is_proven and self.gain_high > WIDEST * self.gain_low

    @property
    def proves_slower(self) -> bool:
        """The candidate is slower than the incumbent, beyond doubt of the comparison's confidence."""
        return self.gain_high < 1.0 and self._is_proven

    @property
    def _is_proven(self) -> bool:
        return is_proven(self.gain, self.gain_low, self.gain_high)


@dataclass(frozen=True, slots=True)
class ServedStep(Record):
    """The engine's turn that was timed: `sequences` of `context` tokens take `tokens` new ones each."""

    phase: Word
    tokens: Annotated[int, Whole(1, MAX_STEP_TOKENS)]
    sequences: Annotated[int, Whole(1, MAX_SEQUENCES)]
    context: Annotated[int, Whole(0, MAX_STEP_TOKENS)]


@dataclass(frozen=True, slots=True)
class UserProblem(Record):
    """A user's kernel, in one build, on one shape: the values of its whole numbers.

    No code is kept. `kernel_abi` holds a hash over the kernel's text and its lowered C: parameters are used
    for the very source that they were found with.
    """

    name: Line
    """Name of its function."""
    kernel_abi: Line
    shape: Choice

    def describe(self) -> str:
        """A few words for people, e.g. `dot n=64`."""
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.shape)])


# ---- kinds of rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """What is declared of a kind of rows beside its fields. Names are those of flat fields.

    To add one: declare it at the end of this file, and draft its migration (`phasewise.migrations`).
    """

    word: str
    """By which a line of a file begins."""
    table: str
    named_by: tuple[str, ...]
    """Fields of the row that say what it is about. Files are sorted by them, then by machine, build and time;
    rows with the same ones and the same instant are compared when others are merged in.
    """
    indexes: Mapping[str, tuple[str, ...]]
    """Columns, by the last word of the index's name."""
    private: tuple[str, ...] = ()
    """Fields that may name something of the owner. Such rows leave where they are asked for, and those are
    never pushed that hold the host's name, the user's or a path.
    """
    columns: Mapping[str, str] = field(default_factory=dict)
    """Older names of columns."""
    on_one_core: bool = False
    """The placement is SINGLE_CORE, and no column."""
    newest_of: tuple[str, ...] = ()
    """Clean-up with a limit keeps so many newest rows of each combination."""
    is_used_imported: bool = False
    """The newest row counts though it was imported, where none was made here."""


R = TypeVar("R", bound="Row")


class Row(Record):
    """What tables and files keep. Appended, never edited; the newest one of what it is about counts."""

    __slots__ = ()
    kind: ClassVar[Kind]
    origin: Origin

    @property
    def build(self) -> str:
        """The kernel's build; empty where a row is of none."""
        return getattr(self, "kernel_abi", "")

    @property
    def verdict(self) -> tuple[str, str, str] | None:
        """For a comparison of databases: the kind of thing, which one, and what the row says of it."""
        return None


def trusted(row: R, verified: bool) -> R:
    """The same row, verified here or not, which is a database's own business."""
    if row.origin.verified is verified:
        return row
    changed: R = replace(cast(Any, row), origin=replace(row.origin, verified=verified))
    return changed


_KEY_COLUMNS = ("core_sig", "placement_sig", "kernel_abi", "problem_id")
_OF_PROBLEM = {"key": _KEY_COLUMNS, "problem": ("problem_id",)}
_OF_MODEL = ("model_key", "phase", "core_sig", "placement_sig")


@dataclass(frozen=True, slots=True)
class Measurement(Row):
    """A sample kept for ever: of which problem, with which build of the kernel, from where."""

    kind = Kind(
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
    """Hash over the kernel family's body and flags: samples of another build are kept apart."""
    origin: Origin


@dataclass(frozen=True, slots=True)
class Promotion(Row):
    """A schedule taken into use for a problem, after it was compared with the one in use until then.

    The newest verified one of a problem, machine and build is in use.
    """

    kind = Kind("promotion", "promotion", named_by=("problem",), indexes=_OF_PROBLEM)
    problem: Problem
    schedule: Schedule
    incumbent: Schedule | None
    """The schedule that it was compared with; None: the kernel's own default."""
    comparison: Comparison
    kernel_abi: Line
    origin: Origin


@dataclass(frozen=True, slots=True)
class StorageDuel(Row):
    """A weight stored sparse, compared with the same weight stored dense."""

    kind = Kind("storage_duel", "storage_duel", named_by=("problem",), indexes=_OF_PROBLEM)
    problem: Problem
    """About the sparse weight: its format names the sixteenths that are kept, e.g. `bf16s8`."""
    schedule: Schedule
    """By which the sparse weight ran."""
    dense_schedule: Schedule
    comparison: Comparison
    """`gain` is dense's time / sparse's time."""
    kernel_abi: Line
    origin: Origin

    @property
    def verdict(self) -> tuple[str, str, str]:
        """Which storage is the faster one."""
        faster = "sparse" if self.comparison.proves_faster else "dense"
        return "storage", self.problem.describe(), faster


@dataclass(frozen=True, slots=True)
class PlanRecord(Row):
    """A service plan for one phase of one model on one kind of machine."""

    kind = Kind(
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
    """The figures of the plan when it was measured, e.g. `tpot_ms`; empty for a plan set by hand."""


@dataclass(frozen=True, slots=True)
class StepTime(Row):
    """One timing of one step of a model on one configuration of cores.

    Code that replays the timing checks that the plan is the one that `configuration_key` names.
    """

    kind = Kind(
        "step_time",
        "step_time",
        named_by=("model_key", "configuration_key", "step"),
        indexes={"key": _OF_MODEL},
        private=("model_key", "plan_json"),
        columns={"plan_json": "plan"},
    )
    model_key: Key
    configuration_key: Line
    """Hash over the cores of the plan's ranks, `tuner.topotree.Configuration.key`."""
    plan_json: PlanJson
    kernels: Word
    """`default` or `tuned`: by which schedules the products ran."""
    step: ServedStep
    samples_ns: SamplesNs
    estimate_ns: EstimateNs
    kernel_abi: Line
    """Build of the kernel family in which most of the time is spent."""
    origin: Origin
    conditions: Conditions = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class PredictorScore(Row):
    """The worth of a predictor of answers' lengths, judged by answers that it did not learn from.

    It says nothing of a machine: its origin is where it was judged.
    """

    kind = Kind(
        "predictor_score",
        "predictor_score",
        named_by=("model_name", "answers_key"),
        indexes={"key": ("model_name", "answers_key")},
        private=("model_name", "reads"),
        newest_of=("model_name", "reads", "answers_key", "judged_by"),
        is_used_imported=True,
    )
    model_name: Key
    """The model whose answers they are."""
    reads: Key
    """`tokens`, or the embedding model that reads prompts for it."""
    answers_key: Line
    """Hash over the answers that judged it: scores with the same one can be compared."""
    judged_by: Word
    """`held_out`, `folds` or `drift`."""
    learnt_answers: Annotated[int, Whole(1, MAX_ANSWERS)]
    judged_answers: Annotated[int, Whole(1, MAX_ANSWERS)]
    hold: Annotated[float, Finite(0.0, 1.0)]
    """The share of answers that its rooms were to hold."""
    origin: Origin
    figures: Figures = field(default_factory=dict, hash=False)
    """E.g. `accuracy`, `utilisation`, and `coverage_90`: the share within the forecast's 90 %."""

    @property
    def verdict(self) -> tuple[str, str, str]:
        """The share of answers that it holds."""
        of = f"{self.model_name}, {self.reads}, {self.judged_by}, answers {self.answers_key}"
        return "predictor", of, f"holds {percent(self.figures.get('accuracy', 0.0), 1)}"


class _UserRow(Row):
    """About a user's kernel, which one thread runs."""

    __slots__ = ()
    problem: UserProblem

    @property
    def kernel_abi(self) -> str:
        """The build of the kernel."""
        return self.problem.kernel_abi

    def _check_whole(self) -> None:
        placement = self.origin.machine.placement_sig
        if placement != SINGLE_CORE:
            raise RecordError(f"a user's kernel runs on {SINGLE_CORE}, not {placement!r:.40}")


def _of_user(word: str, table: str) -> Kind:
    return Kind(
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
    """One timing of one choice of a user's kernel's parameters."""

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
        """The parameters in use."""
        chosen = " ".join(f"{name}={value}" for name, value in self.choice)
        return "user kernel", self.problem.describe(), chosen or "default"


_KINDS: tuple[type[Row], ...] = (
    *(Measurement, PlanRecord, PredictorScore, Promotion, StepTime, StorageDuel, UserPromotion, UserTiming),
)
KINDS = {record.kind.word: record for record in sorted(_KINDS, key=lambda record: record.kind.word)}
"""The kinds of rows, by the word that a line of a file begins with; in the order of a file."""
PRIVATE = frozenset(record for record in KINDS.values() if record.kind.private)
"""Rows that name something of their owner: models, or functions."""
