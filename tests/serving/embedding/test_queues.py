"""WindVE's queues: the paper's algorithm, and what holds whatever is asked of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.embedding.lane import InputTurns
from phasewise.serving.embedding.queues import UNLIMITED, Depth, DeviceQueue, QueueManager
from tests.support.tiers import examples


def manager(*depths: tuple[int, int]) -> QueueManager:
    """Queues by (rank, inputs that they hold)."""
    queues = [
        DeviceQueue(f"device {number}", rank, Depth(n, 1 << 30)) for number, (rank, n) in enumerate(depths)
    ]
    return QueueManager(queues)


def paper(n_queries: int, npu: int, cpu: int, heterogeneous: bool) -> list[str]:
    """Algorithm 1, written out."""
    lengths = {"NPU": 0, "CPU": 0}
    given_to = []
    for _ in range(n_queries):
        if lengths["NPU"] < npu:
            place = "NPU"
        elif heterogeneous and lengths["CPU"] < cpu:
            place = "CPU"
        else:
            place = "BUSY"
        if place != "BUSY":
            lengths[place] += 1
        given_to.append(place)
    return given_to


@examples(60)
@given(npu=st.integers(1, 6), cpu=st.integers(1, 6), n=st.integers(0, 20), heterogeneous=st.booleans())
def test_one_accelerator_and_one_cpu_are_the_papers_algorithm(
    npu: int, cpu: int, n: int, heterogeneous: bool
) -> None:
    """Without its heterogeneous switch the CPU has no queue (`embed_cpu = false`)."""
    queues = manager((0, npu), *([(1, cpu)] if heterogeneous else []))
    got = []
    for _ in range(n):
        places = queues.place([75])
        got.append("BUSY" if places is None else ("NPU", "CPU")[places[0]])

    assert got == paper(n, npu, cpu, heterogeneous)


requests = st.lists(st.one_of(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.none()), max_size=40)


@examples(80)
@given(
    steps=requests, depths=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 9)), min_size=1, max_size=3)
)
def test_a_request_is_placed_whole_within_depths_or_not_at_all(
    steps: list[list[int] | None], depths: list[tuple[int, int]]
) -> None:
    """None answers the oldest request. What is placed is released in the end, and then nothing is left."""
    queues = QueueManager(
        [DeviceQueue(f"device {number}", rank, Depth(n, 100 * n)) for number, (rank, n) in enumerate(depths)]
    )
    placed: list[list[tuple[int, int]]] = []
    for step in steps:
        before = [(queue.inputs, queue.tokens) for queue in queues.queues]
        if step is None:
            for place, size in placed.pop(0) if placed else []:
                queues.release(place, size)
            continue
        was_idle = queues.inputs == 0
        places = queues.place(step)
        if places is None:
            assert not was_idle
            assert before == [(queue.inputs, queue.tokens) for queue in queues.queues]
            continue
        placed.append(list(zip(places, step, strict=True)))
        for queue in (queues.queues[index] for index in set(places)):
            within = queue.inputs <= queue.depth.inputs
            assert within or was_idle
            assert queue.tokens <= queue.depth.tokens or queue.inputs == 1 or was_idle
    for request in placed:
        for place, size in request:
            queues.release(place, size)
    assert queues.inputs == queues.tokens == 0


def test_devices_of_one_rank_share_evenly() -> None:
    queues = manager((1, 10), (1, 10))

    assert queues.place([75] * 6) is not None
    assert [queue.inputs for queue in queues.queues] == [3, 3]


def test_busy_is_the_same_for_one_input_and_for_many() -> None:
    queues = manager((1, 4))
    assert queues.place([75] * 4) == [0] * 4

    assert queues.place([75]) is None
    assert queues.place([75, 75]) is None


def test_a_request_larger_than_all_depths_runs_when_nothing_else_does() -> None:
    queues = manager((0, 2), (1, 3))
    assert queues.place([75]) == [0]
    assert queues.place([75] * 8) is None
    queues.release(0, 75)

    places = queues.place([75] * 8)

    assert places is not None
    assert len(places) == 8
    assert queues.place([75]) is None


def test_what_waits_for_a_device_that_is_down_moves_where_there_is_room() -> None:
    queues = manager((0, 4), (1, 1))
    queues.place([75, 75])
    queues.queues[0].is_up = False

    assert queues.move(0, 75) == 1
    assert queues.move(0, 75) is None
    assert [queue.inputs for queue in queues.queues] == [1, 1]
    assert queues.place([10]) is None
    queues.queues[1].is_up, queues.queues[1].is_gone = False, True
    assert queues.place([10]) == [0]  # none is up: it waits for the one that is started again


def test_tokens_are_a_depth_of_their_own() -> None:
    queues = QueueManager([DeviceQueue("cpu:0", 1, Depth(100, 500))])
    assert queues.place([400]) == [0]

    assert queues.place([101]) is None
    assert queues.place([100]) == [0]
    assert UNLIMITED.tokens > 1 << 39


def test_what_is_owed_is_placed_beyond_full_depths_and_nothing_else_is() -> None:
    queues = manager((1, 4))
    assert queues.place([75] * 4) == [0] * 4
    assert queues.place([75]) is None

    assert queues.place([75, 75], is_owed=True) == [0, 0]
    assert queues.place([75]) is None
    assert queues.inputs == 6


@examples(60)
@given(
    depths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 900)), min_size=1, max_size=3),
    n_clients=st.integers(1, 9),
)
def test_equal_parts_of_all_clients_are_at_most_the_whole(
    depths: list[tuple[int, int]], n_clients: int
) -> None:
    queues = QueueManager(
        [DeviceQueue(f"device {number}", 1, Depth(*depth)) for number, depth in enumerate(depths)]
    )
    whole = Depth(sum(depth[0] for depth in depths), sum(depth[1] for depth in depths))
    part = Depth(whole.inputs // n_clients, whole.tokens // n_clients)

    assert queues.holds(part, n_clients)
    assert not queues.holds(part + Depth(1, 0), n_clients)
    assert not queues.holds(part + Depth(0, 1), n_clients)


@dataclass(frozen=True)
class Item:
    owner: str
    number: int


@examples(80)
@given(st.lists(st.sampled_from("abc"), max_size=40))
def test_an_input_waits_for_its_own_and_one_turn_of_each_other(owners: list[str]) -> None:
    turns: Any = InputTurns()
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
    turns: Any = InputTurns()
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
