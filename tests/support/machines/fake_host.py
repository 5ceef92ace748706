"""A clean host as a folder of /proc and /sys files, to plant single findings in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from phasewise.topology import read_machine
from phasewise.tuner.conditions import Conditions
from phasewise.tuner.doctor import Finding, Host, IsaUse, TunedCounts, examine

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
CGROUP = "sys/fs/cgroup/job"
FLAGS = "fma f16c avx2 avx512f avx512bw avx512vl avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16"

MOUNTS = """30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"""
MEMINFO = """MemTotal:       67108864 kB
MemAvailable:   60000000 kB
HugePages_Total:       0
HugePages_Free:        0
Hugepagesize:       2048 kB"""


def _cpus(n: int, threads: int, nodes: int) -> dict[str, str]:
    """`n` CPUs; those of a core are neighbours, nodes are halves."""
    files = {f"{CPU}/online": f"0-{n - 1}", f"{CPU}/cpufreq/boost": "1"}
    for cpu in range(n):
        core, node = cpu // threads, cpu * nodes // n
        folder = f"{CPU}/cpu{cpu}"
        members = f"{core * threads}-{core * threads + threads - 1}"
        files |= {
            f"{folder}/topology/core_id": str(core),
            f"{folder}/topology/core_cpus_list": members,
            f"{folder}/topology/thread_siblings_list": members,
            f"{folder}/topology/physical_package_id": str(node),
            f"{folder}/cpufreq/scaling_governor": "performance",
            f"{folder}/cpufreq/energy_performance_preference": "performance",
            f"{folder}/cpufreq/scaling_max_freq": "3800000",
            f"{folder}/cpufreq/cpuinfo_max_freq": "3800000",
        }
    for node in range(nodes):
        files[f"{NODE}/node{node}/cpulist"] = f"{node * n // nodes}-{(node + 1) * n // nodes - 1}"
    return files


def clean_files(n: int = 4, threads: int = 1, nodes: int = 1) -> dict[str, str]:
    """By path below the root."""
    ticks = "\n".join(f"cpu{cpu} 1000 0 100 9000 0 0 0 0 0 0" for cpu in range(n))
    return _cpus(n, threads, nodes) | {
        "proc/cpuinfo": "processor : 0\nvendor_id : GenuineIntel\ncpu family : 6\nmodel : 143\nflags : "
        f"{FLAGS}",
        "proc/meminfo": MEMINFO,
        "proc/stat": f"cpu  4000 0 400 36000 0 0 0 0 0 0\n{ticks}",
        "proc/pressure/cpu": "some avg10=0.00 avg60=0.10 avg300=0.00 total=1",
        "proc/self/cgroup": "0::/job",
        "proc/self/mountinfo": MOUNTS,
        "proc/self/status": f"Cpus_allowed_list:\t0-{n - 1}\nCapEff:\t000001ffffffffff\nSeccomp:\t0",
        "proc/sys/kernel/osrelease": "6.8.0-45-generic",
        "proc/sys/kernel/numa_balancing": "0",
        f"{CGROUP}/cpu.max": "max 100000",
        f"{CGROUP}/cpu.stat": "usage_usec 5\nnr_periods 1000\nnr_throttled 0\nthrottled_usec 0",
        f"{CGROUP}/cpuset.cpus.effective": f"0-{n - 1}",
        f"{CGROUP}/memory.max": "max",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    }


@dataclass(frozen=True)
class Plant:
    """The differences from a clean host: files (None: absent), its shape, and what no file tells."""

    files: dict[str, str | None] = field(default_factory=dict)
    shape: tuple[int, int, int] = (4, 1, 1)
    """CPUs, threads of a core, NUMA nodes."""
    told: dict[str, Any] = field(default_factory=dict)


def clean_host(root: Path, plant: Plant = Plant()) -> Host:
    """The host as this process would see its own: conditions, instruction sets and database included."""
    write_files(root, plant)
    host = Host(
        root,
        read_machine(root),
        isa=IsaUse(("portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"), "amx"),
        tuned=TunedCounts("tuning.db", 2, 100),
        conditions=Conditions(steal=0.0, others=0.0, mhz=None),
        refused_calls={},
    )
    return replace(host, **plant.told)


def write_files(root: Path, plant: Plant) -> None:
    for path, text in (clean_files(*plant.shape) | plant.files).items():
        if text is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text + "\n", encoding="utf-8")


def found_in(root: Path, plant: Plant) -> tuple[Finding, ...]:
    return examine(clean_host(root, plant))
