"""A search that a test can start twice, or kill: `python search_child.py DATABASE [SECONDS [KIND]]`.

An evaluation takes SECONDS. Prints a line for each configuration that this process evaluates, in the
moment it begins, and the outcome.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from phasewise.kerneldb.location import locate
from phasewise.kerneldb.records import MachineKey
from phasewise.topology import Kind
from phasewise.tuner.config.space import ConfigSpace
from phasewise.tuner.config.steps import EvaluatorKind, Step, StepTimer
from phasewise.tuner.config.study import Event, SearchOutcome, SearchSettings, SearchTask, StudyKey, run
from phasewise.tuner.config.walk import Rules
from phasewise.tuner.errors import EvaluationError
from phasewise.tuner.plans import Phase
from phasewise.tuner.topotree import Configuration, OperatorLimits, fundamental
from tests.support.machines import paper_machines

N_SLICES = 3
UNPRUNED = SearchSettings(Rules(pruning=False))
KEY = StudyKey(MachineKey("cores", "2 x 2 x 2"), "toy@f32", "decode", "e2e", "trace", "modelled")


def small_space() -> ConfigSpace:
    """Two packages of two cores, two threads each."""
    machine = paper_machines.build("2 x 2 x 2", ((Kind.PACKAGE, 2), (Kind.NUMA, 1), (Kind.CORE, 2)), 2)
    return ConfigSpace(fundamental(machine).tree, OperatorLimits(32, 32, 128, 11008))


def scattered(configuration: Configuration) -> float:
    """Nanoseconds without any structure."""
    return Random(configuration.key).uniform(1e6, 2e6)


@dataclass
class FakeEvaluator:
    """Costs by a formula; `happens` is called whenever a configuration is opened."""

    cost_ns: Callable[[Configuration], float] = scattered
    happens: Callable[[Configuration], None] = lambda configuration: None
    refuses: Callable[[Configuration], bool] = lambda configuration: False
    opened: list[str] = field(default_factory=list)
    steps: list[tuple[str, Step]] = field(default_factory=list)
    kind: EvaluatorKind = "measured"

    @contextmanager
    def open(self, configuration: Configuration, phase: Phase) -> Iterator[StepTimer]:
        self.opened.append(configuration.key)
        self.happens(configuration)
        if self.refuses(configuration):
            raise EvaluationError("no room here: make some")

        def timer(step: Step) -> float:
            self.steps.append((configuration.key, step))
            return self.cost_ns(configuration) * step.context

        yield timer


def slice_cost(number: int) -> Callable[[StepTimer], float]:
    """Cost of the slice with this number, ms; later ones cost more."""
    return lambda timer: timer(Step("decode", 1, context=number + 1)) / 1e6


def task(evaluator: FakeEvaluator, key: StudyKey = KEY) -> SearchTask:
    return SearchTask(key, evaluator, tuple(slice_cost(number) for number in range(N_SLICES)))


def run_on(
    database: str,
    evaluator: FakeEvaluator,
    settings: SearchSettings | None = None,
    stop: Callable[[], bool] = lambda: False,
    report: Callable[[Event], None] = lambda event: None,
) -> SearchOutcome:
    return run(small_space(), task(evaluator), locate(database), settings, stop, report)


def main(arguments: Sequence[str]) -> None:
    pause_s = float(arguments[1]) if len(arguments) > 1 else 0.0

    def happens(configuration: Configuration) -> None:
        print(configuration.key, flush=True)
        time.sleep(pause_s)

    kind: EvaluatorKind = "modelled" if arguments[2:] == ["modelled"] else "measured"
    evaluator = FakeEvaluator(happens=happens, kind=kind)
    outcome = run_on(arguments[0], evaluator, UNPRUNED)
    assert outcome.best is not None
    summary = {"end": outcome.end, "best": outcome.best[0].key, "tried": outcome.tried}
    print(json.dumps({**summary, "evaluations": outcome.evaluations}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
