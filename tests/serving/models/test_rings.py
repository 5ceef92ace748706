"""Layers with windows keep rings: the bits of layers that keep everything, in memory that a window bounds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phasewise.cython_kernels.division import Teams
from phasewise.cython_kernels.kv_formats import KV_FORMATS
from phasewise.serving.batch import Batch, KvCopy, SequenceSlice
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.messages import Answer, Failure, Submit
from phasewise.serving.loaders import load_model
from phasewise.serving.models.forward import Capacity, build_program, kv_bytes_by_reach
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.pools.contract import Demand, Placement, Rings
from phasewise.serving.pools.opening import POLICIES
from phasewise.serving.ranks.open_ranks import KvSettings, RankOptions, Ranks, open_ranks
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.serving.scheduling.prefixes import copies_between
from phasewise.tuner.plans import PHASES, RankCores, ServicePlan
from tests.serving.models.test_forward import SLOTS, Machine, make_model, random_ids, random_steps, sliced
from tests.serving.models.test_forward_ranks import ranks
from tests.serving.scheduling.test_scheduler_laws import requests_of, submit
from tests.support.guessing import GuessingDrafter
from tests.support.models import family_models
from tests.support.scheduled import any_pool
from tests.support.servers.fake_engine import END, AttentiveRanks, make_engine, run_all, slots_of
from tests.support.tiers import examples

RING = 384  # a window of 33 and steps of up to 256 rows
ONE_RANK = (RankCores((0,)),)
TWO_RANKS = (RankCores((0,)), RankCores((1,)))


class RingMachine(Machine):
    """A program whose windowed layers keep rings."""

    def __init__(self, model: PackedModel, n_rings: int, threads: int = 1, kv_format: str = "auto") -> None:
        super().__init__(model, threads, 256, kv_format=kv_format)
        capacity = Capacity(SLOTS, 256, 16, 256, threads, kv_format, ring_slots=n_rings * RING)
        self.plain_kv_bytes = self.program.kv_bytes()
        self.program = build_program(model, capacity)
        self.logits = np.asarray(self.program)


def window_model() -> PackedModel:
    return make_model("mistral-window", "q8")


@examples(25)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=2),
    kv_format=st.sampled_from(KV_FORMATS),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_rings_give_the_bits_of_layers_that_keep_everything(
    lengths: list[int], kv_format: str, threads: int, seed: int
) -> None:
    """Prompts and single tokens of two sequences, cut and mixed at random, round their rings."""
    model, rng = window_model(), np.random.default_rng(seed)
    plain, machine = Machine(model, 1, 512, kv_format=kv_format), RingMachine(model, 2, threads, kv_format)
    sequences = [random_ids(n, model, i) for i, n in enumerate(lengths)]
    alone = [plain.every_row(sliced(ids))[-1] for ids in sequences]
    got: dict[int, np.ndarray] = {}

    for step, ending in random_steps(sequences, [0, 512], rng):
        placed = [piece._replace(ring=(SLOTS + RING * (piece.slot_base > 0), RING)) for piece in step]
        got.update(zip(ending, machine.last_rows(*placed), strict=True))

    for i, logits in enumerate(alone):
        assert (got[i] == logits).all()
    assert machine.program.kv_bytes() < machine.plain_kv_bytes


@pytest.mark.parametrize("teams", [((1, 1), (1, 1)), ((1, 1), (2,)), ((2,), (1, 1))], ids=str)
def test_ranks_keep_rings_together(teams: Teams) -> None:
    """Two sequences round their rings, prompts in pieces and then token by token, divided otherwise in
    decode."""
    model = window_model()
    sequences = [random_ids(700, model), random_ids(430, model, 1)]
    plain = Machine(model, 1, 1024)
    want = [plain.every_row(sliced(ids, base=0)) for ids in sequences]
    slots = [(0, (SLOTS, RING)), (512, (SLOTS + RING, RING))]
    with ranks(model, teams, (), 2 * RING) as two:
        for i, (base, ring) in enumerate(slots):
            for start in range(0, 420, 105):
                piece = sliced(sequences[i][start : start + 105], start, base)._replace(ring=ring)
                assert (two.run([piece], 0)[0] == want[i][start + 104]).all()
        for position in range(420, 430):
            step = [
                sliced([sequences[i][position]], position, base)._replace(ring=ring)
                for i, (base, ring) in enumerate(slots)
            ]
            assert (two.run(step, 1) == [rows[position] for rows in want]).all()
        for start in range(430, 500, 10):  # the longer one goes round again
            piece = sliced(sequences[0][start : start + 10], start, 0)._replace(ring=slots[0][1])
            assert (two.run([piece], start // 10 % 2)[0] == want[0][start + 9]).all()


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "llama4"])
def test_rank_processes_keep_rings_together(name: str, windowed: Callable[[str], PackedModel]) -> None:
    """Beside sinks and caps; one rank that keeps everything gives the same bits."""
    model = windowed(name)
    ids = random_ids(500, model)
    single, two = ({phase: ServicePlan(phase, cores) for phase in PHASES} for cores in (ONE_RANK, TWO_RANKS))
    plain = RankOptions(KvSettings(512), 128, 1, pinned=False)

    def rows_of(ranks: Ranks, ring: tuple[int, int] | None) -> np.ndarray:
        rows = []
        for start in range(0, 480, 96):
            piece = SequenceSlice(ids[start : start + 96], start, 0, True, None, 0, ring)
            rows.append(ranks.forward(Batch("prefill", (piece,))).copy())
        for position in range(480, 500):
            step = SequenceSlice([ids[position]], position, 0, True, None, 0, ring)
            rows.append(ranks.forward(Batch("decode", (step,))).copy())
        return np.concatenate(rows)

    with closing(open_ranks(model, single, plain)) as alone:
        expected = rows_of(alone, None)
    with closing(
        open_ranks(model, two, replace(plain, kv=KvSettings(512, rings=Rings(512, 256, 256, 24))))
    ) as divided:
        divided_rows = rows_of(divided, (512, 256))

    assert (divided_rows == expected).all()


@pytest.mark.parametrize(
    ("ring", "problem"),
    [
        (None, "outside"),
        ((SLOTS + 512, 512), "outside"),
        ((0, 256), "outside"),
        ((SLOTS + 8, 256), "outside"),
        ((SLOTS, 144), "shorter"),
        ((SLOTS, 128), "shorter"),
    ],
)
def test_a_ring_that_cannot_hold_what_is_seen_is_refused(ring: tuple[int, int] | None, problem: str) -> None:
    machine = RingMachine(window_model(), 2)
    with pytest.raises(ValueError, match=problem):
        machine.last_rows(sliced([1] * 150, 0)._replace(ring=ring))


def test_two_sequences_cannot_share_a_ring() -> None:
    machine = RingMachine(window_model(), 2)
    with pytest.raises(ValueError, match="two slices share a ring"):
        machine.last_rows(*[sliced([1], 0, base)._replace(ring=(SLOTS, RING)) for base in (0, 512)])


def test_rings_are_copied_apart_from_other_slots() -> None:
    """A beginning copied to another sequence, ring and all, and continued there."""
    model = window_model()
    ids = random_ids(400, model)
    want = Machine(model, 1, 512).every_row(sliced(ids))
    machine = RingMachine(model, 2)
    source, target = Placement(0, 400, None, (SLOTS, RING)), Placement(512, 400, None, (SLOTS + RING, RING))
    for start in range(0, 320, 160):
        machine.last_rows(sliced(ids[start : start + 160], start)._replace(ring=source.ring))

    n, copies = copies_between(source, target, 320, window=33)
    for copy in copies:
        machine.program.copy_kv(machine.team, *copy)
    rows = machine.last_rows(sliced(ids[320:], 320, 512)._replace(ring=target.ring, n_drafted=79))

    assert n == 320
    assert (rows == want[320:]).all()
    with pytest.raises(ValueError, match="slots"):
        machine.program.copy_kv(machine.team, SLOTS - 16, SLOTS, 16)


def test_copies_that_would_destroy_their_own_source_are_not_made() -> None:
    source, target = (1024, 256), (1024 + 16, 256)
    assert copies_between(Placement(0, 99, None, source), Placement(512, 99, None, target), 96, 33) == (0, [])
    same = copies_between(Placement(0, 99, None, source), Placement(512, 99, None, source), 96, 33)
    assert same == (96, [KvCopy(0, 512, 96)])


class WindowRanks(AttentiveRanks):
    """The next token depends on all tokens, and on those of a window, which are read through the ring."""

    def __init__(self, rings: Rings) -> None:
        super().__init__(successor=lambda token_id: token_id)
        self.rings = rings

    def forward(self, batch: Batch) -> np.ndarray:
        rings = [piece.ring for piece in batch.slices]
        assert None not in rings
        for piece in batch.slices:
            assert piece.ring is not None
            first, n_slots = piece.ring
            positions = piece.start + np.arange(len(piece.token_ids))
            end = int(positions[-1]) + 1
            assert end <= n_slots or n_slots >= self.rings.window + len(positions) - 1
            self.kv[first + positions % n_slots] = piece.token_ids
            self.kv[slots_of(piece)[piece.start :]] = piece.token_ids
            for position in positions:
                seen = np.arange(max(0, position - self.rings.window + 1), position + 1)
                own = self.kv[slots_of(piece)]
                assert (self.kv[first + seen % n_slots] == own[seen]).all(), "a ring has lost what is seen"
        return super().forward(batch)


lengths = st.tuples(st.integers(1, 400), st.integers(1, 200))  # prompt, answer
shared = st.tuples(st.integers(0, 2), st.integers(0, 200))  # a common beginning, and how much of it


@pytest.mark.parametrize("policy", POLICIES)
@examples(15)
@example(  # of a beginning, copies bring less than is there, and the ring has gone on
    asked=[
        *[((1, 1), (0, 0), None)] * 3,
        *[(sizes, (0, 0), None) for sizes in ((1, 64), (380, 134), (336, 50))],
    ],
    chunk=4,
    n_rings=2,
    right=None,
)
@given(
    asked=st.lists(st.tuples(lengths, shared, st.none()), min_size=1, max_size=6),
    chunk=st.integers(1, 64),
    n_rings=st.integers(1, 3),
    right=st.sampled_from((None, 0.7)),
)
def test_what_a_window_sees_is_in_its_ring(
    policy: str,
    asked: list[tuple[tuple[int, int], tuple[int, int], None]],
    chunk: int,
    n_rings: int,
    right: float | None,
) -> None:
    """Whatever is admitted, grown, moved, preempted, copied or drafted."""
    rings = Rings(1 << 14, 128 * n_rings, 128, 60)
    ranks = WindowRanks(rings)
    requests = requests_of(asked)
    answers = {}
    for request in requests:
        seen = list(request.prompt_token_ids)
        for _ in range(request.max_tokens):
            seen.append(ranks.choose_by(np.array(seen)))
        answers[request.request_id] = seen[len(request.prompt_token_ids) :]
    pool = any_pool(policy, 1024, 620).beside(rings)
    drafter = None if right is None else GuessingDrafter(answers, right, END)
    engine = make_engine(ranks, pool=pool, context_length=620, drafter=drafter)
    engine._pace = lambda: (chunk, None)  # type: ignore[method-assign]

    got = run_all(engine, *[submit(request) for request in requests])

    for name, outs in got.items():
        ids = [token.token_id for out in outs if isinstance(out, Answer) for token in out.tokens]
        assert ids == answers[name]
    assert pool.stats().slots_used == 0
    pool.check()


def test_a_ring_that_began_with_a_window_has_no_earlier_positions() -> None:
    """The second sequence copies what its next token sees; the third one begins before that."""
    rings = Rings(1 << 14, 128, 128, 60)
    engine = make_engine(
        WindowRanks(rings), pool=any_pool("odma", 1024, 620).beside(rings), context_length=620
    )
    first = tuple(range(1, 65))
    for name, prompt, n_answer in (("a", first, 66), ("b", (*first, 99), 1), ("c", (*first[:16], 98), 1)):
        answered = run_all(engine, Submit(name, prompt, n_answer, GREEDY, ignore_eos=True))[name]
        assert not any(isinstance(out, Failure) for out in answered)
    assert engine.load().prefix_hits == 1


def test_a_conversation_goes_on_from_its_ring() -> None:
    """The next turn begins with all of the one before: that is copied, though the ring went round."""
    rings = Rings(1 << 14, 512, 128, 60)
    engine = make_engine(
        WindowRanks(rings), pool=any_pool("odma", 2048, 620).beside(rings), context_length=620
    )
    first = Submit("a", tuple(range(1, 240)), 40, GREEDY, ignore_eos=True)
    said = [
        token.token_id
        for out in run_all(engine, first)["a"]
        if isinstance(out, Answer)
        for token in out.tokens
    ]

    run_all(engine, Submit("b", (*first.prompt_token_ids, *said, 5, 6, 7), 10, GREEDY, ignore_eos=True))
    assert engine.scheduler.counts.prefix_tokens_reused >= 240

    before = engine.scheduler.counts.prefix_tokens_reused
    run_all(engine, Submit("c", (*first.prompt_token_ids[:100], 9, 9, 9), 10, GREEDY, ignore_eos=True))
    assert engine.scheduler.counts.prefix_tokens_reused == before  # its window was written over


def test_a_ring_is_no_longer_than_its_request_can_become() -> None:
    rings = Rings(4096, 1024, 512, 100)
    pool = any_pool("odma", 4096, 2000).beside(rings)

    short, long = pool.reserve("short", Demand(10, 40, 10)), pool.reserve("long", Demand(10, 2000, 10))

    assert short is not None
    assert long is not None
    assert short.placement.ring == (4096, 48)
    assert long.placement.ring == (4096 + 48, 512)
    assert pool.reserve("third", Demand(10, 2000, 10)) is None
    pool.release("long")
    assert pool.reserve("third", Demand(10, 2000, 10)) is not None
    pool.check()


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PackedModel]:
    folder = tmp_path_factory.mktemp("windowed")

    def load(name: str) -> PackedModel:
        path = family_models.write_family_hf(folder / name, name)
        return load_model(str(path), "native", cache_dir=folder / "cache")

    return load


def test_memory_of_windows_is_bounded_by_the_window(windowed: Callable[[str], PackedModel]) -> None:
    """The same budget holds more positions; one request's windows keep no more than window and step."""
    model = windowed("gemma3")
    seen_by_all, per_window = kv_bytes_by_reach(model)
    assert seen_by_all > 0
    assert per_window > 0
    longer = replace(model, config=replace(model.config, context_length=1 << 16))

    single = EngineSize.for_one(longer, 40_000, 1000)
    many = EngineSize.for_many(longer, 4, 1 << 16, 64 << 20)

    for size in (single, many):
        assert size.kv.rings is not None
        assert size.kv.rings.longest <= 24 + 512 + 127
        assert size.kv.rings.n_slots <= size.kv.rings.longest * size.limits.max_sequences
    assert many.kv.rings is not None
    assert many.kv.slots * seen_by_all + many.kv.rings.n_slots * per_window <= 64 << 20
    assert many.kv.slots > (64 << 20) // (seen_by_all + per_window)
    assert EngineSize.for_one(model, 100, 50).kv.rings is None
