"""The plain values that the database keeps: frozen, checked when made, ignorant of SQL.

Rows may come from a stranger's database, so every record refuses what no honest measurement could hold.
The bounds here are sanity; a kernel still checks a schedule against its operands before any pointer moves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache

from phasewise._words import WIDEST, is_proven, number
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
MAX_K_PARTS = 64
MAX_PREFETCH_BYTES = 65_536
MAX_CONDITIONS = 16
MAX_OBJECTIVES = 64
MAX_ANSWERS = 2**31 - 1
MAX_STEP_TOKENS = 2**24
MAX_SEQUENCES = 2**16
MAX_GAIN = 1e6

SINGLE_CORE = "1 core"
"""The placement of kernels that one thread runs."""

LOOP_ORDERS = ("nm", "mn")
"""Outermost first: panel blocks outside row blocks, or the other way round."""

_WORD = re.compile(r"[a-z][a-z0-9_]{0,31}")
_LINE = re.compile(rf"[!-~](?:[ -~]{{0,{MAX_TEXT - 2}}}[!-~])?")
_KEY = re.compile(rf"\S(?:[^\x00-\x1f\x7f-\x9f]{{0,{MAX_TEXT - 2}}}\S)?")
_KEPT_NOWHERE = re.compile("[\x00\ud800-\udfff]")
"""Characters that a database cannot keep: SQLite no half of a pair, PostgreSQL no zero."""


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise RecordError(f"{name} must be a whole number from {low} to {high}, not {value!r:.80}")


@lru_cache(maxsize=1024)
def _is_word(text: str) -> bool:
    return _WORD.fullmatch(text) is not None


@lru_cache(maxsize=1024)
def _is_line(text: str) -> bool:
    return _LINE.fullmatch(text) is not None


def _check_word(name: str, value: object) -> None:
    if not isinstance(value, str) or not _is_word(value):
        raise RecordError(f"{name} must be a lower-case word of at most 32 characters, not {value!r:.80}")


def _check_line(name: str, value: object) -> None:
    if not isinstance(value, str) or not _is_line(value):
        raise RecordError(f"{name} must be 1 to {MAX_TEXT} printable ASCII characters, not {value!r:.80}")


def _check_key(name: str, value: object) -> None:
    if not isinstance(value, str) or not _KEY.fullmatch(value) or _KEPT_NOWHERE.search(value):
        raise RecordError(f"{name} must be 1 to {MAX_TEXT} characters in a line, not {value!r:.80}")


def _check_plan_json(value: object) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_PLAN_CHARS:
        raise RecordError(f"plan_json must be text of 1 to {MAX_PLAN_CHARS} characters")
    if _KEPT_NOWHERE.search(value):
        raise RecordError("plan_json must be text without zeros and halves of characters")


def _check_samples(samples_ns: object) -> None:
    if not isinstance(samples_ns, tuple) or not 1 <= len(samples_ns) <= MAX_SAMPLES:
        raise RecordError(f"samples_ns must be a tuple of 1 to {MAX_SAMPLES} numbers")
    if set(map(type, samples_ns)) == {int} and min(samples_ns) >= 1 and max(samples_ns) <= MAX_NS:
        return
    for sample_ns in samples_ns:
        _check_int("a sample in samples_ns", sample_ns, 1, MAX_NS)


def _check_finite(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> None:
    if not isinstance(value, float) or not math.isfinite(value) or not low <= value <= high:
        bounds = "" if low == -math.inf else f" from {number(low)} to {number(high)}"
        raise RecordError(f"{name} must be a finite number{bounds}, not {value!r:.80}")


def _checked_numbers(name: str, numbers: object, most: int) -> dict[str, float]:
    """An own copy of a mapping of words to finite numbers."""
    if not isinstance(numbers, Mapping) or len(numbers) > most:
        raise RecordError(f"{name} must be a mapping of at most {most} words to numbers")
    are_finite = set(map(type, numbers.values())) <= {float} and all(map(math.isfinite, numbers.values()))
    if are_finite and set(map(type, numbers)) <= {str} and all(map(_is_word, numbers)):
        return dict(numbers)
    for word, value in numbers.items():
        _check_word(f"a name in {name}", word)
        _check_finite(f"{word} in {name}", value)
    return dict(numbers)


@dataclass(frozen=True, slots=True)
class MachineKey:
    """The kind of machine: topology's two signatures. Never a host name."""

    core_sig: str
    placement_sig: str

    def __post_init__(self) -> None:
        _check_line("core_sig", self.core_sig)
        _check_line("placement_sig", self.placement_sig)


@dataclass(frozen=True, slots=True)
class Problem:
    """The computation that a kernel is asked for: y[m, n] = x[m, k] W[n, k]^T over weights of one format."""

    family: str
    """Kernel family, e.g. `gemm`."""
    format: str
    """Weight format, e.g. `bf16`, `int4`."""
    n: int
    k: int
    m: int

    def __post_init__(self) -> None:
        _check_word("family", self.family)
        _check_word("format", self.format)
        for name in ("n", "k", "m"):
            _check_int(name, getattr(self, name), 1, MAX_DIMENSION)

    def describe(self) -> str:
        """A few words for people, e.g. `gemm int4 1536x576, m 8`."""
        return f"{self.family} {self.format} {self.n}x{self.k}, m {self.m}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The way in which a kernel computes it: only numbers, and the names of a compute path and of a loop
    order.

    The micro-kernel holds `mr` rows by `panels` panels of 16 columns. A computation slice is
    `block_m x block_n x block_k`; the thread grid is `threads_m x threads_n x threads_k`.
    `compute_path` and `k_parts` are the arithmetic and decide the bits of the result; the rest decides speed.
    """

    mr: int
    panels: int
    block_m: int
    block_n: int
    block_k: int
    threads_m: int
    threads_n: int
    threads_k: int
    compute_path: str
    """The arithmetic of weights and activations, e.g. `fma`, `int8_dot`, `bf16_dot`; known to the kernel
    family.
    """
    k_parts: int
    """Number of parts in which the k inputs are summed; the parts' sums are added in order."""
    prefetch_bytes: int
    """The distance ahead of a panel's reads at which its lines are asked for; 0: not at all."""
    loop_order: str
    """One of LOOP_ORDERS."""

    def __post_init__(self) -> None:
        _check_int("mr", self.mr, 1, 64)
        _check_int("panels", self.panels, 1, 16)
        for name in ("block_m", "block_n", "block_k"):
            _check_int(name, getattr(self, name), 1, 2**24)
        for name in ("threads_m", "threads_n", "threads_k"):
            _check_int(name, getattr(self, name), 1, 4096)
        _check_int("the thread grid", self.threads, 1, 4096)
        _check_word("compute_path", self.compute_path)
        _check_int("k_parts", self.k_parts, 1, MAX_K_PARTS)
        _check_int("prefetch_bytes", self.prefetch_bytes, 0, MAX_PREFETCH_BYTES)
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


@dataclass(frozen=True, slots=True)
class Sample:
    """One timing of one schedule, as an evaluator returns it."""

    schedule: Schedule
    samples_ns: tuple[int, ...]
    """Nanoseconds a call, raw, in the order taken."""
    estimate_ns: int
    """The stated robust estimate over `samples_ns`."""
    numeric_error: float | None
    """Largest error seen against the reference, relative to its largest value; None if not compared."""
    effort_ns: int
    """Wall clock that this timing cost, warm-up included."""
    conditions: Mapping[str, float] = field(default_factory=dict, hash=False)
    """The surroundings that the timer noticed, e.g. `steal_share`, `mhz`, `load`."""

    def __post_init__(self) -> None:
        _check_samples(self.samples_ns)
        _check_int("estimate_ns", self.estimate_ns, 1, MAX_NS)
        _check_int("effort_ns", self.effort_ns, 0, MAX_NS)
        error = self.numeric_error
        if error is not None and not (isinstance(error, float) and 0.0 <= error < math.inf):
            raise RecordError(f"numeric_error must be a finite number of at least 0.0, not {error!r:.80}")
        conditions = _checked_numbers("conditions", self.conditions, MAX_CONDITIONS)
        object.__setattr__(self, "conditions", conditions)


@dataclass(frozen=True, slots=True)
class Origin:
    """The place and time at which a row was made, and whether it may be trusted here."""

    machine: MachineKey
    program_version: str
    created_at_ms: int
    """Unix time in milliseconds."""
    verified: bool = True
    """Measured by this database's owner on a machine of this kind; imported rows start unverified."""

    def __post_init__(self) -> None:
        _check_line("program_version", self.program_version)
        _check_int("created_at_ms", self.created_at_ms, 0, MAX_TIME_MS)
        if type(self.verified) is not bool:
            raise RecordError(f"verified must be true or false, not {self.verified!r:.80}")


@dataclass(frozen=True, slots=True)
class Measurement:
    """A sample kept for ever: of which problem, with which build of the kernel, from where."""

    problem: Problem
    sample: Sample
    kernel_abi: str
    """Hash over the kernel family's body and flags: samples of another build are kept apart."""
    origin: Origin

    def __post_init__(self) -> None:
        _check_line("kernel_abi", self.kernel_abi)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A paired A/B: how many times as fast the candidate was as the incumbent."""

    gain: float
    """Incumbent's time / candidate's time, a robust estimate over the pairs."""
    gain_low: float
    gain_high: float
    confidence: float
    """Confidence level of the interval from `gain_low` to `gain_high`, e.g. 0.95."""
    pairs: int

    def __post_init__(self) -> None:
        for name in ("gain", "gain_low", "gain_high"):
            _check_finite(name, getattr(self, name), 0.0, MAX_GAIN)
        if not self.gain_low <= self.gain <= self.gain_high:
            raise RecordError("gain must lie between gain_low and gain_high")
        _check_finite("confidence", self.confidence, 0.0, 1.0)
        _check_int("pairs", self.pairs, 1, MAX_SAMPLES)

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
class Promotion:
    """A schedule taken into use for a problem, after it was compared with the one in use until then."""

    problem: Problem
    schedule: Schedule
    incumbent: Schedule | None
    """The schedule that it was compared with; None: the kernel's own default."""
    comparison: Comparison
    kernel_abi: str
    origin: Origin

    def __post_init__(self) -> None:
        _check_line("kernel_abi", self.kernel_abi)


@dataclass(frozen=True, slots=True)
class StorageDuel:
    """A weight stored sparse, compared with the same weight stored dense."""

    problem: Problem
    """About the sparse weight: its format names the sixteenths that are kept, e.g. `bf16s8`."""
    schedule: Schedule
    """By which the sparse weight ran."""
    dense_schedule: Schedule
    comparison: Comparison
    """`gain` is dense's time / sparse's time."""
    kernel_abi: str
    origin: Origin

    def __post_init__(self) -> None:
        _check_line("kernel_abi", self.kernel_abi)


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A service plan as stored. The plan itself is opaque JSON here; `tuner.plans` reads and checks it."""

    model_key: str
    phase: str
    plan_json: str
    origin: Origin
    objectives: Mapping[str, float] = field(default_factory=dict, hash=False)
    """The figures of the plan when it was measured, e.g. `tpot_ms`; empty for a plan set by hand."""

    def __post_init__(self) -> None:
        _check_key("model_key", self.model_key)
        _check_word("phase", self.phase)
        _check_plan_json(self.plan_json)
        objectives = _checked_numbers("objectives", self.objectives, MAX_OBJECTIVES)
        object.__setattr__(self, "objectives", objectives)


@dataclass(frozen=True, slots=True)
class ServedStep:
    """The engine's turn that was timed: `sequences` of `context` tokens take `tokens` new ones each."""

    phase: str
    tokens: int
    sequences: int
    context: int

    def __post_init__(self) -> None:
        _check_word("phase", self.phase)
        _check_int("tokens", self.tokens, 1, MAX_STEP_TOKENS)
        _check_int("sequences", self.sequences, 1, MAX_SEQUENCES)
        _check_int("context", self.context, 0, MAX_STEP_TOKENS)


@dataclass(frozen=True, slots=True)
class StepTime:
    """One timing of one step of a model on one configuration of cores.

    The plan is opaque JSON here, as in a PlanRecord; code that replays the timing checks that the plan is the
    one that `configuration_key` names.
    """

    model_key: str
    configuration_key: str
    """Hash over the cores of the plan's ranks, `tuner.topotree.Configuration.key`."""
    plan_json: str
    kernels: str
    """`default` or `tuned`: by which schedules the products ran."""
    step: ServedStep
    samples_ns: tuple[int, ...]
    """Nanoseconds a step, raw, in the order taken."""
    estimate_ns: int
    """The stated robust estimate over `samples_ns`."""
    kernel_abi: str
    """Build of the kernel family in which most of the time is spent."""
    origin: Origin
    conditions: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_key("model_key", self.model_key)
        _check_line("configuration_key", self.configuration_key)
        _check_plan_json(self.plan_json)
        _check_word("kernels", self.kernels)
        _check_samples(self.samples_ns)
        _check_int("estimate_ns", self.estimate_ns, 1, MAX_NS)
        _check_line("kernel_abi", self.kernel_abi)
        conditions = _checked_numbers("conditions", self.conditions, MAX_CONDITIONS)
        object.__setattr__(self, "conditions", conditions)


@dataclass(frozen=True, slots=True)
class PredictorScore:
    """The worth of a predictor of answers' lengths, judged by answers that it did not learn from.

    It says nothing of a machine: its origin is where it was judged.
    """

    model_name: str
    """The model whose answers they are."""
    reads: str
    """`tokens`, or the embedding model that reads prompts for it."""
    answers_key: str
    """Hash over the answers that judged it: scores with the same one can be compared."""
    judged_by: str
    """`held_out`, `folds` or `drift`."""
    learnt_answers: int
    judged_answers: int
    hold: float
    """The share of answers that its rooms were to hold."""
    origin: Origin
    figures: Mapping[str, float] = field(default_factory=dict, hash=False)
    """E.g. `accuracy`, `utilisation`, and `coverage_90`: the share within the forecast's 90 %."""

    def __post_init__(self) -> None:
        _check_key("model_name", self.model_name)
        _check_key("reads", self.reads)
        _check_line("answers_key", self.answers_key)
        _check_word("judged_by", self.judged_by)
        _check_int("learnt_answers", self.learnt_answers, 1, MAX_ANSWERS)
        _check_int("judged_answers", self.judged_answers, 1, MAX_ANSWERS)
        _check_finite("hold", self.hold, 0.0, 1.0)
        figures = _checked_numbers("figures", self.figures, MAX_OBJECTIVES)
        object.__setattr__(self, "figures", figures)
