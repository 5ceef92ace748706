"""A beginning of prompts is found where it is, believed only as far as it is there, copied without loss."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cluster.routing import HeldBlocks
from phasewise.serving.batch import KV_CHUNK, KvCopy
from phasewise.serving.pools.contract import Placement, PoolSettings
from phasewise.serving.pools.opening import open_pool
from phasewise.serving.pools.state_places import StatePlaces
from phasewise.serving.scheduling import held_prefixes
from phasewise.serving.scheduling.held_prefixes import (
    BLOCK_TOKENS,
    MOST_STORED_BLOCKS,
    HeldPrefixes,
    KeptBeginnings,
    block_keys,
)
from phasewise.serving.scheduling.prefixes import (
    RUN_TOKENS,
    Match,
    PrefixError,
    PrefixIndex,
    chain,
    copies_between,
)
from phasewise.serving.scheduling.request import Request, SchedulerLimits, space_of
from phasewise.serving.scheduling.scheduler import Scheduler
from tests.support.scheduled import POLICIES, Turns, make

TOKENS = tuple(range(200))
BLOCK = Placement(0, 256)
ELSEWHERE = Placement(512, 256)


def started(
    index: PrefixIndex, owner: str, tokens: tuple[int, ...] = TOKENS, placement: Placement = BLOCK
) -> None:
    index.start(owner, (tokens, chain(tokens)), placement)


def find(index: PrefixIndex, tokens: tuple[int, ...]) -> Match:
    return index.find(tokens, chain(tokens))


@given(n_common=st.integers(0, 200), n_computed=st.integers(0, 200), n_asked=st.integers(1, 220))
def test_a_match_is_common_computed_and_never_everything(
    n_common: int, n_computed: int, n_asked: int
) -> None:
    index = PrefixIndex(1024)
    started(index, "first")
    index.advance("first", n_computed)
    asked = (*TOKENS[:n_common], *(-1 - number for number in range(220)))[:n_asked]

    match = find(index, asked)

    whole_runs = min(n_common, n_asked - 1, len(TOKENS)) // RUN_TOKENS * RUN_TOKENS
    assert match.n_coming == whole_runs
    assert match.n_ready == min(whole_runs, n_computed // RUN_TOKENS * RUN_TOKENS)
    assert (match.source is not None) == (match.n_ready > 0)


def test_equal_hashes_of_other_tokens_are_not_believed() -> None:
    index = PrefixIndex(1024)
    started(index, "first")
    index.advance("first", 200)

    assert index.find((5,) * 200, chain(TOKENS)).n_ready == 0


def test_no_more_tokens_are_remembered_than_there_are_slots() -> None:
    index = PrefixIndex(160)
    for number in range(4):
        tokens = (number,) * 64
        started(index, str(number), tokens, Placement(number % 2 * 64, 64))
        index.retire(str(number), tokens)

    assert [find(index, (token,) * 65).n_ready for token in range(4)] == [0, 0, 64, 64]
    assert len(index._by_chain) == 2 * 4
    index.clear()
    assert find(index, (3,) * 65).n_ready == 0


def test_an_owner_that_is_not_where_it_should_be_is_told() -> None:
    index = PrefixIndex(1024)
    started(index, "first")
    index.advance("first", 100)
    with pytest.raises(PrefixError, match="100 tokens said"):
        index.check("first", ELSEWHERE, 100)
    started(index, "other", (7,) * 50, BLOCK)
    with pytest.raises(PrefixError, match="0 are"):
        index.check("first", BLOCK, 100)


pages = st.permutations(range(8)).map(lambda order: tuple(KV_CHUNK * page for page in order))


@given(source=pages, target=pages, n_pages=st.integers(1, 4), n_tokens=st.integers(1, 512))
def test_copies_bring_what_they_say_even_between_blocks_that_share_slots(
    source: tuple[int, ...], target: tuple[int, ...], n_pages: int, n_tokens: int
) -> None:
    n_tokens = min(n_tokens, n_pages * KV_CHUNK)
    kv = np.arange(8 * KV_CHUNK)
    positions = np.arange(n_tokens)
    where = [np.array(table)[positions // KV_CHUNK] + positions % KV_CHUNK for table in (source, target)]
    expected = kv[where[0]]

    done, copies = copies_between(
        *(Placement(table[0], n_pages * KV_CHUNK, table[:n_pages]) for table in (source, target)), n_tokens
    )
    for copy in copies:
        kv[copy.target_slot : copy.target_slot + copy.n_slots] = kv[
            copy.source_slot : copy.source_slot + copy.n_slots
        ]

    assert 0 < done <= n_tokens
    assert (kv[where[1]][:done] == expected[:done]).all()


def test_a_contiguous_copy_is_one_and_none_where_nothing_moves() -> None:
    assert copies_between(BLOCK, ELSEWHERE, 200) == (200, [KvCopy(0, 512, 200)])
    assert copies_between(BLOCK, BLOCK, 200) == (200, [])
    paged = Placement(512, 256, (512, 640))
    assert copies_between(BLOCK, paged, 200) == (200, [KvCopy(0, 512, 200)])


def test_the_scheduler_needs_neither_numpy_nor_kernels() -> None:
    """So that a simulator can have it alone."""
    script = (
        "import sys, phasewise.serving.scheduling.scheduler, "
        "phasewise.serving.scheduling.pacing, phasewise.serving.pools.opening; "
        "print([name for name in sys.modules if 'numpy' in name or 'native' in name])"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


LONG = tuple(range(5 * BLOCK_TOKENS + 7))


@given(n_tokens=st.integers(0, len(LONG)), n_known=st.integers(0, 5))
def test_a_chain_of_keys_can_be_continued(n_tokens: int, n_known: int) -> None:
    whole = block_keys(LONG[:n_tokens], "model", "space")

    assert len(whole) == n_tokens // BLOCK_TOKENS
    assert block_keys(LONG[:n_tokens], "model", "space", whole[:n_known]) == whole
    assert block_keys(LONG, "model", "space")[: len(whole)] == whole


@given(position=st.integers(0, 5 * BLOCK_TOKENS - 1), token=st.integers(-(2**40), 2**40))
def test_a_token_changes_the_keys_from_its_block_on(position: int, token: int) -> None:
    other = (*LONG[:position], token, *LONG[position + 1 :])

    alike = [
        mine == yours for mine, yours in zip(block_keys(LONG, "", ""), block_keys(other, "", ""), strict=True)
    ]

    assert alike == [token == LONG[position] or block < position // BLOCK_TOKENS for block in range(5)]


def test_models_adapters_and_spaces_have_no_key_in_common() -> None:
    spaces = [("a", ""), ("b", ""), ("a", "key"), ("a", space_of("", "hash")), ("a", space_of("key", "hash"))]
    keys = [key for model, space in spaces for key in block_keys(LONG, model, space)]

    assert len(set(keys)) == len(keys) == 25


def test_every_process_has_the_same_keys() -> None:
    """Whatever the seed of Python's hashes."""
    code = (
        "from phasewise.serving.scheduling.held_prefixes import block_keys;"
        "print(block_keys(range(200), 'model', 'space'))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }

    assert said == {str(block_keys(range(200), "model", "space"))}


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
    pool = open_pool("odma", N_SLOTS, PoolSettings(longest_request=500))
    pool.beside(states=StatePlaces(4, N_SLOTS))
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
