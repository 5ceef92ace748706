"""Clients take turns: whatever one of them sends, the others wait for its next request alone."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.scheduling.request import LiveSequence, Request
from phasewise.serving.scheduling.waiting_line import WaitingLine
from tests.support.scheduled import Turns, make, request
from tests.support.tiers import examples

CLIENTS = "abcd"
steps = st.lists(st.sampled_from([*CLIENTS, "take", "preempt", "remove"]), max_size=60)


def sequence(client: str, name: int) -> LiveSequence:
    return LiveSequence(Request(str(name), (1,), 1, client=client))


@examples(300)
@given(steps=steps, data=st.data())
def test_turns_keep_their_laws_whatever_comes_and_goes(steps: list[str], data: st.DataObject) -> None:
    """Conservation; order of arrival within a client; a wait bounded by clients; preempted ones by age."""
    line = WaitingLine()
    waiting: dict[int, LiveSequence] = {}
    bounds: dict[int, int] = {}  # requests never admitted that may still be admitted before
    admitted: list[LiveSequence] = []

    for name, step in enumerate(steps):
        if step in CLIENTS:
            new = waiting[name] = sequence(step, name)
            n_own = sum(queued.request.client == step and queued.admission is None for queued in line)
            bounds[name] = n_own + (n_own + 1) * (len(CLIENTS) - 1)
            line.join(new)
        elif step == "take" and waiting:
            taken = next(line.heads)
            line.take(taken)
            preempted = [other for other in waiting.values() if other.admission is not None]
            if preempted:
                assert taken.admission == min(other.admission or 0 for other in preempted)
            else:
                own = [
                    number
                    for number, other in waiting.items()
                    if other.request.client == taken.request.client
                ]
                assert int(taken.request_id) == min(own)
                taken.admission = name
                for waiting_name, other in waiting.items():
                    if other is not taken:
                        bounds[waiting_name] -= 1
                        assert bounds[waiting_name] >= 0
            del waiting[int(taken.request_id)]
            admitted.append(taken)
        elif step == "preempt" and admitted:
            returning = admitted.pop(data.draw(st.integers(0, len(admitted) - 1)))
            waiting[int(returning.request_id)] = returning
            line.rejoin(returning)
        elif step == "remove" and waiting:
            removed = data.draw(st.sampled_from(sorted(waiting)))
            line.remove(waiting.pop(removed))
        assert len(line) == len(waiting)
        assert set(line) == set(waiting.values())
        assert line.n_clients == len(
            {queued.request.client for queued in waiting.values() if queued.admission is None}
        )
        heads = list(line.heads)
        owners = [queued.request.client for queued in line]
        assert [head.request.client for head in heads] == list(dict.fromkeys(owners))
        assert set(heads) <= set(line)
        assert line.clients == {head.request.client for head in heads}


def test_age_is_counted_from_the_first_admission() -> None:
    """A request that had its turn is not preempted for one that came before it and had its turn later."""
    scheduler = make("paged", n_slots=384, context=384, sequences=3)
    scheduler.add(replace(request("greedy 0", 300, 1), client="greedy"))
    for index in (1, 2):
        scheduler.add(replace(request(f"greedy {index}", 5, 150), client="greedy"))
    turns = Turns(scheduler)
    turns.take()
    scheduler.add(replace(request("other", 5, 123), client="other"))

    while not scheduler.counts.preemptions:
        assert turns.take() is not None

    assert [queued.request_id for queued in scheduler._lanes.own.waiting] == ["greedy 2"]
    turns.run()
    assert turns.ended == ["greedy 0", "other", "greedy 1", "greedy 2"]
