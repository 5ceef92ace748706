"""How much memory an allocation may take: asked beforehand, for Linux grants what it does not have."""

from __future__ import annotations

from pathlib import Path

from phasewise.serving.errors import RanksError


def available_bytes(root: Path = Path("/")) -> int | None:
    """The least of what the machine and this process's cgroup (v2) have left; None where neither says."""
    limits = (_machine_bytes(root), _cgroup_bytes(root))
    return min((limit for limit in limits if limit is not None), default=None)


def check_memory(name: str, needed: int, kv_slots: int) -> None:
    """RanksError if so many bytes are not free."""
    left = available_bytes()
    if left is not None and needed > left:
        raise RanksError(
            f"{name}: a KV cache of {kv_slots} slots and its scratch need {needed / 2**20:.0f} MiB, "
            f"{left / 2**20:.0f} MiB are free: ask for a shorter context or fewer sequences"
        )


def _machine_bytes(root: Path) -> int | None:
    kib = _fields(root / "proc/meminfo").get("MemAvailable:")
    return None if kib is None else kib * 1024


def _cgroup_bytes(root: Path) -> int | None:
    folder = root / "sys/fs/cgroup" / _own_cgroup(root)
    try:
        limit = int((folder / "memory.max").read_text())
    except (OSError, ValueError):  # no such controller, or "max"
        return None
    # Pages of files can be dropped; what processes and the kernel hold cannot.
    held = _fields(folder / "memory.stat")
    return max(0, limit - held.get("anon", 0) - held.get("kernel", 0) - held.get("shmem", 0))


def _own_cgroup(root: Path) -> str:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next((line.removeprefix("0::").lstrip("/") for line in lines if line.startswith("0::")), "")


def _fields(path: Path) -> dict[str, int]:
    """`name number ...` lines; an absent file has none."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
