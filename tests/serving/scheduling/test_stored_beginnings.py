"""A store beside the scheduler, for drawn requests: answers stay what they are, and what a writer that is
late believes is what was computed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.pools.contract import Placement
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.serving.scheduling.prefixes import Computed
from phasewise.serving.scheduling.sequence_states import WantedBeginning
from tests.support.scheduled import POLICIES, any_pool
from tests.support.servers.fake_engine import END, AttentiveRanks, make_engine, run_all
from tests.support.tiers import examples

PREFIXES = [tuple(random.Random(seed).choices(range(END), k=400)) for seed in range(2)]


def slots(placement: Placement, begin: int, end: int) -> list[int]:
    return [placement.slot(position) for position in range(begin, end)]


class SlowStore:
    """Has any beginning, or says so; reads and writes whenever the test lets it."""

    def __init__(self, ranks: AttentiveRanks, rng: random.Random) -> None:
        self.ranks = ranks
        self.rng = rng
        self.reading: list[WantedBeginning] = []
        self.writing: list[tuple[Computed, int]] = []
        self.n_believed = 0

    def find(self, token_ids: tuple[int, ...], space: str) -> int:
        return self.rng.choice([0, (len(token_ids) - 1) // 16 * 16])

    def fill(self, wanted: WantedBeginning) -> int:
        """Write a beginning into the block: all of it, a part, or nothing."""
        n_tokens = self.rng.choice([0, 128, (len(wanted.token_ids) - 1) // 16 * 16])
        n_tokens = min(n_tokens, (len(wanted.token_ids) - 1) // 16 * 16)
        self.ranks.kv[slots(wanted.placement, 0, n_tokens)] = wanted.token_ids[:n_tokens]
        return n_tokens

    def read_late(self) -> None:
        """If it is still there, it is what was computed."""
        computed, end = self.writing.pop(self.rng.randrange(len(self.writing)))
        begin = self.rng.randrange(0, end, 16)
        contents = self.ranks.kv[slots(computed.placement, begin, end)]
        if computed.is_there(begin, end):
            assert tuple(contents) == computed.token_ids[begin:end]
            self.n_believed += 1


lengths = st.tuples(st.integers(1, 400), st.integers(1, 60), st.integers(0, 1))  # prompt, answer, beginning


@pytest.mark.parametrize("policy", POLICIES)
@examples(25)
@given(asked=st.lists(lengths, min_size=1, max_size=7), seed=st.integers(0, 999))
def test_whatever_a_store_has_and_whenever_it_reads(
    policy: str, asked: list[tuple[int, int, int]], seed: int
) -> None:
    rng, ranks = random.Random(seed), AttentiveRanks()
    requests = [
        Submit(f"r{number}", PREFIXES[which][:n_prompt], n_answer, GREEDY, ignore_eos=True)
        for number, (n_prompt, n_answer, which) in enumerate(asked)
    ]
    expected = {request.request_id: alone(request) for request in requests}
    engine = make_engine(ranks, pool=any_pool(policy, 1024, 470), context_length=470)
    store = SlowStore(ranks, rng)
    beginnings = engine.scheduler.reads_from(store.find)
    waiting, got, aborted = list(requests), dict[str, list[int]](), set[str]()
    for _ in range(20_000):
        if waiting and rng.random() < 0.2:
            engine.submit(waiting.pop())
        for out in engine.step().outs:
            assert isinstance(out, Answer)
            got.setdefault(out.request_id, []).extend(token.token_id for token in out.tokens)
        store.reading += beginnings.take_wanted()
        store.writing += [
            (computed, len(computed.token_ids) // 16 * 16)
            for computed in beginnings.take_computed()
            if len(computed.token_ids) >= 16
        ]
        engine.scheduler.check()
        if store.reading and rng.random() < 0.3:
            wanted = store.reading.pop(rng.randrange(len(store.reading)))
            if rng.random() < 0.1:
                engine.abort(wanted.request_id)
                aborted.add(wanted.request_id)
            else:
                engine.scheduler.restored(wanted.request_id, store.fill(wanted))
        if store.writing and rng.random() < 0.3:
            store.read_late()
        if not (waiting or engine.has_work):
            break

    assert not engine.has_work
    assert {name: ids for name, ids in got.items() if name not in aborted} == {
        name: ids for name, ids in expected.items() if name not in aborted
    }
    assert engine.load().kv_slots_used == 0


def alone(request: Submit) -> list[int]:
    outs = run_all(make_engine(AttentiveRanks(), context_length=470), request)[request.request_id]
    return [token.token_id for out in outs if isinstance(out, Answer) for token in out.tokens]


@pytest.mark.parametrize("losing", ["clear", "discard"])
def test_what_is_lost_is_not_believed(losing: str) -> None:
    """Ranks that died, and a step that failed."""
    engine = make_engine(AttentiveRanks(), pool=any_pool("odma", 1024, 470), context_length=470)
    beginnings = engine.scheduler.reads_from(lambda *_: 0)
    engine.submit(Submit("a", PREFIXES[0][:200], 40, GREEDY, ignore_eos=True))
    while not (computed := beginnings.take_computed()):
        engine.step()
    assert computed[0].is_there(0, 192)
    if losing == "clear":
        engine.scheduler.clear()
    else:
        batch = engine.scheduler.next_batch()
        assert batch is not None
        engine.scheduler.discard(batch)

    assert not computed[0].is_there(0, 16)
