"""A plan of embedding in the database comes back in the numbers of a like machine, or is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from phasewise.serving.embedding.plan import EmbeddingPlan, Instance
from phasewise.serving.embedding.queues import Depth
from phasewise.serving.embedding.stored_plan import placed_json, stored_places, stored_plan
from phasewise.serving.errors import ServingError
from tests.support.machines.machine_shapes import machine_of

HERE = machine_of([2, 4])
TWIN = machine_of([2, 4], [7, 3, 5, 1, 0, 6, 2, 4])
PLAN = EmbeddingPlan(
    (Instance("cpu:0", (4, 5), Depth(9, 700)), Instance("cuda:0", (0,), Depth(20, 999))), 0.5, "x"
)


def test_a_plan_comes_back_and_a_twin_reads_it_in_its_own_numbers() -> None:
    text = placed_json(PLAN, HERE)

    assert stored_plan(text, HERE, "x") == PLAN
    twin = stored_plan(text, TWIN)
    assert placed_json(twin, TWIN) == text
    assert [instance.cores for instance in twin.instances] != [instance.cores for instance in PLAN.instances]
    assert stored_places(text) == [[4, 5], [0]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 9}, "that this phasewise reads"),
        ({"pus": 4}, "it is for a process with 4 PUs; this one may use 8"),
        ({"instances": []}, "0 instances"),
        ({"instances": None}, "no plan of embedding"),
        (
            {"instances": [{"device": "cpu:0", "places": [99], "depth": {"inputs": 1, "tokens": 1}}]},
            "no place 99",
        ),
        ({"instances": [{"device": "cpu:0", "places": ["0"], "depth": {"inputs": 1, "tokens": 1}}]}, "whole"),
        ({"instances": [{"device": "tpu:0", "places": [0], "depth": {"inputs": 1, "tokens": 1}}]}, "tpu"),
        ({"slo_s": -1}, "an SLO of -1"),
    ],
)
def test_a_plan_that_is_none_is_refused(change: dict[str, Any], reason: str) -> None:
    text = json.dumps({**json.loads(placed_json(PLAN, HERE)), **change})

    with pytest.raises(ServingError, match=reason):
        stored_plan(text, HERE)


def test_a_core_that_may_not_be_used_has_no_place() -> None:
    foreign = replace(PLAN, instances=(Instance("cpu:0", (99,)),))

    with pytest.raises(ServingError, match="core 99"):
        placed_json(foreign, HERE)
