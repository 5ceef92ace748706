"""The evaluator of real kernels: it times what the engine would run, and checks it. No speed is asserted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from phasewise.cython_kernels import _native
from phasewise.cython_kernels.blocks import BLOCKS
from phasewise.kerneldb.records import Problem, Schedule
from phasewise.topology import read_machine
from phasewise.tuner import timing
from phasewise.tuner.errors import TunerError
from phasewise.tuner.native import (
    ACCURACY,
    ACCURACY_OF_QUANTISED,
    KernelMismatchError,
    NativeEvaluator,
    arithmetic_of,
    arithmetics,
    core_caches,
    default_schedule,
    group_of,
    numeric_error,
)
from phasewise.tuner.search.space import Arithmetic, Caches
from phasewise.tuner.weights import blank_weight, cold_bytes, format_name, kind_of, random_weight

FORMATS = ("f32", "f16", "bf16", "int8", "int8m", "int8g16", "int8c", "int4", "int4m")
CORES = sorted(os.sched_getaffinity(0))[:2]


@pytest.fixture
def evaluator() -> Iterator[NativeEvaluator]:
    evaluator = NativeEvaluator(CORES, total_bytes=1 << 20)
    yield evaluator
    evaluator.close()


@pytest.mark.parametrize(
    ("weight_format", "k"), [*((each, 75) for each in FORMATS), *((each, 256) for each in BLOCKS)]
)
def test_a_random_weight_is_of_its_format_and_its_kernels_are_accurate(weight_format: str, k: int) -> None:
    """Sizes off every step but that of blocks: padding must not show."""
    weight = random_weight(weight_format, 37, k)
    ways = arithmetics(weight_format, 37, k, threads=2)

    assert format_name(weight) == format_name(blank_weight(weight_format, 37, k)) == weight_format
    assert ways[0] == Arithmetic(_native.compute_paths(weight.kind, weight.group)[0], 1)
    limit = ACCURACY.get(weight_format, ACCURACY_OF_QUANTISED)
    for way in ways:
        assert 0 <= numeric_error(weight_format, 37, k, way) <= limit


def test_a_width_that_is_not_whole_blocks_is_refused() -> None:
    with pytest.raises(TunerError, match="whole blocks of 256"):
        blank_weight("q4_k", 16, 96)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(TunerError, match="int5"):
        kind_of("int5")


@pytest.mark.parametrize("m", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("weight_format", ["f32", "int8", "int4m"])
def test_the_default_schedule_is_a_legal_record_of_what_the_kernels_say(weight_format: str, m: int) -> None:
    weight = random_weight(weight_format, 200, 160)
    schedule = default_schedule(weight, m, 2, arithmetics(weight_format, 200, 160, 2)[0])
    fields, own = schedule.walk, _native.default_schedule(weight, m, 2)

    same = ("mr", "panels", "prefetch_bytes", "threads_m", "threads_n", "threads_k", "loop_order")
    assert {name: fields[name] for name in same} == {name: own[name] for name in same}
    assert fields["block_m"] >= min(own["block_m"], m)
    assert fields["block_n"] >= min(own["block_n"], 208)


def test_what_is_measured_was_checked_and_its_samples_are_of_one_call(evaluator: NativeEvaluator) -> None:
    group = group_of("int8", 96, 64, len(CORES), Caches(32 << 10, 1 << 20))
    problem = Problem("gemm", "int8", 96, 64, 5)
    schedules = [group.default(5), replace(group.default(5), block_k=32, loop_order="mn")]
    samples = evaluator.measure(problem, schedules)

    assert [sample.schedule for sample in samples] == schedules
    for sample in samples:
        assert len(sample.samples_ns) >= 2
        assert sample.estimate_ns == timing.estimate_ns(sample.samples_ns)
        assert sum(sample.samples_ns) <= sample.effort_ns
        assert sample.numeric_error is not None
        assert sample.conditions.keys() >= {"steal", "others"}


def test_every_micro_kernel_and_arithmetic_of_a_group_can_be_measured(evaluator: NativeEvaluator) -> None:
    group = group_of("bf16", 64, 96, len(CORES), Caches(32 << 10, 1 << 20))
    problem = Problem("gemm", "bf16", 64, 96, 9)
    schedules = [
        Schedule(
            *(kernel.mr, kernel.panels, kernel.mr, 16 * kernel.panels, 96, 1, 1, 1),
            *(way.compute_path, way.k_parts, 0, "nm"),
        )
        for way in group.arithmetics
        for kernel in group.kernels[way.compute_path][::7]
    ]

    assert len(evaluator.measure(problem, schedules)) == len(schedules)


def test_a_duel_keeps_both_sides(evaluator: NativeEvaluator) -> None:
    weight = random_weight("f32", 64, 64)
    ours = default_schedule(weight, 3, len(CORES), Arithmetic("fma"))
    theirs = replace(ours, block_k=32)
    problem = Problem("gemm", "f32", 64, 64, 3)
    fought = evaluator.duel(problem, ours, theirs)

    assert (fought.incumbent.schedule, fought.candidate.schedule) == (ours, theirs)
    assert fought.comparison.pairs == timing.PAIRS


def test_a_schedule_that_changes_a_result_is_never_passed_over(
    evaluator: NativeEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel with a bug, played by rows that another arithmetic computed."""
    weight = random_weight("f32", 64, 64)
    schedule = default_schedule(weight, 3, len(CORES), Arithmetic("fma"))
    problem = Problem("gemm", "f32", 64, 64, 3)
    evaluator.measure(problem, [schedule])
    product = evaluator._product(problem, arithmetic_of(schedule))
    monkeypatch.setattr(product, "_expected", product._expected + 1)

    with pytest.raises(KernelMismatchError, match="changes the result"):
        evaluator.measure(problem, [replace(schedule, block_k=32)])


def test_closing_leaves_the_caller_as_it_was() -> None:
    before = os.sched_getaffinity(0)
    evaluator = NativeEvaluator(CORES[:1], 1 << 20)
    weight = random_weight("f32", 16, 32)
    problem = Problem("gemm", "f32", 16, 32, 1)
    evaluator.measure(problem, [default_schedule(weight, 1, 1, Arithmetic("fma"))])
    evaluator.close()

    assert os.sched_getaffinity(0) == before


def test_sizes_of_this_machine_are_plausible() -> None:
    machine = read_machine()
    caches = core_caches(machine, CORES)

    assert 1 << 13 <= caches.l1_bytes <= caches.l2_bytes <= 1 << 28
    assert 64 << 20 <= cold_bytes(machine) <= 512 << 20
