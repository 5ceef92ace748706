"""Time that a process does not get: quotas and throttling, CPUs that it may not use, stolen time,
co-tenants.
"""

from __future__ import annotations

from collections.abc import Iterator

from phasewise._words import counted, number, percent
from phasewise.topology.cpusets import format_list
from phasewise.tuner.doctor.finding import Finding, FindingEvidence, Severity
from phasewise.tuner.doctor.host import Host, whole_number

MUCH_STEAL, SOME_STEAL = 0.10, 0.02
SOME_OTHERS = 0.05
MUCH_THROTTLED = 0.01
"""Share of the scheduler's periods that counts as much throttling."""

SOME_PRESSURE = 5.0
"""Percent of a minute in which something waited for a CPU, from which on that is told."""


def quota(host: Host) -> Iterator[Finding]:
    """Finds a cgroup quota of less time than the allowed cores have."""
    limits = [(cpus, seen) for seen in _quota_files(host) if (cpus := _cpus_of(seen)) is not None]
    if not limits:
        return
    cpus, seen = min(limits, key=lambda limit: limit[0])
    cores = len(host.cores())
    if cpus < cores:
        yield Finding(
            "cpu-quota",
            Severity.high,
            f"a quota of {number(cpus)} CPUs' time on {counted(cores, 'core')}",
            (seen,),
            f"More than {max(1, int(cpus))} busy threads are all stopped for the rest of every period, so a "
            "team waits for its slowest member; phasewise starts no more threads than the quota pays for.",
            f"docker run --cpus {cores} (Kubernetes: a whole number as resources.limits.cpu, equal to the "
            "request, and the static CPU manager policy)",
        )


def throttled(host: Host) -> Iterator[Finding]:
    """Finds periods in which the group was stopped because its quota was used up."""
    for seen in host.cgroup("cpu", "cpu.stat", "cpu.stat"):
        pairs = (line.split() for line in seen.value.splitlines())
        counts = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
        stopped, periods = (whole_number(counts.get(name)) or 0 for name in ("nr_throttled", "nr_periods"))
        if stopped:
            share = stopped / max(periods, stopped)
            yield Finding(
                "cpu-throttled",
                Severity.high if share > MUCH_THROTTLED else Severity.low,
                f"stopped in {percent(share, 1)} of the scheduler's periods",
                (FindingEvidence(seen.source, f"nr_periods {periods}, nr_throttled {stopped}"),),
                "The quota has run out that often since the group was made; each time every thread of a "
                "step waits.",
                "docker update --cpus with more, or fewer threads: --threads",
            )
            return


def cpuset(host: Host) -> Iterator[Finding]:
    """Finds CPUs of the machine that this process may not use."""
    allowed, online = host.allowed(), host.machine.tree.cpus
    barred = sorted(set(online).difference(allowed))
    if barred:
        files = list(host.cgroup("cpuset", "cpuset.cpus.effective", "cpuset.effective_cpus"))[:1]
        affinity = host.words("proc/self/status").get("Cpus_allowed_list")
        if affinity:
            files.append(FindingEvidence("/proc/self/status", f"Cpus_allowed_list: {affinity}"))
        files.append(host.seen("sys/devices/system/cpu/online", format_list(online)))
        yield Finding(
            "cpuset-smaller",
            Severity.medium,
            f"{len(allowed)} of {counted(len(online), 'CPU')} may be used",
            tuple(files),
            f"CPU {format_list(barred)} is kept for others, or idle, and perhaps its NUMA node's bandwidth.",
            f"docker run --cpuset-cpus {format_list(online)}; outside a container: "
            f"taskset -c {format_list(online)}",
        )


def steal(host: Host) -> Iterator[Finding]:
    """Finds time that the hypervisor gave to other guests."""
    now = None if host.conditions is None else host.conditions.steal
    share, when = (host.steal_since_boot(), "since boot") if now is None else (now, "just now")
    if share is not None and share > SOME_STEAL:
        yield Finding(
            "steal",
            Severity.high if share > MUCH_STEAL else Severity.medium,
            f"other guests of the hypervisor take {percent(share)} of the CPUs' time",
            (FindingEvidence("/proc/stat", f"steal {percent(share, 1)} of the allowed CPUs' time, {when}"),),
            "A pinned thread cannot run while its CPU is away, and its team waits for it.",
            "An instance with dedicated CPUs, or fewer threads than virtual CPUs: --threads",
        )


def neighbours(host: Host) -> Iterator[Finding]:
    """Finds other processes on the same CPUs: watched where the host is this one, else by the kernel's
    averages."""
    shares = _watched(host) if host.conditions is not None else _averages(host)
    if shares is not None:
        yield Finding(
            "co-tenants",
            Severity.medium,
            "other processes use the same CPUs",
            (shares,),
            "They take time and caches from pinned threads, and bandwidth from decoding; measurements "
            "scatter.",
            "ps -eo pid,psr,pcpu,comm --sort=-pcpu | head shows them; give each its own CPUs: "
            "docker run --cpuset-cpus, taskset -c",
        )


def _watched(host: Host) -> FindingEvidence | None:
    others = 0.0 if host.conditions is None else host.conditions.others
    return (
        FindingEvidence(
            "/proc/stat", f"{percent(others)} of the allowed CPUs' time went to other processes just now"
        )
        if others > SOME_OTHERS
        else None
    )


def _averages(host: Host) -> FindingEvidence | None:
    for line in (host.text("proc/pressure/cpu") or "").splitlines():
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        try:
            if line.startswith("some") and float(words.get("avg60", "0")) > SOME_PRESSURE:
                return host.seen("proc/pressure/cpu", line)
        except ValueError:
            return None
    return None


def _quota_files(host: Host) -> Iterator[FindingEvidence]:
    """The texts of quota files as `quota period` in microseconds, those of cgroup v1 written as v2 writes
    them."""
    yield from host.cgroup("cpu", "cpu.max", "cpu.max")
    periods = {
        seen.source.rpartition("/")[0]: seen.value
        for seen in host.cgroup("cpu", "cpu.cfs_period_us", "cpu.cfs_period_us")
    }
    for seen in host.cgroup("cpu", "cpu.cfs_quota_us", "cpu.cfs_quota_us"):
        period = periods.get(seen.source.rpartition("/")[0])
        if period is not None:
            yield FindingEvidence(seen.source, f"{seen.value} {period}")


def _cpus_of(seen: FindingEvidence) -> float | None:
    words = [whole_number(word) for word in seen.value.split()]
    if len(words) == 2 and words[0] and words[1]:
        return words[0] / words[1]
    return None
