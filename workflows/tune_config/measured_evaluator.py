"""Evaluates configurations on real ranks, opened as the engine would open them, by the time of their steps.

Steps are timed below the scheduler and the sampler, through `forward`, in turns (`tuner.timing`). Keys and
values are written before: untouched memory is one shared page of zeros, which reads faster than a real cache.
Two plans are compared with both of them open, in pairs of turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from phasewise.cython_kernels.errors import KernelError
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.errors import ServingError
from phasewise.serving.ranks.open_ranks import STEP_TOKENS, KvSettings, RankOptions, open_ranks
from phasewise.tuner import timing
from phasewise.tuner.conditions import Watch, is_disturbed
from phasewise.tuner.config.recorded import PlanTiming
from phasewise.tuner.config.steps import EvaluatorKind, Step, StepTimer
from phasewise.tuner.errors import EvaluationError, TunerError
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.tuner.plans import PHASES, Phase, ServicePlan, check_fits, default_plan

if TYPE_CHECKING:
    from phasewise.cython_kernels.schedules import ScheduleLookup
    from phasewise.serving.models.packed_model import PackedModel
    from phasewise.serving.ranks.open_ranks import Ranks
    from phasewise.topology import Machine
    from phasewise.tuner.topotree import Configuration

Plans = Mapping[Phase, ServicePlan]
Schedules = Mapping[Phase, "ScheduleLookup"]
Cost = Callable[[StepTimer], float]
"""The objective of a phase in milliseconds, from a timer of its steps."""

Duel = Callable[[int], list[tuple[timing.Samples, timing.Samples]]]
"""Times a number of pairs of turns; returns each pair's samples, the incumbent's first."""

LEAST_NS_A_STEP = 100_000_000
MOST_NS_A_STEP = 3_000_000_000
MOST_TURNS = 25
"""A short step is repeated until LEAST_NS_A_STEP or MOST_TURNS. A step of which `timing.ROUNDS` turns would
last longer than MOST_NS_A_STEP is repeated fewer times, but at least twice."""
SETTLE_NS = 1_000_000
"""Nanoseconds of uncounted work that begin a turn, until the other contestant's threads sleep."""
FILLED_AT_FIRST = 16
"""Slots that get computed keys and values; other slots hold copies of these."""


@dataclass(frozen=True)
class Room:
    """The room that ranks must have so that every one of some steps can run."""

    kv_slots: int
    sequences: int

    @classmethod
    def for_steps(cls, steps: Iterable[Step]) -> Room:
        steps = list(steps)
        slots = max(step.sequences * (step.context + step.tokens) for step in steps)
        return cls(max(slots, FILLED_AT_FIRST), max(step.sequences for step in steps))


@dataclass
class Tally:
    """The disturbances of the timings so far."""

    laps: list[Mapping[str, float]] = field(default_factory=list)

    @property
    def disturbed(self) -> int:
        return sum(map(is_disturbed, self.laps))


class MeasuredEvaluator:
    """Times configurations on this machine's cores, in one thread, whose affinity `open` restores.

    schedules: maps plans to kernel schedules; None: the kernels' own defaults. keep: called with every
    reading. lock: taken while anything is timed.
    """

    kind: EvaluatorKind = "measured"

    def __init__(
        self,
        model: PackedModel,
        machine: Machine,
        room: Room,
        schedules: Callable[[Plans], Schedules | None] = lambda plans: None,
        keep: Callable[[PlanTiming], None] = lambda reading: None,
        lock: MeasurementLock | None = None,
    ) -> None:
        self._model = model
        self._machine = machine
        self._room = room
        self._schedules = schedules
        self._keep = keep
        self._lock = lock or MeasurementLock()
        self.tally = Tally()
        self.deadline_s = math.inf
        """Time (`time.monotonic`) at which waiting for another process that measures ends."""

    @contextmanager
    def open(self, configuration: Configuration, phase: Phase) -> Iterator[Clock]:
        """Open the configuration for `phase`, with the default plan for the other phase.

        EvaluationError if the configuration cannot run here.
        """
        with self.open_plan(configuration.plan(phase)) as clock:
            yield clock

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Have the machine alone. EvaluationError at the deadline, which a slow model must not outlast."""
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise EvaluationError("the budget was used up while it was timed")
        with self._lock.turn(left_s) as is_alone:
            if not is_alone:
                raise EvaluationError("another phasewise measured here until the budget was used up")
            yield

    @contextmanager
    def open_plan(self, plan: ServicePlan) -> Iterator[Clock]:
        """Open a plan for its phase, with the default plan for the other phase. Raises EvaluationError."""
        with _one_line():
            check_fits(plan, self._machine)
            plans: dict[Phase, ServicePlan] = {phase: default_plan(self._machine, phase) for phase in PHASES}
            plans[plan.phase] = plan
            watch = Watch(plan.cores)
            kv = KvSettings(self._room.kv_slots, states=self._room.sequences)
            options = RankOptions(kv, STEP_TOKENS, self._room.sequences, self._schedules(plans))
            ranks = open_ranks(self._model, plans, options)
            try:
                _fill(ranks, self._room.kv_slots)
                vocab_size = self._model.config.vocab_size
                yield Clock(ranks, plan, vocab_size, watch, self._heard, self._turn)
            finally:
                ranks.close()

    @contextmanager
    def duel(
        self, incumbent: ServicePlan, candidate: ServicePlan, steps: Sequence[Step], cost: Cost
    ) -> Iterator[Duel]:
        """Open two plans of one phase; the duel times their objective in nanoseconds, in pairs of turns."""
        with ExitStack() as stack:
            stack.enter_context(self._turn())
            old, new = (stack.enter_context(self.open_plan(plan)) for plan in (incumbent, candidate))
            takes = [Contestant(clock, steps, cost).take for clock in (old, new)]
            new.conditions()
            yield lambda pairs: timing.duel(takes[0], takes[1], pairs)
            self.tally.laps.append(new.conditions())

    def _heard(self, reading: PlanTiming) -> None:
        self.tally.laps.append(reading.conditions)
        self._keep(reading)


class Clock:
    """Times steps of one phase on open ranks; a StepTimer."""

    def __init__(
        self,
        ranks: Ranks,
        plan: ServicePlan,
        vocab_size: int,
        watch: Watch,
        heard: Callable[[PlanTiming], None],
        turn: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._ranks = ranks
        self._plan = plan
        self._watch = watch
        self._heard = heard
        self._turn = turn
        self._known_ns: dict[Step, float] = {}
        self._tokens = np.random.default_rng(0).integers(0, vocab_size, size=STEP_TOKENS).tolist()

    def __call__(self, step: Step) -> float:
        """Nanoseconds of a step, timed when first asked for: slices of a trace ask for the same steps."""
        if step not in self._known_ns:
            with self._turn():
                reading = self._read(step)
            self._heard(reading)
            self._known_ns[step] = float(reading.estimate_ns)
        return self._known_ns[step]

    def _read(self, step: Step) -> PlanTiming:
        with _one_line():
            batch = self.batch(step)
            self._watch.begin()
            turn = timing.plan_turn(self.call_ns(batch))  # the first call also warms up
            samples: timing.Samples = ()
            for _ in range(_turns(self.call_ns(batch) * turn.calls)):
                calls = np.array([self.call_ns(batch) for _ in range(turn.calls)], dtype=np.int64)
                samples += timing.loop_means(calls, turn)
        return PlanTiming(self._plan, step, samples, self._watch.lap().fields())

    def conditions(self) -> Mapping[str, float]:
        """Conditions of the machine since this clock's last reading."""
        return self._watch.lap().fields()

    def batch(self, step: Step) -> Batch:
        """The batch by which ranks compute a step: every sequence in slots of its own."""
        room = step.context + step.tokens
        tokens = tuple(self._tokens[index % len(self._tokens)] for index in range(step.tokens))
        return Batch(
            step.phase,
            tuple(
                SequenceSlice(tokens, step.context, sequence * room, True, state=sequence)
                for sequence in range(step.sequences)
            ),
        )

    def call_ns(self, batch: Batch) -> int:
        """Wall-clock nanoseconds of one step."""
        started_ns = time.perf_counter_ns()
        self._ranks.forward(batch)
        return time.perf_counter_ns() - started_ns


class Contestant:
    """One side of a duel. A turn runs every step of the objective, whose value is the turn's sample."""

    def __init__(self, clock: Clock, steps: Sequence[Step], cost: Cost) -> None:
        self._clock = clock
        self._cost = cost
        self._batches = {step: clock.batch(step) for step in steps}
        self._turns = {step: timing.plan_turn(clock.call_ns(batch)) for step, batch in self._batches.items()}
        self._first = next(iter(self._batches.values()))

    def take(self) -> timing.Samples:
        """One sample in nanoseconds, at least 1."""
        settled_ns = time.perf_counter_ns() + SETTLE_NS
        while time.perf_counter_ns() < settled_ns:
            self._clock.call_ns(self._first)
        step_ns = {step: self._step_ns(step) for step in self._batches}
        return (max(1, round(self._cost(lambda step: step_ns[step]) * 1e6)),)

    def _step_ns(self, step: Step) -> float:
        calls = self._turns[step].calls
        return sum(self._clock.call_ns(self._batches[step]) for _ in range(calls)) / calls


def _turns(turn_ns: int) -> int:
    few = min(timing.ROUNDS, MOST_NS_A_STEP // turn_ns)
    return max(2, few, min(MOST_TURNS, LEAST_NS_A_STEP // turn_ns))


def _fill(ranks: Ranks, kv_slots: int) -> None:
    """Write every slot: a few by a prefill, the rest as copies of what is there, twice as many each time."""
    tokens = tuple(range(1, FILLED_AT_FIRST + 1))
    ranks.forward(Batch("prefill", (SequenceSlice(tokens, 0, 0, True),)))
    filled = FILLED_AT_FIRST
    while filled < kv_slots:
        count = min(filled, kv_slots - filled)
        ranks.copy_kv(0, filled, count)
        filled += count


@contextmanager
def _one_line() -> Iterator[None]:
    """Turn errors of opening or running a plan into EvaluationError, on one line without the plan's name."""
    try:
        yield
    except EvaluationError:
        raise
    except (ServingError, TunerError, KernelError) as error:
        raise EvaluationError(" ".join(str(error).split())) from error
