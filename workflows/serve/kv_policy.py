"""The KV policy of `kv_policy = "auto"`: pages where reading them scattered is as fast as reading in order.

ODMA keeps keys and values contiguous since some memories read scattered pieces slowly (section 2.2). A piece
is the keys of one head in one page.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from phasewise._words import counted, percent
from phasewise.workflows.report import Report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phasewise.serving.models.packed_model import PackedModel
    from phasewise.tuner.machine_limits import PieceReads

AUTO = "auto"
CONTIGUOUS, PAGED = "odma", "paged"
ENOUGH = 0.95
"""Share of the rate in order from which scattered reads count as fast."""

MOST_BYTES = 256 << 20
PART_OF_FREE_MEMORY = 8
LEAST_BYTES = 16 << 20


def resolved(asked: str, model: PackedModel, kv_format: str, cores: Sequence[int], report: Report) -> str:
    """The policy that is asked for; for `auto` the one that this machine's memory suits, measured now."""
    if asked != AUTO:
        return asked
    piece = piece_bytes(model, kv_format)
    reads = timed_reads(piece, tuple(cores))
    policy = policy_for(reads)
    report(f"kv_policy auto: {policy}; {told(piece, reads)}")
    return policy


def policy_for(reads: PieceReads | None) -> str:
    """Pages alone where scattered reads of them are known to cost nothing."""
    return PAGED if reads is not None and reads.share >= ENOUGH else CONTIGUOUS


def told(piece: int, reads: PieceReads | None) -> str:
    """A part of a sentence."""
    if reads is None:
        return "scattered reads could not be measured, since other processes measure or little memory is free"
    return f"scattered reads of {counted(piece, 'byte')} reach {percent(reads.share)} of those in order"


def piece_bytes(model: PackedModel, kv_format: str) -> int:
    """The keys of one head in one page, of the layers with the longest."""
    from phasewise.cython_kernels.kv_formats import kv_slot_bytes
    from phasewise.serving.models.forward import resolve_kv_format
    from phasewise.serving.pools.contract import KV_CHUNK

    config, stored = model.config, resolve_kv_format(model, kv_format)
    is_latent = config.latent is not None
    slot_bytes = max(
        (
            kv_slot_bytes(stored, config.heads_of(layer).head_dim, is_latent)
            for layer in config.attention_layers
        ),
        default=64,
    )
    return KV_CHUNK * slot_bytes // (1 if is_latent else 2) // 8 * 8


@cache
def timed_reads(piece: int, cores: tuple[int, ...]) -> PieceReads | None:
    """Measured once in a process; None where another process measures, or little memory is free."""
    from phasewise.serving.processes.headroom import available_bytes
    from phasewise.tuner.machine_limits import read_in_pieces
    from phasewise.tuner.measurement_lock import user_lock

    n_free = available_bytes()
    n_bytes = MOST_BYTES if n_free is None else min(MOST_BYTES, n_free // PART_OF_FREE_MEMORY)
    if n_bytes < LEAST_BYTES:
        return None
    with user_lock().turn(0.0) as is_alone:
        return read_in_pieces(cores, piece, n_bytes, repeats=2) if is_alone else None
