"""The rank that every plan has: its steps are started by the engine's own thread, on a pinned team per phase.

It cuts batches into steps, runs the program, and sends the team of the other phase to rest. Whether other
ranks take part in a step is the program's business.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels._native import Program, Team
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.errors import RanksError
from phasewise.serving.models.forward import Capacity
from phasewise.serving.ranks.rank_teams import TABLES
from phasewise.serving.ranks.ranks_contract import Follower, RankOptions
from phasewise.tuner.plans import Phase, list_cores

Logits = npt.NDArray[np.float32]

STEP_TOKENS = 512
"""Rows that pass through the model at once; larger batches go in pieces, with the same results. Enough to use
the weights well, few enough for a layer's rows to stay in the L2 caches."""

ALL_LOGITS_ROWS = 64
"""Rows of logits that `all_logits` computes at once."""

_log = logging.getLogger(__name__)


def room_for(options: RankOptions, threads: int, kv_format: str) -> Capacity:
    """The room that a program must have. `threads`: the most that a rank has in any phase.

    kv_format: the resolved one.
    """
    max_sequences = options.max_sequences
    step_tokens = min(options.max_batch_tokens, STEP_TOKENS)
    return Capacity(
        kv_slots=options.kv.slots,
        step_tokens=step_tokens,
        sequences=max_sequences,
        logit_rows=min(max(max_sequences, ALL_LOGITS_ROWS), max(step_tokens, max_sequences)),
        threads=threads,
        kv_format=kv_format,
        ring_slots=options.kv.ring_slots,
        state_places=options.kv.states,
        touched=options.kv.touched,
    )


class Teams:
    """Teams by phase, for one program or for several that take turns."""

    def __init__(self, by_phase: Mapping[Phase, Team]) -> None:
        self.by_phase = by_phase
        self._last: Team | None = None

    @property
    def most_threads(self) -> int:
        """Threads of the largest team."""
        return max(team.size for team in self.by_phase.values())

    def take_turn(self, team: Team) -> Team | None:
        """`team` runs next; the team that ran last, if it is another one."""
        last, self._last = self._last, team
        return None if last is team else last

    def close(self) -> None:
        """End the threads."""
        for team in self.by_phase.values():
            team.close()


class FirstRank:
    """Calls are for one thread at a time; that thread stays pinned until `close`.

    host: the rank whose teams run this program too, between their own steps; None: the teams are its own.
    """

    def __init__(
        self,
        program: Program,
        teams: Mapping[Phase, Team],
        capacity: Capacity,
        host: FirstRank | None = None,
    ) -> None:
        self._program: Program | None = program
        self.teams: Teams = Teams(teams) if host is None else host.teams
        self._is_guest = host is not None
        self._step_tokens = capacity.step_tokens
        self._logit_rows = capacity.logit_rows
        self._logits: Logits = np.asarray(program)
        self._follower: Follower | None = None
        self._warned = False

    def forward(self, batch: Batch) -> Logits:
        """Logits float32 [Batch.n_logits, vocab], in the slices' order; valid until the next call.

        ValueError if a token, position or slot is out of range, if slices overlap or there are too many.
        """
        self._running(batch.phase)  # or say why not, however few its tokens
        if batch.phase == "decode" or batch.n_tokens <= self._step_tokens:
            return self._logits[: self._run(batch.slices, batch.phase)]
        rows = []
        for step in _steps(batch.slices, self._step_tokens):
            n_rows = self._run(step, batch.phase)
            rows.append(self._logits[:n_rows].copy())
        return np.concatenate(rows)

    def all_logits(self, batch: Batch) -> Logits:
        """Logits after every token of the batch, float32 [tokens, vocab]; valid until the next call."""
        self._running(batch.phase)  # or say why not, however few its tokens
        if batch.n_tokens <= min(self._step_tokens, self._logit_rows):
            return self._logits[: self._run(batch.slices, batch.phase, every_row=True)]
        out = np.empty((batch.n_tokens, self._logits.shape[1]), dtype=np.float32)
        done = 0
        for step in _steps(batch.slices, min(self._step_tokens, self._logit_rows)):
            n_rows = self._run(step, batch.phase, every_row=True)
            out[done : done + n_rows] = self._logits[:n_rows]
            done += n_rows
        return out

    def copy_kv(self, source_slot: int, target_slot: int, n_slots: int) -> None:
        """Copy keys and values of all layers; the ranges may overlap. ValueError outside the slots."""
        program, team = self._running("decode")
        resting = self.teams.take_turn(team)
        if resting is not None:
            resting.rest()
        program.copy_kv(team, source_slot, target_slot, n_slots)

    def observed_cpus(self) -> dict[Phase, tuple[int, ...]]:
        """The CPUs on which each phase's threads were last seen working; -1 before their first step."""
        return {phase: tuple(team.observed_cpus()) for phase, team in self.teams.by_phase.items()}

    @property
    def progress(self) -> tuple[int, int]:
        """Steps begun, and layers of the newest whose keys and values are all stored. Any thread may ask."""
        return self.program.progress

    def follow(self, follower: Follower | None) -> None:
        """Tell `follower` of every step from now on."""
        self._follower = follower

    @property
    def native_ns(self) -> int:
        """Time spent computing steps outside Python, since the start. RanksError after `close`."""
        return self.program.native_ns

    @property
    def program(self) -> Program:
        """RanksError after `close`."""
        if self._program is None:
            raise RanksError("the ranks have been closed")
        return self._program

    def close(self) -> None:
        """End the threads and let go of the memory. Logits still held stay valid. Twice is harmless."""
        self._program = None
        self._logits = np.empty((0, 0), np.float32)
        if not self._is_guest:
            self.teams.close()

    def _running(self, phase: Phase) -> tuple[Program, Team]:
        program = self.program
        team = self.teams.by_phase.get(phase)
        if team is None:
            raise RanksError(f"there is no plan for {phase}")
        return program, team

    def _run(self, slices: Iterable[SequenceSlice], phase: Phase, every_row: bool = False) -> int:
        program, team = self._running(phase)
        if self._follower is not None:
            slices = tuple(slices)
            self._follower.begins(slices, program.progress[0] + 1)
        n_rows = program.run(team, slices, every_row, TABLES[phase], self.teams.take_turn(team))
        if not self._warned and team.misplaced():
            self._warned = True
            _log.warning(
                "threads planned for cores %s were seen on %s: another program or a cpuset moves them",
                list_cores(team.cpus or ()),
                list_cores(team.observed_cpus()),
            )
        return n_rows


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
                    piece.table,
                    ring=piece.ring,
                    adapter=piece.adapter,
                    state=piece.state,
                    keeps=tuple(keep for keep in piece.keeps if done < keep[0] - piece.start <= done + count),
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
