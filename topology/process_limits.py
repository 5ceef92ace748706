"""The CPUs that this process may use: affinity, cgroup cpuset and cgroup CPU quota (v1 and v2)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from phasewise._files import open_file
from phasewise.topology.cpusets import mask_of, parse_list

MAX_FILE_BYTES = 2 << 20
"""Most bytes read of a file: more than any file here holds, since a snapshot may hold anything; /proc/sys
refuses a read of 4 MiB and more."""
MAX_ANCESTORS = 64
_QUOTA = re.compile(r"([0-9]{1,20})\s+([0-9]{1,20})")


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of a process. `allowed`: a mask of CPUs. `cpu_quota`: CPUs' worth of time, None without a
    limit."""

    allowed: int
    cpu_quota: float | None


def read_limits(root: Path = Path("/")) -> ProcessLimits:
    """The limits of this process, from its affinity and from the cgroup files under `root`. The affinity is
    its first thread's, which `taskset` changes: other threads may be pinned."""
    allowed = mask_of(os.sched_getaffinity(os.getpid()))
    within = cgroup_cpuset(root)
    if within is not None and allowed & within:
        allowed &= within
    return ProcessLimits(allowed, cgroup_quota(root))


def cgroup_quota(root: Path) -> float | None:
    """The tightest CPU quota of the process's cgroup and its ancestors, in CPUs."""
    return min((cpus for *_, cpus in cgroup_quotas(root)), default=None)


def cgroup_quotas(root: Path) -> Iterator[tuple[Path, str, float]]:
    """The CPU quotas of the process's cgroup and its ancestors: each one's file, its text (quota and period
    in microseconds, as v2 writes them) and its CPUs."""
    texts = list(cgroup_files(root, None, "cpu.max"))
    for path, quota in cgroup_files(root, "cpu", "cpu.cfs_quota_us"):
        texts.append((path, f"{quota} {read_text(path.with_name('cpu.cfs_period_us')) or ''}"))
    for path, text in texts:
        match = _QUOTA.fullmatch(text)  # neither `max` nor -1
        if match and int(match[1]) and int(match[2]):
            yield path, text, int(match[1]) / int(match[2])


def cgroup_cpuset(root: Path) -> int | None:
    """The CPUs of the process's own cgroup as a mask, None where no cpuset applies."""
    for controller, name in ((None, "cpuset.cpus.effective"), ("cpuset", "cpuset.effective_cpus")):
        for _, text in cgroup_files(root, controller, name):
            return parse_list(text)
    return None


def cgroup_files(root: Path, controller: str | None, name: str) -> Iterator[tuple[Path, str]]:
    """A file of the process's cgroup and its ancestors, innermost first, with its text: v1's hierarchy of
    `controller`, or v2's where that is None."""
    for folder in _folders(root, controller):
        text = read_text(folder / name)
        if text:
            yield folder / name, text


def _folders(root: Path, controller: str | None) -> Iterator[Path]:
    """The process's cgroup and its ancestors, innermost first: v1's hierarchy of `controller`, or v2's."""
    group, mount = _own_group(root, controller), _mount(root, controller)
    if group is None or mount is None:
        return
    shown, point = mount
    # In a container without a cgroup namespace the path is the host's, and the mount shows a part of it.
    inside = group.relative_to(shown) if group.is_relative_to(shown) else group.relative_to("/")
    folder = point / inside
    for _ in range(MAX_ANCESTORS):
        yield root / folder.relative_to("/")
        if folder == point:
            return
        folder = folder.parent


def _own_group(root: Path, controller: str | None) -> PurePosixPath | None:
    """The path in /proc/self/cgroup: `4:cpu,cpuacct:/a/b`, or `0::/a/b` for v2. None if absent."""
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") if controller else not controllers:
            group = PurePosixPath(path)
            return group if group.is_absolute() and ".." not in group.parts else PurePosixPath("/")
    return None


def _mount(root: Path, controller: str | None) -> tuple[PurePosixPath, PurePosixPath] | None:
    """The cgroup that a mounted hierarchy shows, and where: v1's hierarchy of `controller`, or v2's."""
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        head, _, tail = line.partition(" - ")
        fields, filesystem = head.split(), tail.split()
        if len(fields) < 5 or len(filesystem) < 3 or filesystem[0] not in {"cgroup", "cgroup2"}:
            continue
        is_v2 = filesystem[0] == "cgroup2"
        if is_v2 if controller is None else controller in filesystem[2].split(","):
            return PurePosixPath(fields[3]), PurePosixPath(fields[4])
    return None


def read_text(path: Path) -> str | None:
    """The text of a small file without its newline; None if absent or unreadable, which is common in /sys."""
    try:
        with open_file(path) as file:
            data = file.read(MAX_FILE_BYTES)
    except OSError:
        return None
    return data.partition(b"\0")[0].decode("utf-8", "replace").strip()  # snapshots pad files with NUL
