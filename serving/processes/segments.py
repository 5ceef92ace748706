"""Anonymous memory that several processes map. It has no name: the kernel frees it with the last process that
holds it, and no other process can open it."""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise.serving.errors import RanksError

PAGE = mmap.PAGESIZE


def prefer_huge_pages(mapped: mmap.mmap) -> None:
    """Ask for large pages for a mapping; a refusal is ignored."""
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)


class Mapped:
    """Memory that arrays are views of. An array over `memory` keeps it mapped."""

    def __init__(self, memory: mmap.mmap, n_bytes: int) -> None:
        self.memory = memory
        self.n_bytes = n_bytes

    @classmethod
    def own(cls, n_bytes: int) -> Mapped:
        """Zeroed memory of this process, in large pages if available. RanksError: the system refuses."""
        n_bytes = -(-n_bytes // PAGE) * PAGE
        try:
            memory = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise RanksError(
                f"the system refused {n_bytes / 2**20:.0f} MiB of memory for weights: {error.strerror}; "
                "`ulimit -v` says what this process may have"
            ) from error
        prefer_huge_pages(memory)
        return cls(memory, n_bytes)

    def view(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array over a part of the memory. ValueError: the part lies outside."""
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        if offset < 0 or offset + count * kind.itemsize > self.n_bytes:
            raise ValueError(f"{count} x {kind} at byte {offset} of {self.n_bytes}")
        return np.frombuffer(self.memory, kind, count, offset).reshape(shape)


class Segment(Mapped):
    """Zeroed shared memory behind a descriptor, which `close` closes. Pages exist from their first touch
    on."""

    def __init__(self, fd: int, n_bytes: int, writable: bool = True) -> None:
        self.fd = fd
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        super().__init__(mmap.mmap(fd, n_bytes, mmap.MAP_SHARED, access), n_bytes)
        if not writable:
            prefer_huge_pages(self.memory)

    @classmethod
    def create(cls, n_bytes: int, purpose: str) -> Segment:
        """A new segment of at least `n_bytes`. RanksError: the system refuses the memory."""
        n_bytes = -(-n_bytes // PAGE) * PAGE
        fd = None
        try:
            fd = os.memfd_create(f"phasewise-{purpose}")
            os.ftruncate(fd, n_bytes)
            return cls(fd, n_bytes)
        except OSError as error:
            if fd is not None:
                os.close(fd)
            raise RanksError(
                f"the system refused {n_bytes / 2**20:.0f} MiB of memory that ranks share ({purpose}): "
                f"{error.strerror}; `ulimit -v` and `ulimit -n` say what this process may have"
            ) from error

    def close(self) -> None:
        """Close the descriptor, if it is open."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1
