"""Memory that a model takes once its engine is open, told before any of it is allocated."""

from __future__ import annotations

from dataclasses import replace

from phasewise.cython_kernels.division import Teams
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.open_engine import Plans
from phasewise.serving.models.forward import Capacity, build_program, kv_bytes_by_reach, resolve_kv_format
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks.first_rank import room_for
from phasewise.serving.ranks.rank_layout import teams_of
from phasewise.serving.ranks.ranks_contract import RankOptions

VOCABULARY_BYTES_A_TOKEN = 900
"""The tokenizer, the bytes of its tokens, and what grammars keep of them: 863 measured of 49,152 tokens."""


class _Told(Exception):
    """The bytes that a program would take, in place of taking them."""

    def __init__(self, n_bytes: int) -> None:
        super().__init__(n_bytes)
        self.n_bytes = n_bytes


def _tell(_name: str, n_bytes: int, _kv_slots: int) -> None:
    raise _Told(n_bytes)


def program_bytes(model: PackedModel, capacity: Capacity) -> int:
    """Keys, values, states and scratch of one program. ModelError: the model does not fit the kernels."""
    try:
        build_program(model, capacity, _tell)
    except _Told as told:
        return told.n_bytes
    raise AssertionError("a program is not built before its memory is checked")


def engine_bytes(model: PackedModel, plans: Plans, size: EngineSize, draft: PackedModel | None) -> int:
    """Weights, programs and vocabulary of a model and, where there is one, of its draft model.

    Each further rank has scratch of its own, counted as that of a rank that computes all columns, and ranks
    keep copies of the heads that they share.
    """
    feeds, limits = "" if draft is None else draft.config.drafts, size.limits
    options = RankOptions(
        size.kv, limits.max_batch_tokens, limits.max_sequences, feeds=feeds, threads=size.threads
    )
    threads = max(len(rank.cores) for plan in plans.values() for each in plan.each for rank in each.ranks)
    n_ranks = max(len(plan.ranks) for plan in plans.values())
    n_bytes = 0
    for served in (model, draft):
        if served is None:
            continue
        own = options if served is model else replace(options, feeds="")
        room = room_for(own, threads, resolve_kv_format(served, size.kv.format))
        program = program_bytes(served, room)
        own_kv = _kv_bytes(served, room, ())
        n_bytes += served.weight_bytes + program + VOCABULARY_BYTES_A_TOKEN * served.config.vocab_size
        if served is model:
            copies = _kv_bytes(served, room, teams_of(plans)) - own_kv
            n_bytes += (n_ranks - 1) * (program - own_kv) + copies
    return n_bytes


def _kv_bytes(model: PackedModel, room: Capacity, teams: Teams) -> int:
    seen_by_all, windowed = kv_bytes_by_reach(model, room.kv_format, teams)
    return room.kv_slots * seen_by_all + (room.ring_slots or room.kv_slots) * windowed
