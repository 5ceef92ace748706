"""A program refuses ops that do not fit together; its divided steps read only what lies behind a barrier."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasewise.cython_kernels import packing
from phasewise.cython_kernels._native import Program, Team
from phasewise.cython_kernels.division import Division, columns, share
from phasewise.cython_kernels.errors import GroupFailed, ProgramError, WeightError
from phasewise.serving.batch import SequenceSlice
from tests.support.kernels.cross import COMMON_FLAGS, HERE, KERNELS, common_sources, compile_isa

SHAPE = {
    "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "hidden": 16, "ffn": 24, "vocab": 20,
    "window": 0, "norm_eps": 1e-5,
}  # fmt: skip
ROOM = {
    "kv_slots": 30, "max_tokens": 8, "max_slices": 2, "max_logit_rows": 2, "kv_format": "f16",
    "max_threads": 1,
}  # fmt: skip
ANGLES = np.ones(4)
TOKEN = SequenceSlice((1,), 0, 0, wants_logits=True)
NEXT_TOKEN = SequenceSlice((2,), 1, 0, wants_logits=True)


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


W16, W24 = weight(16, 16), weight(16, 24)
CUT = packing.PackedWeight("f32", 16, 16, 0, 0, W16.values[:, :8], None, None)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda p: p.linear([(W16, 0), (W24, 16)], "rows", 0, 32, 0, 32), "same number of inputs"),
        (lambda p: p.linear([], "rows", 0, 32, 0, 32), "1 to 3 weights"),
        (lambda p: p.linear([(CUT, 0)], "rows", 0, 16, 0, 16), "values is"),
        (lambda p: p.linear([(W16, 0)], "rows", -1, 16, 0, 16), "before the arena"),
        (lambda p: p.linear([(W16, 0)], "rows", 0, 16, -16, 16), "before the arena"),
        (lambda p: p.linear([(W16, 0)], "rows", 0, 15, 0, 16), "overlap"),
        (lambda p: p.linear([(W16, 0)], "rows", 0, 16, 0, 15), "overlap"),
        (lambda p: p.linear([(W16, 0)], "norm", 0, 16, 0, 16, norm=np.ones(15)), "15 values where 16 belong"),
        (lambda p: p.linear([(W16, 0)], "norm", 0, 16, 0, 16), "norm weights: 0 values"),
        (lambda p: p.attend(0, 0, 32, 0, 32, bias=np.ones(31)), "attention biases: 31 values where 32"),
        (lambda p: p.attend(1, 0, 32, 0, 32), "layer 1 of 1"),
        (lambda p: p.linear([(W16, 0)], "rows", 0, 16, 0, 16, add=True, residual=(0, 16)), "residual"),
        (lambda p: p.linear([(W16, 0)], "rows", 0, 16, 0, 16, add=True, rows="gathered"), "residual"),
        (lambda p: p.embed(weight(19, 16), 0, 16), "19 rows for a vocabulary of 20"),
        (lambda p: p.touch(Team(None, members=1)), "not been sealed"),
    ],
)
def test_ops_that_do_not_fit_are_refused(build: Callable[[Program], object], says: str) -> None:
    with pytest.raises((ProgramError, WeightError), match=says):
        build(program())


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
    built = program()
    built.embed(weight(20, 16), 0, 16)
    built.linear([(weight(20, 16), 0)], "rows", 0, 16, 128, 20, rows="gathered")
    built.seal(128)

    with pytest.raises(ValueError, match="fewer threads"):
        built.run(Team(None, members=2), [TOKEN])
    assert built.run(Team(None, members=1), [TOKEN]) == 1
    assert np.asarray(built)[0].tolist() == [16.0] * 20


def test_touched_memory_is_there_and_keeps_what_it_held() -> None:
    def built() -> Program:
        attention_program = program(kv_slots=1 << 20)
        attention_program.embed(weight(20, 16), 0, 16)
        attention_program.linear([(weight(32, 16), 0)], "rows", 0, 16, 128, 32)
        attention_program.attend(0, 128, 32, 384, 16)
        attention_program.linear([(weight(20, 16), 0)], "rows", 384, 16, 512, 20, rows="gathered")
        attention_program.seal(512)
        return attention_program

    team, plain, touched = Team(None, members=1), built(), built()
    plain.run(team, [TOKEN])
    before = resident_bytes()  # a run may bring huge pages of it
    touched.run(team, [TOKEN])
    touched.touch(team)

    assert resident_bytes() - before > 0.9 * touched.bytes() > 20 << 20
    plain.run(team, [NEXT_TOKEN])
    touched.run(team, [NEXT_TOKEN])
    assert np.asarray(touched)[0].tolist() == np.asarray(plain)[0].tolist()


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


ROOM_FOR_TWO = {**ROOM, "max_threads": 2}
TWO_RANKS = ((1, 1), (1, 1))


def divided(teams: Any = TWO_RANKS, rank: int = 0, patience_s: float = 10.0, vocab: int = 20) -> Program:
    """A token's embedding, all ones, times ones: logits of 16."""
    built = Program({**SHAPE, "vocab": vocab}, ROOM_FOR_TWO, np.ones(4), Division(teams, rank), patience_s)
    weight = packing.pack_dense(np.ones((vocab, 16), np.float32), "f32")
    built.embed(weight, 0, 16)
    built.linear([(weight, 0)], "rows", 0, 16, 128, vocab, rows="gathered")
    return built


def shared(built: Program) -> memoryview:
    return memoryview(mmap.mmap(-1, built.shared_bytes()))


def sealed(**options: Any) -> tuple[Program, Program]:
    first, second = divided(**options), divided(**options, rank=1)
    memory = shared(first)
    first.seal_shared(128, memory)
    second.seal_shared(128, memory)
    return first, second


@pytest.mark.parametrize("count", [0, 1, 3, 16, 97])
@pytest.mark.parametrize("teams", [(1,), (1, 1), (3, 1, 2), (1,) * 16])
def test_shares_cover_everything_once_in_proportion_to_threads(teams: tuple[int, ...], count: int) -> None:
    shares = [share(count, teams, rank) for rank in range(len(teams))]

    assert [begin for begin, _ in shares] == [0, *(end for _, end in shares[:-1])]
    assert shares[-1][1] == count
    for (begin, end), threads in zip(shares, teams, strict=True):
        assert abs((end - begin) - count * threads / sum(teams)) < 1
    assert share(count, teams, len(teams)) == (0, 0)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8", "q4"])
def test_columns_of_a_weight_are_its_rows(kind: Any) -> None:
    rows = np.random.default_rng(0).standard_normal((50, 70)).astype(np.float32)
    whole = (
        packing.pack_dense(rows, kind)
        if kind in packing.DENSE_KINDS
        else packing.pack_quant(packing.quantise(rows, int(kind[1]), symmetric=False))
    )

    for begin, end in ((0, 1), (1, 4), (3, 4)):
        view = columns(whole, begin, end)
        assert view is not None
        assert np.shares_memory(view.values, whole.values)
        assert (packing.unpack(view) == packing.unpack(whole)[16 * begin : 16 * end]).all()
    assert columns(whole, 2, 2) is None


@pytest.mark.parametrize(
    ("teams", "rank", "patience_s", "says"),
    [
        (((1, 1),) * 6, 0, 1.0, "for each of at most 5 tables"),
        (((), ()), 0, 1.0, "1 to 256 ranks"),
        (((1,), (1,) * 257), 0, 1.0, "1 to 256 ranks"),
        (TWO_RANKS, 2, 1.0, "rank 2 of teams"),
        (TWO_RANKS, -1, 1.0, "rank -1 of teams"),
        (((1, 0), (1,)), 0, 1.0, "a rank with 0 threads"),
        (((1, 1 << 20), (1,)), 0, 1.0, "threads: 1 to 1024 expected"),
        (((3, 1), (1,)), 0, 1.0, "room for 2 threads"),
        (TWO_RANKS, 0, 0.0, "a patience of 0"),
        (TWO_RANKS, 0, float("nan"), "a patience of nan"),
    ],
)
def test_divisions_that_cannot_be_are_refused(teams: Any, rank: int, patience_s: float, says: str) -> None:
    with pytest.raises(ProgramError, match=says):
        divided(teams, rank, patience_s)


def test_ranks_share_memory_that_is_large_enough_and_begins_a_page() -> None:
    built = divided()
    memory = memoryview(mmap.mmap(-1, built.shared_bytes() + 4096))

    with pytest.raises(ProgramError, match="with the memory that they share"):
        built.seal(128)
    with pytest.raises(ProgramError, match="from a page's start"):
        built.seal_shared(128, memory[: built.shared_bytes() - 1])
    with pytest.raises(ProgramError, match="from a page's start"):
        built.seal_shared(128, memory[64:])
    with pytest.raises(BufferError):
        built.seal_shared(128, memory.toreadonly())
    with pytest.raises(ProgramError, match="no op writes the logits"):
        built.seal_shared(1 << 20, memory)
    built.seal_shared(128, memory)
    with pytest.raises(ProgramError, match="sealed once"):
        built.seal_shared(128, memory)


def test_other_ranks_join_the_first_ones_program() -> None:
    first, other = divided(), divided(rank=1, vocab=21)
    memory = memoryview(mmap.mmap(-1, 1 << 17))

    with pytest.raises(ProgramError, match="rank 0 has not sealed this memory"):
        divided(rank=1).seal_shared(128, memory)
    first.seal_shared(128, memory)
    with pytest.raises(ProgramError, match="not for the same program"):
        divided(((1, 1, 1), (1,)), rank=1).seal_shared(128, memory)
    other.linear([(packing.pack_dense(np.ones((21, 16), np.float32), "f32"), 0)], "rows", 0, 16, 128, 21)
    with pytest.raises(ProgramError, match="not for the same program"):
        other.seal_shared(128, memory)
    divided(rank=1).seal_shared(128, memory)


def test_rank_0_runs_and_the_others_serve() -> None:
    first, second = sealed()
    team = Team(None, members=1)

    with pytest.raises(ProgramError, match="rank 1 serves"):
        second.run(team, [TOKEN])
    with pytest.raises(ProgramError, match="rank 0 says when to stop"):
        second.stop()
    for rank, teams in ((first, [team, team]), (second, [team])):
        with pytest.raises(ProgramError, match="ranks from 1 on serve"):
            rank.serve(teams)
    with pytest.raises(ValueError, match="a team of 2 for rank 1"):
        second.serve([Team(None, members=2), None])
    with pytest.raises(TypeError):
        second.serve(["team", None])
    with pytest.raises(ValueError, match="KV head 1 of layer 0"):
        first.kv_span(0, 1)


def test_a_table_that_nobody_runs_is_not_run() -> None:
    first, _ = sealed(teams=((1, 1), ()))

    with pytest.raises(ValueError, match=r"a team of 1 for rank 0 of teams \(\)"):
        first.run(Team(None, members=1), [TOKEN], table=1)


def test_a_rank_that_does_not_come_is_not_waited_for_without_end() -> None:
    first, second = sealed(patience_s=0.05)

    with pytest.raises(GroupFailed, match="did not arrive in time"):
        first.run(Team(None, members=1), [TOKEN])
    with pytest.raises(GroupFailed, match="failed or ended"):
        second.serve([Team(None, members=1)] * 2)


def test_a_rank_without_a_team_for_a_step_ends_it_for_all() -> None:
    first, second = sealed()
    failures: list[str] = []

    def serve() -> None:
        with pytest.raises(GroupFailed) as failure:
            second.serve([None, None])
        failures.append(str(failure.value))

    server = threading.Thread(target=serve)
    server.start()
    with pytest.raises(GroupFailed, match="failed or ended"):
        first.run(Team(None, members=1), [TOKEN])
    server.join(60)
    assert failures == ["this rank was not built for the step that rank 0 runs"]


def test_stop_reaches_a_rank_that_serves_later() -> None:
    first, second = sealed()
    first.stop()

    second.serve([None, None])


def test_keys_and_values_of_a_head_lie_in_the_shared_memory() -> None:
    """Two ranks share the only KV head, and each has a copy."""
    first, _ = sealed()

    offset, size = first.kv_span(0, 0)

    assert 0 < offset <= first.shared_bytes() - 2 * size
    assert first.kv_span(0, 0, 1) == (offset + size, size)
    assert 2 * size == first.kv_bytes()


def compiled(source: Path, flags: list[str], others: list[Path], target: Path) -> Path | None:
    command = ["gcc", *COMMON_FLAGS, "-O1", "-g", *flags, "-I", KERNELS, source, *others, "-lm", "-o", target]
    return None if subprocess.run(command, capture_output=True).returncode else target


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to compile with")
def test_no_rank_reads_what_another_may_still_write(tmp_path: Path) -> None:
    """Three ranks and two, in turn, against one; any data race fails it."""
    flags = ["-fsanitize=thread", '-DPW_GEMM_ABI=""', '-DPW_ATTENTION_ABI=""']
    empty = tmp_path / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    sample = compiled(empty, flags, [], tmp_path / "empty")
    if sample is None or subprocess.run([sample], capture_output=True).returncode:
        pytest.skip("the thread sanitizer does not work here")
    kernels = compile_isa("gcc", KERNELS / "isa" / "portable.h", tmp_path, "-O1", "-g", *flags)
    sources = [*common_sources(), *kernels]
    wrapped = [*flags, "-Wl,--wrap=pw_cpu_features"]

    program = compiled(HERE / "divided_steps.c", wrapped, sources, tmp_path / "divided_steps")

    assert program is not None
    got = subprocess.run([program], capture_output=True, text=True)
    assert (got.returncode, got.stderr) == (0, "")
