"""A program refuses ops that do not fit together, and steps before it is whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasewise.cython_kernels import packing
from phasewise.cython_kernels._native import Program, Team
from phasewise.cython_kernels.errors import ProgramError, WeightError

SHAPE = {
    "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "hidden": 16, "ffn": 24, "vocab": 20,
    "window": 0, "norm_eps": 1e-5,
}  # fmt: skip
ROOM = {
    "kv_slots": 30, "max_tokens": 8, "max_slices": 2, "max_logit_rows": 2, "kv_format": "f16",
    "max_threads": 1,
}  # fmt: skip
ANGLES = np.ones(4)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def weight(n: int, k: int) -> packing.PackedWeight:
    return packing.pack_dense(np.ones((n, k), np.float32), "f32")


def program(**changes: Any) -> Program:
    room = {name: changes.get(name, value) for name, value in ROOM.items()}
    return Program({name: changes.get(name, value) for name, value in SHAPE.items()}, room, ANGLES)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head_dim": 7}, "heads of 7 dimensions"),
        ({"head_dim": 514}, "heads of 514 dimensions"),
        ({"head_dim": 6}, "4 rotation frequencies for heads of 6"),
        ({"n_heads": 3, "n_kv_heads": 2}, "cannot be"),
        ({"vocab": 0}, "cannot be"),
        ({"kv_format": "f8"}, "f32, f16, bf16, int8, int4, int16 are supported"),
        ({"max_threads": 0}, "room for something"),
        ({"kv_slots": 1 << 40}, "more than 2"),
    ],
)
def test_shapes_that_no_kernel_computes_are_refused(changes: dict[str, int], says: str) -> None:
    with pytest.raises(ProgramError, match=says):
        program(**changes)


def test_weights_of_one_op_read_the_same_row() -> None:
    with pytest.raises(ProgramError, match="same number of inputs"):
        program().linear([(weight(16, 16), 0), (weight(16, 24), 16)], "rows", 0, 32, 0, 32)
    with pytest.raises(ProgramError, match="1 to 3 weights"):
        program().linear([], "rows", 0, 32, 0, 32)


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ((-1, 16, 0, 16), "before the arena"),
        ((0, 15, 0, 16), "overlap"),
        ((0, 16, 0, 15), "overlap"),
        ((0, 16, -16, 16), "before the arena"),
    ],
)
def test_rows_that_overlap_are_refused(places: tuple[int, int, int, int], says: str) -> None:
    with pytest.raises(ProgramError, match=says):
        program().linear([(weight(16, 16), 0)], "rows", *places)


def test_vectors_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(ProgramError, match="norm weights: 15 values where 16 belong"):
        program().linear([(weight(16, 16), 0)], "norm", 0, 16, 0, 16, norm=np.ones(15))
    with pytest.raises(ProgramError, match="norm weights: 0 values"):
        program().linear([(weight(16, 16), 0)], "norm", 0, 16, 0, 16)
    with pytest.raises(ProgramError, match="attention biases: 31 values where 32"):
        program().attend(0, 0, 32, 0, 32, bias=np.ones(31))
    with pytest.raises(ProgramError, match="layer 1 of 1"):
        program().attend(1, 0, 32, 0, 32)


def test_a_residual_belongs_to_gathered_rows() -> None:
    with pytest.raises(ProgramError, match="residual"):
        program().linear([(weight(16, 16), 0)], "rows", 0, 16, 0, 16, add=True, residual=(0, 16))
    with pytest.raises(ProgramError, match="residual"):
        program().linear([(weight(16, 16), 0)], "rows", 0, 16, 0, 16, add=True, rows="gathered")


def test_schedules_belong_to_weights_of_linear_ops_in_the_order_of_their_rows() -> None:
    built = program()
    built.embed(weight(20, 16), 0, 16)
    op = built.linear([(weight(20, 16), 0)], "rows", 0, 16, 128, 20, rows="gathered")
    built.set_schedules(op, 0, [(1, None), (8, None)])

    for place in ((0, 0), (op + 1, 0), (-1, 0), (op, 1)):
        with pytest.raises(ProgramError, match="there is no weight"):
            built.set_schedules(*place, [])
    with pytest.raises(ProgramError, match="no table 5"):
        built.set_schedules(op, 0, [], table=5)
    for ranges in ([(8, None), (8, None)], [(8, None), (1, None)], [(m, None) for m in range(1, 66)]):
        with pytest.raises(ProgramError, match="at most 64 schedules, in the order"):
            built.set_schedules(op, 0, ranges)


def test_an_embedding_holds_the_vocabulary() -> None:
    with pytest.raises(ProgramError, match="19 rows for a vocabulary of 20"):
        program().embed(weight(19, 16), 0, 16)


def test_a_damaged_weight_is_refused() -> None:
    good = weight(16, 16)
    bad = packing.PackedWeight("f32", 16, 16, 0, 0, good.values[:, :8], None, None)
    with pytest.raises(WeightError, match="values is"):
        program().linear([(bad, 0)], "rows", 0, 16, 0, 16)


def test_only_a_sealed_program_runs_and_it_takes_no_more_ops() -> None:
    built, team = program(), Team(None, members=1)
    built.embed(weight(20, 16), 0, 16)
    with pytest.raises(ProgramError, match="not been sealed"):
        built.run(team, [])
    with pytest.raises(ProgramError, match="no op writes the logits"):
        built.seal(1 << 20)
    built.linear([(weight(20, 16), 0)], "rows", 0, 16, 128, 20, rows="gathered")
    built.seal(128)

    with pytest.raises(ProgramError, match="no more ops"):
        built.embed(weight(20, 16), 0, 16)
    with pytest.raises(ProgramError, match="sealed once"):
        built.seal(128)
    assert np.asarray(built).shape == (2, 20)


def test_a_team_larger_than_the_program_is_refused() -> None:
    class Slice:
        token_ids, start, slot_base, wants_logits = (1,), 0, 0, True
        table, n_drafted, ring, adapter = None, 0, None, 0

    built = program()
    built.embed(weight(20, 16), 0, 16)
    built.linear([(weight(20, 16), 0)], "rows", 0, 16, 128, 20, rows="gathered")
    built.seal(128)

    with pytest.raises(ValueError, match="fewer threads"):
        built.run(Team(None, members=2), [Slice()])
    assert built.run(Team(None, members=1), [Slice()]) == 1
    assert np.asarray(built)[0].tolist() == [16.0] * 20


def test_touched_memory_is_there_and_keeps_what_it_held() -> None:
    class First:
        token_ids, start, slot_base, wants_logits = (1,), 0, 0, True
        table, n_drafted, ring, adapter = None, 0, None, 0

    class Second(First):
        token_ids, start = (2,), 1

    def built() -> Program:
        attention_program = program(kv_slots=1 << 20)
        attention_program.embed(weight(20, 16), 0, 16)
        attention_program.linear([(weight(32, 16), 0)], "rows", 0, 16, 128, 32)
        attention_program.attend(0, 128, 32, 384, 16)
        attention_program.linear([(weight(20, 16), 0)], "rows", 384, 16, 512, 20, rows="gathered")
        attention_program.seal(512)
        return attention_program

    team, plain, touched = Team(None, members=1), built(), built()
    plain.run(team, [First()])
    touched.run(team, [First()])
    before = resident_bytes()
    touched.touch(team)

    assert resident_bytes() - before > 0.9 * touched.bytes() > 20 << 20
    plain.run(team, [Second()])
    touched.run(team, [Second()])
    assert np.asarray(touched)[0].tolist() == np.asarray(plain)[0].tolist()


def test_only_a_sealed_program_has_memory_to_touch() -> None:
    with pytest.raises(ProgramError, match="not been sealed"):
        program().touch(Team(None, members=1))


def test_rows_are_written_and_read_within_the_arena_alone() -> None:
    sealed = program()
    sealed.embed(weight(20, 16), 0, 32)
    sealed.adjust(16, 0, 32, 300, 16)
    with pytest.raises(ProgramError, match="has not been sealed"):
        sealed.read_rows(0, 32, np.empty((1, 16), np.float32))
    sealed.linear([(weight(20, 16), 0)], "rows", 300, 16, 500, 20, rows="logits")
    sealed.seal(500)
    drawn = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)

    sealed.write_rows(16, 20, drawn)

    got = np.empty((4, 10), np.float32)
    sealed.read_rows(16, 20, got)
    assert (got == drawn[:, :10]).all()
    for offset, stride, n_rows in ((-1, 16, 1), (0, 15, 1), (0, 1 << 40, 2), (500, 16, 4), (0, 16, 10_000)):
        with pytest.raises(ValueError, match=r"lie outside the arena|numbers, .* apart"):
            sealed.read_rows(offset, stride, np.empty((n_rows, 16), np.float32))
    with pytest.raises(ValueError, match="0 rows of 16 numbers"):
        sealed.write_rows(0, 16, np.empty((0, 16), np.float32))
