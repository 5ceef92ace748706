"""Bands of a plan: which cores a step of so many sequences has, and what a stranger's row can do."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.topology import Machine
from phasewise.tuner.emit import TOOLS, emit
from phasewise.tuner.errors import PlanError
from phasewise.tuner.plans import (
    MAX_BANDS,
    LoadBand,
    RankCores,
    ServicePlan,
    check_fits,
    is_placed,
    placed_json,
    rank_on,
    resolve_plans,
    stored_places,
    stored_plan,
)
from tests.support.machines.paper_machines import epyc, kunpeng, xeon
from tests.tuner.test_plans import MODEL, PLAIN, SMT, FakeStore, machine_of

MACHINES = (xeon(), epyc(1), kunpeng())


def on(machine: Machine, *cores: tuple[int, ...]) -> tuple[RankCores, ...]:
    return tuple(rank_on(machine, own) for own in cores)


@st.composite
def banded(draw: st.DrawFn, machine: Machine) -> ServicePlan:
    """One rank on some cores of the first node, and others of that node for more sequences."""
    pus = list(machine.allowed_pus[:8])
    cores = st.lists(st.sampled_from(pus), min_size=1, max_size=8, unique=True).map(tuple)
    plan = ServicePlan("decode", on(machine, draw(cores)), "database")
    for sequences in sorted(draw(st.sets(st.integers(2, 64), max_size=MAX_BANDS))):
        plan = plan.with_band(sequences, on(machine, draw(cores)))
    return plan


@given(st.data(), st.integers(1, 80))
def test_a_step_has_the_cores_of_the_last_band_that_has_begun(data: st.DataObject, sequences: int) -> None:
    plan = data.draw(banded(xeon()))
    begun = [band for band in plan.bands if band.sequences <= sequences]

    now = plan.at(sequences)

    assert now.ranks == (begun[-1].ranks if begun else plan.ranks)
    assert (now.bands, now.phase, now.source) == ((), "decode", "database")
    assert set(now.cores) <= plan.all_cores == {core for each in plan.each for core in each.cores}


@given(st.data(), st.sampled_from(MACHINES))
def test_a_plan_with_bands_survives_its_json_and_its_places(data: st.DataObject, machine: Machine) -> None:
    plan = data.draw(banded(machine))
    text = placed_json(plan, machine)

    assert ServicePlan.from_json(plan.to_json()) == plan
    assert is_placed(text)
    assert stored_plan(text, machine) == plan
    assert [n for n, _ in stored_places(text) or ()] == [1, *plan.starts]
    assert json.loads(text)["format"] == (4 if plan.bands else 2)
    assert json.loads(plan.to_json())["format"] == (3 if plan.bands else 1)


def test_the_same_cores_for_more_sequences_are_no_band() -> None:
    plan = ServicePlan("decode", on(PLAIN, (0, 1)))

    assert plan.with_band(8, on(PLAIN, (1, 0))) is plan
    assert plan.with_band(8, on(PLAIN, (0,))).with_band(32, on(PLAIN, (0,))).starts == (8,)


@pytest.mark.parametrize(
    ("bands", "says"),
    [
        ([(1, (0,))], "a band begins at 2"),
        ([(4097, (0,))], "a band begins at 2"),
        ([(True, (0,))], "a band begins at 2"),
        ([(8, (0,)), (8, (1,))], "bands must rise: 8 sequences come after 8"),
        ([(8, (0,)), (4, (1,))], "bands must rise: 4 sequences come after 8"),
        ([(2, (0,)), (3, (1,)), (4, (0,)), (5, (1,))], "at most 3 bands"),
        ([(2, (2,))], "other ranks, or on other NUMA nodes"),
        ([(2, (0, 2))], "other ranks, or on other NUMA nodes"),
    ],
)
def test_what_is_no_band_is_refused(bands: list[tuple[Any, tuple[int, ...]]], says: str) -> None:
    """PUs 0 and 1 are of one node, 2 and 3 of another."""
    with pytest.raises(PlanError, match=says):
        ServicePlan("decode", on(SMT, (0, 1)), bands=tuple(LoadBand(n, on(SMT, own)) for n, own in bands))


def test_bands_are_decode_s_and_have_as_many_ranks() -> None:
    band = LoadBand(8, on(PLAIN, (0,)))
    with pytest.raises(PlanError, match="bands of sequences are decode's"):
        ServicePlan("prefill", on(PLAIN, (0, 1)), bands=(band,))
    with pytest.raises(PlanError, match="other ranks"):
        ServicePlan("decode", on(PLAIN, (0,), (1,)), bands=(band,))
    with pytest.raises(PlanError, match="two ranks share a core"):
        LoadBand(8, on(PLAIN, (0, 1), (1,)))


def test_a_plan_fits_where_all_of_its_bands_do() -> None:
    plan = ServicePlan("decode", on(PLAIN, (0,))).with_band(8, on(PLAIN, (0, 3)))
    check_fits(plan, PLAIN)

    with pytest.raises(PlanError, match="may not use core 3"):
        check_fits(plan, replace(PLAIN, allowed_pus=(0, 1, 2)))
    with pytest.raises(PlanError, match="2 threads would be throttled"):
        check_fits(plan, replace(PLAIN, cpu_quota=1.0))


BANDED = ServicePlan("decode", on(PLAIN, (0,))).with_band(8, on(PLAIN, (0, 1))).to_json()


def test_a_stored_plan_comes_with_its_bands_and_a_flag_has_none() -> None:
    store = FakeStore(decode=BANDED)

    assert resolve_plans(store, PLAIN, MODEL)["decode"].starts == (8,)
    assert resolve_plans(store, PLAIN, MODEL, threads=2)["decode"].bands == ()


@pytest.mark.parametrize("tool", TOOLS)
def test_other_tools_are_told_what_they_cannot_have(tool: str) -> None:
    machine = machine_of([[[0], [1], [2], [3]]])
    plan = ServicePlan("decode", on(machine, (0, 1))).with_band(8, on(machine, (0, 1, 2)))
    first = {"decode": plan.each[0]}

    emitted = emit(tool, {"decode": plan}, machine)

    assert any("from 8 sequences on" in line for line in emitted.notes)
    if tool != "kubernetes":
        assert emitted.text == emit(tool, first, machine).text  # type: ignore[arg-type]
