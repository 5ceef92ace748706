"""A step divided over ranks, also over more than there are KV heads, gives the bits of one."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import isa
from phasewise.cython_kernels._native import Program, Team
from phasewise.cython_kernels.division import Division, Teams
from phasewise.cython_kernels.errors import GroupFailed
from phasewise.cython_kernels.schedules import ScheduleLookup
from phasewise.serving.batch import SequenceSlice
from phasewise.serving.models.forward import AUTO, Capacity, build_program, kv_bytes_per_slot
from phasewise.serving.models.packed_model import PackedModel
from tests.serving.models.test_forward import (
    MODELS,
    SLOTS,
    DefaultSchedules,
    Machine,
    RandomSchedules,
    make_model,
    random_ids,
    sliced,
)
from tests.support.models.reference_forward import tiny_config, tiny_model
from tests.support.tiers import examples

STEP_TOKENS = 256


class Ranks:
    """Every rank's program over one memory; those from 1 on serve in threads of their own."""

    def __init__(
        self,
        model: PackedModel,
        teams: Teams,
        schedules: Sequence[Sequence[ScheduleLookup]] = (),
        ring_slots: int = 0,
        kv_format: str = AUTO,
        weights: Teams = (),
    ) -> None:
        self.teams, self.kv_format, self.weights = teams, kv_format, weights
        self.ring_slots = ring_slots
        self.endings: dict[int, BaseException | None] = {}
        self._memory: mmap.mmap | None = None
        n_ranks = max(map(len, teams))
        self.programs = [
            self._build(model, rank, schedules[rank] if schedules else ()) for rank in range(n_ranks)
        ]
        self.logits = np.asarray(self.programs[0])
        self.own_teams = [self._open_teams(rank) for rank in range(n_ranks)]
        self.servers = [threading.Thread(target=self._serve, args=(rank,)) for rank in range(1, n_ranks)]
        for server in self.servers:
            server.start()

    def _build(self, model: PackedModel, rank: int, schedules: Sequence[ScheduleLookup]) -> Program:
        own = max(team[rank] for team in self.teams if rank < len(team))
        capacity = Capacity(
            SLOTS, STEP_TOKENS, 16, STEP_TOKENS, own, self.kv_format, ring_slots=self.ring_slots
        )
        division = Division(self.teams, rank, self.weights)
        return build_program(model, capacity, None, schedules, division, self._share)

    def _share(self, size: int) -> memoryview:
        if self._memory is None:
            self._memory = mmap.mmap(-1, size)
        return memoryview(self._memory)

    def _open_teams(self, rank: int) -> list[Team | None]:
        return [Team(None, members=team[rank]) if rank < len(team) else None for team in self.teams]

    def _serve(self, rank: int) -> None:
        try:
            self.programs[rank].serve(self.own_teams[rank])
            self.endings[rank] = None
        except GroupFailed as error:
            self.endings[rank] = error

    def run(self, slices: Sequence[SequenceSlice], table: int = 0, every_row: bool = False) -> np.ndarray:
        rows = self.programs[0].run(self.own_teams[0][table], slices, every_row=every_row, table=table)
        return self.logits[:rows].copy()

    def close(self) -> None:
        self.programs[0].stop()
        for server in self.servers:
            server.join(60)
        assert not any(server.is_alive() for server in self.servers)


@contextmanager
def ranks(*arguments: Any) -> Iterator[Ranks]:
    opened = Ranks(*arguments)
    try:
        yield opened
    finally:
        opened.close()


def prompts(model: PackedModel) -> list[SequenceSlice]:
    """One in two chunks of positions; one of a single token, whose logits are not wanted."""
    lengths, bases, wanted = (140, 1, 60), (0, 200, 333), (True, False, True)
    return [
        sliced(random_ids(n, model, n), base=base, wants_logits=wants)
        for n, base, wants in zip(lengths, bases, wanted, strict=True)
    ]


def decode_steps(model: PackedModel, count: int) -> list[list[SequenceSlice]]:
    """The next tokens of the prompts, together and alone."""
    steps = []
    for i, token in enumerate(random_ids(count, model, 9)):
        batch = [sliced([token], len(p.token_ids) + i, p.slot_base) for p in prompts(model)]
        steps.append(batch)
        if i % 2:
            steps[-1] = batch[:2]
    return steps


def assert_bits_of_one(model: PackedModel, teams: Teams, n_steps: int, kv_format: str = AUTO) -> None:
    """Prefill and decode divided otherwise; a decode batch and a single sequence."""
    single = Machine(model, kv_format=kv_format)
    with ranks(model, teams, (), 0, kv_format) as many:
        assert (many.run(prompts(model), 0, True) == single.every_row(*prompts(model))).all()
        assert (many.run(prompts(model), 0) == single.last_rows(*prompts(model))).all()
        for step in decode_steps(model, n_steps):
            assert (many.run(step, 1) == single.last_rows(*step)).all()


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8", "q4"])
@pytest.mark.parametrize("teams", [((1, 1), (1, 1)), ((2, 1), (1, 1, 1)), ((1, 1, 1, 1), (3,))], ids=str)
def test_ranks_give_the_bits_of_one(teams: Teams, kind: str) -> None:
    assert_bits_of_one(make_model("llama", kind), teams, 4)


@pytest.mark.parametrize("kv_format", ["f16", "int8", "int4", "int16"])
def test_ranks_give_the_bits_of_one_in_every_format_of_keys_and_values(kv_format: str) -> None:
    assert_bits_of_one(make_model("llama"), ((2, 1), (1, 1, 1)), 2, kv_format)


@pytest.mark.parametrize("name", MODELS)
def test_every_shape_of_model_is_divided(name: str) -> None:
    """Uneven KV heads, one KV head for two ranks, heads and vocabularies that are no multiple of a panel."""
    assert_bits_of_one(make_model(name), ((1, 1), (1, 2)), 2)


@pytest.mark.parametrize("isa_name", isa.usable())
def test_the_other_ranks_follow_the_first_ones_instruction_set(isa_name: str) -> None:
    model = make_model("llama", "q8")
    with ranks(model, ((1, 1), (1, 1)), (), 0, "f16") as many, isa.using(isa_name):
        want = Machine(model, kv_format="f16").last_rows(*prompts(model))
        assert (many.run(prompts(model)) == want).all()


@examples(15)
@given(
    sizes=st.tuples(*[st.lists(st.integers(1, 2), min_size=1, max_size=4)] * 2).filter(
        lambda sizes: max(map(len, sizes)) > 1
    ),
    kind=st.sampled_from(("f32", "q4")),
    k_parts=st.sampled_from((1, 3)),
    seed=st.integers(0, 1000),
    is_weighed=st.booleans(),
)
def test_a_change_of_ranks_at_every_step_changes_nothing(
    sizes: tuple[list[int], list[int]], kind: str, k_parts: int, seed: int, is_weighed: bool
) -> None:
    """Any table for any step, chunks of a prompt included; each rank with schedules of its own, and weighed
    by its threads or as cores of several kinds would be: some have nothing then."""
    model, rng = make_model("separate-parts", kind), np.random.default_rng(seed)
    teams = tuple(map(tuple, sizes))
    schedules = [
        [RandomSchedules(seed + 2 * rank + table, k_parts) for table in range(2)] for rank in range(4)
    ]
    single = Machine(model, schedules=[DefaultSchedules(k_parts)])
    ids, done = random_ids(200, model), 0
    weights = tuple(tuple(int(rng.integers(1, 60)) for _ in team) for team in teams) if is_weighed else ()
    with ranks(model, teams, schedules, 0, AUTO, weights) as many:
        while done < len(ids):
            count = int(rng.choice((1, 1, 2, 8, 9, 40)))
            step = [sliced(ids[done : done + count], done, 70)]
            assert (many.run(step, int(rng.integers(2))) == single.last_rows(*step)).all()
            done += count


def test_keys_and_values_moved_by_rank_0_serve_all() -> None:
    model = make_model("llama")
    with ranks(model, ((1, 1), (1, 1))) as many:
        ids = random_ids(40, model)
        want = many.run([sliced(ids)])
        many.run([sliced(ids[:-1])])
        many.programs[0].copy_kv(many.own_teams[0][0], 0, 500, 39)

        assert (many.run([sliced(ids[-1:], 39, 500)], 1) == want).all()


def test_a_step_out_of_range_reaches_no_rank() -> None:
    model = make_model("llama")
    with ranks(model, ((1, 1), (1, 1))) as many:
        with pytest.raises(ValueError, match="outside the KV slots"):
            many.run([sliced([1], start=SLOTS)])

        assert (many.run(prompts(model)) == Machine(model).last_rows(*prompts(model))).all()


def test_a_rank_that_fails_ends_the_step_of_all() -> None:
    """Rank 2 never comes: the others wait inside the step until somebody says that it is lost."""
    model = make_model("llama")
    many = Ranks(model, ((2, 2, 1), (1,)))
    many.programs[0].stop()
    for server in many.servers:
        server.join()
    server = threading.Thread(target=many._serve, args=(1,))
    server.start()
    threading.Timer(0.2, many.programs[2].fail).start()

    for _ in range(2):
        with pytest.raises(GroupFailed, match="failed or ended"):
            many.run(prompts(model))
    server.join(60)
    assert isinstance(many.endings[1], GroupFailed)
    with pytest.raises(GroupFailed):
        many.programs[2].serve(many.own_teams[2])


def test_ranks_tell_where_their_threads_ran() -> None:
    model = make_model("llama")
    with ranks(model, ((2, 1), (1,))) as many:
        assert many.programs[0].observed(0) == [(-1, -1), (-1,)]
        for _ in range(2):  # what a rank tells after a step is certainly there after the next
            many.run(prompts(model))

        assert all(cpu >= 0 for cpus in many.programs[0].observed(0) for cpu in cpus)
        assert many.programs[0].observed(1) == [(-1,)]
        assert many.programs[0].misplaced(0) == 0


DEFAULT_MODELS_HEADS = {"n_heads": 9, "n_kv_heads": 3, "hidden": 144, "ffn": 176}

SHAPES = [
    (DEFAULT_MODELS_HEADS, 4),
    (DEFAULT_MODELS_HEADS, 7),
    (DEFAULT_MODELS_HEADS, 9),
    ({"n_heads": 6, "n_kv_heads": 1}, 4),
    ({"n_heads": 6, "n_kv_heads": 2}, 3),
    ({"n_heads": 6, "n_kv_heads": 2}, 5),
    ({"n_heads": 6, "n_kv_heads": 6}, 6),
]


def model_of(fields: dict[str, int], kind: str = "f32") -> PackedModel:
    return tiny_model(tiny_config(**fields), kind)


@pytest.mark.parametrize("others", [None, (1,), (2, 1)], ids=str)
@pytest.mark.parametrize(("fields", "n_ranks"), SHAPES, ids=str)
def test_ranks_that_share_heads_give_the_bits_of_one(
    fields: dict[str, int], n_ranks: int, others: tuple[int, ...] | None
) -> None:
    """Prompts and answers by as many ranks; answers by few, and prompts by few."""
    many = (1,) * n_ranks
    model = model_of(fields)

    assert_bits_of_one(model, (many, others or many), 2)
    if others is not None:
        assert_bits_of_one(model, (others, many), 2)


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8", "q4"])
def test_in_every_storage_of_weights(kind: str) -> None:
    assert_bits_of_one(model_of(DEFAULT_MODELS_HEADS, kind), ((1, 2, 1, 1), (1,) * 5), 2)


@pytest.mark.parametrize("kv_format", ["f16", "bf16", "int16", "int8", "int4"])
def test_in_every_format_of_keys_and_values(kv_format: str) -> None:
    assert_bits_of_one(model_of(DEFAULT_MODELS_HEADS), ((1,) * 4, (1,) * 7), 2, kv_format)


def test_in_rings() -> None:
    """Layers with windows keep copies of their rings."""
    model = tiny_model(tiny_config(architecture="mistral", sliding_window=33, n_kv_heads=2))
    ring = (SLOTS, 384)
    ids = random_ids(300, model)
    single = Machine(model)
    with ranks(model, ((1,) * 5, (1, 1)), (), 512) as many:
        done = 0
        for count in (200, 1, 1, 60, 1, 1, 1):
            step = [sliced(ids[done : done + count], done)]
            ringed = [step[0]._replace(ring=ring)]
            assert (many.run(ringed, done % 2) == single.last_rows(*step)).all()
            done += count


@examples(20)
@given(
    heads=st.sampled_from([(1, 5), (1, 8), (2, 3), (3, 3), (3, 2)]),
    sizes=st.tuples(*[st.lists(st.integers(1, 2), min_size=1, max_size=6).map(tuple)] * 2).filter(
        lambda sizes: max(map(len, sizes)) > 1
    ),
    kv_format=st.sampled_from(("f32", "int8")),
    seed=st.integers(0, 1000),
)
def test_chunks_moves_and_changes_of_ranks_change_nothing(
    heads: tuple[int, int], sizes: Teams, kv_format: str, seed: int
) -> None:
    """Any table for any step; now and then what is known so far moves to other slots, as prefixes do."""
    n_kv_heads, group = heads
    model = model_of({"n_heads": n_kv_heads * group, "n_kv_heads": n_kv_heads})
    rng = np.random.default_rng(seed)
    single = Machine(model, kv_format=kv_format)
    ids, done, base = random_ids(180, model, seed), 0, 70
    with ranks(model, sizes, (), 0, kv_format) as many:
        while done < len(ids):
            count = int(rng.choice((1, 1, 2, 9, 40)))
            step = ids[done : done + count]
            got = many.run([sliced(step, done, base)], int(rng.integers(2)))
            assert (got == single.last_rows(sliced(step, done, 70))).all()
            done += len(step)
            if rng.random() < 0.3:
                target = int(rng.integers(0, SLOTS - 200))
                many.programs[0].copy_kv(many.own_teams[0][0], base, target, done)
                base = target


def test_ranks_without_a_query_head_do_no_harm() -> None:
    """`RankLayout` refuses such plans; a program computes the same."""
    assert_bits_of_one(model_of({"n_heads": 2, "n_kv_heads": 1}), ((1,) * 3, (1,) * 4), 1)


@pytest.mark.parametrize(("fields", "n_ranks"), SHAPES, ids=str)
def test_each_rank_has_one_kv_head_in_its_memory(fields: dict[str, int], n_ranks: int) -> None:
    """Keys and values take the memory of max(ranks, KV heads) heads, and programs take the stated memory."""
    model = model_of(fields)
    of_one_head = kv_bytes_per_slot(model) // fields["n_kv_heads"]
    teams = ((1,), (1,) * n_ranks)

    assert kv_bytes_per_slot(model, teams=teams) == of_one_head * max(n_ranks, fields["n_kv_heads"])
    with ranks(model, teams) as many:
        many.run(prompts(model))
        assert many.programs[0].kv_bytes() == SLOTS * kv_bytes_per_slot(model, teams=teams)
