"""The kernel is asked to place the memory of ranks, and its refusal is told in one line."""

from __future__ import annotations

import errno
import logging
import mmap

import pytest

from phasewise.cython_kernels._native import place_on_node, prefer_node
from phasewise.serving.errors import RanksError
from phasewise.serving.processes.segments import Segment
from phasewise.serving.ranks.rank_memory import preferring, warn_of_refusals


class Kernel:
    """Answers a memory policy with `answer`, and remembers the one in force."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.node: int | None = None

    def set_policy(self, node: int | None) -> int:
        if self.answer == 0:
            self.node = node
        return self.answer


def test_a_policy_holds_for_the_block_and_no_longer() -> None:
    kernel = Kernel()
    with preferring(3, kernel.set_policy) as answer:
        assert (kernel.node, answer) == (3, 0)

    assert kernel.node is None


def test_no_node_asks_nothing() -> None:
    with preferring(None, Kernel(errno.EPERM).set_policy) as answer:
        assert answer == 0


def test_a_denied_policy_is_one_warning_that_names_the_flag(caplog: pytest.LogCaptureFixture) -> None:
    answers = {}
    for rank in range(4):
        with preferring(rank % 2, Kernel(errno.EPERM).set_policy) as answers[rank]:
            pass
    with caplog.at_level(logging.WARNING):
        warn_of_refusals(answers)

    (record,) = caplog.records
    assert "--cap-add SYS_NICE" in record.getMessage()
    assert "rank 0, 1, 2, 3" in record.getMessage()


def test_granted_policies_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_refusals({0: 0, 1: 0})

    assert not caplog.records


def test_a_node_that_is_not_there_is_no_matter_of_permission(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_refusals({1: errno.EINVAL})

    assert "SYS_NICE" not in caplog.text
    assert "rank 1" in caplog.text


def test_the_kernel_is_asked() -> None:
    """Granted, or refused with a reason: what a container allows is not ours to say."""
    allowed = {0, errno.EPERM, errno.ENOSYS}
    memory = mmap.mmap(-1, 1 << 16)

    assert prefer_node(0) in allowed
    assert prefer_node(None) in allowed
    assert place_on_node(memory, 5000, 20000, 0) in allowed
    assert prefer_node(4000) in {errno.EINVAL, errno.EPERM, errno.ENOSYS}
    assert prefer_node(-1) == prefer_node(1 << 20) == errno.EINVAL
    with pytest.raises(ValueError, match="bytes"):
        place_on_node(memory, 0, (1 << 16) + 1, 0)


def test_a_segment_is_zero_shared_and_nameless() -> None:
    segment = Segment.create(5000, "test")
    other = Segment(segment.fd, segment.n_bytes)
    numbers = segment.view(64, (3, 5), "float32")
    assert not numbers.any()
    numbers[1, 2] = 7

    assert other.view(64, (3, 5), "float32")[1, 2] == 7
    with pytest.raises(ValueError, match="at byte"):
        segment.view(segment.n_bytes - 8, (3,), "float32")
    segment.close()
    segment.close()
    assert numbers[1, 2] == 7


def test_a_segment_that_nobody_can_have_is_one_line() -> None:
    with pytest.raises(RanksError, match=r"refused \d+ MiB of memory that ranks share \(weights\)"):
        Segment.create(1 << 60, "weights")
