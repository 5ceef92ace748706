"""A slot's library: read from a file that only its user can write, held in sealed memory, loaded from there.

What is loaded is what was read, whatever becomes of the file meanwhile.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
from pathlib import Path

from phasewise.cython_kernels._native import SLOT_SYMBOL, slot_fill
from phasewise.cython_kernels.errors import SlotError

MAX_LIBRARY_BYTES = 4 << 20
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def read_own(path: Path, most_bytes: int) -> bytes:
    """The bytes of a regular file that its user alone may write. SlotError for any other; OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SlotError(f"{path} is no regular file")
        _check_owner(path, status)
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise SlotError(f"{path} has more than {most_bytes} bytes")
    return content


def check_own_folder(folder: Path) -> None:
    """Check that no other user could replace what lies in `folder`: SlotError.

    OSError where it cannot be read.
    """
    _check_owner(folder, folder.stat())


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise SlotError(f"{path} belongs to another user")
    if status.st_mode & WRITABLE_BY_OTHERS:
        raise SlotError(f"{path} can be written by others: chmod go-w {path}")


def sealed(content: bytes) -> int:
    """A descriptor of memory that holds `content` and cannot be changed any more."""
    descriptor = os.memfd_create("phasewise-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def address_of(path: str, symbol: str = SLOT_SYMBOL) -> int:
    """The address of a library's function; the library stays loaded. SlotError where there is none."""
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        address = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
    except (OSError, AttributeError) as error:
        raise SlotError(f"it cannot be loaded: {error}") from None
    assert address is not None
    return address


def address_in(descriptor: int) -> int:
    """The address of the function of a library in sealed memory."""
    return address_of(f"/proc/self/fd/{descriptor}")


def fill_from(slot: str, descriptor: int) -> None:
    """Call the library's function in place of the built-in one, in this process."""
    slot_fill(slot, address_in(descriptor))
