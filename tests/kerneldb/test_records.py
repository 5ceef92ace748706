"""Records let in only what is within their bounds, which stand between a stranger's row and a kernel."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.kerneldb.errors import KernelDbError, RecordError
from phasewise.kerneldb.records import GROUP, MachineKey, PlanRecord, Schedule
from tests.support.machines.kerneldb_examples import (
    MEASUREMENT,
    ORIGIN,
    PLAN,
    PROBLEM,
    PROMOTION,
    SAMPLE,
    SCHEDULE,
    STEP_TIME,
)

NOT_A_COUNT = [0, -1, 2**31, 10**30, 1.0, True, "8", None, math.nan, b"8"]
FIELDS = [field.name for field in dataclasses.fields(Schedule)]


@pytest.mark.parametrize("value", NOT_A_COUNT)
@pytest.mark.parametrize("name", ["n", "k", "m"])
def test_a_problem_has_positive_whole_dimensions(name: str, value: Any) -> None:
    """The message names the field, and is a database error that the command line knows how to print."""
    with pytest.raises(RecordError, match=f"{name} must be") as caught:
        dataclasses.replace(PROBLEM, **{name: value})

    assert isinstance(caught.value, KernelDbError)


@pytest.mark.parametrize("value", NOT_A_COUNT)
@pytest.mark.parametrize("name", [name for name in FIELDS if name != "prefetch_bytes"])
def test_a_schedule_is_bounded_numbers_and_a_word(name: str, value: Any) -> None:
    """A schedule from the database is only numbers, each checked before any use."""
    with pytest.raises(RecordError):
        dataclasses.replace(SCHEDULE, **{name: value})


@pytest.mark.parametrize("value", [*NOT_A_COUNT[1:], 65_537])
def test_a_prefetch_distance_may_be_none_and_is_bounded(value: Any) -> None:
    assert dataclasses.replace(SCHEDULE, prefetch_bytes=0).prefetch_bytes == 0
    with pytest.raises(RecordError, match="prefetch_bytes"):
        dataclasses.replace(SCHEDULE, prefetch_bytes=value)


@given(
    numbers=st.lists(st.integers(-(2**40), 2**40), min_size=10, max_size=10),
    path=st.text(max_size=40),
    order=st.sampled_from(["nm", "mn", "km", ""]),
)
def test_a_schedule_that_is_let_in_keeps_its_bounds(numbers: list[int], path: str, order: str) -> None:
    """Whatever the numbers: refused, or within the bounds that kernels rely on."""
    try:
        schedule = Schedule(*cast(Any, (*numbers[:8], path, *numbers[8:], order)))
    except RecordError:
        return

    assert schedule.threads <= 4096
    assert schedule.block_m % schedule.mr == 0
    assert schedule.block_n % schedule.nr == 0
    assert schedule.block_k % GROUP == 0
    assert schedule.k_parts <= 64
    assert schedule.loop_order in ("nm", "mn")


@given(
    mr=st.integers(1, 64),
    panels=st.integers(1, 16),
    times=st.tuples(*[st.integers(1, 1000)] * 3),
    grid=st.tuples(*[st.integers(1, 16)] * 3),
)
def test_every_whole_multiple_of_a_micro_kernel_is_let_in(
    mr: int, panels: int, times: tuple[int, int, int], grid: tuple[int, int, int]
) -> None:
    """The bounds do not stand in the way of the search."""
    block_m, block_n, block_k = mr * times[0], 16 * panels * times[1], GROUP * times[2]
    schedule = Schedule(mr, panels, block_m, block_n, block_k, *grid, "fma", 2, 64, "mn")

    assert schedule.nr == 16 * panels
    assert schedule.threads == math.prod(grid)


@pytest.mark.parametrize("name", ["mr", "panels", "block_m", "block_n", "block_k"])
def test_a_block_that_cuts_a_micro_kernel_is_refused(name: str) -> None:
    """Odd values of any one size break a divisibility, except where nothing divides by it."""
    with pytest.raises(RecordError, match="multiple of"):
        dataclasses.replace(SCHEDULE, **cast(Any, {name: {"mr": 7, "panels": 3}.get(name, 33)}))


@pytest.mark.parametrize(
    "samples_ns", [(), [1, 2], (0,), (1, -5), (1.5,), (True,), None, (2**63,), (1,) * 100_001]
)
def test_samples_are_positive_nanoseconds(samples_ns: Any) -> None:
    """Raw samples stay raw: whole nanoseconds, in a tuple that cannot be edited."""
    with pytest.raises(RecordError):
        dataclasses.replace(SAMPLE, samples_ns=samples_ns)


@pytest.mark.parametrize(
    "conditions",
    [
        None,
        [("mhz", 1.0)],
        {"mhz": 1},
        {"mhz": math.nan},
        {"host name": 1.0},
        {"mhz": "fast"},
        {f"c{number}": 1.0 for number in range(17)},
    ],
)
def test_conditions_are_a_few_words_with_numbers(conditions: Any) -> None:
    """Room for what a timer notices, not for texts."""
    with pytest.raises(RecordError, match="conditions"):
        dataclasses.replace(SAMPLE, conditions=conditions)


def test_a_sample_keeps_its_own_copy_of_the_conditions() -> None:
    noticed = {"mhz": 2900.0}
    sample = dataclasses.replace(SAMPLE, conditions=noticed)
    noticed["mhz"] = 1.0

    assert sample.conditions == {"mhz": 2900.0}
    assert hash(sample) == hash(SAMPLE)


@pytest.mark.parametrize(
    "changes",
    [{name: value} for name in ("gain", "gain_low", "gain_high") for value in (math.nan, -1.0, 2e6, 1)]
    + [{"gain_low": 1.5}, {"gain_high": 1.0}, {"confidence": 1.5}, {"pairs": 0}],
)
def test_a_comparison_is_an_interval_around_its_gain(changes: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        dataclasses.replace(PROMOTION.comparison, **changes)


@pytest.mark.parametrize("error", [math.nan, math.inf, -0.5, "0", 1, True])
def test_a_numeric_error_is_a_finite_float(error: Any) -> None:
    with pytest.raises(RecordError, match="numeric_error"):
        dataclasses.replace(SAMPLE, numeric_error=error)


@pytest.mark.parametrize("text", ["", " ", "a\nb", "a ", "é", "x" * 256, None, 7, "a\0b"])
def test_signatures_and_versions_are_one_printable_line(text: Any) -> None:
    with pytest.raises(RecordError):
        MachineKey(text, "p")
    with pytest.raises(RecordError):
        dataclasses.replace(MEASUREMENT, kernel_abi=text)
    with pytest.raises(RecordError):
        dataclasses.replace(ORIGIN, program_version=text)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_key": ""},
        {"model_key": "a\nb"},
        {"model_key": "a\x1b[31mb"},
        {"model_key": "a\x9bb"},
        {"model_key": "x" * 256},
        {"model_key": None},
        {"phase": "DROP TABLE"},
        {"plan_json": ""},
        {"plan_json": "x" * 100_001},
        {"plan_json": b"{}"},
        {"objectives": {"tpot_ms": math.nan}},
        {"objectives": {"tpot_ms": "fast"}},
        {"objectives": {"not a word": 1.0}},
        {"objectives": {7: 1.0}},
        {"objectives": None},
    ],
)
def test_a_plan_record_refuses_what_no_tuner_writes(changes: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        dataclasses.replace(PLAN, **changes)


def test_a_model_key_may_hold_any_script() -> None:
    """Model names are people's, unlike signatures."""
    key = "模型/Llama 3 – instruct@int4"

    assert dataclasses.replace(PLAN, model_key=key).model_key == key


def test_a_plan_record_keeps_its_own_copy_of_the_objectives() -> None:
    objectives = {"tpot_ms": 1.0}
    record = PlanRecord("m@f", "decode", "{}", ORIGIN, objectives)
    objectives["tpot_ms"] = 2.0

    assert record.objectives == {"tpot_ms": 1.0}


@pytest.mark.parametrize("value", ["x" * 10_000_000, 10**4000, ["deep"] * 1_000_000])
def test_a_huge_value_gives_a_short_message(value: Any) -> None:
    """The message quotes no more than a line of what it refuses."""
    with pytest.raises(RecordError) as caught:
        dataclasses.replace(PROBLEM, n=value)

    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 0},
        {"tokens": 2**24 + 1},
        {"tokens": 1.0},
        {"sequences": 0},
        {"sequences": True},
        {"context": -1},
        {"context": None},
        {"phase": "Decode"},
    ],
)
def test_a_served_step_is_bounded_numbers_and_a_phase(changes: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match=next(iter(changes))):
        dataclasses.replace(STEP_TIME.step, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_key": ""},
        {"configuration_key": "a\n"},
        {"plan_json": ""},
        {"kernels": "very tuned"},
        {"samples_ns": ()},
        {"samples_ns": [1]},
        {"estimate_ns": 0},
        {"kernel_abi": "\x1b"},
        {"conditions": {"load": float("nan")}},
    ],
)
def test_a_step_time_refuses_what_no_evaluator_writes(changes: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        dataclasses.replace(STEP_TIME, **changes)
