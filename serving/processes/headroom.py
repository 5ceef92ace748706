"""Free memory of this process: what the machine and its cgroups leave, and what malloc has given out."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from phasewise.serving.errors import RanksError

_CGROUPS = "sys/fs/cgroup"


def available_bytes(root: Path = Path("/")) -> int | None:
    """Least bytes that the machine and this process's cgroups have left; None: unknown."""
    limits = (_machine_bytes(root), *_cgroup_bytes(root), _old_cgroup_bytes(root))
    return min((limit for limit in limits if limit is not None), default=None)


def check_memory(name: str, needed: int, kv_slots: int) -> None:
    """Raise RanksError, naming `name` and the slots, if fewer than `needed` bytes are free."""
    left = available_bytes()
    if left is not None and needed > left:
        raise RanksError(
            f"{name}: a KV cache of {kv_slots} slots and its scratch need {needed / 2**20:.0f} MiB, "
            f"{left / 2**20:.0f} MiB are free: ask for a shorter context or fewer sequences"
        )


def _machine_bytes(root: Path) -> int | None:
    kib = _fields(root / "proc/meminfo").get("MemAvailable:")
    return None if kib is None else kib * 1024


def _cgroup_bytes(root: Path) -> Iterator[int]:
    """Bytes left in this process's cgroup (version 2) and in each cgroup above it."""
    folder, top = root / _CGROUPS / _own_cgroup(root, "0::"), root / _CGROUPS
    while folder.is_relative_to(top):
        with suppress(OSError, ValueError):  # no such controller, or "max"
            limit = int((folder / "memory.max").read_text())
            # Pages of files can be dropped; what processes and the kernel hold cannot.
            held = _fields(folder / "memory.stat")
            yield max(0, limit - held.get("anon", 0) - held.get("kernel", 0) - held.get("shmem", 0))
        folder = folder.parent


def _old_cgroup_bytes(root: Path) -> int | None:
    """Bytes left by cgroup version 1, which reports the least limit of this group and those above."""
    own = root / _CGROUPS / "memory" / _own_cgroup(root, ":memory:")
    told = _fields(own / "memory.stat")
    limit = told.get("hierarchical_memory_limit")
    return None if limit is None else max(0, limit - told.get("total_rss", 0) - told.get("total_shmem", 0))


def _own_cgroup(root: Path, hierarchy: str) -> str:
    """Path of this process's cgroup in a hierarchy, named as in /proc/self/cgroup."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    paths = (line.partition(hierarchy) for line in lines)
    return next((path.lstrip("/") for _, separator, path in paths if separator), "")


def _fields(path: Path) -> dict[str, int]:
    """Numbers by name from a file of `name number ...` lines; an absent file has none."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


_M_ARENA_MAX = -8

_LIBC = ctypes.CDLL(None)


_MALLINFO = getattr(_LIBC, "mallinfo2", None) or getattr(_LIBC, "mallinfo", None)


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, or its older `struct mallinfo`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t if hasattr(_LIBC, "mallinfo2") else ctypes.c_uint)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def malloc_bytes_in_use() -> int | None:
    """Bytes that malloc has allocated, modulo 4 GiB before glibc 2.33; None if the C library is not glibc.
    Python's arenas are not counted: they come from the system."""
    if _MALLINFO is None:
        return None
    _MALLINFO.restype = _MallInfo
    told = _MALLINFO()
    return int(told.uordblks) + int(told.hblkhd)


def return_free_memory() -> None:
    """Return malloc's free pages to the system, those between used ones included: some milliseconds."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def use_one_heap() -> None:
    """Limit glibc's malloc to one heap. Call before threads start: a thread keeps its heap. Almost all
    allocations here hold Python's lock, so that several heaps would only waste free pages."""
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_M_ARENA_MAX, 1)
