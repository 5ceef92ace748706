"""Requests in shadow: they end, they change nothing for others, and they give way at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.batch import Batch
from phasewise.serving.scheduling.pacing import NO_ROOM, USUAL, Pacing, ShadowPacing, decode_ns, rows_within
from phasewise.serving.scheduling.request import Request
from tests.support.scheduled import POLICIES, Turns, make, request
from tests.support.tiers import examples

ROWS = {1: 10.0, 2: 12.0, 4: 20.0, 8: 40.0}


def shadow(name: str, n_prompt: int = 5, max_tokens: int = 3) -> Request:
    return replace(request(name, n_prompt, max_tokens), in_shadow=True)


@pytest.mark.parametrize("policy", POLICIES)
@examples(20)
@given(data=st.data())
def test_whatever_comes_and_goes_everything_ends_and_nobody_waits_for_a_shadow(
    policy: str, data: st.DataObject
) -> None:
    """Laws of the scheduler hold after every step (`Turns.take`), and no shadow holds slots while a request
    that is none waits."""
    scheduler = make(policy, n_slots=data.draw(st.sampled_from([512, 1008])), context=200)
    turns = Turns(scheduler)
    take = scheduler.next_batch

    def next_batch(*limits: Any) -> Batch | None:
        batch = take(*limits)
        if scheduler.n_running < scheduler.limits.max_sequences and any(
            not sequence.n_preempted for sequence in scheduler._lanes.own.waiting
        ):
            assert not any(sequence.request.in_shadow for sequence in scheduler._lanes.running)
        return batch

    scheduler.next_batch = next_batch  # type: ignore[method-assign]
    draw = st.tuples(st.booleans(), st.integers(1, 60), st.integers(1, 40))
    n_sent = 0
    for _ in range(data.draw(st.integers(1, 30))):
        for in_shadow, n_prompt, n_answer in data.draw(st.lists(draw, max_size=3)):
            n_sent += 1
            new_request = request(f"{n_sent}", n_prompt, n_answer)
            scheduler.add(replace(new_request, in_shadow=in_shadow, client=str(n_sent % 3)))
        turns.take()
    turns.run()
    assert len(turns.ended) == n_sent


def test_the_steps_of_others_are_those_without_shadows() -> None:
    """With no room in a step, interactive requests have the same steps, one by one, beside shadows."""

    def steps(with_shadows: bool) -> list[tuple[str, tuple[str, ...]]]:
        scheduler = make(n_slots=4032, sequences=4)
        for name in range(6 if with_shadows else 0):
            scheduler.add(shadow(f"s{name}", 40, 30))
        for name in range(6):
            scheduler.add(request(f"r{name}", 20 + name, 10))
        seen = []
        while scheduler.n_running or scheduler.n_waiting:
            batch = scheduler.next_batch(None, None, NO_ROOM)
            assert batch is not None
            scheduler.commit(batch, [1] * batch.n_logits)
            seen.append((batch.phase, batch.request_ids))
            scheduler.check()
        return seen

    assert steps(True) == steps(False)


@given(
    st.dictionaries(st.integers(1, 64), st.floats(1, 1e9), min_size=1), st.integers(1, 64), st.floats(0, 1e9)
)
def test_rows_are_within_what_is_left(costs: dict[int, float], n_rows: int, left_ns: float) -> None:
    """But for one that was never tried."""
    further = rows_within(costs, n_rows, left_ns)

    n_costed = min(n_rows + further, max(n_rows, max(costs)))
    assert decode_ns(costs, n_costed) - decode_ns(costs, n_rows) <= left_ns or n_costed == n_rows
    assert n_rows + further <= max(max(costs), n_rows) + 1


def test_short_gaps_are_filled_and_long_ones_are_left_alone() -> None:
    pacing = ShadowPacing()
    for _ in range(100):
        pacing.observe_decode(8, 40, ROWS, 1.0)
    assert pacing.room(ROWS, 8, 1.0).rows in (0, 1), "no more than a try"
    assert pacing.room(ROWS, 0, 1.0) == NO_ROOM
    room = pacing.room(ROWS, 1, 1.0)
    assert room.rows is not None
    assert ROWS[1] < decode_ns(ROWS, 1 + room.rows) <= ROWS[1] + 40 + USUAL * 40


@given(st.lists(st.tuples(st.integers(1, 8), st.booleans()), min_size=50, max_size=300))
def test_in_the_long_run_no_gap_is_longer_than_it_was_or_than_usual(rows: list[tuple[int, bool]]) -> None:
    """Shadows add to all gaps what short ones leave, a saved chunk apart."""
    pacing, extra, most = ShadowPacing(), 0.0, 0.0
    for n_rows, has_prompt in rows:
        room = pacing.room(ROWS, n_rows, 1.0)
        own = decode_ns(ROWS, n_rows)
        most += max(0.0, USUAL * max(ROWS.values()) - own)
        chunk = room.chunk_tokens or 0 if has_prompt else 0
        if chunk:
            pacing.observe_prompts(chunk, in_shadow=True)
            room = pacing.room(ROWS, n_rows, 1.0)
        further = min(room.rows or 0, 8 - n_rows)
        real = decode_ns(ROWS, n_rows + further)
        extra += chunk + real - own
        pacing.observe_decode(n_rows, round(real), ROWS, 1.0)

    assert extra <= most + 2 * 40 + 24


def test_steps_of_shadows_alone_are_short_for_whoever_comes() -> None:
    pacing = Pacing(10**8, 2048)
    for _ in range(20):
        pacing.observe("prefill", 512, 512 * 10**6)

    alone, other = pacing.pace(0, is_all_shadow=True), pacing.pace(0)

    assert alone.chunk_tokens < other.chunk_tokens
    assert alone.chunk_tokens >= 16
