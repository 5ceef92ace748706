"""Several ranks: this process is the first, the others are processes that wait for its steps.

They share memory (`segments`), not messages: a step is written there and a bell rung (group.h). A phase with
R ranks uses processes 0 to R - 1; both phases see the same keys and values, so that a switch from one to the
other copies nothing. Decision 0015 says why.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from phasewise.cython_kernels import isa
from phasewise.cython_kernels._native import Program, place_on_node
from phasewise.cython_kernels.division import share
from phasewise.cython_kernels.errors import GroupFailed
from phasewise.cython_kernels.schedules import ScheduleLookup
from phasewise.serving.batch import Batch
from phasewise.serving.errors import RankLost, RanksError
from phasewise.serving.models.forward import (
    PATIENCE_S,
    Capacity,
    build_program,
    kv_bytes_per_slot,
    resolve_kv_format,
)
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.pools.arena import aligned
from phasewise.serving.processes.memory import check_memory
from phasewise.serving.processes.segments import Segment
from phasewise.serving.ranks.first_rank import FirstRank, Logits, room_for
from phasewise.serving.ranks.kv_share import KvShape, KvShare
from phasewise.serving.ranks.rank_instructions import Instructions
from phasewise.serving.ranks.rank_layout import RankLayout
from phasewise.serving.ranks.rank_memory import preferring, warn_of_refusals
from phasewise.serving.ranks.rank_teams import TABLES, open_teams, touch_memory
from phasewise.serving.ranks.ranks_contract import Follower, RankOptions
from phasewise.serving.ranks.shared_weights import SharedWeights, share_weights
from phasewise.serving.ranks.worker_processes import START_S, WorkerProcesses
from phasewise.serving.ranks.written_schedules import WrittenSchedules
from phasewise.tuner.plans import PHASES, Phase, ServicePlan, list_cores

LEARN_S = 5.0
"""The time after a failed step within which its cause is to be known."""
LEAST_RESTART_S = 20.0
RESTART_FACTOR = 5.0
"""Reopened ranks may take this many times as long as they took at first; see LEAST_RESTART_S."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Setup:
    """The inputs from which the ranks are started, however often."""

    layout: RankLayout
    capacities: tuple[Capacity, ...]
    lookups: tuple[ScheduleLookup, ...]
    pinned: bool
    shared: SharedWeights
    kv_shared: bool


@dataclass
class _Listener:
    """The receiver of a loss. Outlives the processes that are lost."""

    on_loss: Callable[[], None] = lambda: None


class ProcessRanks:
    """Ranks in processes of their own. Arguments and errors: `ranks.open_ranks`.

    A rank that dies ends every wait of the others: the step under way, and all later ones, raise RankLost
    until they are opened again.
    """

    def __init__(self, model: PackedModel, plans: Mapping[Phase, ServicePlan], options: RankOptions) -> None:
        self.kv_slots = options.kv.slots
        self.kv_format = resolve_kv_format(model, options.kv.format)
        self.kv_bytes_per_slot = kv_bytes_per_slot(model, self.kv_format)
        self._crew = layout = RankLayout(plans)
        self._owner = os.getpid()
        self._warned = not options.pinned
        self._listener = _Listener()
        self._former_native_ns = 0
        self._follower: Follower | None = None
        layout.check_divides(model)
        capacities = tuple(
            room_for(options, layout.threads(rank), self.kv_format) for rank in range(layout.n_ranks)
        )
        lookups = tuple(options.schedules[phase] for phase in PHASES) if options.schedules else ()
        began = time.monotonic()
        self._life = ExitStack()
        """The resources that end with these processes; `_close` also ends what the next ones are started
        from.
        """
        with ExitStack() as ending:
            with preferring(layout.node(0)):
                shared = ending.enter_context(
                    share_weights(model, layout.division(0), spread=layout.spans_nodes)
                )
            self._setup: _Setup | None = _Setup(
                layout, capacities, lookups, options.pinned, shared, options.kv.shared
            )
            ending.callback(self._life.close)
            warn_of_refusals(self._start(self._setup, START_S, shared.copied_bytes))
            self._close = weakref.finalize(self, ending.pop_all().close)
        self._restart_s = max(LEAST_RESTART_S, RESTART_FACTOR * (time.monotonic() - began))

    def _start(self, setup: _Setup, within_s: float, n_bytes_to_copy: int) -> dict[int, int]:
        """Start the first rank, then the others; what the kernel said to each one's memory policy."""
        layout = setup.layout
        with ExitStack() as ending, ExitStack() as descriptors:
            with preferring(layout.node(0)) as answer:
                program, step = _first_program(setup, n_bytes_to_copy)
                # Kept open where others map it too, through this process's descriptor.
                (ending if setup.kv_shared else descriptors).callback(step.close)
                teams = open_teams(layout.cores(0), setup.pinned)
            first = FirstRank(program, teams, setup.capacities[0])
            ending.callback(first.close)
            if setup.capacities[0].touched:
                touch_memory(program, teams)
            told = [_instructions(setup, rank, step) for rank in range(1, layout.n_ranks)]
            workers = WorkerProcesses(told, _on_death(program, self._listener), within_s)
            ending.callback(_end, self._owner, program, workers)
            answers = workers.wait_until_ready()
            self._life.push(ending.pop_all())
        self._first, self._workers = first, workers
        self._step_memory: Segment | None = step
        first.follow(self._follower)
        return {0: answer, **answers}

    @property
    def first_rank(self) -> FirstRank:
        """The rank in this process; another one after `reopen`."""
        return self._first

    @property
    def lost(self) -> str | None:
        """In one line, why these ranks are of no more use until `reopen`; None while all is well."""
        return self._workers.lost

    def watch(self, on_loss: Callable[[], None]) -> None:
        """`on_loss` is called, on a thread of the ranks', when one has died."""
        self._listener.on_loss = on_loss

    def reopen(self) -> None:
        """End what is left of the ranks and start them anew: same plans and weights, no keys and values.

        RanksError if a rank cannot be started, or not in time; it may be tried again then. Logits still held
        keep the former memory mapped.
        """
        self._check_process()
        if self._setup is None:
            raise RanksError("the ranks have been closed")
        with suppress(RanksError):  # closed already by an attempt that failed
            self._former_native_ns += self._first.native_ns
        self._workers.kill()
        self._life.close()
        self._start(self._setup, self._restart_s, 0)

    def forward(self, batch: Batch) -> Logits:
        """As LocalRanks.forward. RankLost, naming the rank, once one has died."""
        logits = self._step(self._first.forward, batch)
        if not self._warned:
            self._check_places(batch.phase)
        return logits

    def all_logits(self, batch: Batch) -> Logits:
        """As LocalRanks.all_logits. RankLost, naming the rank, once one has died."""
        return self._step(self._first.all_logits, batch)

    def copy_kv(self, source_slot: int, target_slot: int, n_slots: int) -> None:
        """As LocalRanks.copy_kv; the first rank does it alone."""
        self._check_process()
        self._first.copy_kv(source_slot, target_slot, n_slots)

    def observed_cpus(self) -> dict[Phase, tuple[int, ...]]:
        """The CPUs on which each phase's threads, rank by rank, were last seen working; -1 before their
        first step.
        """
        program = self._first.program
        return {
            phase: tuple(cpu for cpus in program.observed(TABLES[phase]) for cpu in cpus)
            for phase in self._crew.plans
        }

    @property
    def kv_share(self) -> KvShare:
        """The place of keys and values, until `reopen`. RanksError unless `KvSettings.shared`."""
        setup = self._setup
        if setup is None or self._step_memory is None or not setup.kv_shared:
            raise RanksError("these ranks do not share their keys and values")
        shape = KvShape.of(setup.shared.model.config, self.kv_format)
        offset, _ = self._first.program.kv_span(0, 0)
        return KvShare(self._step_memory, offset, aligned(self.kv_slots), shape)

    @property
    def progress(self) -> tuple[int, int]:
        """As LocalRanks.progress; a layer is stored when every rank has stored its heads."""
        return self._first.progress

    def follow(self, follower: Follower | None) -> None:
        """Tell `follower` of every step from now on, also those of ranks that are started anew."""
        self._follower = follower
        self._first.follow(follower)

    @property
    def native_ns(self) -> int:
        """Time that the first rank spent computing steps outside Python. RanksError after `close`."""
        return self._former_native_ns + self._first.native_ns

    @property
    def pids(self) -> dict[int, int]:
        """The processes of the other ranks, by rank."""
        return self._workers.pids

    def close(self) -> None:
        """End threads and processes. Logits still held stay valid. Twice is harmless."""
        self._close()
        self._setup = self._step_memory = None

    def _check_process(self) -> None:
        if os.getpid() != self._owner:
            raise RanksError(f"these ranks are those of process {self._owner}: open others after a fork")

    def _check_places(self, phase: Phase) -> None:
        if self._first.program.misplaced(TABLES[phase]):
            self._warned = True
            _log.warning(
                "threads planned for cores %s were seen on %s: another program or a cpuset moves them",
                list_cores(self._crew.plans[phase].cores),
                list_cores(self.observed_cpus()[phase]),
            )

    def _step(self, compute: Callable[[Batch], Logits], batch: Batch) -> Logits:
        self._check_process()
        try:
            return compute(batch)
        except GroupFailed as error:
            said = str(error)
        # Not within the handler: a cause would hold frames that keep the lost ranks' memory mapped.
        raise RankLost(self._workers.reason(LEARN_S) or said)


def _first_program(setup: _Setup, n_bytes_to_copy: int) -> tuple[Program, Segment]:
    """The first rank's program, and the memory that it shares with the others."""
    segments: list[Segment] = []
    layout, shared = setup.layout, setup.shared

    def memory(n_bytes: int) -> memoryview:
        segments.append(Segment.create(n_bytes, "step"))
        return memoryview(segments[0].memory)

    def check(name: str, needed: int, kv_slots: int) -> None:
        check_memory(name, needed + n_bytes_to_copy, kv_slots)

    try:
        program = build_program(
            shared.model,
            setup.capacities[0],
            check,
            setup.lookups,
            layout.division(0),
            memory,
            patience_s=PATIENCE_S,
        )
    except BaseException:
        for segment in segments:
            segment.close()
        raise
    _place_kv(program, shared.model, layout, segments[0])
    return program, segments[0]


def _on_death(program: Program, listener: _Listener) -> Callable[[], None]:
    def on_death() -> None:
        program.fail()
        listener.on_loss()

    return on_death


def _place_kv(program: Program, model: PackedModel, layout: RankLayout, step: Segment) -> None:
    """Keys and values near the rank that reads them in decode, wherever prefill writes them from.

    A refusal is no news: it was the same for the ranks' other memory.
    """
    teams = layout.teams[TABLES["decode"]]
    if not (layout.spans_nodes and teams):
        return
    for layer in range(len(model.config.attention_layers)):
        for rank in range(len(teams)):
            node = layout.node(rank)
            for head in range(*share(model.config.n_kv_heads, teams, rank)):
                offset, n_bytes = program.kv_span(layer, head)
                if node is not None:
                    place_on_node(step.memory, offset, offset + n_bytes, node)


def _instructions(setup: _Setup, rank: int, step: Segment) -> Instructions:
    layout, capacity, shared = setup.layout, setup.capacities[rank], setup.shared
    model = shared.model
    return Instructions(
        rank=rank,
        parent_pid=os.getpid(),
        model_name=model.name,
        config=model.config,
        weight_format=model.format,
        isa=isa.active(),
        capacity=capacity,
        teams=layout.teams,
        cores=layout.cores(rank),
        pinned=setup.pinned,
        numa_node=layout.node(rank),
        step_fd=step.fd,
        step_bytes=step.n_bytes,
        weights=shared.weights,
        weights_source=shared.source,
        schedules=tuple(
            WrittenSchedules.of(lookup, layout.division(rank), table, model, capacity)
            for table, lookup in enumerate(setup.lookups)
        ),
        adapters=shared.adapters,
    )


def _end(owner: int, program: Program, workers: WorkerProcesses) -> None:
    """A fork's copy of the ranks ends nothing."""
    if os.getpid() == owner:
        program.stop()
        workers.close()
