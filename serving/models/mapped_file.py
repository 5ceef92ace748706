"""The packed file that a model's arrays lie in, on disk or in memory."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from phasewise._files import open_regular
from phasewise.cython_kernels._native import drop_mapped


class MemoryFile:
    """A file in memory without a name, which vanishes with its last mapping. Other processes of the same user
    open `path` while this object lives."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.path = Path(f"/proc/{os.getpid()}/fd/{fd}")

    @classmethod
    def create(cls, n_bytes: int) -> Self:
        """A file of zeros. Raises OSError where the system refuses it."""
        file = cls(os.memfd_create("phasewise-packed"))
        os.fchmod(file.fd, 0o600)
        os.ftruncate(file.fd, n_bytes)
        return file

    def __del__(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True)
class MappedFile:
    """The packed file that a model's arrays are views of. Other processes can map the same file."""

    path: Path
    address: int
    """The address of the first byte in this process."""
    n_bytes: int
    identity: tuple[int, int]
    """Device and inode: the path may get another file."""
    memory: MemoryFile | None = None
    """The file where this process made it in memory; None: it lies on disk, or another process made it."""

    def release(self) -> None:
        """Give the file's pages back to the system, which reads them again when they are used. A file in
        memory keeps them."""
        drop_mapped(self.address, self.n_bytes)
        fd = self.open_again()
        if fd is not None:
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def open_again(self) -> int | None:
        """Open the same file again; None if another file has its path by now."""
        try:
            fd = open_regular(self.path)
        except OSError:
            return None
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) == self.identity:
            return fd
        os.close(fd)
        return None
