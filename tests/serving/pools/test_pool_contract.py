"""One contract for every KV pool: what `serving.pools.contract` promises, on memory that is really copied."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.batch import KvCopy
from phasewise.serving.errors import ServingError
from phasewise.serving.pools.contract import (
    ALIGNMENT,
    Demand,
    Estimate,
    Grant,
    Placement,
    PoolError,
    PoolSettings,
)
from phasewise.serving.pools.opening import POLICIES, open_pool
from phasewise.serving.pools.pool import KvPool
from phasewise.workflows.bench.kv.compared import KV_POLICIES, ComparedSettings
from tests.support.tiers import examples

N_SLOTS = 960
LONGEST_REQUEST = 400

SMALL = {
    "odma": ComparedSettings(LONGEST_REQUEST, refresh_every=4, window=32),
    "odma-whole": ComparedSettings(LONGEST_REQUEST, refresh_every=4, window=32),
    "static": ComparedSettings(LONGEST_REQUEST),
    "fixed": ComparedSettings(LONGEST_REQUEST, answer_tokens=200, n_fixed=4),
    "paged": ComparedSettings(LONGEST_REQUEST, page_slots=32),
}


def opened(name: str, n_slots: int = N_SLOTS) -> KvPool:
    return KV_POLICIES[name](n_slots, SMALL[name])


class Memory:
    """Slots that hold whose position was written there; requests that grow, a step of all at a time."""

    def __init__(self, pool: KvPool, page_slots: int) -> None:
        self.pool = pool
        self.page_slots = page_slots
        self.slots: list[tuple[str, int] | None] = [None] * pool.n_slots
        self.written: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.prompt: dict[str, int] = {}
        self.placements: dict[str, Placement] = {}
        self.copies: list[KvCopy] = []

    def reserve(self, owner: str, demand: Demand) -> None:
        before = self._state()
        grant = self.pool.reserve(owner, demand)
        if grant is None:
            assert self._state() == before, "a refusal changed something"
            return
        assert grant.placement.n_slots >= demand.held_tokens
        self._follow(owner, grant)
        self._copy()
        self.written[owner], self.most[owner], self.prompt[owner] = (
            0,
            demand.most_tokens,
            demand.prompt_tokens,
        )
        self._check()
        self._write(owner, demand.held_tokens)

    def grow(self, owner: str, n_positions: int) -> bool:
        """Room for this many tokens; what was there is copied when the step is computed."""
        before = self._state()
        grant = self.pool.grow(owner, n_positions)
        if grant is None:
            assert self._state() == before, "a refusal changed something"
            return False
        assert grant.placement.n_slots >= n_positions
        self._follow(owner, grant)
        self._check()
        return True

    def release(self, owner: str, *, ended: bool) -> None:
        del self.placements[owner]
        answer = self.written.pop(owner) - self.prompt[owner]
        self.pool.release(owner, answer if ended else None)
        assert owner not in self.pool.placements()
        self._check()

    def step(self, growths: list[tuple[str, int]], preempted: list[str]) -> None:
        """Growths and releases as they come; then all copies, in their order; then what is new is written."""
        grown = []
        for owner, n_positions in growths:
            if owner in self.written and n_positions > self.written[owner]:
                if self.grow(owner, n_positions):
                    grown.append((owner, n_positions))
                elif preempted and preempted[-1] in self.written and preempted[-1] != owner:
                    self.release(preempted.pop(), ended=False)
        self._copy()
        for owner, n_positions in grown:
            if owner in self.written:
                self._write(owner, n_positions)
        self._assert_contents()

    def slot(self, placement: Placement, position: int) -> int:
        if placement.table is None:
            return placement.base + position
        return placement.table[position // self.page_slots] + position % self.page_slots

    def _follow(self, owner: str, grant: Grant) -> None:
        """Placements are those the pool tells, and none differs without having been told as a move."""
        self.placements[owner] = grant.placement
        for move in grant.moves:
            assert move.copy.target_slot == move.placement.base
            assert move.copy.source_slot != move.copy.target_slot
            self.placements[move.owner] = move.placement
            self.copies.append(move.copy)
        assert self.pool.placements() == self.placements

    def _copy(self) -> None:
        for source, target, n_slots in self.copies:
            self.slots[target : target + n_slots] = self.slots[source : source + n_slots]
        self.copies.clear()

    def _write(self, owner: str, n_positions: int) -> None:
        placement = self.pool.placements()[owner]
        for position in range(self.written[owner], n_positions):
            self.slots[self.slot(placement, position)] = owner, position
        self.written[owner] = n_positions

    def _assert_contents(self) -> None:
        for owner, placement in self.pool.placements().items():
            for position in range(self.written[owner]):
                assert self.slots[self.slot(placement, position)] == (owner, position)

    def _state(self) -> tuple[object, ...]:
        stats = self.pool.stats()
        return self.pool.placements(), stats.slots_used, stats.slots_free, stats.migrations

    def _check(self) -> None:
        """Conservation, by the pool's own count and by ours."""
        self.pool.check()
        stats = self.pool.stats()
        assert stats.slots_used + stats.slots_free == self.pool.n_slots
        assert stats.largest_reservable <= stats.slots_free
        taken: list[int] = []
        for placement in self.pool.placements().values():
            starts = placement.table or (placement.base,)
            length = placement.n_slots // len(starts)
            assert {boundary % ALIGNMENT for boundary in (*starts, length)} == {0}
            taken.extend(slot for start in starts for slot in range(start, start + length))
        assert len(taken) == len(set(taken)) == stats.slots_used
        assert all(0 <= slot < self.pool.n_slots for slot in taken)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    prompt = draw(st.integers(1, 150))
    answered = draw(st.sampled_from([0, 0, 0, 7, 60]))
    most = prompt + answered + draw(st.integers(1, LONGEST_REQUEST - prompt - answered))
    estimate = draw(st.none() | st.builds(Estimate, st.floats(0, 500), st.floats(0, 1)))
    return Demand(prompt + answered, most, prompt, estimate)


ACTIONS = st.one_of(
    st.tuples(st.just("reserve"), demands()),
    st.tuples(st.just("step"), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 90)), max_size=6)),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("refresh"), st.none()),
)


@pytest.mark.parametrize("name", SMALL)
class TestEveryPool:
    @examples(60)
    @given(actions=st.lists(ACTIONS, min_size=1, max_size=40))
    def test_slots_are_conserved_and_contents_survive(
        self, name: str, actions: list[tuple[str, object]]
    ) -> None:
        """Whatever comes in whatever order: no slot is lost or shared, and what was written is read again."""
        memory = Memory(opened(name), SMALL[name].page_slots)
        for index, (action, argument) in enumerate(actions):
            owners = list(memory.written)
            if action == "reserve":
                assert isinstance(argument, Demand)
                memory.reserve(f"r{index}", argument)
            elif action == "refresh":
                memory.pool.refresh()
            elif action == "step":
                assert isinstance(argument, list)
                wanted = [(owners[i % len(owners)], by) for i, by in argument if owners]
                growths = [(o, min(memory.most[o], memory.written[o] + by)) for o, by in wanted]
                memory.step(growths, owners[:])
            elif owners:
                assert isinstance(argument, int)
                memory.release(owners[argument % len(owners)], ended=action == "end")
        for owner in list(memory.written):
            memory.release(owner, ended=False)
        assert memory.pool.stats().slots_free == memory.pool.n_slots

    @examples(30)
    @given(
        prompt=st.integers(1, 300),
        lessons=st.lists(st.integers(1, 300), max_size=40),
        estimate=st.none() | st.builds(Estimate, st.floats(0, 2000), st.floats(0, 1)),
    )
    def test_the_empty_pool_takes_the_longest_request_to_its_end(
        self, name: str, prompt: int, lessons: list[int], estimate: Estimate | None
    ) -> None:
        """Whatever was learnt before, and however wrong the estimate is."""
        pool = opened(name)
        memory = Memory(pool, SMALL[name].page_slots)
        for index, answer in enumerate(lessons):
            memory.reserve(f"l{index}", Demand(1, 1 + answer, 1))
            memory.step([(f"l{index}", 1 + answer)], [])
            memory.release(f"l{index}", ended=True)
            pool.refresh()

        memory.reserve("long", Demand(prompt, pool.n_slots, prompt, estimate))
        for n_positions in range(prompt + 1, pool.n_slots + 1):
            if n_positions > pool.placements()["long"].n_slots or n_positions == pool.n_slots:
                assert memory.grow("long", n_positions)
                memory.step([("long", n_positions)], [])

        assert pool.placements()["long"].n_slots >= pool.n_slots

    def test_whoever_preempts_all_others_goes_on_to_the_end(self, name: str) -> None:
        """The oldest of many always gets its room once the others have given theirs back."""
        memory = Memory(opened(name), SMALL[name].page_slots)
        for index in range(40):
            memory.reserve(f"r{index}", Demand(20, 380, 20))
        others = [owner for owner in memory.written if owner != "r0"]
        for n_positions in range(21, 381):
            while not memory.grow("r0", n_positions):
                memory.release(others.pop(), ended=False)
            memory.step([("r0", n_positions)], [])
        assert memory.written["r0"] == 380

    def test_misuse_raises_and_names_the_owner(self, name: str) -> None:
        pool = opened(name)
        assert pool.reserve("a", Demand(5, 9, 5)) is not None
        with pytest.raises(PoolError, match="'a'"):
            pool.reserve("a", Demand(5, 9, 5))
        with pytest.raises(PoolError, match="'b'"):
            pool.grow("b", 5)
        with pytest.raises(PoolError, match="'b'"):
            pool.release("b")
        with pytest.raises(PoolError, match="'a'"):
            pool.grow("a", 10)
        for demand in (Demand(0, 9, 0), Demand(10, 9, 5), Demand(5, 9, 6)):
            with pytest.raises(PoolError):
                pool.reserve("c", demand)
        pool.check()

    def test_a_pool_without_room_for_one_block_is_refused(self, name: str) -> None:
        with pytest.raises((PoolError, ServingError), match="15"):
            opened(name, 15)


def test_every_policy_is_under_the_contract() -> None:
    assert {*SMALL, "paged-16"} == set(KV_POLICIES)


def test_what_serves_is_odma_in_buckets_or_in_pages() -> None:
    assert set(POLICIES) == {"odma", "paged"}


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(PoolError, match=r"'buddy'.*odma, paged$"):
        open_pool("buddy", 64, PoolSettings(64))
