"""Checks of unused software: instruction sets, system calls of newer kernels, tuning for this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phasewise._words import counted
from phasewise.tuner.doctor.host import Finding, FindingEvidence, Host, Severity

PROMISED = (
    ("amx", frozenset({"amx_tile", "amx_int8", "amx_bf16"})),
    ("avx512_bf16", frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"})),
    ("avx512_vnni", frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_vnni"})),
    ("avx512", frozenset({"avx512f", "avx512bw", "avx512vl"})),
    ("avx2", frozenset({"avx2", "fma", "f16c"})),
)
"""Instruction sets of kernels, fastest first, each with the /proc/cpuinfo flags that it needs."""

AMX_KERNEL = (5, 16)
OLDEST_KERNEL = (5, 3)
"""The oldest kernel with pidfd_open, by which a rank's end is noticed; memfd_create came with 3.17."""

OSRELEASE = "proc/sys/kernel/osrelease"


def forced(host: Host) -> Iterator[Finding]:
    """Finds a PHASEWISE_ISA below the best instruction set of the machine."""
    isa = host.isa
    if isa is not None and isa.forced and isa.active != isa.usable[-1]:
        yield Finding(
            "isa-forced",
            Severity.high,
            f"kernels are held to {isa.active}; this machine runs {isa.usable[-1]}",
            (FindingEvidence("environment PHASEWISE_ISA", isa.forced),),
            "Each step of the ladder is a multiple in prefill. The variable is meant for tests.",
            "unset PHASEWISE_ISA",
        )


def unused(host: Host) -> Iterator[Finding]:
    """Finds an instruction set that the CPU lists but the kernels cannot use."""
    promised = next((name for name, needs in PROMISED if needs <= host.machine.cpu.features), None)
    usable = host.isa.usable if host.isa is not None else _by_kernel(host)
    if promised is None or promised in usable:
        return
    release = host.text(OSRELEASE) or "unknown"
    is_old = promised == "amx" and (_version(release) or AMX_KERNEL) < AMX_KERNEL
    yield Finding(
        "isa-unused",
        Severity.high if promised == "amx" else Severity.medium,
        f"the CPU has {promised}, and the kernels cannot use it",
        (
            FindingEvidence("/proc/cpuinfo", f"flags list {promised}"),
            FindingEvidence(f"/{OSRELEASE}", release),
        ),
        "The system does not save the registers, or refuses the permission to use them; prefill runs on "
        "a slower set.",
        f"a kernel of {AMX_KERNEL[0]}.{AMX_KERNEL[1]} or later"
        if is_old
        else "docker run --security-opt seccomp=unconfined: arch_prctl must be allowed",
    )


def old_kernel(host: Host) -> Iterator[Finding]:
    """Finds a kernel without system calls that ranks need."""
    release = host.text(OSRELEASE)
    version = _version(release or "")
    refused = [
        FindingEvidence(f"{call}()", answer)
        for call, answer in (host.refused_calls or {}).items()
        if call in {"memfd_create", "pidfd_open"}
    ]
    if (version is not None and version < OLDEST_KERNEL) or refused:
        yield Finding(
            "kernel-old",
            Severity.high,
            "the kernel lacks, or a filter refuses, calls that ranks need",
            (host.seen(OSRELEASE), *refused),
            "Ranks share memory by memfd_create and watch each other by pidfd_open; plans of several "
            "ranks fail.",
            f"Linux {OLDEST_KERNEL[0]}.{OLDEST_KERNEL[1]} or later; "
            "docker run --security-opt seccomp=unconfined",
        )


def untuned(host: Host) -> Iterator[Finding]:
    """Finds that the database has no service plans or kernel timings for this kind of machine."""
    tuned = host.tuned
    if tuned is None or (tuned.service_plans and tuned.measurements):
        return
    lacking = []
    if not tuned.service_plans:
        lacking.append(("service plans", "Both phases run on all cores.", "phasewise tune-config MODEL"))
    if not tuned.measurements:
        lacking.append(
            ("kernel timings", "Kernels run by their default schedules.", "phasewise tune-kernels MODEL")
        )
    what, meanings, remedies = zip(*lacking, strict=True)
    counts = f"{tuned.service_plans} service plans, {tuned.measurements} kernel timings of this machine"
    yield Finding(
        "untuned",
        Severity.medium,
        f"no {' and no '.join(what)} for this machine",
        (FindingEvidence(f"database {tuned.name}", counts),),
        " ".join(meanings),
        "; ".join(remedies),
    )


def set_aside(host: Host) -> Iterator[Finding]:
    """Finds schedules from before an upgrade of the kernels, which have to be timed again."""
    tuned = host.tuned
    if tuned is None or not tuned.products.set_aside:
        return
    n = tuned.products.set_aside
    yield Finding(
        "tuned-before-upgrade",
        Severity.medium,
        f"winners of another build of the kernels are set aside, those of {counted(n, 'product')}",
        (FindingEvidence(f"database {tuned.name}", tuned.products.describe()),),
        "Nothing is lost; timings of another compiler or release are not used unseen. These products run by "
        "their defaults meanwhile.",
        "phasewise tune-kernels MODEL: it times them first, a minute at most",
    )


def _by_kernel(host: Host) -> tuple[str, ...]:
    """Instruction sets that the OS kernel of a snapshot allows: all, without AMX on old kernels."""
    version = _version(host.text(OSRELEASE) or "")
    is_old = version is not None and version < AMX_KERNEL
    return tuple(name for name, _ in PROMISED if not (is_old and name == "amx"))


def _version(release: str) -> tuple[int, int] | None:
    match = re.match(r"(\d{1,3})\.(\d{1,4})", release)
    return (int(match[1]), int(match[2])) if match else None
