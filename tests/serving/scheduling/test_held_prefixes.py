"""Reports of what an engine holds: added up they are what a request would take over, whatever the pool."""

from __future__ import annotations

import random

import pytest

from phasewise.cluster.held_blocks import HeldBlocks
from phasewise.serving.pools.contract import PoolSettings
from phasewise.serving.pools.opening import open_pool
from phasewise.serving.pools.state_places import StatePlaces
from phasewise.serving.pools.states import StatefulPool
from phasewise.serving.prefix_store.kept_beginnings import MOST_KEPT, KeptBeginnings
from phasewise.serving.scheduling import held_prefixes
from phasewise.serving.scheduling.held_prefixes import (
    BLOCK_TOKENS,
    MOST_STORED_BLOCKS,
    HeldPrefixes,
    block_keys,
)
from phasewise.serving.scheduling.prefixes import chain
from phasewise.serving.scheduling.request import Request
from phasewise.serving.scheduling.scheduler import Scheduler
from phasewise.serving.scheduling.scheduler_terms import SchedulerLimits
from tests.support.scheduled import POLICIES, Turns, make

MODEL = "model"
N_SLOTS = 1008


class Reported:
    """A scheduler, and what its reports add up to."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.held = HeldPrefixes(scheduler, MODEL)
        self.blocks = HeldBlocks(N_SLOTS // BLOCK_TOKENS)
        self.turns = Turns(scheduler, lambda _name, index: index % 3)

    def hear(self) -> None:
        report = self.held.report()
        if report is not None:
            self.blocks.hear(report)

    def run(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
        while self.scheduler.has_work:
            self.turns.take()
            self.hear()
        self.hear()

    def n_told(self, tokens: tuple[int, ...], space: str = "") -> int:
        return self.blocks.n_first(block_keys(tokens, MODEL, space))


def answer(request: Request) -> tuple[int, ...]:
    """The tokens of a request that `Reported` runs, as far as they have keys and values at its end."""
    return (*request.prompt_token_ids, *(index % 3 for index in range(request.max_tokens - 1)))


def drawn(rng: random.Random, number: int) -> Request:
    """It begins as one of three others do, for a while."""
    beginning = [rng.randrange(3)] * rng.randrange(1, 260)
    prompt = (*beginning, *[1000 + number] * rng.randrange(1, 80))
    return Request(str(number), prompt, rng.randrange(1, 60), cache_space=rng.choice(["", "", "other"]))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_told_is_there_and_all_that_would_be_found_is_told(policy: str, seed: int) -> None:
    """Whenever nothing runs: the blocks of all requests so far, in each space, those forgotten included."""
    rng = random.Random(seed)
    reported = Reported(make(policy, n_slots=N_SLOTS))
    index = reported.scheduler._prefixes
    assert index is not None
    sent: list[Request] = []
    n_found = 0
    for number in range(0, 60, 4):
        group = [drawn(rng, number + each) for each in range(rng.randrange(1, 5))]
        reported.run(*group)
        sent += group
        for request in sent:
            tokens = answer(request)
            for space in ("", "other"):
                probe = (*tokens, -1)
                n_ready = index.find(probe, chain(probe, space=space), space).n_ready
                n_told = reported.n_told(tokens, space) * BLOCK_TOKENS
                assert n_told + BLOCK_TOKENS > n_ready, (request, space)
                assert n_told == 0 or any(
                    source.space == space
                    and source.token_ids[:n_told] == tokens[:n_told]
                    and index.holds(source, source.placement, 0, n_told)
                    for source in index.sources
                ), (request, space)
                n_found += n_ready
    assert n_found


def test_a_prompt_is_told_when_it_is_whole_and_its_answer_when_it_ends() -> None:
    reported = Reported(make())
    request = Request("r", tuple(range(3 * BLOCK_TOKENS)), 2 * BLOCK_TOKENS + 1)
    reported.scheduler.add(request)
    reported.hear()
    assert reported.n_told(answer(request)) == 0
    while not reported.turns.got:
        reported.turns.take()
    reported.hear()

    assert reported.n_told(answer(request)) == 3
    reported.run()
    assert reported.n_told(answer(request)) == 5


def test_the_first_report_says_that_a_life_begins_and_nothing_is_told_twice() -> None:
    held = HeldPrefixes(make(), MODEL)

    first = held.report()

    assert first == held_prefixes.HeldReport(1)
    assert held.report() is None
    assert not held.has_changed


def test_long_changes_are_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_prefixes, "MOST_KEYS", 2)
    scheduler = make()
    held = HeldPrefixes(scheduler, MODEL)
    scheduler.add(Request("r", tuple(range(400)), 1))
    Turns(scheduler).run()
    parts = []
    while held.has_changed:
        report = held.report()
        assert report is not None
        parts.append(len(report.added))

    assert parts == [2, 2, 2]


def test_with_states_a_sequence_is_held_up_to_its_last_kept_state() -> None:
    """At its end, where its conversation goes on; and nothing of it once its places are given to others
    whose states cost more tokens."""
    pool = StatefulPool(
        open_pool("odma", N_SLOTS, PoolSettings(longest_request=500)), StatePlaces(4, N_SLOTS)
    )
    reported = Reported(Scheduler(pool, SchedulerLimits(500, 64, 2)))
    request = Request("r", tuple(range(150)), 60)
    reported.run(request)

    assert reported.n_told(answer(request)) == len(answer(request)) // BLOCK_TOKENS
    for number in range(6):
        reported.run(Request(f"other{number}", tuple(range(1000 * number + 1000, 1000 * number + 1250)), 20))
    assert reported.n_told(answer(request)) == 0


def test_without_reuse_nothing_is_held() -> None:
    pool = open_pool("odma", N_SLOTS, PoolSettings(longest_request=500))
    reported = Reported(Scheduler(pool, SchedulerLimits(500, 64, 2, prefix_reuse=False)))
    request = Request("r", tuple(range(150)), 60)

    reported.run(request)

    assert reported.n_told(answer(request)) == len(reported.blocks) == 0


def test_what_is_on_disk_is_told_until_it_is_removed() -> None:
    """Also where memory has forgotten it; of more than there is room to tell, what was written last."""
    on_disk = {(1,) * 300: 300, (2,) * 300: 130}
    stored = KeptBeginnings(lambda token_ids, _space: on_disk[token_ids])
    held, blocks = HeldPrefixes(make(), MODEL, stored), HeldBlocks(MOST_STORED_BLOCKS)

    def n_told() -> list[int]:
        report = held.report()
        if report is not None:
            blocks.hear(report)
        return [blocks.n_first(block_keys(tokens, MODEL, "")) for tokens in on_disk]

    for tokens in on_disk:
        stored.note(tokens, "")
    assert n_told() == [300 // BLOCK_TOKENS, 130 // BLOCK_TOKENS]
    on_disk[(1,) * 300] = 70
    stored.look_again()
    assert n_told() == [1, 130 // BLOCK_TOKENS]
    long = tuple(range(BLOCK_TOKENS * (MOST_STORED_BLOCKS + 5)))
    on_disk[long] = len(long)
    stored.note(long, "")
    assert n_told() == [0, 0, MOST_STORED_BLOCKS]


def test_a_longer_beginning_on_disk_stands_for_those_that_it_begins_with() -> None:
    stored = KeptBeginnings(lambda token_ids, _space: len(token_ids))
    for n_tokens in (100, 200, 300):
        stored.note((1,) * n_tokens, "")
    stored.note((1,) * 100, "other")

    assert [(len(kept.token_ids), kept.space) for kept in stored.now()] == [(300, ""), (100, "other")]
    for number in range(2 * MOST_KEPT):
        stored.note((number, 7), "")
    assert len(stored.now()) == MOST_KEPT
