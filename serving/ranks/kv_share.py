"""Keys, values and states of an instance in memory that other instances of the same user can map. The memory
is named by a path under /proc, which only processes of the same user and PID namespace can open; nothing is
left behind by a killed instance."""

from __future__ import annotations

import os
from dataclasses import dataclass

from phasewise._words import reason_of
from phasewise.cython_kernels._native import KvMemory
from phasewise.serving.errors import RanksError
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.processes.segments import Segment


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape of keys and values, which must be equal in two instances before one sends them to the other."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    kv_format: str
    latent: bool = False
    """True if one vector is both key and value of a token."""
    state_bytes: int = 0
    """Bytes of a sequence's state beside its keys and values; 0: none."""

    @classmethod
    def of(cls, config: ModelConfig, kv_format: str) -> KvShape:
        n_layers, latent = len(config.attention_layers), config.latent is not None
        return cls(n_layers, config.n_kv_heads, config.head_dim, kv_format, latent, config.state_bytes)

    def memory(self, segment: Segment, place: KvPlace) -> KvMemory:
        """Keys, values and states in `segment`. ValueError: they lie outside."""
        return KvMemory(
            segment.memory,
            place.offset,
            self.n_layers,
            self.n_kv_heads,
            self.head_dim,
            place.kv_slots,
            self.kv_format,
            self.latent,
            self.state_bytes,
            place.state_places,
            place.copies,
        )


@dataclass(frozen=True, slots=True)
class KvPlace:
    """Location of a process's keys and values, for other processes."""

    path: str
    n_bytes: int
    offset: int
    kv_slots: int
    state_places: int = 1
    copies: tuple[int, ...] = ()
    """Number of copies of each KV head, if ranks share heads; (): one each."""


@dataclass(frozen=True, slots=True)
class KvShare:
    """Keys and values of this process, and the location that others map."""

    segment: Segment
    shape: KvShape
    place: KvPlace

    @classmethod
    def of(
        cls, segment: Segment, shape: KvShape, offset: int, slots: int, states: int, copies: tuple[int, ...]
    ) -> KvShare:
        """The last four: as in `KvPlace`."""
        path = f"/proc/{os.getpid()}/fd/{segment.fd}"
        return cls(segment, shape, KvPlace(path, segment.n_bytes, offset, slots, states, copies))

    @property
    def memory(self) -> KvMemory:
        return self.shape.memory(self.segment, self.place)


def map_place(place: KvPlace, shape: KvShape) -> KvMemory:
    """Map another process's keys and values. RanksError: this process cannot."""
    try:
        fd = os.open(place.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RanksError(f"{place.path} cannot be opened: {error.strerror}") from error
    segment = None
    try:
        if os.fstat(fd).st_size != place.n_bytes:
            raise RanksError(f"{place.path} has {os.fstat(fd).st_size} bytes, not {place.n_bytes}")
        segment = Segment(fd, place.n_bytes)
        return shape.memory(segment, place)
    except (OSError, ValueError) as error:
        raise RanksError(f"{place.path} cannot be mapped: {reason_of(error)}") from error
    finally:
        if segment is None:
            os.close(fd)
        else:
            segment.close()
