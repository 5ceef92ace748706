"""The instructions of a rank's process: pickled in memory that it inherits as its standard input.

So nothing of a model or a plan stands in a command line, and nothing is left when the process has ended. Its
standard output is the way back: one line when it is ready, or why it cannot be; its end when it dies.
"""

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
    """All that one rank needs to know. Descriptors have the same numbers on both sides."""

    rank: int
    parent_pid: int
    model_name: str
    config: ModelConfig
    weight_format: str
    isa: str
    """In use by the parent; how a weight is computed by default depends on it."""
    capacity: Capacity
    teams: tuple[tuple[int, ...], ...]
    """Threads of every rank, for each table of schedules: `Division.teams`."""
    weights_of_ranks: tuple[tuple[int, ...], ...]
    """`Division.weights`."""
    cores: Mapping[int, tuple[int, ...]]
    """The CPUs of this rank's threads, by the tables that it takes part in."""
    pinned: bool
    nodes: tuple[int, ...]
    """The NUMA nodes of its memory; none: wherever it is touched."""
    step_fd: int
    step_bytes: int
    """The memory that all ranks share: steps, rows, logits, keys and values."""
    weights: Holding
    weights_source: Holding | None
    """From where this rank copies its panels of the weights to `weights`; None: they are there."""
    schedules: tuple[WrittenSchedules, ...]
    adapters: Holding | None = None
    """The adapters that slices name by their numbers."""

    @property
    def division(self) -> Division:
        return Division(self.teams, self.rank, self.weights_of_ranks)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that the process inherits."""
        holdings = (self.weights, self.weights_source, self.adapters)
        return self.step_fd, *(holding.fd for holding in holdings if holding is not None)

    def write(self) -> int:
        """A descriptor of memory that holds them, to be read from its start."""
        fd = os.memfd_create(f"phasewise-rank-{self.rank}")
        with os.fdopen(os.dup(fd), "wb") as file:
            pickle.dump(self, file)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd


@dataclass(frozen=True, slots=True)
class Report:
    """The line that a rank's process writes. error: why it cannot run; None: it is ready."""

    error: str | None = None
    policy_errno: int = 0
    """The kernel's answer to its memory policy; 0: granted, or none was asked for."""
    weights: Mapping[int, int] | None = None
    """Bytes by NUMA node of the weights that it has copied; None: none, or it is not told."""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Report:
        values = json.loads(line)
        weights = values["weights"] and {int(node): n_bytes for node, n_bytes in values["weights"].items()}
        return cls(**{**values, "weights": weights})
