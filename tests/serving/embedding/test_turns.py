"""Clients take turns, an input each, whatever each of them sends."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.embedding.turns import InputTurns
from tests.support.tiers import examples


@dataclass(frozen=True)
class Item:
    owner: str
    number: int


@examples(80)
@given(st.lists(st.sampled_from("abc"), max_size=40))
def test_an_input_waits_for_its_own_and_one_turn_of_each_other(owners: list[str]) -> None:
    turns: InputTurns[Item] = InputTurns()
    items = [Item(owner, number) for number, owner in enumerate(owners)]
    for client_input in items:
        turns.join(client_input)

    taken: list[Item] = []
    while turns:
        head = turns.head
        taken.append(turns.take())
        assert taken[-1] == head

    assert sorted(taken, key=lambda client_input: client_input.number) == items
    for owner in set(owners):
        own = [client_input for client_input in taken if client_input.owner == owner]
        assert own == sorted(own, key=lambda client_input: client_input.number)
        for k, own_input in enumerate(own):
            before = taken[: taken.index(own_input)]
            for other in set(owners) - {owner}:
                assert sum(each.owner == other for each in before) <= k + 1


def test_what_waits_again_comes_first_in_its_order() -> None:
    turns: InputTurns[Item] = InputTurns()
    turns.join(Item("a", 0))
    for number in (2, 1):
        turns.rejoin(Item("b", number))

    assert [client_input.number for client_input in turns] == [1, 2, 0]
    assert [turns.take().number for _ in range(3)] == [1, 2, 0]
    assert not turns
    with pytest.raises(IndexError, match="nothing waits"):
        turns.take()
    with pytest.raises(IndexError, match="nothing waits"):
        assert turns.head
