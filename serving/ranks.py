"""Where batches are computed: this process, one pinned thread team per phase, over one set of weights and KV.

Both phases run the same program over the same memory, so switching between them copies nothing. Teams that
would use the same cores are one team.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels._native import Program, Team
from phasewise.cython_kernels.errors import TeamError
from phasewise.serving.batch import Batch, Phase, SequenceSlice
from phasewise.serving.errors import RanksError
from phasewise.serving.forward import Capacity, build_program, kv_bytes_per_slot
from phasewise.serving.memory import available_bytes
from phasewise.serving.model import PackedModel
from phasewise.serving.schedules import ScheduleLookup
from phasewise.tuner.plans import PHASES, ServicePlan, list_cores

Logits = npt.NDArray[np.float32]

STEP_TOKENS = 512
"""Rows that pass through the model at once; larger batches go in pieces, with the same results. Enough to use
the weights well, few enough for a layer's rows to stay in the L2 caches."""

ALL_LOGITS_ROWS = 64
"""Rows of logits that `all_logits` computes at once."""

_TABLES: Mapping[Phase, int] = {phase: table for table, phase in enumerate(PHASES)}
"""Which of a program's tables of schedules a phase runs by."""

_log = logging.getLogger(__name__)


class LocalRanks:
    """One rank, in this process. Calls are for one thread at a time; that thread stays pinned until `close`.

    kv_slots: positions that all sequences together may hold. schedules: a lookup for each phase; prefill's
    says by which arithmetic every weight is computed, in both. RanksError if a plan cannot be run here or the
    memory is not there; ModelError if no kernel computes this model.
    """

    def __init__(
        self,
        model: PackedModel,
        plans: Mapping[Phase, ServicePlan],
        kv_slots: int,
        max_batch_tokens: int,
        max_sequences: int,
        schedules: Mapping[Phase, ScheduleLookup] | None = None,
    ) -> None:
        cores = {phase: _only_rank(plan) for phase, plan in plans.items()}
        self.kv_bytes_per_slot = kv_bytes_per_slot(model)
        self.kv_slots = kv_slots
        self._step_tokens = min(max_batch_tokens, STEP_TOKENS)
        self._sequences = max_sequences
        self._vocab = model.config.vocab_size
        self._teams = _open_teams(set(cores.values()))
        self._by_phase = {phase: self._teams[members] for phase, members in cores.items()}
        self._last: Team | None = None
        self._warned = False
        capacity = Capacity(
            kv_slots=kv_slots,
            step_tokens=self._step_tokens,
            sequences=max_sequences,
            logit_rows=min(max(max_sequences, ALL_LOGITS_ROWS), max(self._step_tokens, max_sequences)),
            threads=max(len(members) for members in cores.values()),
        )
        self._logit_rows = capacity.logit_rows
        lookups = [schedules[phase] for phase in PHASES] if schedules else []
        self._program: Program | None = build_program(model, capacity, _check_memory, lookups)
        self._logits: Logits = np.asarray(self._program)

    def forward(self, batch: Batch) -> Logits:
        """Logits float32 [slices that want them, vocab], in the slices' order; valid until the next call.

        ValueError if a token, position or slot is out of range, if slices overlap or there are too many.
        """
        program, team = self._running(batch.phase)
        if batch.phase == "decode" or batch.n_tokens <= self._step_tokens:
            return self._logits[: self._run(program, team, batch.slices, batch.phase)]
        rows = []
        for step in _steps(batch.slices, self._step_tokens):
            n_rows = self._run(program, team, step, batch.phase)
            rows.append(self._logits[:n_rows].copy())
        return np.concatenate(rows)

    def all_logits(self, batch: Batch) -> Logits:
        """Logits after every token of the batch, float32 [tokens, vocab]."""
        program, team = self._running(batch.phase)
        out = np.empty((batch.n_tokens, self._vocab), dtype=np.float32)
        done = 0
        for step in _steps(batch.slices, min(self._step_tokens, self._logit_rows)):
            n_rows = program.run(team, step, every_row=True, table=_TABLES[batch.phase])
            out[done : done + n_rows] = self._logits[:n_rows]
            done += n_rows
        return out

    def copy_kv(self, source_slot: int, target_slot: int, n_slots: int) -> None:
        """Copy keys and values of all layers; the ranges may overlap. ValueError outside the slots."""
        program, team = self._running("decode")
        program.copy_kv(team, source_slot, target_slot, n_slots)

    def observed_cpus(self) -> dict[Phase, tuple[int, ...]]:
        """Where each phase's threads were last seen working; -1 before their first step."""
        return {phase: tuple(team.observed_cpus()) for phase, team in self._by_phase.items()}

    @property
    def native_ns(self) -> int:
        """Time spent computing steps outside Python, since the start. RanksError after `close`."""
        if self._program is None:
            raise RanksError("the ranks have been closed")
        return cast(int, self._program.native_ns)

    def close(self) -> None:
        """End the threads and let go of the memory. Logits still held stay valid. Twice is harmless."""
        self._program = None
        for team in self._teams.values():
            team.close()

    def _running(self, phase: Phase) -> tuple[Program, Team]:
        if self._program is None:
            raise RanksError("the ranks have been closed")
        team = self._by_phase.get(phase)
        if team is None:
            raise RanksError(f"there is no plan for {phase}")
        if self._last is not team:
            if self._last is not None:
                self._last.rest()
            self._last = team
        return self._program, team

    def _run(self, program: Program, team: Team, slices: Iterable[SequenceSlice], phase: Phase) -> int:
        n_rows = program.run(team, slices, table=_TABLES[phase])
        if not self._warned and team.misplaced():
            self._warned = True
            _log.warning(
                "threads planned for cores %s were seen on %s: another program or a cpuset moves them",
                list_cores(team.cpus),
                list_cores(team.observed_cpus()),
            )
        return cast(int, n_rows)


def _only_rank(plan: ServicePlan) -> tuple[int, ...]:
    if len(plan.ranks) != 1:
        raise RanksError(f"the {plan.phase} plan has {len(plan.ranks)} ranks; this version runs plans of one")
    return plan.ranks[0].cores


def _open_teams(core_sets: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], Team]:
    teams: dict[tuple[int, ...], Team] = {}
    try:
        for cores in core_sets:
            teams[cores] = Team(cores)
    except TeamError as error:
        for team in teams.values():
            team.close()
        raise RanksError(str(error)) from error
    return teams


def _check_memory(name: str, needed: int, kv_slots: int) -> None:
    left = available_bytes()
    if left is not None and needed > left:
        raise RanksError(
            f"{name}: a KV cache of {kv_slots} slots and its scratch need {needed / 2**20:.0f} MiB, "
            f"{left / 2**20:.0f} MiB are free: ask for a shorter context or fewer sequences"
        )


def _steps(slices: Iterable[SequenceSlice], most_tokens: int) -> Iterator[list[SequenceSlice]]:
    """The same slices in runs of at most `most_tokens` tokens, cut where a run is full."""
    step: list[SequenceSlice] = []
    room = most_tokens
    for piece in slices:
        done, total = 0, len(piece.token_ids)
        while True:
            count = min(total - done, room)
            last = done + count == total
            step.append(
                SequenceSlice(
                    piece.token_ids[done : done + count],
                    piece.start + done,
                    piece.slot_base,
                    piece.wants_logits and last,
                )
            )
            done, room = done + count, room - count
            if room == 0:
                yield step
                step, room = [], most_tokens
            if last:
                break
    if step:
        yield step
