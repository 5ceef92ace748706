"""Checks of memory: huge pages, page balancing between nodes, denied or wrong placement, and limits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from phasewise._words import percent
from phasewise.topology import Kind
from phasewise.topology.cpusets import cpus_of, parse_list
from phasewise.topology.sizes import format_memory
from phasewise.tuner.doctor.host import Finding, FindingEvidence, Host, Severity, whole_number

THP = "sys/kernel/mm/transparent_hugepage/enabled"
GIB = 1 << 30
LEAST_LIMIT_SHARE = 0.9
"""Share of the machine's memory from which a memory limit does not matter."""

SMALL_LIMIT_BYTES = 4 * GIB
MUCH_RESERVED = 0.05
CAP_SYS_NICE = 23
SECCOMP_FILTER = "2"


def huge_pages_denied(host: Host) -> Iterator[Finding]:
    """Finds transparent huge pages switched off altogether."""
    if "[never]" in (host.text(THP) or ""):
        yield Finding(
            "huge-pages-off",
            Severity.medium,
            "transparent huge pages are switched off",
            (host.seen(THP),),
            "Every step walks through its scratch and weights; with pages of 4K it misses the TLB all "
            "the way.",
            f"echo madvise | sudo tee /{THP}",
        )


def huge_pages_reserved(host: Host) -> Iterator[Finding]:
    """Finds reserved huge pages that are unused, so that their memory is lost."""
    words = host.words("proc/meminfo")
    free, size_kb, total_kb = (
        whole_number(words.get(name, "").split(" ")[0]) or 0
        for name in ("HugePages_Free", "Hugepagesize", "MemTotal")
    )
    if free * size_kb > MUCH_RESERVED * total_kb > 0:
        yield Finding(
            "huge-pages-reserved",
            Severity.medium,
            f"{format_memory(free * size_kb << 10)} are set aside as explicit huge pages that are not in use",
            (FindingEvidence("/proc/meminfo", f"HugePages_Free: {free}, Hugepagesize: {size_kb} kB"),),
            "phasewise asks for transparent huge pages; reserved ones hold neither weights nor KV cache.",
            "sudo sysctl vm.nr_hugepages=0, unless another program is to use them",
        )


def balancing(host: Host) -> Iterator[Finding]:
    """Finds a kernel that moves pages between NUMA nodes by itself."""
    path = "proc/sys/kernel/numa_balancing"
    if _n_nodes(host) > 1 and (host.number(path) or 0) > 0:
        yield Finding(
            "numa-balancing",
            Severity.medium,
            "the kernel moves pages between NUMA nodes by itself",
            (host.seen(path),),
            "It unmaps pages to see who touches them. Pinned threads take those faults in every step, "
            "and their "
            "weights lie right already.",
            "sudo sysctl kernel.numa_balancing=0",
        )


def policy_denied(host: Host) -> Iterator[Finding]:
    """Finds that memory cannot be placed on a node; irrelevant on a machine of one node."""
    if _n_nodes(host) < 2:
        return
    if host.refused_calls is not None:
        evidence = tuple(FindingEvidence(f"{call}()", answer) for call, answer in host.refused_calls.items())
        title = "memory cannot be placed on a NUMA node"
    else:
        evidence = _filtered(host)
        title = "memory can probably not be placed on a NUMA node"
    if evidence:
        yield Finding(
            "memory-policy-denied",
            Severity.high if host.refused_calls else Severity.medium,
            title,
            evidence,
            "Weights and KV cache lie where they were touched first, and ranks read through the link "
            "between nodes.",
            "docker run --cap-add SYS_NICE (Kubernetes: securityContext.capabilities.add: [SYS_NICE]); "
            "or start "
            "each process by numactl --membind outside the container",
        )


def _filtered(host: Host) -> tuple[FindingEvidence, ...]:
    """Evidence of filtered calls in a snapshot: container runtimes filter them without CAP_SYS_NICE."""
    status = host.words("proc/self/status")
    try:
        capable = int(status.get("CapEff", ""), 16) >> CAP_SYS_NICE & 1
    except ValueError:
        return ()
    if capable or status.get("Seccomp") != SECCOMP_FILTER:
        return ()
    return (FindingEvidence("/proc/self/status", f"Seccomp: {SECCOMP_FILTER}, CapEff: {status['CapEff']}"),)


def limited(host: Host) -> Iterator[Finding]:
    """Finds a cgroup memory limit below the machine's memory."""
    total = (whole_number(host.words("proc/meminfo").get("MemTotal", "").split(" ")[0]) or 0) << 10
    limits = [
        (size, seen)
        for seen in host.cgroup("memory", "memory.max", "memory.limit_in_bytes")
        if (size := whole_number(seen.value)) is not None
    ]
    if not limits or not total:
        return
    size, seen = min(limits, key=lambda limit: limit[0])
    if size < LEAST_LIMIT_SHARE * total:
        yield Finding(
            "memory-limit",
            Severity.high if size < SMALL_LIMIT_BYTES else Severity.medium,
            f"{format_memory(size)} of {format_memory(total)} of memory may be used",
            (seen, FindingEvidence("/proc/meminfo", f"MemTotal: {total >> 10} kB")),
            "Mapped weights count when they are read: a model that does not fit beside its KV cache is "
            "read from disk "
            "again in every step, or killed.",
            f"docker run --memory {-(-total // GIB)}g (Kubernetes: resources.limits.memory)",
        )


def _n_nodes(host: Host) -> int:
    """The number of NUMA nodes with allowed CPUs."""
    allowed = set(host.allowed())
    return sum(bool(allowed.intersection(node.cpus)) for node in host.machine.nodes(Kind.NUMA))


KERNELS = "cython_kernels/_native"
"""The library by whose mapping a phasewise process is recognised."""

MUCH_STRAY = 0.1
LEAST_BYTES = 64 << 20
"""Memory of a process below which its placement does not matter."""

_PAGES = re.compile(r"\bN(\d{1,4})=(\d{1,12})\b")
_PAGE_KIB = re.compile(r"\bkernelpagesize_kB=(\d{1,8})\b")


@dataclass(frozen=True)
class ProcessMemory:
    """A computing process: its memory (without libraries) and its pinned threads, each by NUMA node."""

    pid: int
    bytes_by_node: Mapping[int, int]
    threads_by_node: Mapping[int, int]

    @property
    def local_reads(self) -> float:
        """The share of reads that are local, if every thread reads equally from all of the memory."""
        return sum(self._memory(node) * self._threads(node) for node in self.bytes_by_node)

    @property
    def stray(self) -> float:
        """The share of memory that would have to move for memory to be divided like threads."""
        return sum(max(0.0, self._memory(node) - self._threads(node)) for node in self.bytes_by_node)

    @property
    def n_bytes(self) -> int:
        return sum(self.bytes_by_node.values())

    def describe(self) -> str:
        """The process's bytes by node and its share of local reads, in words."""
        parts = [f"node {node} {format_memory(n)}" for node, n in sorted(self.bytes_by_node.items())]
        return f"{', '.join(parts)}; {percent(self.local_reads)} of its reads are local"

    def _memory(self, node: int) -> float:
        return self.bytes_by_node.get(node, 0) / self.n_bytes

    def _threads(self, node: int) -> float:
        return self.threads_by_node.get(node, 0) / sum(self.threads_by_node.values())


def computing_processes(host: Host) -> Iterator[ProcessMemory]:
    """The phasewise processes that can be inspected; none on a machine of one NUMA node."""
    nodes = {node.os_index or 0: frozenset(node.cpus) for node in host.machine.nodes(Kind.NUMA)}
    if len(nodes) < 2:
        return
    for folder in sorted((host.root / "proc").glob("[0-9]*"), key=lambda path: (len(path.name), path.name)):
        maps = host.text(f"proc/{folder.name}/numa_maps") or ""
        if KERNELS not in maps:
            continue
        by_node, threads = _bytes_by_node(maps), _threads_by_node(host, folder.name, nodes)
        if by_node and threads:
            yield ProcessMemory(int(folder.name), by_node, threads)


def remote_memory(host: Host) -> Iterator[Finding]:
    """Finds a running process whose memory is not on its cores' nodes."""
    for process in computing_processes(host):
        if process.n_bytes >= LEAST_BYTES and process.stray > MUCH_STRAY:
            cores = ", ".join(f"{n} on node {node}" for node, n in sorted(process.threads_by_node.items()))
            yield Finding(
                "memory-remote",
                Severity.medium,
                f"{percent(process.stray)} of the memory of phasewise's process {process.pid} lies on other "
                "nodes than its cores",
                (
                    host.seen(f"proc/{process.pid}/numa_maps", process.describe()),
                    FindingEvidence(f"/proc/{process.pid}/task", f"pinned threads: {cores}"),
                ),
                "Decoding reads all weights in every step, here through the link between nodes.",
                "start it again, which copies weights to the nodes of its cores; if that node is full "
                "(numactl --hardware), free memory there or plan fewer ranks on it",
            )


def _bytes_by_node(maps: str) -> dict[int, int]:
    """A process's bytes by NUMA node, without files of others, since processes share libraries."""
    by_node: Counter[int] = Counter()
    for line in maps.splitlines():
        name = next((word for word in line.split() if word.startswith("file=")), None)
        if name is not None and ("phasewise" not in name or KERNELS in name or name.endswith(".so")):
            continue
        size = _PAGE_KIB.search(line)
        for node, pages in _PAGES.findall(line):
            by_node[int(node)] += int(pages) * (int(size[1]) if size else 4) << 10
    return dict(by_node)


def _threads_by_node(host: Host, pid: str, nodes: Mapping[int, frozenset[int]]) -> dict[int, int]:
    """The number of a process's threads on each node, of those bound to one CPU."""
    by_node: Counter[int] = Counter()
    for task in (host.root / "proc" / pid / "task").glob("[0-9]*"):
        allowed = host.words(f"proc/{pid}/task/{task.name}/status").get("Cpus_allowed_list", "")
        try:
            cpus = cpus_of(parse_list(allowed))
        except ValueError:
            continue
        if len(cpus) == 1:
            by_node.update(node for node, own in nodes.items() if cpus[0] in own)
    return dict(by_node)
