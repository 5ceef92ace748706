"""The first rank, which every plan has: the engine's thread starts its steps, on a pinned team per phase. It
cuts batches into steps and rests the team of the other phase; the program itself involves other ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels._native import Program, Team
from phasewise.cython_kernels.schedules import ScheduleLookup
from phasewise.serving.batch import STEP_TOKENS, Batch, SequenceSlice
from phasewise.serving.errors import RanksError
from phasewise.serving.models.draft_head import FedRows, RowVectors
from phasewise.serving.models.forward import AUTO, Capacity
from phasewise.serving.pools.contract import Rings
from phasewise.serving.ranks.kv_share import KvShare
from phasewise.serving.ranks.rank_memory import Nodes
from phasewise.serving.ranks.rank_teams import TABLES, tell_if_moved
from phasewise.tuner.plans import PHASES, Phase, ServicePlan

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KvSettings:
    """Settings of the memory for keys and values."""

    slots: int
    """Positions that all sequences together may hold."""
    format: str = AUTO
    """Format of keys and values, or `auto`: `forward.resolve_kv_format`."""
    touched: bool = False
    """True if all memory is touched at the start; False: pages come with use, and may be missing then."""
    shared: bool = False
    """True if other processes may map the keys and values, as in an instance of a pool."""
    rings: Rings | None = None
    """Slots of layers with windows, which keep only their window; None: all layers have `slots`."""

    states: int = 1
    """Places for states, if the model has layers that keep them."""

    @property
    def ring_slots(self) -> int:
        return self.rings.n_slots if self.rings else 0


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Options of ranks: memory, size of steps, schedules and threads."""

    kv: KvSettings
    max_batch_tokens: int
    max_sequences: int
    schedules: Mapping[Phase, ScheduleLookup] | None = None
    """Schedule lookup of each phase; prefill's decides every weight's arithmetic in both phases."""
    pinned: bool = True
    """False: the system may move the threads, so that there may be more threads than cores (for tests)."""
    feeds: bool = False
    """True if a draft head reads rows of every step."""
    threads: int = 0
    """Most threads of one rank after a move to other plans, if more than at the start."""


class Follower(Protocol):
    """Is told which slices a step computes, to follow it layer by layer."""

    def begins(self, slices: Sequence[SequenceSlice], step: int) -> None:
        """Called before a step; `step` is the number that `Ranks.progress` will report for it."""


ALL_LOGITS_ROWS = 64
"""Most rows of logits that `all_logits` computes at once."""


def room_for(options: RankOptions, threads: int, kv_format: str) -> Capacity:
    """Capacity that a rank's program must have. `threads`: most threads of the rank in any phase.
    `kv_format`: resolved format."""
    max_sequences = options.max_sequences
    threads = max(threads, options.threads)
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
        feeds=options.feeds,
    )


class Teams:
    """Thread teams by schedule table, for one program or several that take turns. `starts`: numbers of
    sequences from which a decode step uses each further table."""

    def __init__(self, by_table: Mapping[int, Team], starts: Sequence[int] = ()) -> None:
        self.by_table = by_table
        self._starts = starts
        self._last: Team | None = None
        self._last_tables: dict[Phase, int] = {}

    def table_of(self, phase: Phase, n_sequences: int) -> int:
        """Index of the schedule table for a step of `phase` with `n_sequences`."""
        band = bisect_right(self._starts, n_sequences) if phase == "decode" else 0
        return len(TABLES) + band - 1 if band else TABLES[phase]

    def last_table(self, phase: Phase) -> int:
        """Index of the table of the phase's last step; before it, of the table for one sequence."""
        return self._last_tables.get(phase, TABLES[phase])

    def note(self, phase: Phase, table: int) -> None:
        """Record that a step of `phase` runs by `table`."""
        self._last_tables[phase] = table

    @property
    def most_threads(self) -> int:
        return max(team.size for team in self.by_table.values())

    def take_turn(self, team: Team) -> Team | None:
        """Let `team` run next. Returns the team that ran last, if it is another one."""
        last, self._last = self._last, team
        return None if last is team else last

    def change(self, by_table: Mapping[int, Team], starts: Sequence[int]) -> None:
        """Replace the teams, and end the threads of the former ones."""
        former, self.by_table, self._last = self.by_table, by_table, None
        self._starts, self._last_tables = starts, {}
        for team in former.values():
            team.close()

    def close(self) -> None:
        """End the teams' threads."""
        for team in self.by_table.values():
            team.close()


class FirstRank:
    """Runs one program's steps. Calls are for one thread at a time, which stays pinned until `close`. `host`:
    the rank that owns `teams`, and runs its own steps in between; None: this one. `fed`: the rows that a
    draft head reads; None: there is no head. `nodes`: NUMA nodes of the rank's memory; (): any."""

    def __init__(
        self,
        program: Program,
        teams: Teams,
        capacity: Capacity,
        host: FirstRank | None = None,
        fed: FedRows | None = None,
        nodes: Nodes = (),
    ) -> None:
        self._program: Program | None = program
        self.teams = teams
        self.nodes: Nodes = nodes if host is None else host.nodes
        self._is_guest = host is not None
        self._step_tokens = capacity.step_tokens
        self._logit_rows = capacity.logit_rows
        self._logits: Logits = np.asarray(program)
        self._follower: Follower | None = None
        self._fed = fed
        self._fed_parts: list[RowVectors] = []
        self._warned = False

    def forward(self, batch: Batch) -> Logits:
        """Logits float32 [Batch.n_logits, vocab], in the slices' order; valid until the next call.
        ValueError: a token, position or slot is out of range, or slices overlap or are too many."""
        self._fed_parts.clear()
        if batch.phase == "decode" or batch.n_tokens <= self._step_tokens:
            return self._logits[: self._run(batch.slices, batch.phase)]
        rows = []
        for step in slices_at_once(batch.slices, self._step_tokens):
            n_rows = self._run(step, batch.phase)
            rows.append(self._logits[:n_rows].copy())
        return np.concatenate(rows)

    def all_logits(self, batch: Batch) -> Logits:
        """Logits after every token of the batch, float32 [tokens, vocab]; valid until the next call."""
        self._fed_parts.clear()
        if batch.n_tokens <= min(self._step_tokens, self._logit_rows):
            return self._logits[: self._run(batch.slices, batch.phase, every_row=True)]
        out = np.empty((batch.n_tokens, self._logits.shape[1]), dtype=np.float32)
        done = 0
        for step in slices_at_once(batch.slices, min(self._step_tokens, self._logit_rows)):
            n_rows = self._run(step, batch.phase, every_row=True)
            out[done : done + n_rows] = self._logits[:n_rows]
            done += n_rows
        return out

    def copy_kv(self, source_slot: int, target_slot: int, n_slots: int) -> None:
        """Copy keys and values of all layers; the ranges may overlap. ValueError: a slot is out of range."""
        program, team = self._running(self.teams.last_table("decode"))
        resting = self.teams.take_turn(team)
        if resting is not None:
            resting.rest()
        program.copy_kv(team, source_slot, target_slot, n_slots)

    def observed_cpus(self) -> dict[Phase, tuple[int, ...]]:
        """CPUs on which each phase's threads were last seen working; -1 before their first step."""
        seen: dict[Phase, tuple[int, ...]] = {}
        for phase in PHASES:
            team = self.teams.by_table.get(self.teams.last_table(phase))
            if team is not None:
                seen[phase] = tuple(team.observed_cpus())
        return seen

    @property
    def progress(self) -> tuple[int, int]:
        """Steps begun, and layers of the last step whose keys and values are stored. Thread-safe."""
        return self.program.progress

    def follow(self, follower: Follower | None) -> None:
        """Set the follower that is told of every step; None: nobody is."""
        self._follower = follower

    def take_fed_rows(self, n_tokens: int) -> RowVectors | None:
        """Rows after the last norm of the last batch, one for each of its tokens. None: the batch had another
        number of tokens than `n_tokens`, or no draft head reads the rows."""
        parts, self._fed_parts = self._fed_parts, []
        if sum(map(len, parts)) != n_tokens or not parts:
            return None
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @property
    def native_ns(self) -> int:
        """Nanoseconds spent computing steps outside Python since the start. RanksError after `close`."""
        return self.program.native_ns

    @property
    def program(self) -> Program:
        """The rank's program. RanksError after `close`."""
        if self._program is None:
            raise RanksError("the ranks have been closed")
        return self._program

    def close(self) -> None:
        """End the threads and release the memory; logits still held stay valid. May be called twice."""
        self._program = self._fed = None
        self._logits = np.empty((0, 0), np.float32)
        if not self._is_guest:
            self.teams.close()

    def _running(self, table: int) -> tuple[Program, Team]:
        program = self.program
        team = self.teams.by_table.get(table)
        if team is None:
            raise RanksError(f"there is no plan for {'prefill' if table == TABLES['prefill'] else 'decode'}")
        return program, team

    def _run(self, slices: Iterable[SequenceSlice], phase: Phase, every_row: bool = False) -> int:
        slices = tuple(slices)
        table = self.teams.table_of(phase, len(slices))
        program, team = self._running(table)
        self.teams.note(phase, table)
        if self._follower is not None:
            self._follower.begins(slices, program.progress[0] + 1)
        n_rows = program.run(team, slices, every_row, table, self.teams.take_turn(team))
        if self._fed is not None:
            self._fed_parts.append(self._fed.read(sum(len(piece.token_ids) for piece in slices)))
        self._warned = self._warned or tell_if_moved(team)
        return n_rows


class Ranks(ABC):
    """Computes a model's steps. Calls are for one thread at a time, which they may pin."""

    kv_slots: int
    kv_format: str
    """Resolved format of keys and values: `forward.resolve_kv_format`."""
    kv_bytes_per_slot: int
    """Bytes of the keys and values of one position, in all copies that ranks keep."""
    moves_in_place = False
    """True if `move` keeps keys and values: for one rank of at most `RankOptions.threads` threads."""
    lost: str | None = None
    """One line on why these ranks cannot be used until `reopen`; None: all are well."""
    _followed_by: Follower | None = None

    @property
    @abstractmethod
    def first_rank(self) -> FirstRank:
        """The rank in this process; `reopen` replaces it."""

    @property
    @abstractmethod
    def kv_share(self) -> KvShare:
        """Location of keys and values, until `reopen`. RanksError unless `KvSettings.shared`."""

    def forward(self, batch: Batch) -> Logits:
        """Logits float32 [Batch.n_logits, vocab], in the slices' order; valid until the next call.
        ValueError: a token, position or slot is out of range, or slices overlap or are too many."""
        return self._step(self.first_rank.forward, batch)

    def all_logits(self, batch: Batch) -> Logits:
        """Logits after every token of the batch, float32 [tokens, vocab]; valid until the next call."""
        return self._step(self.first_rank.all_logits, batch)

    def copy_kv(self, source_slot: int, target_slot: int, n_slots: int) -> None:
        """Copy keys and values of all layers; the ranges may overlap. ValueError: a slot is out of range."""
        self.first_rank.copy_kv(source_slot, target_slot, n_slots)

    @abstractmethod
    def observed_cpus(self) -> dict[Phase, tuple[int, ...]]:
        """CPUs on which each phase's threads were last seen working, by rank; -1: no step yet."""

    @property
    def progress(self) -> tuple[int, int]:
        """Steps begun, and layers of the last one whose keys and values all ranks have. Thread-safe."""
        return self.first_rank.progress

    def follow(self, follower: Follower | None) -> None:
        """Set the follower that is told of every step, also after `reopen`; None: nobody is."""
        self._followed_by = follower
        self.first_rank.follow(follower)

    @property
    def native_ns(self) -> int:
        """Nanoseconds spent computing steps outside Python since the start. RanksError after `close`."""
        return self.first_rank.native_ns

    @abstractmethod
    def move(
        self, plans: Mapping[Phase, ServicePlan], schedules: Mapping[Phase, ScheduleLookup] | None
    ) -> None:
        """Use other plans from the next step on. `schedules`: kernel schedules with the arithmetic of the
        ranks' start. RanksError: the plans cannot be run, and the former ones stay. CoresMoved: `reopen` must
        be called, and keys and values are lost."""

    def watch(self, on_loss: Callable[[], None]) -> None:  # noqa: B027 - a rank alone cannot be lost
        """Set the function that is called, on any thread, when a rank has died."""

    def reopen(self) -> None:
        """Start the ranks again with the same weights and the present plans; keys and values are lost.
        RanksError: that cannot be done, or not now."""
        raise RanksError("the only rank is this process; it cannot be started anew")

    @abstractmethod
    def close(self) -> None:
        """End threads and processes; logits still held stay valid. May be called twice."""

    def _step(self, compute: Callable[[Batch], Logits], batch: Batch) -> Logits:
        return compute(batch)


def slices_at_once(slices: Iterable[SequenceSlice], most_tokens: int) -> Iterator[list[SequenceSlice]]:
    """Regroup slices into runs of at most `most_tokens` tokens, cutting a slice where a run is full."""
    step: list[SequenceSlice] = []
    room = most_tokens
    for piece in slices:
        done, total = 0, len(piece.token_ids)
        while True:
            count = min(total - done, room)
            last = done + count == total
            part = piece._replace(
                token_ids=piece.token_ids[done : done + count],
                start=piece.start + done,
                wants_logits=piece.wants_logits and last,
                n_drafted=0,
                keeps=tuple(keep for keep in piece.keeps if done < keep[0] - piece.start <= done + count),
            )
            step.append(part)
            done, room = done + count, room - count
            if room == 0:
                yield step
                step, room = [], most_tokens
            if last:
                break
    if step:
        yield step
