"""Checks of cores and their time: hyper-threads counted as cores, slow clocks (governor, preference, cap,
boost), quotas and throttling, CPUs that may not be used, stolen time, co-tenants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from phasewise._words import counted, number, percent
from phasewise.topology.cpusets import format_list
from phasewise.topology.process_limits import cgroup_quotas
from phasewise.tuner.doctor.host import Finding, FindingEvidence, Host, Severity, whole_number

CPU = "sys/devices/system/cpu"
THREAD_VARIABLES = ("PHASEWISE_THREADS", "OMP_NUM_THREADS")
CAPPED = 0.98
"""Share of the CPU's own maximum frequency below which a set maximum counts as a cap."""


def siblings(host: Host) -> Iterator[Finding]:
    """Finds second hardware threads of cores that are counted as CPUs."""
    cores = host.cores()
    cpus = [cpu for core in cores for cpu in core]
    if len(cpus) == len(cores):
        return
    shared = next(core for core in cores if len(core) > 1)
    path = f"{CPU}/cpu{shared[0]}/topology/thread_siblings_list"
    evidence = [host.seen(path, host.text(path) or format_list(shared))]
    counts = {name: whole_number(host.environment.get(name)) for name in THREAD_VARIABLES}
    wrong = {name: count for name, count in counts.items() if count is not None and count > len(cores)}
    evidence += [FindingEvidence(f"environment {name}", str(count)) for name, count in wrong.items()]
    firsts = format_list(core[0] for core in cores)
    yield Finding(
        "smt-siblings",
        Severity.medium if wrong else Severity.low,
        f"{counted(len(cpus), 'CPU')} on {counted(len(cores), 'core')}",
        tuple(evidence),
        "Threads of one core share its arithmetic units and caches: a second one rarely helps prefill "
        "and mostly slows "
        "decoding. phasewise starts one a core; programs that count CPUs start twice as many.",
        f"--threads {len(cores)} where a number is asked for; taskset -c {firsts} for other programs",
    )


def governor(host: Host) -> Iterator[Finding]:
    """Finds a frequency governor that saves power."""
    slow = _counted(host, "cpufreq/scaling_governor", lambda text: text != "performance")
    if slow:
        name, cpus = slow
        yield Finding(
            "governor",
            Severity.medium,
            f"the frequency governor of {counted(len(cpus), 'CPU')} is {name}",
            (host.seen(f"{CPU}/cpu{cpus[0]}/cpufreq/scaling_governor"),),
            "Cores that wait at a barrier look idle and are clocked down, and every step begins slowly.",
            "sudo cpupower frequency-set -g performance",
        )


def preference(host: Host) -> Iterator[Finding]:
    """Finds an energy preference that leans to saving; the performance governor overrules it."""
    mild, slow = "balance_performance", ("balance_power", "power")
    commonest = _counted(
        host, "cpufreq/energy_performance_preference", lambda text: text in (mild, *slow) and bool(text)
    )
    if (
        commonest is None
        or host.text(f"{CPU}/cpu{commonest[1][0]}/cpufreq/scaling_governor") == "performance"
    ):
        return
    name, cpus = commonest
    yield Finding(
        "energy-preference",
        Severity.medium if name in slow else Severity.low,
        f"the energy preference of {counted(len(cpus), 'CPU')} is {name}",
        (host.seen(f"{CPU}/cpu{cpus[0]}/cpufreq/energy_performance_preference"),),
        "The CPU raises its clock late and lowers it early.",
        "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/energy_performance_preference",
    )


def boost(host: Host) -> Iterator[Finding]:
    """Finds turbo switched off."""
    for path, off, remedy in (
        (f"{CPU}/intel_pstate/no_turbo", "1", "echo 0"),
        (f"{CPU}/cpufreq/boost", "0", "echo 1"),
    ):
        if host.text(path) == off:
            yield Finding(
                "boost-off",
                Severity.medium,
                "the CPU may not exceed its base clock",
                (host.seen(path),),
                "Prefill is bound by arithmetic, and loses in proportion to the clock.",
                f"{remedy} | sudo tee /{path}",
            )
            return


def capped(host: Host) -> Iterator[Finding]:
    """Finds a maximum frequency below the CPU's own."""
    low = []
    for cpu in host.allowed():
        folder = f"{CPU}/cpu{cpu}/cpufreq"
        cap, limit = host.number(f"{folder}/scaling_max_freq"), host.number(f"{folder}/cpuinfo_max_freq")
        if cap and limit and cap < CAPPED * limit:
            low.append((cpu, cap, limit))
    if low:
        cpu, cap, limit = low[0]
        yield Finding(
            "frequency-cap",
            Severity.medium,
            f"{counted(len(low), 'CPU')} held to {cap / 1e6:.2f} of {limit / 1e6:.2f} GHz",
            (
                host.seen(f"{CPU}/cpu{cpu}/cpufreq/scaling_max_freq"),
                host.seen(f"{CPU}/cpu{cpu}/cpufreq/cpuinfo_max_freq"),
            ),
            "Prefill is bound by arithmetic, and loses in proportion to the clock.",
            f"sudo cpupower frequency-set -u {limit}kHz",
        )


def _counted(host: Host, name: str, is_slow: Callable[[str], bool]) -> tuple[str, list[int]] | None:
    """The commonest slow text in the allowed CPUs' files `name`, with its CPUs; None: no text is slow."""
    texts = {cpu: host.text(f"{CPU}/cpu{cpu}/{name}") for cpu in host.allowed()}
    slow = {cpu: text for cpu, text in texts.items() if text and is_slow(text)}
    if not slow:
        return None
    commonest = Counter(slow.values()).most_common(1)[0][0]
    return commonest, [cpu for cpu, text in slow.items() if text == commonest]


MUCH_STEAL, SOME_STEAL = 0.10, 0.02
SOME_OTHERS = 0.05
MUCH_THROTTLED = 0.01
"""Share of the scheduler's periods that counts as much throttling."""

SOME_PRESSURE = 5.0
"""Percent of a minute in which a process waited for a CPU, from which co-tenants are reported."""


def quota(host: Host) -> Iterator[Finding]:
    """Finds a cgroup quota of less time than the allowed cores have."""
    limits = list(cgroup_quotas(host.root))
    if not limits:
        return
    path, text, cpus = min(limits, key=lambda limit: limit[2])
    seen = host.seen(str(path.relative_to(host.root)), text)
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
    """Finds periods in which the process group was stopped because its quota was used up."""
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
    """Finds other processes on the same CPUs: measured on this host, else by the kernel's averages."""
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
