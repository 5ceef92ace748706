"""A clean host has no finding; each thing planted in it gives exactly the one that names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from phasewise.kerneldb.product_counts import ProductCounts
from phasewise.tuner.conditions import Conditions
from phasewise.tuner.doctor import CHECKS, IsaUse, Severity, TunedCounts, examine, not_examined
from phasewise.tuner.doctor.decode import DecodeFigures, PhaseFigures, explain_decode
from tests.support.machines.fake_host import CGROUP, CPU, MEMINFO, Plant, clean_host, found_in

LADDER = ("portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
V1_MOUNTS = """31 23 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
32 23 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"""
V1_CGROUPS = "3:cpu,cpuacct:/job\n2:memory:/job"
V1_CPU = "sys/fs/cgroup/cpu,cpuacct/job"
FILTERED = "Cpus_allowed_list:\t0-3\nCapEff:\t00000000a80425fb\nSeccomp:\t2"


def _all(name: str, value: str) -> dict[str, str | None]:
    return {f"{CPU}/cpu{cpu}/{name}": value for cpu in range(4)}


def _cpuinfo(flags: str, model: str = "85") -> dict[str, str | None]:
    text = f"processor : 0\nvendor_id : GenuineIntel\ncpu family : 6\nmodel : {model}\nflags : {flags}"
    return {"proc/cpuinfo": text}


def computing(pid: int, pages: Mapping[int, int], pinned: tuple[int, ...]) -> dict[str, str | None]:
    """A process that computes: its pages of 4 KiB by node, the CPUs of its pinned threads."""
    placed = " ".join(f"N{node}={count}" for node, count in pages.items())
    maps = [
        f"7f0000000000 default file=/memfd:phasewise-weights {placed} kernelpagesize_kB=4",
        "7f1000000000 default file=/x/cython_kernels/_native.so mapped=900 N0=900 kernelpagesize_kB=4",
        "7f2000000000 default file=/lib/libc.so.6 mapped=900000 N0=900000 kernelpagesize_kB=4",
    ]
    threads = {
        f"proc/{pid}/task/{pid + number}/status": f"Cpus_allowed_list:\t{cpus}"
        for number, cpus in enumerate(["0-3", *map(str, pinned)])
    }
    return {f"proc/{pid}/numa_maps": "\n".join(maps), **threads}


Planted = tuple[str, Severity, Plant, str]


def _finds(
    wanted: str,
    severity: str,
    value: str,
    files: dict[str, str | None] | None = None,
    shape: tuple[int, int, int] = (4, 1, 1),
    **told: object,
) -> Planted:
    """A plant and its finding: the name, the severity, and a part of the evidence."""
    return wanted, Severity[severity], Plant(files or {}, shape, told), value


PLANTS: dict[str, Planted] = {
    "quota": _finds("cpu-quota", "high", "150000 100000", {f"{CGROUP}/cpu.max": "150000 100000"}),
    "quota of an outer group": _finds(
        "cpu-quota", "high", "200000 100000", {"sys/fs/cgroup/cpu.max": "200000 100000"}
    ),
    "quota, cgroups v1": _finds(
        "cpu-quota",
        "high",
        "50000 100000",
        {
            "proc/self/cgroup": V1_CGROUPS,
            "proc/self/mountinfo": V1_MOUNTS,
            f"{V1_CPU}/cpu.cfs_quota_us": "50000",
            f"{V1_CPU}/cpu.cfs_period_us": "100000",
        },
    ),
    "throttled often": _finds(
        "cpu-throttled",
        "high",
        "nr_throttled 200",
        {f"{CGROUP}/cpu.stat": "nr_periods 1000\nnr_throttled 200"},
    ),
    "throttled once": _finds(
        "cpu-throttled", "low", "nr_throttled 1", {f"{CGROUP}/cpu.stat": "nr_periods 1000\nnr_throttled 1"}
    ),
    "cpuset": _finds(
        "cpuset-smaller",
        "medium",
        "0-1",
        {
            "proc/self/status": "Cpus_allowed_list:\t0-1\nCapEff:\t0000000000800000\nSeccomp:\t0",
            f"{CGROUP}/cpuset.cpus.effective": "0-1",
        },
    ),
    "steal just now": _finds(
        "steal", "high", "25.0%", conditions=Conditions(steal=0.25, others=0.0, mhz=None)
    ),
    "steal since boot": _finds(
        "steal", "medium", "since boot", {"proc/stat": "cpu0 1000 0 100 9000 0 0 0 500 0 0"}, conditions=None
    ),
    "a busy neighbour": _finds(
        "co-tenants", "medium", "40%", conditions=Conditions(steal=0.0, others=0.4, mhz=None)
    ),
    "pressure on CPUs": _finds(
        "co-tenants",
        "medium",
        "avg60=22.50",
        {"proc/pressure/cpu": "some avg10=9.00 avg60=22.50 avg300=9.00 total=9"},
        conditions=None,
    ),
    "siblings": _finds("smt-siblings", "low", "0-1", shape=(4, 2, 1)),
    "siblings counted": _finds(
        "smt-siblings", "medium", "0-1", shape=(4, 2, 1), environment={"OMP_NUM_THREADS": "4"}
    ),
    "governor": _finds("governor", "medium", "powersave", _all("cpufreq/scaling_governor", "powersave")),
    "preference": _finds(
        "energy-preference",
        "low",
        "balance_performance",
        _all("cpufreq/energy_performance_preference", "balance_performance")
        | _all("cpufreq/scaling_governor", ""),
    ),
    "boost": _finds("boost-off", "medium", "0", {f"{CPU}/cpufreq/boost": "0"}),
    "turbo": _finds("boost-off", "medium", "1", {f"{CPU}/intel_pstate/no_turbo": "1"}),
    "capped": _finds("frequency-cap", "medium", "2000000", _all("cpufreq/scaling_max_freq", "2000000")),
    "no huge pages": _finds(
        "huge-pages-off",
        "medium",
        "always madvise [never]",
        {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"},
    ),
    "reserved huge pages": _finds(
        "huge-pages-reserved",
        "medium",
        "HugePages_Free: 8192",
        {"proc/meminfo": MEMINFO.replace("HugePages_Free:        0", "HugePages_Free:     8192")},
    ),
    "NUMA balancing": _finds(
        "numa-balancing", "medium", "1", {"proc/sys/kernel/numa_balancing": "1"}, shape=(4, 1, 2)
    ),
    "memory of a process on another node": _finds(
        "memory-remote",
        "medium",
        "node 0 117M, node 1 39.1M; 25% of its reads are local",
        computing(7, {0: 30_000, 1: 10_000}, pinned=(2, 3)),
        shape=(4, 1, 2),
    ),
    "mbind refused": _finds(
        "memory-policy-denied",
        "high",
        "EPERM: Operation not permitted",
        shape=(4, 1, 2),
        refused_calls={"mbind": "EPERM: Operation not permitted"},
    ),
    "mbind filtered, as a snapshot shows": _finds(
        "memory-policy-denied",
        "medium",
        "Seccomp: 2, CapEff: 00000000a80425fb",
        {"proc/self/status": FILTERED},
        shape=(4, 1, 2),
        refused_calls=None,
    ),
    "memory limit": _finds("memory-limit", "medium", str(16 << 30), {f"{CGROUP}/memory.max": str(16 << 30)}),
    "tight memory limit": _finds(
        "memory-limit", "high", str(1 << 30), {f"{CGROUP}/memory.max": str(1 << 30)}
    ),
    "forced ISA": _finds("isa-forced", "high", "avx2", isa=IsaUse(LADDER, "avx2", "avx2")),
    "AMX refused": _finds("isa-unused", "high", "flags list amx", isa=IsaUse(LADDER[:-1], LADDER[-2])),
    "AMX on an old kernel": _finds(
        "isa-unused", "high", "5.10.0-30-amd64", {"proc/sys/kernel/osrelease": "5.10.0-30-amd64"}, isa=None
    ),
    "old kernel": _finds(
        "kernel-old",
        "high",
        "4.18.0-553.el8.x86_64",
        {"proc/sys/kernel/osrelease": "4.18.0-553.el8.x86_64", **_cpuinfo("avx2 fma f16c")},
    ),
    "pidfd refused": _finds(
        "kernel-old",
        "high",
        "ENOSYS: Function not implemented",
        refused_calls={"pidfd_open": "ENOSYS: Function not implemented"},
    ),
    "untuned": _finds(
        "untuned", "medium", "0 service plans, 12 kernel timings", tuned=TunedCounts("tuning.db", 0, 12)
    ),
    "tuned before an upgrade": _finds(
        "tuned-before-upgrade",
        "medium",
        "4 tuned here, 0 imported of which 0 verified, 3 set aside",
        tuned=TunedCounts("tuning.db", 2, 12, ProductCounts(tuned=4, set_aside=3)),
    ),
}


@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 1, 1), (8, 1, 2)])
def test_a_clean_host_has_no_finding(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    assert found_in(tmp_path, Plant(shape=shape)) == ()


@pytest.mark.parametrize("name", PLANTS)
def test_what_is_planted_is_the_one_finding(tmp_path: Path, name: str) -> None:
    wanted, severity, plant, value = PLANTS[name]

    (finding,) = found_in(tmp_path, plant)

    assert (finding.id, finding.severity) == (wanted, severity)
    assert any(value in evidence.value for evidence in finding.evidence)
    assert all(str(tmp_path) not in evidence.source for evidence in finding.evidence)
    assert finding.meaning
    assert finding.remedy


def test_every_check_has_a_plant() -> None:
    assert {wanted for wanted, *_ in PLANTS.values()} == set(CHECKS)


def test_the_severest_come_first(tmp_path: Path) -> None:
    findings = found_in(
        tmp_path,
        Plant(
            {
                f"{CGROUP}/cpu.max": "100000 100000",
                f"{CPU}/cpufreq/boost": "0",
                "sys/kernel/mm/transparent_hugepage/enabled": "[never]",
            }
        ),
    )

    assert [finding.id for finding in findings] == ["cpu-quota", "boost-off", "huge-pages-off"]


@pytest.mark.parametrize(
    "plant",
    [
        Plant(shape=(4, 1, 1), told={"refused_calls": {"mbind": "EPERM"}}),
        Plant({"proc/sys/kernel/numa_balancing": "1"}),
        Plant({f"{CGROUP}/cpu.max": "400000 100000"}),
        Plant({f"{CGROUP}/memory.max": str(64 << 30)}),
        Plant(_all("cpufreq/energy_performance_preference", "balance_performance")),
        Plant(computing(7, {0: 100, 1: 40_000}, pinned=(2, 3)), shape=(4, 1, 2)),
        Plant(computing(7, {0: 20_000, 1: 20_000}, pinned=(0, 1, 2, 3)), shape=(4, 1, 2)),
        Plant(computing(7, {0: 900}, pinned=(2, 3)), shape=(4, 1, 2)),
        Plant(computing(7, {0: 40_000}, pinned=()), shape=(4, 1, 2)),
    ],
    ids=[
        *("mbind on one node", "balancing of one node", "ample quota", "ample memory"),
        *("EPP", "memory where its cores are", "memory by turns", "little memory elsewhere"),
        "threads that may run anywhere",
    ],
)
def test_what_costs_nothing_is_no_finding(tmp_path: Path, plant: Plant) -> None:
    assert found_in(tmp_path, plant) == ()


@pytest.mark.parametrize("text", ["", "nonsense", "-1 -1", "9" * 5000, "max", "\x00", "a b c d: e"])
def test_damaged_files_are_no_finding_and_no_crash(tmp_path: Path, text: str) -> None:
    """Snapshots come from strangers, and containers hide or fake what they like."""
    damaged = dict.fromkeys(
        [
            *("proc/stat", "proc/pressure/cpu", "proc/self/status", "proc/sys/kernel/osrelease"),
            *("proc/sys/kernel/numa_balancing", f"{CGROUP}/cpu.max", f"{CGROUP}/cpu.stat"),
            *(f"{CGROUP}/memory.max", f"{CGROUP}/cpuset.cpus.effective"),
            *(f"{CPU}/cpu0/cpufreq/scaling_max_freq", "sys/kernel/mm/transparent_hugepage/enabled"),
        ],
        text,
    )
    host = clean_host(tmp_path, Plant(damaged, told={"conditions": None, "refused_calls": None}))

    assert {finding.id for finding in examine(host)} <= {"memory-limit"}


def test_what_a_snapshot_does_not_tell_is_listed(tmp_path: Path) -> None:
    whole = clean_host(tmp_path / "whole", Plant())
    bare = clean_host(tmp_path / "bare", Plant({"proc/meminfo": None}, told={"tuned": None, "isa": None}))

    assert not_examined(whole) == ()
    assert not_examined(bare) == ("instruction sets in use", "the tuning database", "memory (proc/meminfo)")


FIGURES = DecodeFigures("a-model", 4, PhaseFigures(1200.0, 0.8), PhaseFigures(40.0, 0.3), 6e9, 20e9)


@pytest.mark.parametrize(("share", "reason"), [(0.9, "decode-bandwidth"), (0.3, "decode-below-bandwidth")])
def test_figures_get_their_reason(share: float, reason: str) -> None:
    finding = explain_decode(replace(FIGURES, decode=PhaseFigures(40.0, share)))

    assert finding.id == reason
    assert finding.evidence
    assert finding.remedy
