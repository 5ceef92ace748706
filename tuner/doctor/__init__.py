"""Checks of a host for what slows phasewise down, read from files; each finding has evidence and a remedy. To
add a check: a function from a Host to findings, and its entry in CHECKS."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from phasewise.tuner.doctor import cores, memory, software
from phasewise.tuner.doctor.cores import CPU
from phasewise.tuner.doctor.host import Finding, FindingEvidence, Host, IsaUse, Severity, TunedCounts

__all__ = [
    "CHECKS",
    "Finding",
    "FindingEvidence",
    "Host",
    "IsaUse",
    "Severity",
    "TunedCounts",
    "examine",
    "not_examined",
]

CHECKS: Mapping[str, Callable[[Host], Iterator[Finding]]] = {
    "cpu-quota": cores.quota,
    "cpu-throttled": cores.throttled,
    "cpuset-smaller": cores.cpuset,
    "steal": cores.steal,
    "co-tenants": cores.neighbours,
    "smt-siblings": cores.siblings,
    "governor": cores.governor,
    "energy-preference": cores.preference,
    "boost-off": cores.boost,
    "frequency-cap": cores.capped,
    "huge-pages-off": memory.huge_pages_denied,
    "huge-pages-reserved": memory.huge_pages_reserved,
    "numa-balancing": memory.balancing,
    "memory-policy-denied": memory.policy_denied,
    "memory-remote": memory.remote_memory,
    "memory-limit": memory.limited,
    "isa-forced": software.forced,
    "isa-unused": software.unused,
    "kernel-old": software.old_kernel,
    "untuned": software.untuned,
    "tuned-before-upgrade": software.set_aside,
}
"""All checks, by the id of the finding that each may report."""


def examine(host: Host) -> tuple[Finding, ...]:
    """Every finding, most severe first; equals in the order of the checks."""
    findings = [finding for check in CHECKS.values() for finding in check(host)]
    return tuple(sorted(findings, key=lambda finding: -finding.severity))


def not_examined(host: Host) -> tuple[str, ...]:
    """Facts that the host, mostly a snapshot, does not state, in words; checks of them report nothing."""
    told = {
        "load of this moment": host.conditions,
        "instruction sets in use": host.isa,
        "system calls that are refused": host.refused_calls,
        "the tuning database": host.tuned,
        "limits of the process (proc/self)": host.text("proc/self/status"),
        "memory (proc/meminfo)": host.text("proc/meminfo"),
        "kernel settings (proc/sys)": host.text("proc/sys/kernel/osrelease"),
        "clocks (cpufreq)": host.text(f"{CPU}/cpu{host.machine.tree.cpus[0]}/cpufreq/scaling_governor"),
    }
    return tuple(name for name, value in told.items() if value is None)
