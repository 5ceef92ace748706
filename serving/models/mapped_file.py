"""The packed file that a model's arrays lie in."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from phasewise._files import open_regular
from phasewise.cython_kernels._native import drop_mapped


@dataclass(frozen=True)
class MappedFile:
    """The packed file that a model's arrays are views of. Other processes can map the same file."""

    path: Path
    address: int
    """The address of the first byte in this process."""
    n_bytes: int
    identity: tuple[int, int]
    """Device and inode: the path may get another file."""

    def release(self) -> None:
        """Give the file's pages back to the system, which reads them again when they are used."""
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
