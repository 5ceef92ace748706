"""CPU sets as text; CPU quotas and cpusets of cgroups v1 and v2, inside and outside containers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.topology.cpusets import (
    cpus_of,
    format_list,
    mask_of,
    parse_hwloc_mask,
    parse_kernel_mask,
    parse_list,
)
from phasewise.topology.process_limits import cgroup_cpuset, cgroup_quota, read_limits
from phasewise.topology.sizes import format_memory, format_size
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


def _in_a_container(root: Path) -> Path:
    """Without a cgroup namespace the path names the host's group, and the mount shows it as its root."""
    return _v2(root, "/docker/abc", "30 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw")


V1 = "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_"
OWN, OUTER, TOP = (f"sys/fs/cgroup/{group}cpu.max" for group in ("user/job/", "user/", ""))


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        (_v2, {OWN: "max 100000", OUTER: "150000 100000", TOP: "400000 100000"}, 1.5),
        *((_v2, {OWN: text}, None) for text in ("max 100000", "", "100000", "100000 0")),
        (_v1, {f"{V1}quota_us": "250000", f"{V1}period_us": "100000"}, 2.5),
        (_v1, {f"{V1}quota_us": "-1", f"{V1}period_us": "100000"}, None),
        (_in_a_container, {TOP: "50000 100000"}, 0.5),
        (lambda root: _v2(root, "/../other"), {TOP: "100000 100000"}, 1.0),  # outside of the namespace
    ],
)
def test_the_tightest_quota_of_a_group_and_those_around_it_decides(
    tmp_path: Path, groups: Callable[[Path], object], files: dict[str, str], quota: float | None
) -> None:
    groups(tmp_path)
    for name, text in files.items():
        write(tmp_path / name, text)

    assert cgroup_quota(tmp_path) == quota


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


CPU_SETS = st.sets(st.integers(0, 1023), max_size=80)


def _words(mask: int, prefix: str) -> str:
    words = []
    while mask or not words:
        words.append(f"{prefix}{mask & 0xFFFFFFFF:08x}")
        mask >>= 32
    return ",".join(reversed(words))


@given(cpus=CPU_SETS)
def test_every_notation_comes_back_as_the_same_set(cpus: set[int]) -> None:
    mask = mask_of(cpus)

    assert cpus_of(mask) == tuple(sorted(cpus))
    assert parse_list(format_list(cpus)) == mask
    assert parse_kernel_mask(_words(mask, "")) == mask
    assert parse_hwloc_mask(_words(mask, "0x")) == mask


def test_hwloc_shortens_empty_words() -> None:
    assert cpus_of(parse_hwloc_mask("0x00000001,0x0,,0x3")) == (0, 1, 96)


@pytest.mark.parametrize("text", ["5-1", "-3", "a", "1-2-3", "99999", "1-99999999999", "٣", "0x1"])
def test_bad_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_list(text)


@pytest.mark.parametrize("text", ["0xf...f,0x1", "0x123456789", "zz", "0x-1", "0x1_0", "0x1," * 600])
def test_bad_masks_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_hwloc_mask(text)


@pytest.mark.parametrize(
    ("size_bytes", "cache", "memory"),
    [
        (None, "?", "?"),
        (512, "512", "512"),
        (48 << 10, "48K", "48K"),
        (1280 << 10, "1.25M", "1.25M"),
        (134_904_430_592, "125.64G", "126G"),
        (1 << 42, "4T", "4T"),
        (1000 << 30, "1000G", "1000G"),
    ],
)
def test_sizes_read_like_the_kernels(size_bytes: int | None, cache: str, memory: str) -> None:
    assert (format_size(size_bytes), format_memory(size_bytes)) == (cache, memory)
