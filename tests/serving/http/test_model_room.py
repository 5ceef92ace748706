"""The room of models that come and go: laws on drawn comings and goings."""

from __future__ import annotations

import math
import random

import pytest

from phasewise.serving.http.models.model_room import ModelRoom
from tests.support.tiers import n_examples


@pytest.mark.parametrize("seed", range(n_examples(50)))
def test_who_makes_way_are_the_longest_unused_and_no_more_than_needed(seed: int) -> None:
    rng = random.Random(seed)
    budget = rng.randrange(20, 60)
    room, now_s = ModelRoom(budget), 0.0
    for number in range(60):
        now_s += rng.random()
        name, n_bytes = str(number), rng.randrange(1, 30)
        assert room.holds_alone(n_bytes) == (n_bytes <= budget)
        if not room.holds_alone(n_bytes):
            continue
        leaving = room.makes_way(n_bytes)
        assert bool(leaving) != room.fits(n_bytes)
        staying = [model for model in room.residents.values() if model not in leaving]
        unused = [model for model in leaving if not model.n_users]
        assert leaving == [*unused, *(model for model in leaving if model.n_users)]
        assert not any(model.n_users for model in leaving) or all(model.n_users for model in staying)
        for stayer in staying:
            if bool(stayer.n_users) == bool(leaving and leaving[-1].n_users):
                assert all(
                    stayer.used_s >= other.used_s for other in leaving if other.n_users == stayer.n_users
                )
        needed = sum(model.n_bytes for model in leaving[:-1])
        assert not leaving or room.n_bytes - needed + n_bytes > budget
        for leaver in leaving:
            while leaver.n_users:
                room.end(leaver.name, now_s, rng.choice([0.5, math.inf]))
            room.leave(leaver.name)
        room.enter(name, n_bytes, now_s, rng.choice([0.5, 2, math.inf]))
        assert room.n_bytes <= budget
        for resident in list(room.residents.values()):
            if rng.random() < 0.5:
                resident.n_users += 1
            elif resident.n_users:
                room.end(resident.name, now_s, 0.5)
        for overdue in room.overdue(now_s):
            assert not overdue.n_users
            assert overdue.used_s + overdue.keep_s <= now_s
            room.leave(overdue.name)
        assert room.next_end_s > now_s


def test_without_a_budget_nobody_makes_way() -> None:
    room = ModelRoom(None)
    for name in "abc":
        assert room.fits(1 << 60)
        assert room.makes_way(1 << 60) == []
        room.enter(name, 1 << 60, 0.0, 1.0)
    assert room.next_end_s == 1.0
