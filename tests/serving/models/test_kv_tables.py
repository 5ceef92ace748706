"""Sequences in runs of slots, as a table says: the bits of contiguous ones, and no way out of the arena."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels.kv_formats import KV_FORMATS
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.models.forward import Capacity
from phasewise.serving.ranks.first_rank import FirstRank, Teams
from phasewise.serving.ranks.rank_teams import TABLES
from tests.serving.models.test_forward import SLOTS, Machine, make_model, random_ids, random_steps, sliced
from tests.serving.models.test_forward_ranks import ranks
from tests.support.tiers import examples

CHUNK = 128

Table = tuple[int, ...]


def in_runs(ids: Sequence[int], table: Table, start: int = 0, wants_logits: bool = True) -> SequenceSlice:
    return SequenceSlice(list(ids), start, 0, wants_logits, table)


def scattered(lengths: Sequence[int], rng: np.random.Generator) -> list[Table]:
    """Tables that share no slot: runs of all sequences in any order; last ones are no longer than needed."""
    runs = [(i, start, min(CHUNK, n - start)) for i, n in enumerate(lengths) for start in range(0, n, CHUNK)]
    tables: list[dict[int, int]] = [{} for _ in lengths]
    slot = 0
    for chosen in rng.permutation(len(runs)):
        i, start, size = runs[chosen]
        tables[i][start] = slot
        slot += -(-size // 16) * 16
    assert slot <= SLOTS
    return [tuple(table[start] for start in sorted(table)) for table in tables]


@examples(25)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    kv_format=st.sampled_from(KV_FORMATS),
    name=st.sampled_from(("llama", "mistral-window")),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_runs_in_any_order_give_the_bits_of_a_contiguous_sequence(
    lengths: list[int], kv_format: str, name: str, threads: int, seed: int
) -> None:
    """Prompts and single tokens of all sequences, cut and mixed at random."""
    model, rng = make_model(name), np.random.default_rng(seed)
    plain, machine = Machine(model, 1, 512, kv_format=kv_format), Machine(model, threads, kv_format=kv_format)
    sequences = [random_ids(n, model, i) for i, n in enumerate(lengths)]
    alone = [plain.every_row(sliced(ids, base=7))[-1] for ids in sequences]
    tables = scattered(lengths, rng)
    got: dict[int, np.ndarray] = {}

    for step, ending in random_steps(sequences, range(len(sequences)), rng):
        placed = [piece._replace(slot_base=0, table=tables[piece.slot_base]) for piece in step]
        got.update(zip(ending, machine.last_rows(*placed), strict=True))

    for i, logits in enumerate(alone):
        assert (got[i] == logits).all()


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_sequences_may_share_what_they_begin_with(kv_format: str) -> None:
    """Two hundred and fifty-six positions in common, written once, read by all in one step."""
    model = make_model("llama")
    machine, plain = Machine(model, 2, 512, kv_format=kv_format), Machine(model, 1, 512, kv_format=kv_format)
    common = random_ids(2 * CHUNK, model)
    own = [random_ids(n, model, n) for n in (3, 20, 140)]
    tables = [(512, 256, 0), (512, 256, 16), (512, 256, 48, 176)]
    machine.last_rows(in_runs(common, tables[0]))

    prompts = [in_runs(ids[:-1], table, 2 * CHUNK) for ids, table in zip(own, tables, strict=True)]
    machine.last_rows(*prompts)
    ends = [2 * CHUNK + len(ids) - 1 for ids in own]
    steps = [in_runs(ids[-1:], table, end) for ids, table, end in zip(own, tables, ends, strict=True)]
    got = machine.last_rows(*steps)

    want = [plain.last_rows(sliced(common + ids))[0] for ids in own]
    assert (got == np.stack(want)).all()


def test_a_batch_that_is_cut_into_steps_keeps_its_tables() -> None:
    model = make_model("llama")
    machine, plain = Machine(model, 1, 40), Machine(model, 1, 512)
    teams = Teams({TABLES["prefill"]: machine.team})
    first = FirstRank(machine.program, teams, Capacity(SLOTS, 40, 16, 40, 1))
    ids = random_ids(300, model)

    got = first.forward(Batch("prefill", (in_runs(ids, (640, 32, 256)),)))

    assert (got == plain.last_rows(sliced(ids))).all()


@pytest.mark.parametrize("teams", [((1, 1), (1, 1)), ((2, 1), (1, 1, 1))], ids=str)
def test_every_rank_reads_the_same_tables(teams: tuple[tuple[int, ...], ...]) -> None:
    """Prefill and decode; a sequence in runs beside one that is contiguous."""
    model = make_model("llama")
    single = Machine(model)
    ids, others, table = random_ids(200, model), random_ids(30, model, 5), (768, 16)
    with ranks(model, teams) as many:
        for run in (0, 1):
            got = many.run([in_runs(ids[:150], table), sliced(others[:-2], base=300)], run)
            want = single.last_rows(sliced(ids[:150]), sliced(others[:-2], base=300))
            assert (got == want).all()
            for i in range(2):
                got = many.run(
                    [
                        in_runs(ids[150 + i : 151 + i], table, 150 + i),
                        sliced(others[28 + i : 29 + i], 28 + i, 300),
                    ],
                    1,
                )
                want = single.last_rows(
                    sliced(ids[150 + i : 151 + i], 150 + i), sliced(others[28 + i : 29 + i], 28 + i, 300)
                )
                assert (got == want).all()


BAD_TABLES: dict[str, list[SequenceSlice]] = {
    "multiple of 16": [in_runs([1], (8,))],
    "too few runs for": [in_runs([1], (0,), 128)],
    "has too few runs": [in_runs([1], ())],
    "run begins at slot -16": [in_runs([1], (-16,))],
    f"begins at slot {SLOTS}": [in_runs([1], (SLOTS,))],
    "outside the KV slots": [in_runs([1] * 17, (SLOTS - 16,))],
    "a slice lies outside": [in_runs([1], (0,) * 9, SLOTS)],
    "lies outside the KV slots": [in_runs([1], (0,), -1)],
    "64 bits": [in_runs([1], (1 << 70,))],
    "two tokens write the same": [in_runs([1, 2], (16,)), in_runs([3], (0,), 17)],
    "write the same KV slot": [in_runs([1] * 200, (64, 128))],
    "the same KV slot": [in_runs([1], (32,), 5), sliced([1], base=37)],
}


@pytest.mark.parametrize("says", BAD_TABLES)
def test_a_table_that_leads_astray_is_refused_and_changes_nothing(says: str) -> None:
    model = make_model("llama")
    machine = Machine(model)
    ids = random_ids(9, model)
    machine.every_row(in_runs(ids[:8], (32,)))

    with pytest.raises(ValueError, match=says):
        machine.last_rows(*BAD_TABLES[says])

    assert (machine.last_rows(in_runs(ids[8:], (32,), 8)) == Machine(model).every_row(sliced(ids))[8:]).all()


def test_entries_beyond_the_last_position_are_not_read() -> None:
    """A block's table may be longer than what its sequence has reached."""
    model = make_model("llama")
    ids = random_ids(20, model)

    got = Machine(model).last_rows(in_runs(ids, (96, -1, 5)))

    assert (got == Machine(model).last_rows(sliced(ids))).all()


def test_a_token_that_another_one_of_the_step_reads_is_stored_first() -> None:
    """Two tokens of one sequence in one step, as slices of their own."""
    model = make_model("llama")
    machine, ids = Machine(model, 3), random_ids(150, model)
    machine.last_rows(in_runs(ids[:148], (512, 64)))

    got = machine.last_rows(*(in_runs([ids[position]], (512, 64), position) for position in (148, 149)))

    assert (got == Machine(model).every_row(sliced(ids))[148:]).all()


wild_tables = st.one_of(
    st.none(),
    st.lists(st.integers(-1, SLOTS // 16).map(lambda panel: 16 * panel), max_size=9),
    st.lists(st.one_of(st.integers(-20, SLOTS + 20), st.integers(-(2**65), 2**65)), max_size=4),
)
wild_starts = st.one_of(st.integers(-2, 300), st.sampled_from((0, 127, 128, SLOTS, 2**31, 2**63 - 1)))


def test_hostile_tables_either_run_or_are_refused() -> None:
    """Run it under AddressSanitizer too: nothing may read or write outside."""
    model = make_model("llama", "q8")
    machines = [Machine(model, threads=2, kv_format=kv_format) for kv_format in ("f16", "int8", "int4")]

    @examples(200)
    @given(
        slices=st.lists(
            st.builds(
                SequenceSlice,
                st.lists(st.integers(0, 82), min_size=1, max_size=40),
                wild_starts,
                st.integers(0, SLOTS),
                st.booleans(),
                wild_tables.map(lambda table: None if table is None else tuple(table)),
            ),
            max_size=4,
        )
    )
    def check(slices: list[SequenceSlice]) -> None:
        for machine in machines:
            with contextlib.suppress(ValueError):
                assert np.isfinite(machine.last_rows(*slices)).all()

    check()
    for machine in machines:
        assert np.isfinite(machine.last_rows(sliced(random_ids(50, model)))).all()
