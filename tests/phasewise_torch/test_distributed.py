"""The process group of one host: sums in the order of ranks, the same bits on each; what fails says so."""

from __future__ import annotations

import datetime
import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

import torch.distributed as dist  # noqa: E402

import phasewise.torch.distributed as process_group  # noqa: E402
from tests.support.kernels import rank_processes  # noqa: E402

TYPES = (torch.float32, torch.float64, torch.bfloat16)
PIECE = process_group.SLOT_BYTES - process_group.EXCHANGE_LINE
SIZES = (1, 3, 1021, 4099, PIECE // 4 - 1, PIECE // 4 + 1, 1 << 20)
"""Elements: one, primes, around a piece of float32, 1 MiB."""


def start(
    folder: Path, n_ranks: int, work: Callable[[int], object], timeout_s: float = 60.0
) -> rank_processes.Ranks:
    """`work(rank)` in a process for each rank, inside a group of all of them."""

    def within(rank: int) -> None:
        torch.set_num_threads(1)  # a forked process has none of its parent's threads
        dist.init_process_group(
            "phasewise",
            init_method=f"file://{folder}/meeting",
            rank=rank,
            world_size=n_ranks,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        work(rank)
        dist.destroy_process_group()

    return rank_processes.start(n_ranks, within)


def run(folder: Path, n_ranks: int, work: Callable[[int], object]) -> None:
    assert start(folder, n_ranks, work).ended() == [0] * n_ranks


def message(turn: int, rank: int, count: int, dtype: Any) -> Any:
    """Numbers whose sum shows in its last bits in which order it was added up."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    drawn = torch.randn(count, generator=generator)
    return (drawn * 10.0 ** torch.randint(-3, 4, (count,), generator=generator)).to(dtype)


def sum_in_rank_order(messages: list[Any]) -> Any:
    wide = torch.float64 if messages[0].dtype == torch.float64 else torch.float32
    total = messages[0].to(wide)
    for term in messages[1:]:
        total = total + term.to(wide)
    return total.to(messages[0].dtype)


@pytest.mark.parametrize("n_ranks", range(2, 9))
def test_every_rank_has_the_sum_in_the_order_of_ranks(n_ranks: int, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        for turn, count in enumerate(SIZES):
            for dtype in TYPES:
                messages = [message(turn, other, count, dtype) for other in range(n_ranks)]
                tensor = messages[rank].clone()
                dist.all_reduce(tensor)
                assert torch.equal(tensor, sum_in_rank_order(messages))

    run(tmp_path, n_ranks, work)


@pytest.mark.parametrize("n_ranks", [2, 5])
def test_tensors_that_are_not_contiguous_and_tensors_of_no_dimension(n_ranks: int, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        messages = [message(0, other, 60_000, torch.float32).view(200, 300) for other in range(n_ranks)]
        expected = sum_in_rank_order(messages)
        for cut in (lambda m: m.t(), lambda m: m[3:190:2, 1::3], lambda m: m[7, 11], lambda m: m[:0]):
            tensor = messages[rank].clone()
            dist.all_reduce(cut(tensor))
            assert torch.equal(cut(tensor), cut(expected))
        tensor = messages[rank].clone()
        dist.all_reduce(tensor[:, ::2])
        assert torch.equal(tensor[:, 1::2], messages[rank][:, 1::2]), "what lies between was written"

    run(tmp_path, n_ranks, work)


def gather_into_one(joined: Any, own: Any) -> None:
    """By its name in this release of torch."""
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(joined, own)


@pytest.mark.parametrize("n_ranks", [2, 3, 8])
def test_gathers_broadcasts_and_barriers(n_ranks: int, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        for turn, count in enumerate(SIZES):
            for dtype in (*TYPES, torch.int64, torch.bool):
                messages = [message(turn, other, count, dtype) for other in range(n_ranks)]
                outs = [torch.empty(count, 2, dtype=dtype)[:, 0] for _ in range(n_ranks)]
                dist.all_gather(outs, messages[rank])
                assert all(torch.equal(out, m) for out, m in zip(outs, messages, strict=True))
                joined = torch.empty(n_ranks * count, dtype=dtype)
                gather_into_one(joined, messages[rank])
                assert torch.equal(joined, torch.cat(messages))
                tensor = messages[rank].clone()
                dist.broadcast(tensor, src=turn % n_ranks)
                assert torch.equal(tensor, messages[turn % n_ranks])
            dist.barrier()
        objects: list[Any] = [None] * n_ranks
        dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
        assert objects == [{"rank": other, "text": "x" * other} for other in range(n_ranks)]

    run(tmp_path, n_ranks, work)


def test_groups_of_some_ranks_beside_the_group_of_all(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        for turn in range(20):
            tensor = message(turn, rank, 5000, torch.float32)
            dist.all_reduce(tensor, group=pairs[rank % 2])
            expected = [message(turn, other, 5000, torch.float32) for other in (rank % 2, rank % 2 + 2)]
            assert torch.equal(tensor, sum_in_rank_order(expected))
            dist.barrier()

    run(tmp_path, 4, work)


def network() -> Any:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(37, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))


def inputs(rank: int) -> Any:
    return torch.randn(16, 37, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_distributed_data_parallel_trains_by_the_mean_of_the_gradients(n_ranks: int, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        model = torch.nn.parallel.DistributedDataParallel(network(), find_unused_parameters=n_ranks == 3)
        model(inputs(rank)).square().mean().backward()
        alone = network()
        torch.stack([alone(inputs(other)).square().mean() for other in range(n_ranks)]).mean().backward()
        for got, expected in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(got.grad, expected.grad, rtol=1e-4, atol=1e-6)
            outs = [torch.empty_like(got.grad) for _ in range(n_ranks)]
            dist.all_gather(outs, got.grad)
            assert all(torch.equal(out, outs[0]) for out in outs)

    run(tmp_path, n_ranks, work)


def test_what_it_does_not_do_is_refused_in_one_line_and_the_group_goes_on(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        x = torch.ones(4)
        refusals: list[tuple[Any, type[Exception], str]] = [
            (lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX), ValueError, "adds up"),
            (lambda: dist.all_reduce(x.half()), ValueError, "float32, float64, bfloat16, int32, int64, not"),
            (lambda: dist.reduce(x, 0), NotImplementedError, "not reduce"),
            (lambda: dist.scatter(x, [x, x] if rank == 0 else None), NotImplementedError, "not scatter"),
            (lambda: dist.reduce_scatter(x, [x, x]), NotImplementedError, "not reduce_scatter"),
            (lambda: dist.all_to_all([x, x], [x, x]), NotImplementedError, "not all"),
            (lambda: dist.send(x, 1 - rank), NotImplementedError, "not send"),
            (lambda: dist.recv(x, 1 - rank), NotImplementedError, "not recv"),
            (lambda: dist.all_gather([x, torch.ones(5)], x), ValueError, "one length and type"),
            (lambda: dist.all_reduce(torch.ones(2).to_sparse()), ValueError, "dense tensors on the CPU"),
            (
                lambda: dist.all_reduce(torch.ones(4 + rank)),
                dist.DistBackendError,
                "do not call the same collective",
            ),
        ]
        for call, error, words in refusals:
            with pytest.raises(error, match=words) as caught:
                call()
            assert "\n" not in str(caught.value)
            dist.all_reduce(x)
            assert bool((x == 2).all())
            x.fill_(1)

    run(tmp_path, 2, work)


def reduce_for_ever() -> None:
    while True:
        dist.all_reduce(torch.ones(100_000))


def until_a_rank_is_missed(words: str) -> None:
    with pytest.raises(dist.DistBackendError, match=words) as caught:
        reduce_for_ever()
    assert "\n" not in str(caught.value)


def test_a_killed_rank_ends_the_waits_of_all_others(tmp_path: Path) -> None:
    """Long before the group's time is over, which is longer than this test may last."""
    ranks = start(tmp_path, 3, lambda rank: until_a_rank_is_missed("the group has failed"), timeout_s=1e6)
    time.sleep(1.0)
    ranks.kill(1)

    codes = ranks.ended()

    assert codes[1] == -signal.SIGKILL
    assert [codes[0], codes[2]] == [0, 0]


def test_a_rank_that_leaves_with_an_error_ends_the_waits_of_all_others(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        if rank == 2:
            raise SystemExit(3)
        until_a_rank_is_missed("the group has failed")

    assert start(tmp_path, 3, work, timeout_s=1e6).ended()[:2] == [0, 0]


def test_a_rank_that_is_late_is_named(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        if rank == 1:
            time.sleep(3)
        else:
            until_a_rank_is_missed(r"not all ranks came within 1 s \(missing: rank 1\)")

    assert start(tmp_path, 2, work, timeout_s=1.0).ended()[0] == 0


def test_a_rank_that_has_done_all_may_leave_before_the_others(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        for _ in range(10):
            dist.all_reduce(torch.ones(1000))
        time.sleep(0.5 * rank)

    run(tmp_path, 3, work)


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("phasewise-process-group")


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """No file anywhere, no descriptor, no memory once a group is destroyed."""
    shared = Path("/dev/shm")
    before = set(os.listdir(shared)) if shared.is_dir() else set()

    def work(rank: int) -> None:
        assert mapped() == 1
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            group = dist.new_group([0, 1])
            dist.all_reduce(torch.ones(10), group=group)
            assert group.group_name
            assert mapped() == 2
            dist.destroy_process_group(group)
            del group
            gc.collect()
        assert mapped() == 1
        assert len(os.listdir("/proc/self/fd")) == descriptors
        if shared.is_dir():
            assert not [name for name in set(os.listdir(shared)) - before if "phasewise" in name]

    run(tmp_path, 2, work)


def test_ranks_of_two_hosts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_host", lambda: str(os.getpid()))

    def work(rank: int) -> None:
        with pytest.raises(dist.DistBackendError, match="rank 1 and rank 0 are on different hosts"):
            dist.init_process_group(
                "phasewise", init_method=f"file://{tmp_path}/meeting", rank=rank, world_size=2
            )

    rank_processes.run(2, work)
