"""The CPUs that this process may use: affinity, cgroup cpuset and cgroup CPU quota (v1 and v2)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from phasewise._files import open_file
from phasewise.topology.cpusets import mask_of, parse_list

_MAX_FILE_BYTES = 4 << 20
MAX_ANCESTORS = 64


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of a process. `allowed`: a mask of CPUs.

    `cpu_quota`: CPUs' worth of time, None without a limit.
    """

    allowed: int
    cpu_quota: float | None


@dataclass(frozen=True)
class _Mount:
    """A mounted cgroup hierarchy: `root` is the cgroup seen at `point`; v2 has no controllers here."""

    root: PurePosixPath
    point: PurePosixPath
    controllers: frozenset[str]
    is_v2: bool


def read_limits(root: Path = Path("/")) -> ProcessLimits:
    """The limits of this process, from its affinity and from the cgroup files under `root`.

    The affinity is its first thread's, which `taskset` changes: other threads may be pinned.
    """
    allowed = mask_of(os.sched_getaffinity(os.getpid()))
    within = cgroup_cpuset(root)
    if within is not None and allowed & within:
        allowed &= within
    return ProcessLimits(allowed, cgroup_quota(root))


def cgroup_quota(root: Path) -> float | None:
    """The tightest CPU quota of the process's cgroup and its ancestors, in CPUs."""
    quotas = [_quota_v2(folder) for folder in _folders(root, None)]
    quotas += [_quota_v1(folder) for folder in _folders(root, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def cgroup_cpuset(root: Path) -> int | None:
    """The CPUs of the process's own cgroup as a mask, None where no cpuset applies."""
    for controller, name in ((None, "cpuset.cpus.effective"), ("cpuset", "cpuset.effective_cpus")):
        for folder in _folders(root, controller):
            text = _read(folder / name)
            if text:
                return parse_list(text)
    return None


def cgroup_files(root: Path, controller: str | None, name: str) -> Iterator[tuple[Path, str]]:
    """A file of the process's cgroup and its ancestors, innermost first, with its text: v1's hierarchy of
    `controller`, or v2's where that is None."""
    for folder in _folders(root, controller):
        text = _read(folder / name)
        if text:
            yield folder / name, text


def _quota_v2(folder: Path) -> float | None:
    words = (_read(folder / "cpu.max") or "").split()
    if len(words) != 2 or words[0] == "max":
        return None
    return _ratio(words[0], words[1])


def _quota_v1(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if quota is None or period is None or quota.startswith("-"):
        return None
    return _ratio(quota, period)


def _ratio(quota_us: str, period_us: str) -> float | None:
    return int(quota_us) / int(period_us) if int(period_us) > 0 else None


def _folders(root: Path, controller: str | None) -> Iterator[Path]:
    """The process's cgroup and its ancestors, innermost first: v1's hierarchy of `controller`, or v2's."""
    group = _own_group(root, controller)
    mount = _mount(root, controller)
    if group is None or mount is None:
        return
    # In a container without a cgroup namespace the path is the host's, and the mount shows a part of it.
    inside = group.relative_to(mount.root) if group.is_relative_to(mount.root) else group.relative_to("/")
    folder = mount.point / inside
    for _ in range(MAX_ANCESTORS):
        yield root / folder.relative_to("/")
        if folder == mount.point:
            return
        folder = folder.parent


def _own_group(root: Path, controller: str | None) -> PurePosixPath | None:
    """The path in /proc/self/cgroup: `4:cpu,cpuacct:/a/b`, or `0::/a/b` for v2. None if absent."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") if controller else not controllers:
            group = PurePosixPath(path)
            return group if group.is_absolute() and ".." not in group.parts else PurePosixPath("/")
    return None


def _mount(root: Path, controller: str | None) -> _Mount | None:
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        head, _, tail = line.partition(" - ")
        fields, filesystem = head.split(), tail.split()
        if len(fields) < 5 or len(filesystem) < 3 or filesystem[0] not in {"cgroup", "cgroup2"}:
            continue
        mount = _Mount(
            root=PurePosixPath(fields[3]),
            point=PurePosixPath(fields[4]),
            controllers=frozenset(filesystem[2].split(",")),
            is_v2=filesystem[0] == "cgroup2",
        )
        if mount.is_v2 if controller is None else controller in mount.controllers:
            return mount
    return None


def _read(path: Path) -> str | None:
    try:
        with open_file(path) as file:
            return file.read(_MAX_FILE_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return None
