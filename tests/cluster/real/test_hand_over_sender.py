"""Keys and values that leave while the step that computes them still runs."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from phasewise.cluster.real.handing_over.sender import Sender
from phasewise.serving.batch import Batch
from phasewise.serving.engine.engine import Engine
from phasewise.serving.engine.messages import Submit
from phasewise.serving.pools.contract import Placement
from phasewise.serving.ranks.first_rank import Follower
from tests.support.servers.fake_engine import FakeRanks, make_engine
from tests.support.servers.rude_clients import until

N_LAYERS = 3
PATIENCE_S = 60.0
"""The longest that a test waits for another thread's turn."""
PROMPT = Submit("p", tuple(range(100, 140)), 1, part="prompt")


class LayeredRanks(FakeRanks):
    """Ranks whose steps store one layer after the other. after_layer(n): called when n layers are stored."""

    def __init__(self) -> None:
        super().__init__()
        self.progress = (0, 0)
        self.after_layer: Callable[[int], object] = lambda n_stored: None
        self._follower: Follower | None = None

    def follow(self, follower: Follower | None) -> None:
        self._follower = follower

    def forward(self, batch: Batch) -> np.ndarray:
        assert self._follower is not None
        step = self.progress[0] + 1
        self._follower.begins(batch.slices, step)
        for n_stored in range(N_LAYERS + 1):
            self.progress = step, n_stored
            self.after_layer(n_stored)
        return super().forward(batch)


class Link:
    """The other side: takes everything."""

    def __init__(self) -> None:
        self.puts: queue.SimpleQueue[tuple[int, int, int]] = queue.SimpleQueue()
        self.logits: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        self.parts: list[int] = []

    def put(self, layer: int, begin: int, end: int, source: Placement) -> bool:
        self.puts.put((layer, begin, end))
        return True

    def put_state(self, part: int, source: Placement) -> bool:
        assert not self.logits.qsize(), "the end was told before"
        self.parts.append(part)
        return len(self.parts) != 2  # the second time there is no room

    def finish(self, logits: np.ndarray) -> bool:
        self.logits.put(logits)
        return True

    def taken(self, n_puts: int) -> Sequence[tuple[int, int, int]]:
        return [self.puts.get(timeout=PATIENCE_S) for _ in range(n_puts)]


@pytest.fixture
def ranks() -> LayeredRanks:
    return LayeredRanks()


@pytest.fixture
def sender(ranks: LayeredRanks) -> Iterator[Sender]:
    sender = Sender(N_LAYERS, lambda: ranks.progress, _ignored, _not_failed)
    sender.start()
    yield sender
    sender.stop()


def engine_of(ranks: LayeredRanks, sender: Sender, max_batch_tokens: int = 64) -> Engine:
    engine = make_engine(ranks, max_batch_tokens=max_batch_tokens)
    engine.hand_over.outbox = sender
    ranks.follow(sender)
    return engine


def test_layers_leave_during_a_step_that_began_before_there_was_a_block(
    ranks: LayeredRanks, sender: Sender
) -> None:
    """A whole prompt is one step: the other engine's block is known when that has begun, and not before."""
    link = Link()
    left: list[tuple[int, int, int]] = []

    def after_layer(n_stored: int) -> None:
        if n_stored == 1:
            sender.send_to("p", link)
        if n_stored:
            left.extend(link.taken(1))  # while the step goes on

    ranks.after_layer = after_layer
    engine = engine_of(ranks, sender)
    engine.submit(PROMPT)
    engine.step()

    assert left == [(layer, 0, 40) for layer in range(N_LAYERS)]
    assert link.logits.get(timeout=PATIENCE_S).shape == (257,)
    until(lambda: not sender.n_jobs, "its end was told, and it is kept")
    engine.hand_over.target_ready("p")  # what the engine's queue still held
    assert engine.scheduler.abort("p")
    engine.scheduler.check()


def test_a_state_leaves_behind_the_layers_and_once_its_prompt_is_whole(ranks: LayeredRanks) -> None:
    sender = Sender(N_LAYERS, lambda: ranks.progress, _ignored, _not_failed, n_parts=3)
    sender.start()
    try:
        engine, link = engine_of(ranks, sender, max_batch_tokens=30), Link()
        engine.submit(PROMPT)
        sender.send_to("p", link)
        engine.step()
        engine.hand_over.target_ready("p")
        assert link.taken(N_LAYERS) == [(layer, 0, 30) for layer in range(N_LAYERS)]
        assert not link.parts
        engine.step()
        link.logits.get(timeout=PATIENCE_S)
    finally:
        sender.stop()

    assert link.taken(N_LAYERS) == [(layer, 30, 40) for layer in range(N_LAYERS)]
    assert link.parts == [0, 1, 1, 2]
    assert not sender.n_jobs


def test_a_block_may_move_between_steps_until_it_is_aimed(ranks: LayeredRanks, sender: Sender) -> None:
    """Between two steps nothing is read from a block that is not pinned, though its target is known."""
    engine = engine_of(ranks, sender, max_batch_tokens=30)
    engine.submit(PROMPT)
    engine.step()
    link = Link()

    sender.send_to("p", link)

    assert link.puts.empty()
    assert not sender.rests("p"), "it may be read"
    engine.hand_over.target_ready("p")
    assert link.taken(N_LAYERS) == [(layer, 0, 30) for layer in range(N_LAYERS)]
    engine.step()
    assert link.taken(N_LAYERS) == [(layer, 30, 40) for layer in range(N_LAYERS)]
    link.logits.get(timeout=PATIENCE_S)


def test_a_prompt_without_a_block_is_lost_when_it_is_aimed(ranks: LayeredRanks) -> None:
    """It does not wait for one: what waits for it elsewhere may be what this engine waits for."""
    begun, failed = [], []
    sender = Sender(N_LAYERS, lambda: ranks.progress, begun.append, lambda *told: failed.append(told))
    engine = engine_of(ranks, sender)
    engine.submit(PROMPT)
    engine.step()
    assert begun == ["p"]
    (held,) = engine.scheduler._lanes.running
    engine.scheduler._preempt(held)

    sender.send_to("p", Link())
    engine.hand_over.target_ready("p")

    assert [(request_id, reason) for request_id, reason, _ in failed] == [("p", "preempted")]
    assert not sender.n_jobs
    engine.step()
    assert begun == ["p", "p"]  # a front has forgotten the attempt


def test_what_is_given_up_during_its_step_is_not_sent(ranks: LayeredRanks, sender: Sender) -> None:
    link = Link()

    def after_layer(n_stored: int) -> None:
        if n_stored == 1:
            sender.send_to("p", link)
            link.taken(1)
            sender.cancel("p")

    ranks.after_layer = after_layer
    engine = engine_of(ranks, sender)
    engine.submit(PROMPT)
    engine.step()
    engine.abort("p")

    assert link.puts.empty()
    assert link.logits.empty()
    assert not sender.n_jobs
    assert not engine.has_work


def _ignored(request_id: str) -> None:
    pass


def _not_failed(request_id: str, reason: str, why: str) -> None:
    raise AssertionError(f"{request_id}: {why}")
