"""Checks of cores: threads counted as cores, slow clocks by governor, preference, cap, boost or
heat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from phasewise._words import counted
from phasewise.topology.cpusets import format_list
from phasewise.tuner.doctor.finding import Finding, FindingEvidence, Severity
from phasewise.tuner.doctor.host import Host, whole_number

CPU = "sys/devices/system/cpu"
THREAD_VARIABLES = ("PHASEWISE_THREADS", "OMP_NUM_THREADS")
CAPPED = 0.98
"""Share of the CPU's own maximum frequency below which a maximum counts as capped; less is rounding."""


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


def heat(host: Host) -> Iterator[Finding]:
    """Finds cores that have throttled because they were hot."""
    path = "thermal_throttle/core_throttle_count"
    counts = {cpu: host.number(f"{CPU}/cpu{cpu}/{path}") or 0 for cpu in host.allowed()}
    hot = {cpu: count for cpu, count in counts.items() if count}
    if hot:
        worst = max(hot, key=lambda cpu: hot[cpu])
        yield Finding(
            "thermal-throttle",
            Severity.low,
            f"{counted(len(hot), 'CPU')} slowed by heat",
            (host.seen(f"{CPU}/cpu{worst}/{path}"),),
            "The count is since boot. While it grows, long runs are slower than short ones.",
            "sudo turbostat shows whether it goes on; better cooling, or a lower power limit that holds",
        )


def _counted(host: Host, name: str, is_slow: Callable[[str], bool]) -> tuple[str, list[int]] | None:
    """The commonest text among the allowed CPUs' files `name` that are slow, and the CPUs that have it."""
    texts = {cpu: host.text(f"{CPU}/cpu{cpu}/{name}") for cpu in host.allowed()}
    slow = {cpu: text for cpu, text in texts.items() if text and is_slow(text)}
    if not slow:
        return None
    commonest = Counter(slow.values()).most_common(1)[0][0]
    return commonest, [cpu for cpu, text in slow.items() if text == commonest]
