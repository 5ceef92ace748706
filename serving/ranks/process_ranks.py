"""Several ranks: this process is the first, the others are processes that wait for its steps. They share
memory (`segments`), not messages: a step is written there and a bell rung (group.h). A phase of R ranks uses
processes 0 to R - 1, and both phases share keys and values: switching copies nothing. Why: decision 0015."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import chain, product

from phasewise.cython_kernels import isa
from phasewise.cython_kernels._native import Program, place_on_nodes
from phasewise.cython_kernels.division import head_share
from phasewise.cython_kernels.errors import GroupFailed
from phasewise.cython_kernels.schedules import ScheduleLookup
from phasewise.serving.batch import Batch
from phasewise.serving.errors import CoresMoved, RankLost, RanksError
from phasewise.serving.models.draft_head import FedRows
from phasewise.serving.models.forward import (
    PATIENCE_S,
    Capacity,
    build_program,
    kv_bytes_per_slot,
    resolve_kv_format,
)
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.models.parts.attention import Attending
from phasewise.serving.pools.arena import aligned
from phasewise.serving.processes.headroom import check_memory
from phasewise.serving.processes.segments import Segment
from phasewise.serving.ranks.first_rank import FirstRank, Logits, RankOptions, Ranks, Teams, room_for
from phasewise.serving.ranks.kv_share import KvShape, KvShare
from phasewise.serving.ranks.rank_instructions import Instructions, WrittenSchedules
from phasewise.serving.ranks.rank_layout import RankLayout
from phasewise.serving.ranks.rank_memory import (
    ByNode,
    placing,
    tell_of_others,
    warn_of_refusals,
    warn_of_strays,
)
from phasewise.serving.ranks.rank_teams import TABLES, lookups_by_table, open_teams, tell_moved, touch_memory
from phasewise.serving.ranks.shared_weights import SharedWeights, share_weights
from phasewise.serving.ranks.worker_processes import START_S, WorkerProcesses
from phasewise.tuner.plans import Phase, ServicePlan, list_cores

LEARN_S = 5.0
"""Seconds to wait for the cause of a failed step."""
LEAST_RESTART_S = 20.0
RESTART_FACTOR = 5.0
"""Reopened ranks may take so many times as long as the first start, or LEAST_RESTART_S if that is longer."""


@dataclass(frozen=True)
class _Setup:
    """All that ranks are started from, at first and again."""

    layout: RankLayout
    capacities: tuple[Capacity, ...]
    lookups: tuple[ScheduleLookup, ...]
    options: RankOptions
    shared: SharedWeights
    is_spread: bool
    """True if every rank has copied its weights to its own NUMA nodes."""


@dataclass
class _Listener:
    """Receives the loss of a rank; it outlives the processes."""

    on_loss: Callable[[], None] = lambda: None


class ProcessRanks(Ranks):
    """Ranks in processes of their own. Arguments and errors: as `open_ranks`. When a rank dies, the step
    under way and all later ones raise RankLost until `reopen`."""

    def __init__(self, model: PackedModel, plans: Mapping[Phase, ServicePlan], options: RankOptions) -> None:
        self.kv_slots = options.kv.slots
        self._model, self._options = model, replace(options, threads=0)
        self.kv_format = resolve_kv_format(model, options.kv.format)
        layout = RankLayout.here(plans, pinned=options.pinned)
        self._owner = os.getpid()
        self._warned = not options.pinned
        self._listener = _Listener()
        self._former_native_ns = 0
        layout.check_divides(model)
        began = time.monotonic()
        self._life = ExitStack()
        """Resources that end with these processes; `_close` ends the shared weights too."""
        self._weights_life = ExitStack()
        with ExitStack() as ending:
            ending.callback(self._weights_life.close)
            self._setup: _Setup | None = self._set_up(layout, options.schedules, self._share(layout))
            ending.callback(self._life.close)
            self._start(self._setup, START_S)
            self._close = weakref.finalize(self, ending.pop_all().close)
        self._restart_s = max(LEAST_RESTART_S, RESTART_FACTOR * (time.monotonic() - began))
        self._moves_to: tuple[RankLayout, Mapping[Phase, ScheduleLookup] | None] | None = None

    def _share(self, layout: RankLayout) -> SharedWeights:
        """Share the weights among the ranks of `layout`, and release the formerly shared ones."""
        self._weights_life.close()
        return self._weights_life.enter_context(share_weights(self._model, layout))

    def _set_up(
        self, layout: RankLayout, schedules: Mapping[Phase, ScheduleLookup] | None, shared: SharedWeights
    ) -> _Setup:
        options = self._options
        return _Setup(
            layout,
            tuple(room_for(options, layout.threads(rank), self.kv_format) for rank in range(layout.n_ranks)),
            tuple(lookups_by_table(schedules)[: len(layout.teams)]),
            options,
            shared,
            layout.places_memory,
        )

    def _start(self, setup: _Setup, within_s: float) -> None:
        """Start the first rank, then the others, and release the packed file's pages."""
        layout = setup.layout
        with ExitStack() as ending, ExitStack() as descriptors:
            with placing(layout.nodes(0)) as answer:
                program, step = _first_program(setup)
                # Kept open where others map it too, through this process's descriptor.
                (ending if setup.options.kv.shared else descriptors).callback(step.close)
                teams = open_teams(layout.cores(0), setup.options.pinned)
            room, config = setup.capacities[0], setup.shared.model.config
            fed = FedRows.of(program, config, room.step_tokens, room.logit_rows) if room.feeds else None
            own_teams = Teams(teams, layout.starts)
            first = FirstRank(program, own_teams, room, fed=fed, nodes=layout.nodes(0))
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
        first.follow(self._followed_by)
        if setup.shared.copied_bytes:
            copied = {**workers.copied_by_node, **setup.shared.by_node}
            _tell_of_memory(layout, {0: answer, **answers}, copied)
            if self._model.file is not None and setup.shared.source is not None:
                self._model.file.release()
            in_place = replace(setup.shared, source=None, copied_bytes=0, by_node={})
            self._setup = replace(setup, shared=in_place)

    @property
    def first_rank(self) -> FirstRank:
        return self._first

    @property
    def kv_bytes_per_slot(self) -> int:  # type: ignore[override]
        return kv_bytes_per_slot(self._model, self.kv_format, self._layout.teams)

    @property
    def lost(self) -> str | None:  # type: ignore[override]
        return self._workers.lost

    def watch(self, on_loss: Callable[[], None]) -> None:
        self._listener.on_loss = on_loss

    def reopen(self) -> None:
        """End the remaining ranks and start all again, with the same weights and no keys and values, by the
        former plans or those given to `move`. RanksError: a rank cannot be started in time; another try is
        possible. Logits still held keep the former memory mapped."""
        self._check_process()
        if self._setup is None:
            raise RanksError("the ranks have been closed")
        with suppress(RanksError):  # closed already by an attempt that failed
            self._former_native_ns += self._first.native_ns
        self._workers.kill()
        self._life.close()
        if self._moves_to is not None:
            layout, schedules = self._moves_to
            shared = self._setup.shared
            if self._setup.is_spread or layout.places_memory:
                shared = self._share(layout)
            self._setup = self._set_up(layout, schedules, shared)
            self._moves_to = None
        self._start(self._setup, START_S if self._setup.shared.copied_bytes else self._restart_s)

    def move(
        self, plans: Mapping[Phase, ServicePlan], schedules: Mapping[Phase, ScheduleLookup] | None
    ) -> None:
        """Raise CoresMoved: `reopen` starts the ranks of these plans. RanksError: too few heads."""
        layout = RankLayout.here(plans, pinned=self._options.pinned)
        layout.check_divides(self._model)
        self._moves_to = layout, schedules
        raise CoresMoved(f"the ranks move to cores {list_cores(sorted(layout.all_cores))}")

    def copy_kv(self, source_slot: int, target_slot: int, n_slots: int) -> None:
        self._check_process()
        super().copy_kv(source_slot, target_slot, n_slots)

    def observed_cpus(self) -> dict[Phase, tuple[int, ...]]:
        program, layout = self._first.program, self._layout
        if layout.n_ranks == 1:
            return self._first.observed_cpus()
        last_table = self._first.teams.last_table
        return {
            phase: tuple(cpu for cpus in program.observed(last_table(phase)) for cpu in cpus)
            for phase in layout.plans
        }

    @property
    def kv_share(self) -> KvShare:
        setup = self._setup
        if setup is None or self._step_memory is None or not setup.options.kv.shared:
            raise RanksError("these ranks do not share their keys and values")
        config = setup.shared.model.config
        shape = KvShape.of(config, self.kv_format)
        offset = 0 if setup.layout.n_ranks == 1 else self._first.program.kv_span(0, 0)[0]
        places = setup.capacities[0].state_places
        copies = config.keeping[0].copies(setup.layout.teams)
        return KvShare.of(self._step_memory, shape, offset, aligned(self.kv_slots), places, copies)

    @property
    def native_ns(self) -> int:
        return self._former_native_ns + self._first.native_ns

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the other ranks, by rank."""
        return self._workers.pids

    def close(self) -> None:
        self._close()
        self._setup = self._step_memory = None

    @property
    def _layout(self) -> RankLayout:
        """The layout of the ranks. RanksError after `close`."""
        if self._setup is None:
            raise RanksError("the ranks have been closed")
        return self._setup.layout

    def _check_process(self) -> None:
        if os.getpid() != self._owner:
            raise RanksError(f"these ranks are those of process {self._owner}: open others after a fork")

    def _check_places(self, table: int) -> None:
        """Warn, once, if threads of ranks other than the first run on other cores than planned."""
        if self._layout.n_ranks > 1 and self._first.program.misplaced(table):
            self._warned = True
            seen = [cpu for cpus in self._first.program.observed(table) for cpu in cpus]
            tell_moved(self._layout.cores_by(table), seen)

    def _step(self, compute: Callable[[Batch], Logits], batch: Batch) -> Logits:
        """Compute a batch. RankLost, naming the rank: a rank has died."""
        self._check_process()
        try:
            logits = compute(batch)
            if not self._warned:
                self._check_places(self._first.teams.table_of(batch.phase, len(batch.slices)))
            return logits
        except GroupFailed as error:
            said = str(error)
        # Not within the handler: a cause would hold frames that keep the lost ranks' memory mapped.
        raise RankLost(self._workers.reason(LEARN_S) or said)


def _first_program(setup: _Setup) -> tuple[Program, Segment]:
    """The first rank's program, and the memory shared with the other ranks; for a single rank (possible after
    `ProcessRanks.move`) only keys and values."""
    segments: list[Segment] = []
    layout, shared = setup.layout, setup.shared

    def memory(n_bytes: int) -> memoryview:
        segments.append(Segment.create(n_bytes, "step"))
        return memoryview(segments[0].memory)

    def check(name: str, needed: int, kv_slots: int) -> None:
        check_memory(name, needed + shared.copied_bytes, kv_slots)

    is_alone = layout.n_ranks == 1
    try:
        program = build_program(
            shared.model,
            setup.capacities[0],
            check,
            setup.lookups,
            None if is_alone else layout.division(0),
            memory=None if is_alone else memory,
            kv_memory=memory if is_alone else None,
            patience_s=PATIENCE_S,
        )
    except BaseException:
        for segment in segments:
            segment.close()
        raise
    if not is_alone:
        _place_kv(program, shared.model, layout, segments[0])
    elif layout.nodes(0):
        program.spread(layout.nodes(0))
    return program, segments[0]


def _on_death(program: Program, listener: _Listener) -> Callable[[], None]:
    def on_death() -> None:
        program.fail()
        listener.on_loss()

    return on_death


def _place_kv(program: Program, model: PackedModel, layout: RankLayout, step: Segment) -> None:
    """Place keys and values on the NUMA nodes of the rank that reads them in decode, or in prefill those that
    no rank reads in decode. Refusals are ignored: they were reported for the ranks' other memory."""
    if not layout.places_memory:
        return
    layers = enumerate(model.config.keeping)
    for table, (layer, part) in product(range(len(TABLES)), layers):  # decode's places are the last word
        for head, copy, nodes in _kv_homes(part, layout, table):
            offset, n_bytes = program.kv_span(layer, head, copy)
            if nodes:
                place_on_nodes(step.memory, offset, offset + n_bytes, nodes)


def _kv_homes(part: Attending, layout: RankLayout, table: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """KV heads of a layer, the copy of each that a rank reads, and that rank's NUMA nodes. Latent vectors are
    interleaved over the nodes of all ranks."""
    shares = layout.division(0).shares(table)
    nodes = [layout.nodes(rank) for rank in range(len(shares))]
    if part.is_latent:
        yield 0, 0, tuple(sorted({*chain(*nodes)}))
        return
    for rank, own_nodes in enumerate(nodes):
        own = head_share(part.n_heads, part.heads.n_kv_heads, shares, rank)
        for head in range(own.begin, own.end):
            yield head, own.copy, own_nodes


def _instructions(setup: _Setup, rank: int, step: Segment) -> Instructions:
    layout, capacity, shared = setup.layout, setup.capacities[rank], setup.shared
    model, division = shared.model, layout.division(rank)
    without_arrays = replace(model, weights={}, vectors={}, adapters=(), file=None)
    return Instructions(
        parent_pid=os.getpid(),
        model=replace(without_arrays, tokenizer_json="", chat_template=None),
        isa=isa.active(),
        capacity=capacity,
        division=division,
        cores=layout.cores(rank),
        pinned=setup.options.pinned,
        nodes=layout.nodes(rank),
        step_fd=step.fd,
        step_bytes=step.n_bytes,
        weights=shared.weights,
        weights_source=shared.source,
        schedules=tuple(
            WrittenSchedules.of(lookup, division, table, model, capacity)
            for table, lookup in enumerate(setup.lookups)
        ),
        adapters=shared.adapters,
    )


def _tell_of_memory(
    layout: RankLayout, answers: Mapping[int, int], by_node: Mapping[int, ByNode | None]
) -> None:
    """Warn of memory that is not on the planned NUMA nodes. `answers`: each rank's errno or 0."""
    warn_of_refusals(answers)
    for rank in range(layout.n_ranks if layout.places_memory else 0):
        tell_of_others(rank, layout.home(rank), layout.nodes(rank))
        if not answers.get(rank):
            warn_of_strays(rank, by_node.get(rank), layout.nodes(rank))


def _end(owner: int, program: Program, workers: WorkerProcesses) -> None:
    """End the worker processes; in a forked copy of this process do nothing."""
    if os.getpid() == owner:
        if workers.pids:
            program.stop()
        workers.close()
