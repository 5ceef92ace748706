"""Small clusters whose times can be worked out by hand, and laws that every simulation keeps."""

from __future__ import annotations

import math

import pytest

from phasewise.cluster.routing import Router
from phasewise.cluster.simulated.simulate import ClusterSpec, Link, MachineType, Pool, Simulation
from phasewise.cluster.simulated.simulated_requests import Arrival
from phasewise.cluster.simulated.steps import Curve, StepTimes

STEPS = StepTimes(Curve([(0, 0.0), (1000, 1.0)]), Curve([(0, 0.010), (1000, 0.010)]))
"""1 ms a prompt token; 10 ms a decode step."""

KV_BYTES = 1000


def machine(
    name: str = "cpu", *, slots: int = 100_000, link: Link | None = None, **fields: float
) -> MachineType:
    settings = {"max_sequences": 512, "tpot_ms": 1e6, "cost": 1.0, "power_w": 100.0, **fields}
    return MachineType(
        name,
        STEPS,
        slots * KV_BYTES,
        0,
        KV_BYTES,
        10,
        link or Link(1e9),
        **settings,  # type: ignore[arg-type]
    )


def split(n_prompt: int, n_token: int, kind: MachineType, policy: str = "splitwise") -> ClusterSpec:
    return ClusterSpec((Pool("prompt", kind, n_prompt), Pool("token", kind, n_token)), policy)


def mixed(count: int, kind: MachineType, policy: str = "splitwise") -> ClusterSpec:
    return ClusterSpec((Pool("mixed", kind, count),), policy)


def assert_lawful(result: Simulation, arrivals: list[Arrival]) -> None:
    """Every request lived once, its instants ascend, and machines computed no more than time passed."""
    assert [life.arrival for life in result.lives] == arrivals
    for life in result.lives:
        instants = [life.arrival.at_s, life.prompt_start_s, life.prompt_end_s, life.first_token_s, life.end_s]
        assert not any(map(math.isnan, instants)), life
        assert instants == sorted(instants), life
        moved = life.prompt_machine != life.token_machine
        assert moved == (not math.isnan(life.kv_arrival_s))
        if moved:
            assert life.kv_arrival_s >= life.prompt_end_s
    for use in result.machines:
        assert use.busy_s <= result.end_s * (1 + 1e-9)
        assert sum(use.occupancy_s.values()) == pytest.approx(use.busy_s)


def check_counts(route: Router) -> None:
    """Raise unless the machines' counts are the sums over the requests that have not ended."""
    for machine in route._machines:
        mine = [held for held in route._held.values() if machine.index in held.assignment]
        prompts = [
            held.n_to_compute
            for held in mine
            if held.assignment.prompt == machine.index and not held.is_prompt_done
        ]
        answers = [held for held in mine if held.assignment.token == machine.index]
        leaving = [
            held.ask.prompt_tokens
            for held in mine
            if held.assignment.token != machine.index and not held.is_prompt_done
        ]
        kv = sum(leaving) + sum(held.ask.prompt_tokens + held.ask.answer_tokens for held in answers)
        expected = (len(prompts), sum(prompts), len(answers), kv)
        load = (machine.n_prompts, machine.prompt_tokens, machine.n_answers, machine.kv_tokens)
        if expected != load:
            raise AssertionError(f"machine {machine.index} counts {load}, its requests are {expected}")
