"""Step times that were kept answer for the cores that they were measured on, and for no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from phasewise.kerneldb.records import StepTime
from phasewise.kerneldb.store import open_store
from phasewise.topology import read_machine
from phasewise.tuner.config.recorded import PlanTiming, configurations, keep
from phasewise.tuner.config.steps import Step
from phasewise.tuner.ledger import Scope
from phasewise.tuner.plans import machine_key, rank_on
from phasewise.tuner.topotree import Configuration


@pytest.mark.parametrize(
    "changes",
    [
        {"configuration_key": "another"},
        {"plan_json": "{}"},
        {"plan_json": '{"format": 1, "phase": "prefill", "ranks": [{"cores": [0], "numa_node": null}]}'},
    ],
)
def test_a_row_whose_plan_is_not_its_keys_is_set_aside_and_said(changes: dict[str, str]) -> None:
    """A stranger's row must not answer for a configuration that it was not measured on."""
    machine = read_machine()
    one_rank = Configuration((rank_on(machine, machine.allowed_pus[:1]),))
    reading = PlanTiming(one_rank.plan("decode"), Step("decode", 1, context=64), (300,), {})
    said: list[str] = []
    with open_store(":memory:") as store:
        keep(store, Scope(machine_key(machine), "gemm-5f1c9e", "0.1.0"), machine, "m@bf16", reading)
        (kept,) = store.rows(StepTime)

    forged = replace(kept, **cast(Any, changes))

    assert [*configurations([kept, forged], machine, said.append)] == [(one_rank.key, kept)]
    assert len(said) == 1
    assert "is set aside" in said[0]
