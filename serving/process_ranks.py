"""Several ranks: this process is the first, the others are processes that wait for its steps.

They share memory (`segments`), not messages: a step is written there and a bell rung (group.h). A phase with
R ranks uses processes 0 to R - 1; both phases see the same keys and values, so that a switch from one to the
other copies nothing. Decision 0015 says why.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NoReturn

from phasewise.cython_kernels import isa
from phasewise.cython_kernels._native import Program, place_on_node
from phasewise.cython_kernels.division import share
from phasewise.cython_kernels.errors import GroupFailed
from phasewise.serving.batch import Batch, Phase
from phasewise.serving.crew import Crew
from phasewise.serving.errors import RanksError
from phasewise.serving.first_rank import FirstRank, Logits, room_for
from phasewise.serving.forward import Capacity, build_program, kv_bytes_per_slot
from phasewise.serving.memory import check_memory
from phasewise.serving.model import PackedModel
from phasewise.serving.rank_instructions import Instructions
from phasewise.serving.rank_memory import preferring, warn_of_refusals
from phasewise.serving.rank_teams import TABLES, open_teams
from phasewise.serving.schedules import ScheduleLookup
from phasewise.serving.segments import Segment
from phasewise.serving.shared_weights import SharedWeights, share_weights
from phasewise.serving.worker_processes import WorkerProcesses
from phasewise.serving.written_schedules import WrittenSchedules
from phasewise.tuner.plans import PHASES, ServicePlan, list_cores

LEARN_S = 5.0
"""How long after a failed step its cause may take to be known."""

_log = logging.getLogger(__name__)


class ProcessRanks:
    """Ranks in processes of their own. What the arguments mean, and what may go wrong: `ranks.open_ranks`.

    A rank that dies ends every wait of the others: the step under way, and all later ones, raise RanksError.
    """

    def __init__(
        self,
        model: PackedModel,
        plans: Mapping[Phase, ServicePlan],
        kv_slots: int,
        max_batch_tokens: int,
        max_sequences: int,
        schedules: Mapping[Phase, ScheduleLookup] | None = None,
        pinned: bool = True,
    ) -> None:
        self.kv_slots = kv_slots
        self.kv_bytes_per_slot = kv_bytes_per_slot(model)
        self._crew = Crew(plans)
        self._owner = os.getpid()
        self._warned = not pinned
        self._crew.check_divides(model)
        lookups = [schedules[phase] for phase in PHASES] if schedules else []
        capacities = [
            room_for(kv_slots, max_batch_tokens, max_sequences, self._crew.threads(rank))
            for rank in range(self._crew.n_ranks)
        ]
        with ExitStack() as ending:
            self._open(model, capacities, lookups, pinned, ending)
            self._close = weakref.finalize(self, ending.pop_all().close)

    def _open(
        self,
        model: PackedModel,
        capacities: Sequence[Capacity],
        lookups: Sequence[ScheduleLookup],
        pinned: bool,
        ending: ExitStack,
    ) -> None:
        """Weights, the first rank, then the others. What must be undone at the end is put on `ending`."""
        crew, node = self._crew, self._crew.node(0)
        with ExitStack() as descriptors:
            with preferring(node) as answer:
                shared = descriptors.enter_context(
                    share_weights(model, crew.division(0), spread=crew.spans_nodes)
                )
                program, step = _first_program(shared, crew, capacities[0], lookups)
                descriptors.callback(step.close)
                teams = open_teams(crew.cores(0), pinned)
            self._first = FirstRank(program, teams, capacities[0])
            ending.callback(self._first.close)
            told = [
                _instructions(crew, rank, capacity, shared, step, lookups, pinned)
                for rank, capacity in enumerate(capacities)
                if rank > 0
            ]
            self._workers = WorkerProcesses(told, program.fail)
            ending.callback(_end, self._owner, program, self._workers)
            answers = self._workers.wait_until_ready()
        warn_of_refusals({0: answer, **answers})

    def forward(self, batch: Batch) -> Logits:
        """As LocalRanks.forward. RanksError, naming the rank, once one has died."""
        self._check_process()
        try:
            logits = self._first.forward(batch)
        except GroupFailed as error:
            self._explain(error)
        if not self._warned:
            self._check_places(batch.phase)
        return logits

    def all_logits(self, batch: Batch) -> Logits:
        """As LocalRanks.all_logits. RanksError, naming the rank, once one has died."""
        self._check_process()
        try:
            return self._first.all_logits(batch)
        except GroupFailed as error:
            self._explain(error)

    def copy_kv(self, source_slot: int, target_slot: int, n_slots: int) -> None:
        """As LocalRanks.copy_kv; the first rank does it alone."""
        self._check_process()
        self._first.copy_kv(source_slot, target_slot, n_slots)

    def observed_cpus(self) -> dict[Phase, tuple[int, ...]]:
        """Where each phase's threads, rank by rank, were last seen working; -1 before their first step."""
        program = self._first.program
        return {
            phase: tuple(cpu for cpus in program.observed(TABLES[phase]) for cpu in cpus)
            for phase in self._crew.plans
        }

    @property
    def native_ns(self) -> int:
        """Time that the first rank spent computing steps outside Python. RanksError after `close`."""
        return self._first.native_ns

    @property
    def pids(self) -> dict[int, int]:
        """The processes of the other ranks, by rank."""
        return self._workers.pids

    def close(self) -> None:
        """End threads and processes. Logits still held stay valid. Twice is harmless."""
        self._close()

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

    def _explain(self, error: GroupFailed) -> NoReturn:
        raise RanksError(self._workers.reason(LEARN_S) or str(error)) from error


def _first_program(
    shared: SharedWeights, crew: Crew, capacity: Capacity, lookups: Sequence[ScheduleLookup]
) -> tuple[Program, Segment]:
    """The first rank's program, and the memory that it shares with the others."""
    segments: list[Segment] = []

    def memory(n_bytes: int) -> memoryview:
        segments.append(Segment.create(n_bytes, "step"))
        return memoryview(segments[0].memory)

    def check(name: str, needed: int, kv_slots: int) -> None:
        check_memory(name, needed + shared.copied_bytes, kv_slots)

    try:
        program = build_program(shared.model, capacity, check, lookups, crew.division(0), memory)
    except BaseException:
        for segment in segments:
            segment.close()
        raise
    _place_kv(program, shared.model, crew, segments[0])
    return program, segments[0]


def _place_kv(program: Program, model: PackedModel, crew: Crew, step: Segment) -> None:
    """Keys and values near the rank that reads them in decode, wherever prefill writes them from.

    A refusal is no news: it was the same for the ranks' other memory.
    """
    teams = crew.teams[TABLES["decode"]]
    if not (crew.spans_nodes and teams):
        return
    for layer in range(model.config.n_layers):
        for rank in range(len(teams)):
            node = crew.node(rank)
            for head in range(*share(model.config.n_kv_heads, teams, rank)):
                offset, n_bytes = program.kv_span(layer, head)
                if node is not None:
                    place_on_node(step.memory, offset, offset + n_bytes, node)


def _instructions(
    crew: Crew,
    rank: int,
    capacity: Capacity,
    shared: SharedWeights,
    step: Segment,
    lookups: Sequence[ScheduleLookup],
    pinned: bool,
) -> Instructions:
    model = shared.model
    most_rows = max(capacity.step_tokens, capacity.logit_rows)
    return Instructions(
        rank=rank,
        parent_pid=os.getpid(),
        model_name=model.name,
        config=model.config,
        weight_format=model.format,
        isa=isa.active(),
        capacity=capacity,
        teams=crew.teams,
        cores=crew.cores(rank),
        pinned=pinned,
        numa_node=crew.node(rank),
        step_fd=step.fd,
        step_bytes=step.n_bytes,
        weights=shared.weights,
        weights_source=shared.source,
        schedules=tuple(
            WrittenSchedules.of(lookup, crew.division(rank), table, model, most_rows)
            for table, lookup in enumerate(lookups)
        ),
    )


def _end(owner: int, program: Program, workers: WorkerProcesses) -> None:
    """A fork's copy of the ranks ends nothing."""
    if os.getpid() == owner:
        program.stop()
        workers.close()
