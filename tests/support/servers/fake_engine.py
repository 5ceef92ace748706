"""An engine without a model: one token per byte, and ranks whose next token depends on the last alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from phasewise.serving.batch import KV_CHUNK, Batch, SequenceSlice
from phasewise.serving.drafts.contract import Drafter
from phasewise.serving.engine.engine import Engine
from phasewise.serving.engine.live_request import Vocabulary
from phasewise.serving.engine.messages import Answer, Failure, Submit
from phasewise.serving.errors import RankLost
from phasewise.serving.pools.contract import PoolSettings
from phasewise.serving.pools.opening import open_pool
from phasewise.serving.pools.pool import KvPool
from phasewise.serving.scheduling.request import SchedulerLimits
from phasewise.serving.scheduling.scheduler import Scheduler

END = 256
VOCAB_SIZE = 257
ALPHABET = b"abcdefghijklmnopqrstuvwxyz"


class ByteStream:
    """Decodes UTF-8 bytes as they come; the end token has no text."""

    def __init__(self, shown: frozenset[int] = frozenset()) -> None:
        self._pending = b""

    def push(self, token_id: int) -> str:
        if token_id == END:
            return ""
        self._pending += bytes([token_id])
        try:
            text = self._pending.decode()
        except UnicodeDecodeError:
            return ""
        self._pending = b""
        return text

    def flush(self) -> str:
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        return text


def encode(text: str, add_special: bool = False) -> list[int]:
    return list(text.encode())


def piece(token_id: int) -> bytes:
    return b"" if token_id == END else bytes([token_id])


def next_letter(token_id: int) -> int:
    """The alphabet, round and round."""
    place = ALPHABET.find(token_id) if token_id < END else -1
    return ALPHABET[(place + 1) % 26]


class FakeRanks:
    """Logits that favour `successor(last token)`, then its neighbours. Checks the batches it is given."""

    kv_bytes_per_slot = 16

    def __init__(self, successor: Callable[[int], int] = next_letter, kv_slots: int = 1 << 14) -> None:
        self.successor = successor
        self.batches: list[Batch] = []
        self.fail_with: Exception | None = None
        self.closed = False
        self.lost: str | None = None
        self.on_loss: Callable[[], object] = lambda: None
        self.reopen_errors: list[Exception] = []
        """Errors of the next attempts to reopen, which fail."""
        self.n_reopened = 0
        self.kv = np.full(kv_slots, -1, dtype=np.int64)
        self.before_step: Callable[[], object] = lambda: None

    def forward(self, batch: Batch) -> np.ndarray:
        self.before_step()
        if self.lost is not None:
            raise RankLost(self.lost)
        if self.fail_with is not None:
            raise self.fail_with
        self.batches.append(batch)
        rows = []
        for piece in batch.slices:
            assert batch.phase == "prefill" or len(piece.token_ids) == 1 + piece.n_drafted
            slots = slots_of(piece)
            self.kv[slots[piece.start :]] = piece.token_ids
            for n_beyond in range(piece.n_drafted, -1, -1) if piece.wants_logits else ():
                seen = self.kv[slots[: len(slots) - n_beyond]]
                rows.append(self._logits(self.successor(self.choose_by(seen))))
        return np.array(rows, dtype=np.float32).reshape(-1, VOCAB_SIZE)

    def all_logits(self, batch: Batch) -> np.ndarray:
        """A row after every token."""
        rows = [
            self.forward(
                batch._replace(slices=(piece._replace(token_ids=(token,), start=piece.start + index),))
            )
            for piece in batch.slices
            for index, token in enumerate(piece.token_ids)
        ]
        return np.concatenate(rows)

    def copy_kv(self, source_slot: int, target_slot: int, n_slots: int) -> None:
        for first in (source_slot, target_slot):
            assert 0 <= first <= len(self.kv) - n_slots, (source_slot, target_slot, n_slots, len(self.kv))
        self.kv[target_slot : target_slot + n_slots] = self.kv[source_slot : source_slot + n_slots]

    def watch(self, on_loss: Callable[[], object]) -> None:
        self.on_loss = on_loss

    def lose(self, reason: str = "rank 1 (pid 7) was killed by SIGKILL") -> None:
        """A rank dies."""
        self.lost = reason
        self.on_loss()

    def reopen(self) -> None:
        if self.reopen_errors:
            raise self.reopen_errors.pop(0)
        self.lost = None
        self.n_reopened += 1
        self.kv[:] = -1

    def close(self) -> None:
        self.closed = True

    def choose_by(self, seen: np.ndarray) -> int:
        """The last of the tokens that attention sees: it decides the next one."""
        return int(seen[-1])

    def _logits(self, wanted: int) -> np.ndarray:
        distance = np.abs(np.arange(VOCAB_SIZE) - wanted)
        return (-0.5 * distance).astype(np.float32)


class AttentiveRanks(FakeRanks):
    """The next token depends on every token that attention sees, in order: what is read from a wrong slot,
    or was written over, shows."""

    def choose_by(self, seen: np.ndarray) -> int:
        assert (seen >= 0).all(), "attention sees a slot that was never written"
        weights = np.arange(1, len(seen) + 1) * 2654435761 % 1000003
        return int((seen * weights).sum() % END)


def slots_of(piece: SequenceSlice) -> np.ndarray:
    """The slots that hold a sequence up to the end of this slice."""
    positions = np.arange(piece.start + len(piece.token_ids))
    if piece.table is None:
        return piece.slot_base + positions
    return np.array(piece.table)[positions // KV_CHUNK] + positions % KV_CHUNK


def make_engine(
    ranks: FakeRanks | None = None,
    *,
    kv_slots: int = 4096,
    context_length: int = 2048,
    max_batch_tokens: int = 64,
    max_sequences: int = 4,
    max_waiting: int | None = None,
    kv_policy: str = "odma",
    prefix_reuse: bool = True,
    pool: KvPool | None = None,
    drafter: Drafter | None = None,
) -> Engine:
    limits = SchedulerLimits(context_length, max_batch_tokens, max_sequences, max_waiting, prefix_reuse)
    vocabulary = Vocabulary(VOCAB_SIZE, frozenset({END}), ByteStream)
    if pool is None:
        pool = open_pool(kv_policy, kv_slots, PoolSettings(longest_request=context_length))
    ranks = ranks or FakeRanks()
    n_slots = pool.rings.first_slot + pool.rings.n_slots if pool.rings else pool.n_slots
    ranks.kv = np.full(n_slots, -1, dtype=np.int64)  # what lies beyond the pool is not there
    return Engine(ranks, vocabulary, Scheduler(pool, limits), drafter=drafter)


def run_all(engine: Engine, *messages: Submit, max_steps: int = 10_000) -> dict[str, list[Answer | Failure]]:
    """Submit everything, step until nothing is left, checking the scheduler's laws after each step."""
    outs: dict[str, list[Answer | Failure]] = {}
    for message in messages:
        engine.submit(message)
    for _ in range(max_steps):
        if not engine.has_work:
            return outs
        for out in engine.step().outs:
            outs.setdefault(out.request_id, []).append(out)
        engine.scheduler.check()
    raise AssertionError(f"still working after {max_steps} steps")


def text_of(pieces: Sequence[Answer | Failure]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Answer))
