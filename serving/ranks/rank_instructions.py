"""Instructions of a rank's process, pickled in memory that it inherits as standard input: nothing of a model
or plan is on a command line, and nothing is left behind. Its standard output reports back: one line when it
is ready, or why it cannot be; end of file when it dies."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from phasewise.cython_kernels.division import Division
from phasewise.serving.models.forward import Capacity
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.ranks.shared_weights import Holding
from phasewise.serving.ranks.written_schedules import WrittenSchedules


@dataclass(frozen=True)
class Instructions:
    """All that one rank's process needs to know. File descriptors have the same numbers in both processes."""

    rank: int
    parent_pid: int
    model_name: str
    config: ModelConfig
    weight_format: str
    isa: str
    """Instruction set that the parent uses, on which default compute paths depend."""
    capacity: Capacity
    teams: tuple[tuple[int, ...], ...]
    """Threads of every rank, for each schedule table: `Division.teams`."""
    weights_of_ranks: tuple[tuple[int, ...], ...]
    """Weights of every rank, for each schedule table: `Division.weights`."""
    cores: Mapping[int, tuple[int, ...]]
    """CPUs of this rank's threads, by schedule table that the rank takes part in."""
    pinned: bool
    nodes: tuple[int, ...]
    """NUMA nodes of the rank's memory; (): any."""
    step_fd: int
    step_bytes: int
    """Bytes of the memory that all ranks share: steps, rows, logits, keys and values."""
    weights: Holding
    weights_source: Holding | None
    """Source from which this rank copies its weight panels to `weights`; None: they are in place."""
    schedules: tuple[WrittenSchedules, ...]
    adapters: Holding | None = None
    """Weights of the adapters, which slices name by number; None: there are none."""

    @property
    def division(self) -> Division:
        return Division(self.teams, self.rank, self.weights_of_ranks)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that the process inherits."""
        holdings = (self.weights, self.weights_source, self.adapters)
        return self.step_fd, *(holding.fd for holding in holdings if holding is not None)

    def write(self) -> int:
        """Write the instructions to new memory, and return its descriptor, positioned at the start."""
        fd = os.memfd_create(f"phasewise-rank-{self.rank}")
        with os.fdopen(os.dup(fd), "wb") as file:
            pickle.dump(self, file)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd


@dataclass(frozen=True, slots=True)
class Report:
    """The line that a rank's process writes. `error`: reason why it cannot run; None: it is ready."""

    error: str | None = None
    policy_errno: int = 0
    """The kernel's errno for the rank's memory policy; 0: granted, or none was asked for."""
    weights: Mapping[int, int] | None = None
    """Bytes of copied weights by NUMA node; None: nothing was copied, or the system does not tell."""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Report:
        values = json.loads(line)
        weights = values["weights"] and {int(node): n_bytes for node, n_bytes in values["weights"].items()}
        return cls(**{**values, "weights": weights})
