"""A cgroup for one process, whose CPUs and quota a test changes: made where root may, and removed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000


@dataclass(frozen=True)
class OwnCgroup:
    """Its folders: v1's two hierarchies, or v2's one."""

    cpuset: Path
    cpu: Path

    @property
    def _is_v2(self) -> bool:
        return self.cpuset == self.cpu

    def allow(self, cores: list[int]) -> None:
        (self.cpuset / "cpuset.cpus").write_text(",".join(map(str, cores)))

    def add(self, pid: int) -> None:
        """The process, and what it starts from now on, has these limits."""
        for folder in dict.fromkeys((self.cpuset, self.cpu)):
            (folder / "cgroup.procs").write_text(str(pid))

    def set_quota(self, cpus: float | None) -> None:
        """None: as much time as there is."""
        if self._is_v2:
            share = "max" if cpus is None else str(int(cpus * PERIOD_US))
            (self.cpu / "cpu.max").write_text(f"{share} {PERIOD_US}")
        else:
            (self.cpu / "cpu.cfs_quota_us").write_text(str(-1 if cpus is None else int(cpus * PERIOD_US)))


@contextlib.contextmanager
def own_cgroup(pid: int, cores: list[int]) -> Iterator[OwnCgroup]:
    """The process and what it starts from now on, in a cgroup with these cores. Skips where denied."""
    name, folders = f"phasewise-test-{os.getpid()}-{pid}", list[Path]()
    is_v2 = (_ROOT / "cgroup.controllers").exists()
    parents = [_ROOT] if is_v2 else [_ROOT / "cpuset", _ROOT / "cpu"]
    try:
        try:
            for parent in parents:
                folders.append(parent / name)
                folders[-1].mkdir()
            if not is_v2:
                (folders[0] / "cpuset.mems").write_text((parents[0] / "cpuset.mems").read_text())
            group = OwnCgroup(folders[0], folders[-1])
            group.allow(cores)
            group.set_quota(None)
            group.add(pid)
        except OSError as error:
            pytest.skip(f"may not do that here: {error}")
        yield group
    finally:
        for parent, folder in zip(parents, folders, strict=False):
            _remove(parent, folder)


def _remove(parent: Path, folder: Path) -> None:
    """Its processes go back to where they came from; those that are ending are waited for."""
    for _ in range(50):
        with contextlib.suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (parent / "cgroup.procs").write_text(pid)
            folder.rmdir()
            return
        time.sleep(0.05)
