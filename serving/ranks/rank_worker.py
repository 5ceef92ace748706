"""The process of one rank: `python -m phasewise.serving.ranks.rank_worker`, started by `worker_processes`. It
maps what its parent has prepared, builds the same program, and computes its part of every step in C until it
is told to stop or its parent ends. It opens no file: all it reads is behind inherited descriptors. Few
modules are imported, so that it starts fast."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from dataclasses import replace

import numpy as np

from phasewise.cython_kernels._native import Program, Team, isa_select, watch_mapping
from phasewise.cython_kernels.errors import GroupFailed, KernelError
from phasewise.serving.errors import ServingError
from phasewise.serving.models.forward import build_program
from phasewise.serving.models.linears import unflat
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.processes.behind_others import end_with_parent
from phasewise.serving.processes.segments import Segment
from phasewise.serving.ranks.rank_instructions import Instructions, Report
from phasewise.serving.ranks.rank_memory import placing
from phasewise.serving.ranks.rank_teams import open_teams, touch_memory
from phasewise.serving.ranks.shared_weights import Holding, copy_panels, panels_by_node

FOR_THE_ENGINE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a rank ignores: supervisors send them to all processes, but the engine ends its ranks."""


def main() -> int:
    for number in FOR_THE_ENGINE:
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    with os.fdopen(os.dup(sys.stdin.fileno()), "rb") as told:
        instructions: Instructions = pickle.load(told)
    if os.getppid() != instructions.parent_pid:
        return 0  # it had ended before it could take us along
    report_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever is printed is no report
    try:
        program, teams, report = open_rank(instructions)
    except (ServingError, KernelError, OSError, MemoryError) as error:
        os.write(report_fd, Report(error=str(error) or type(error).__name__).to_line())
        return 1
    os.write(report_fd, report.to_line())
    with contextlib.suppress(GroupFailed):  # another rank died, and the parent knows why
        program.serve(teams)
    return 0


def open_rank(told: Instructions) -> tuple[Program, list[Team | None], Report]:
    """Map the weights, copy this rank's panels if told to, and build the program. Returns it, the team of
    each schedule table (None: the rank takes no part), and what is to be reported."""
    isa_select(told.isa)
    with placing(told.nodes) as policy_errno:
        step = Segment(told.step_fd, told.step_bytes)
        model = _model(told)
        program = build_program(
            model,
            told.capacity,
            schedules=told.schedules,
            division=told.division,
            memory=lambda _n_bytes: memoryview(step.memory),
        )
        teams = open_teams(told.cores, told.pinned)
        if told.capacity.touched:
            touch_memory(program, teams)
    copied = (
        None
        if told.weights_source is None or not told.nodes
        else panels_by_node(model.weights, told.division)
    )
    by_table = [teams.get(table) for table in range(len(told.division.teams))]
    return program, by_table, Report(None, policy_errno, copied)


def _model(told: Instructions) -> PackedModel:
    """The model over the arrays that ranks share."""
    copies = told.weights_source is not None
    weights, vectors = told.weights.places.views(_mapped(told.weights, writable=copies))
    if told.weights_source is not None:
        source, _ = told.weights_source.places.views(_mapped(told.weights_source))
        copy_panels(source, weights, told.division, huge=len(told.nodes) == 1, apart=True)
    adapters = () if told.adapters is None else unflat(*told.adapters.places.views(_mapped(told.adapters)))
    return replace(told.model, weights=weights, vectors=vectors, adapters=adapters)


def _mapped(holding: Holding, writable: bool = False) -> Segment:
    segment = Segment(holding.fd, holding.places.n_bytes, writable)
    if not writable:
        file = os.readlink(f"/proc/self/fd/{holding.fd}")
        address = np.frombuffer(segment.memory, np.uint8).ctypes.data
        watch_mapping(address, segment.n_bytes, f"phasewise: {file} was cut short while a rank uses it")
    return segment


if __name__ == "__main__":
    sys.exit(main())
