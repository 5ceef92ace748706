"""CPU quotas and cpusets of cgroups v1 and v2, inside and outside containers."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from phasewise.topology.cpusets import cpus_of
from phasewise.topology.process_limits import cgroup_cpuset, cgroup_quota, read_limits
from tests.support.machines.sysfs_factory import write

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw"
V1_CPU_MOUNT = "31 23 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
V1_CPUSET_MOUNT = "32 23 0:28 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset"


def _v2(root: Path, group: str = "/user/job", mount: str = V2_MOUNT) -> Path:
    write(root / "proc/self/cgroup", f"0::{group}")
    write(root / "proc/self/mountinfo", mount)
    return root


def _v1(root: Path, mount: str = V1_CPU_MOUNT) -> Path:
    write(root / "proc/self/cgroup", "4:cpuset:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/job\n0::/")
    write(root / "proc/self/mountinfo", f"{mount}\n{V1_CPUSET_MOUNT}")
    return root


def test_the_tightest_ancestor_decides_in_v2(tmp_path: Path) -> None:
    _v2(tmp_path)
    write(tmp_path / "sys/fs/cgroup/user/job/cpu.max", "max 100000")
    write(tmp_path / "sys/fs/cgroup/user/cpu.max", "150000 100000")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "400000 100000")

    assert cgroup_quota(tmp_path) == 1.5


@pytest.mark.parametrize("text", ["max 100000", "", "100000", "100000 0"])
def test_no_quota_is_none_in_v2(tmp_path: Path, text: str) -> None:
    write(_v2(tmp_path) / "sys/fs/cgroup/user/job/cpu.max", text)

    assert cgroup_quota(tmp_path) is None


def test_a_quota_of_v1_is_found_under_its_joint_name(tmp_path: Path) -> None:
    folder = _v1(tmp_path) / "sys/fs/cgroup/cpu,cpuacct/job"
    write(folder / "cpu.cfs_quota_us", "250000")
    write(folder / "cpu.cfs_period_us", "100000")

    assert cgroup_quota(tmp_path) == 2.5


def test_minus_one_is_no_quota_in_v1(tmp_path: Path) -> None:
    folder = _v1(tmp_path) / "sys/fs/cgroup/cpu,cpuacct/job"
    write(folder / "cpu.cfs_quota_us", "-1")
    write(folder / "cpu.cfs_period_us", "100000")

    assert cgroup_quota(tmp_path) is None


def test_a_container_sees_its_part_of_the_hosts_hierarchy(tmp_path: Path) -> None:
    """Without a cgroup namespace the path names the host's group, and the mount shows it as its root."""
    _v2(tmp_path, "/docker/abc", "30 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "50000 100000")

    assert cgroup_quota(tmp_path) == 0.5


def test_a_path_outside_the_namespace_falls_back_to_the_mount(tmp_path: Path) -> None:
    _v2(tmp_path, "/../other")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "100000 100000")

    assert cgroup_quota(tmp_path) == 1.0


def test_cpusets_of_both_versions(tmp_path: Path) -> None:
    write(_v2(tmp_path / "two") / "sys/fs/cgroup/user/job/cpuset.cpus.effective", "2-3,8")
    write(_v1(tmp_path / "one") / "sys/fs/cgroup/cpuset/job/cpuset.effective_cpus", "5")

    assert cpus_of(cgroup_cpuset(tmp_path / "two") or 0) == (2, 3, 8)
    assert cpus_of(cgroup_cpuset(tmp_path / "one") or 0) == (5,)


def test_nothing_mounted_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_quota(tmp_path) is None
    assert cgroup_cpuset(tmp_path) is None


def test_this_process_has_limits_that_make_sense() -> None:
    limits = read_limits()

    assert limits.allowed
    assert limits.cpu_quota is None or limits.cpu_quota > 0


def test_the_affinity_is_that_of_the_process_not_of_a_pinned_thread() -> None:
    """The engine's own thread is pinned, and asks while cores come and go."""
    here = read_limits().allowed
    seen: list[int] = []

    def look() -> None:
        os.sched_setaffinity(0, {cpus_of(here)[0]})
        seen.append(read_limits().allowed)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()

    assert seen == [here]
