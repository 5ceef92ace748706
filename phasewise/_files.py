"""The one writer of files that a user names: it writes a file whole or not at all, and an existing file keeps
its kind. Beside it the reader of such files, which neither waits for a pipe without a writer nor reads
without end.

A new file is written beside its place and moved there. So is a regular file that exists, where its mode,
owner and attributes can be given to the new one; else it is rewritten in its place, its room being
reserved first. A link stays, and its target is written. A device or a FIFO is opened and written.
Everything raises OSError, and then an existing file is unchanged.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import stat
import sys
import time
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

_REPLACED_IN_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV, errno.ENOTSUP)
"""Errors on replacing a writable file for which it is rewritten in place: its directory forbids it, or
something is mounted on the file."""

FIRST_BYTE_S = 10.0
"""Seconds that a pipe has to deliver its first byte, or to find a reader."""
_LOOK_AGAIN_S = 0.02


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file and return its descriptor. OSError, at once, for anything else that a stranger may
    have put there, such as a pipe."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK, mode)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_file(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for reading, as `open_regular` does."""
    return os.fdopen(open_regular(path), "rb")


def read_file(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Read all bytes of a regular file. OSError also for a file of more than `most_bytes`."""
    with open_file(path) as file:
        return _bounded(file, most_bytes, path)


def open_input(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file, a device or a pipe for reading. OSError for a directory, or a pipe that has no writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if stat.S_ISFIFO(mode):
            _await_bytes(descriptor, os.fspath(path))
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_input(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Read all bytes of what `open_input` opens. OSError also for more than `most_bytes`."""
    with open_input(path) as file:
        return _bounded(file, most_bytes, path)


def open_output(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Open a file, a device or a pipe for writing and return its descriptor. OSError for a pipe that nobody
    reads.

    flags: flags of `os.open` beside `os.O_WRONLY`.
    """
    flags |= os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    deadline_s = time.monotonic() + FIRST_BYTE_S
    while True:
        try:
            descriptor = os.open(path, flags, mode)
            break
        except OSError as error:
            if error.errno != errno.ENXIO or not stat.S_ISFIFO(os.stat(path).st_mode):
                raise
            if time.monotonic() >= deadline_s:
                why = f"nobody read this pipe in {FIRST_BYTE_S:g} s"
                raise TimeoutError(errno.ETIMEDOUT, why, os.fspath(path)) from None
        time.sleep(_LOOK_AGAIN_S)
    os.set_blocking(descriptor, True)
    return descriptor


def _bounded(file: BinaryIO, most_bytes: int, path: str | os.PathLike[str]) -> bytes:
    data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        most = f"{most_bytes >> 20} MiB" if most_bytes >= 1 << 20 else f"{most_bytes} bytes"
        raise OSError(errno.EFBIG, f"it is larger than {most}", os.fspath(path))
    return data


def _await_bytes(descriptor: int, name: str) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(FIRST_BYTE_S * 1000):
        raise TimeoutError(errno.ETIMEDOUT, f"nothing came from this pipe in {FIRST_BYTE_S:g} s", name)


def write_file(path: Path, data: bytes | str) -> None:
    """Write `data` to a file, text in UTF-8; the path `-` is stdout."""
    content = data.encode() if isinstance(data, str) else data
    if str(path) == "-":
        sys.stdout.flush()
        _write_all(1, content)
        return
    try:
        there = path.stat()
    except FileNotFoundError:
        _write_new(path, content)
        return
    own = _own_output(there)
    if own is not None:
        _write_all(own, content)
        return
    # Opened under the name that was given, so that the system's rules for links of others hold.
    descriptor = open_output(path, 0)
    try:
        there = os.fstat(descriptor)
        if not stat.S_ISREG(there.st_mode):
            _write_all(descriptor, content)
        elif there.st_nlink > 1 or not _replace(Path(os.path.realpath(path)), descriptor, content):
            _rewrite(descriptor, there.st_size, content)
    finally:
        os.close(descriptor)


def check_writable(path: Path) -> None:
    """Raise the OSError that `write_file` would surely fail with; called before work that takes long."""
    if str(path) == "-":
        return
    try:
        is_directory, there = stat.S_ISDIR(path.stat().st_mode), path
    except FileNotFoundError:
        is_directory, there = False, Path(os.path.realpath(path)).parent
        there.stat()
    if is_directory:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not os.access(there, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def cut_broken_line(path: Path) -> bool:
    """Remove a log's unfinished last line, which a killed process left; True where there was one.

    A file that is not regular is not read.
    """
    if not path.is_file():
        return False
    with open_file(path) as file:
        data = file.read()
    if not data or data.endswith(b"\n"):
        return False
    os.truncate(path, data.rfind(b"\n") + 1)
    return True


def _write_new(path: Path, content: bytes) -> None:
    """Write a path without a file, or a link to no file, which the system follows or refuses to follow."""
    if path.is_symlink():
        written = Path(os.path.realpath(path))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    else:
        written, descriptor = _beside(path, 0o666)
    try:
        _fill(descriptor, content)
        if not path.is_symlink():
            os.replace(written, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(written)
        raise
    finally:
        os.close(descriptor)


def _own_output(there: os.stat_result) -> int | None:
    """The descriptor of this process's stdout or stderr if the file is open as that, so that writing goes on
    at its position; None otherwise."""
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), there):
                with suppress(AttributeError, ValueError):
                    stream.flush()
                return descriptor
    return None


def _replace(real: Path, descriptor: int, content: bytes) -> bool:
    """Put a new file in the place of the open one. False, with nothing done, where the new file could not
    have the same owner, attributes and mode."""
    there = os.fstat(descriptor)
    try:
        if not os.path.samestat(os.stat(real), there):
            return False
        temporary, new = _beside(real, 0o600)
    except OSError as error:
        if error.errno in (*_REPLACED_IN_PLACE, errno.ENOENT):
            return False
        raise
    is_placed = False
    try:
        if _took_after(new, descriptor):
            _fill(new, content)
            os.replace(temporary, real)
            is_placed = True
    except OSError as error:
        if error.errno not in _REPLACED_IN_PLACE:
            raise
    finally:
        os.close(new)
        if not is_placed:
            os.unlink(temporary)
    return is_placed


def _took_after(new: int, old: int) -> bool:
    """Give the new file owner, attributes (with access lists) and mode of the old one; False: it cannot."""
    there, mine = os.fstat(old), os.fstat(new)
    try:
        if (there.st_uid, there.st_gid) != (mine.st_uid, mine.st_gid):
            os.fchown(new, there.st_uid, there.st_gid)
        if hasattr(os, "listxattr"):
            for name in os.listxattr(old):
                os.setxattr(new, name, os.getxattr(old, name))
        os.fchmod(new, stat.S_IMODE(there.st_mode))
    except OSError:
        return False
    return True


def _beside(path: Path, mode: int) -> tuple[Path, int]:
    """Create a temporary file in the same directory; its path, and its descriptor open for writing."""
    temporary = path.with_name(f".phasewise-{secrets.token_hex(8)}")
    return temporary, os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def _fill(descriptor: int, content: bytes) -> None:
    _write_all(descriptor, content)
    os.fsync(descriptor)  # some file systems say only now that they are full


def _rewrite(descriptor: int, n_before: int, content: bytes) -> None:
    """Write other content into the same file, unchanged until the disk has room for all of the content."""
    if len(content) > n_before:
        try:
            os.posix_fallocate(descriptor, 0, len(content))
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV):
                os.ftruncate(descriptor, n_before)
                raise
    _write_all(descriptor, content)
    os.ftruncate(descriptor, len(content))


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
