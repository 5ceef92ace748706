"""Tuning of a user's kernel: search, ledger, duel, promotion, as for products.

What the database holds is not timed again, so that a second run answers from it. The winner of a search is
checked against the default's results and comes into use only by a duel.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from phasewise._version import __version__
from phasewise.ir.build import built, chosen, kernel_abi
from phasewise.ir.errors import SourceError, UserKernelError
from phasewise.ir.nodes import FunctionDefinition
from phasewise.ir.printing import Original, is_original
from phasewise.ir.reading import read
from phasewise.ir.running import cases as drawing
from phasewise.ir.running.checking import (
    REASSOCIATED_BOUND,
    Program,
    TimingProcess,
    check,
    in_folder,
    library_of,
)
from phasewise.ir.running.compiling import compiler_for, emulator_for
from phasewise.ir.targets import IsaTarget
from phasewise.kerneldb.fields import Choice
from phasewise.kerneldb.records import (
    SINGLE_CORE,
    Comparison,
    MachineKey,
    Origin,
    UserProblem,
    UserPromotion,
    UserTiming,
)
from phasewise.kerneldb.store import Store
from phasewise.tuner import timing
from phasewise.tuner.conditions import Watch
from phasewise.tuner.ledger import reversed_comparison
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.tuner.search.parameters import Point, search_parameters
from phasewise.tuner.search.protocol import drive
from phasewise.workflows.report import Report
from phasewise.workflows.user_kernels.files import PARTS, Shape, take_of

CHECKED_CASES = 200
HOPELESS_NS = 10**15
"""Time that stands for parameters that do not fit each other."""

COMPILES_OF_A_DUEL = 3
"""Kernels that are compiled in the time of one comparison at the end: two to check, and the timing."""


@dataclass(frozen=True)
class ShapeOutcome:
    """The schedule in use for a shape now, and the way it came to that."""

    problem: UserProblem
    choice: Choice
    gain: float
    """Gain of the last duel: speed-up over the opponent."""
    gain_low: float
    baseline: Choice
    """The author's own function where it takes part, else the first parameters."""
    over_baseline: Comparison | None
    """The duel with the baseline; None where the baseline is in use."""
    before: Choice
    """The choice in use when the run began."""
    over_before: Comparison | None
    """The duel with `before`, where this run replaced that choice."""
    timed: int
    replayed: int
    default_ns: int | None
    best_ns: int | None
    """Best time in nanoseconds; None where there was no time to measure one."""
    is_complete: bool


@dataclass(frozen=True)
class KernelSetting:
    """The kernel to tune, the core and target that it is tuned on, and the run's budget."""

    text: str
    where: str
    target: IsaTarget
    core_sig: str
    core: int
    store: Store
    lock: MeasurementLock
    report: Report
    budget_s: float
    """Seconds, counted from the call of `tune_user_kernel`."""
    resume: bool = True
    original: Original | None = None
    """The author's own function: it stays in use where no parameters are proven faster."""


def tune_user_kernel(setting: KernelSetting, shapes: Sequence[Shape]) -> list[ShapeOutcome]:
    """Tune each shape in turn, each within its share of the time that is left.

    Raises UserKernelError where the kernel cannot be read, compiled or run here, and CheckError where
    parameters change a result that they must not change.
    """
    if emulator_for(setting.target):
        raise UserKernelError(
            f"kernels for {setting.target.name} run under an emulator here; times there mean nothing"
        )
    function = read(setting.text, setting.where)
    abi = kernel_abi(setting.text, setting.target, compiler_for(setting.target))
    deadline_s = time.monotonic() + setting.budget_s
    with in_folder() as folder:
        run = _Run(setting, function, abi, Path(folder), shapes)
        with run.process:
            return [
                run.tune(number, time.monotonic() + (deadline_s - time.monotonic()) / (len(shapes) - number))
                for number in range(len(shapes))
            ]


class _Run:
    def __init__(
        self,
        setting: KernelSetting,
        function: FunctionDefinition,
        abi: str,
        folder: Path,
        shapes: Sequence[Shape],
    ) -> None:
        self._setting = setting
        self._function = function
        self._abi = abi
        self._folder = folder
        self._shapes = shapes
        self._names = [parameter.name for parameter in function.parameters]
        self._began_ms = 0 if setting.resume else time.time_ns() // 1_000_000
        self._first = tuple(parameter.values[0] for parameter in function.parameters)
        self._fits: dict[Point, bool] = {}
        self._kernels: dict[Choice, int] = {}
        self._programs: dict[Choice, Program] = {}
        self._batch_s = 0.0
        """The longest time that a batch of timings has taken."""
        self._compile_s = 0.0
        """The longest time that a kernel has taken to compile."""
        self._watch = Watch([setting.core])
        rng = np.random.default_rng(0)
        default = chosen(setting.text, {}, setting.where)
        self._default = default
        drawn = [
            drawing.draw(default, rng, dict(shape), where=setting.where, is_plain=True) for shape in shapes
        ]
        self.process = TimingProcess(default, drawn, folder, setting.core)

    def tune(self, number: int, deadline_s: float) -> ShapeOutcome:
        problem = UserProblem(self._function.name, self._abi, self._shapes[number])
        self.process.use_case(number)
        estimates_ns = self._known(problem)
        takes = Counter[Point]()
        counts = {"timed": 0, "replayed": 0}

        def answer(asked: list[Point]) -> list[int]:
            """Answer the i-th time that a point is asked for with its i-th sample: resuming is replaying."""
            if any(
                takes[point] >= len(estimates_ns.get(point, ())) and self._kernel_fits(point)
                for point in asked
            ):
                began_s = time.monotonic()
                if began_s + self._batch_s + COMPILES_OF_A_DUEL * self._compile_s > deadline_s:
                    raise _OutOfTime
                counts["timed"] += self._time(problem, asked, estimates_ns)
                self._batch_s = max(self._batch_s, time.monotonic() - began_s)
            else:
                counts["replayed"] += len(asked)
            samples_ns = [
                estimates_ns[point][takes[point]] if self._kernel_fits(point) else HOPELESS_NS
                for point in asked
            ]
            takes.update(asked)
            return samples_ns

        values = [parameter.values for parameter in self._function.parameters]
        first = self._first
        is_complete = True
        try:
            best = drive(search_parameters(values), answer)
        except _OutOfTime:
            is_complete = False
            best = min(estimates_ns, key=lambda point: estimates_ns[point][-1], default=first)
        original = self._setting.original
        baseline = original.choice if original else self._named(first)
        earlier = self._promotions(problem)
        before = earlier[-1].choice if earlier else baseline
        for choice in self._imported(problem):
            self._settle(problem, self._named(first), choice)
        promotion = self._settle(problem, self._named(first), self._named(best))
        replaced = promotion.comparison if promotion.incumbent == before != promotion.choice else None
        promotion, gain = self._beside_baseline(problem, baseline, promotion)
        return ShapeOutcome(
            problem, promotion.choice, promotion.comparison.gain, promotion.comparison.gain_low, baseline,
            gain, before, replaced if promotion.choice != before else None, counts["timed"],
            counts["replayed"], _newest(estimates_ns, first), _newest(estimates_ns, best), is_complete,
        )  # fmt: skip

    def _beside_baseline(
        self, problem: UserProblem, baseline: Choice, promotion: UserPromotion
    ) -> tuple[UserPromotion, Comparison | None]:
        """The choice after a duel with the baseline (an earlier duel counts), and that duel."""
        if promotion.choice == baseline:
            return promotion, None
        for earlier in reversed(self._promotions(problem)):
            if {earlier.choice, earlier.incumbent} == {promotion.choice, baseline}:
                is_own = earlier.choice == promotion.choice
                own = earlier.comparison if is_own else reversed_comparison(earlier.comparison)
                return promotion, own
        promotion = self._duel(problem, baseline, promotion.choice)
        return promotion, promotion.comparison if promotion.choice != baseline else None

    def _promotions(self, problem: UserProblem, *, verified: bool = True) -> list[UserPromotion]:
        """The promotions for a problem that are still offered, the newest last: those here, or imported."""
        store, abi, core_sig = self._setting.store, problem.kernel_abi, self._setting.core_sig
        promotions = store.rows(UserPromotion, kernel_abi=abi, core_sig=core_sig, verified=verified)
        return [
            promotion
            for promotion in promotions
            if promotion.problem == problem and self._is_offered(promotion.choice)
        ]

    def _known(self, problem: UserProblem) -> dict[Point, list[int]]:
        """The database's rows of each point, oldest first."""
        core_sig = self._setting.core_sig
        stored = self._setting.store.rows(UserTiming, problem=problem, core_sig=core_sig, verified=True)
        estimates_ns: dict[Point, list[int]] = {}
        for timed in stored:
            by_name = dict(timed.choice)
            if timed.origin.created_at_ms >= self._began_ms and list(by_name) == self._names:
                estimates_ns.setdefault(tuple(by_name.values()), []).append(timed.estimate_ns)
        return estimates_ns

    def _time(
        self, problem: UserProblem, asked: Sequence[Point], estimates_ns: dict[Point, list[int]]
    ) -> int:
        """Time points side by side, except those that do not fit; return the number that was timed."""
        usable = [point for point in asked if self._kernel_fits(point)]
        takes = [self._take(self._named(point)) for point in usable]
        with self._setting.lock.turn():
            self._watch.begin()
            taken = timing.race(takes)
            conditions = self._watch.lap().fields()
        rows = []
        for point, parts in zip(usable, taken, strict=True):
            samples = tuple(max(1, round(part / PARTS)) for part in parts)
            estimate_ns = max(1, timing.estimate_ns(samples))
            estimates_ns.setdefault(point, []).append(estimate_ns)
            rows.append(
                UserTiming(problem, self._named(point), samples, estimate_ns, self._origin(), conditions)
            )
        self._setting.store.add(rows)
        self._setting.report(f"{problem.describe()}: {len(estimates_ns)} of its choices timed")
        return len(rows)

    def _kernel_fits(self, point: Point) -> bool:
        """True if the transformations take these parameters together. SourceError for refused defaults."""
        if point not in self._fits:
            setting = self._setting
            try:
                chosen(setting.text, dict(self._named(point)), setting.where)
            except SourceError:
                if point == self._first:
                    raise
                self._fits[point] = False
            else:
                self._fits[point] = True
        return self._fits[point]

    def _source(self, choice: Choice) -> str:
        setting = self._setting
        if setting.original and choice == setting.original.choice:
            return setting.original.file()
        return built(setting.text, dict(choice), setting.target, setting.where).file(setting.target)

    def _kernel(self, choice: Choice) -> int:
        """The kernel's number in the timing process."""
        if choice not in self._kernels:
            name, began_s = f"k{len(self._kernels)}", time.monotonic()
            path = library_of(self._source(choice), name, self._folder, self._setting.target)
            self._kernels[choice] = self.process.load(path)
            self._compile_s = max(self._compile_s, time.monotonic() - began_s)
        return self._kernels[choice]

    def _take(self, choice: Choice) -> timing.Take:
        """Turns whose samples are picoseconds of a call."""
        return take_of(partial(self.process.call_ns, self._kernel(choice)))

    def _imported(self, problem: UserProblem) -> list[Choice]:
        """The last parameters that another database has in use for the shape; they get a duel here."""
        promotions = self._promotions(problem, verified=False)
        for choice in dict.fromkeys(promotion.choice for promotion in reversed(promotions)):
            if is_original(dict(choice)) or self._kernel_fits(tuple(dict(choice).values())):
                return [choice]
        return []

    def _settle(self, problem: UserProblem, default: Choice, best: Choice) -> UserPromotion:
        """The choice after a duel of the best with the one in use; no duel is fought twice.

        An original counts as in use at the beginning: parameters that replace it, now or from an earlier run
        without it, have to be proven faster.
        """
        setting = self._setting
        earlier = self._promotions(problem)
        original = setting.original.choice if setting.original else None
        met = {choice for promotion in earlier for choice in (promotion.choice, promotion.incumbent)}
        if original and earlier and original not in met:
            earlier.append(self._duel(problem, original, earlier[-1].choice))
            met.add(original)
        if earlier and best in met:
            return earlier[-1]
        return self._duel(problem, earlier[-1].choice if earlier else original or default, best)

    def _duel(self, problem: UserProblem, incumbent: Choice, challenger: Choice) -> UserPromotion:
        """The challenger comes into use where it is proven faster and keeps the incumbent's results."""
        setting = self._setting
        if challenger != incumbent:
            self._check(incumbent, challenger)
        takes = self._take(incumbent), self._take(challenger)
        with setting.lock.turn():
            comparison = timing.compare(timing.duel(*takes))
        if challenger != incumbent and comparison.proves_faster:
            promotion = UserPromotion(problem, challenger, incumbent, comparison, self._origin())
        else:
            reverse = reversed_comparison(comparison)
            promotion = UserPromotion(problem, incumbent, challenger, reverse, self._origin())
        setting.store.add([promotion])
        return promotion

    def _is_offered(self, choice: Choice) -> bool:
        if is_original(dict(choice)):
            return self._setting.original is not None and choice == self._setting.original.choice
        values = {parameter.name: parameter.values for parameter in self._function.parameters}
        return [name for name, _ in choice] == self._names and all(
            value in values[name] for name, value in choice
        )

    def _check(self, incumbent: Choice, challenger: Choice) -> None:
        """Raise CheckError unless results agree: in bits, or within a bound where sums may be reordered."""
        bound = REASSOCIATED_BOUND if self._function.reassociate else None
        check(
            self._program(incumbent),
            self._program(challenger),
            self._default,
            CHECKED_CASES,
            bound,
            where=self._setting.where,
        )

    def _program(self, choice: Choice) -> Program:
        if choice not in self._programs:
            source = self._folder / f"check{len(self._programs)}.c"
            source.write_text(self._source(choice))
            self._programs[choice] = Program(self._default, [source], self._folder, self._setting.target)
        return self._programs[choice]

    def _named(self, point: Point) -> Choice:
        return tuple(zip(self._names, point, strict=True))

    def _origin(self) -> Origin:
        machine = MachineKey(self._setting.core_sig, SINGLE_CORE)
        return Origin(machine, __version__, time.time_ns() // 1_000_000)


def _newest(estimates_ns: Mapping[Point, Sequence[int]], point: Point) -> int | None:
    return estimates_ns[point][-1] if point in estimates_ns else None


class _OutOfTime(Exception):
    pass
