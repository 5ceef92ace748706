"""Export of service plans as flags of other tools: llama.cpp, vLLM, and whatever runs under a launcher.

Few tools can express a whole plan. Each emitter prints the closest flags of its tool, and a note for
everything that is lost: ranks where there is one process, a phase where there is one set of cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from phasewise._words import counted
from phasewise.topology import Kind, Machine
from phasewise.tuner.errors import PlanError
from phasewise.tuner.plans import Phase, RankCores, ServicePlan, list_cores

Plans = Mapping[Phase, ServicePlan]

LLAMA_CPP_FLAGS: Mapping[Phase, tuple[str, str, str]] = MappingProxyType(
    {"decode": ("-t", "-C", "--cpu-strict"), "prefill": ("-tb", "-Cb", "--cpu-strict-batch")}
)
"""llama.cpp's flags for the number of threads, the CPU mask, and pinning each thread to one CPU."""

LLAMA_CPP_MAX_CPUS = 512
"""The number of CPUs that llama.cpp's masks can name (GGML_MAX_N_THREADS)."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """The flags for a tool, and notes, a line each, on parts of the plan that the tool cannot express."""

    text: str
    notes: tuple[str, ...] = ()


def emit(tool: str, plans: Plans, machine: Machine) -> Emitted:
    """The plans of `machine` as flags of one of `TOOLS`. PlanError for no plans, or an unknown tool."""
    if tool not in TOOLS:
        raise PlanError(f"plans are printed for {', '.join(TOOLS)}, not for {tool!r:.40}")
    if not plans:
        raise PlanError("there is no plan to print: find one with tune-config")
    emitted = TOOLS[tool](plans, machine)
    bands = tuple(
        f"{tool} has one set of cores for every load: left out is what decode has from"
        f" {' and '.join(map(str, plan.starts))} sequences on"
        for plan in plans.values()
        if plan.bands
    )
    return replace(emitted, notes=emitted.notes + bands)


def cpu_mask(pus: tuple[int, ...]) -> str:
    """The PUs as a bit mask in hexadecimal."""
    return hex(sum(1 << pu for pu in set(pus)))


# ---- tools that know both phases ---------------------------------------------------------------------------


def _llama_cpp(plans: Plans, machine: Machine) -> Emitted:
    """llama.cpp's flags: one set for generation and one for batches."""
    flags, notes = [], []
    for phase, (threads, mask, strict) in LLAMA_CPP_FLAGS.items():
        if phase not in plans:
            continue
        cores, n_ranks = plans[phase].cores, len(plans[phase].ranks)
        if max(cores) >= LLAMA_CPP_MAX_CPUS:
            raise PlanError(
                f"llama.cpp has masks of {LLAMA_CPP_MAX_CPUS} CPUs: CPU {max(cores)} is not in them"
            )
        flags += [threads, str(len(cores)), mask, cpu_mask(cores), strict, "1"]
        if len(cores) == 1:
            notes.append(
                f"llama.cpp built with OpenMP pins no thread that is alone, as in {phase}: "
                "build it with -DGGML_OPENMP=OFF"
            )
        if n_ranks > 1:
            notes.append(
                f"llama.cpp is one process: {counted(n_ranks, 'rank')} of {phase} become"
                f" {counted(len(cores), 'thread')}"
            )
    nodes = _nodes_of(machine, {pu for plan in plans.values() for pu in plan.cores})
    if len(nodes) > 1:
        listed = ",".join(map(str, nodes))
        notes.append(f"--numa would undo the masks: put `numactl --interleave={listed}` before the command")
    return Emitted(" ".join(flags), tuple(notes))


def _kubernetes(plans: Plans, machine: Machine) -> Emitted:
    """A Guaranteed pod with whole CPUs, as the static CPU manager requires."""
    cores = {pu for plan in plans.values() for pu in plan.cores}
    taken = [core for core in machine.nodes(Kind.CORE) if cores & set(core.cpus)]
    n_cpus = sum(len(core.cpus) for core in taken)
    nodes = _nodes_of(machine, cores)
    options = "full-pcpus-only=true" + (",distribute-cpus-across-numa=true" if len(nodes) > 1 else "")
    topology = "single-numa-node" if len(nodes) == 1 else "best-effort"
    notes = [
        f"kubernetes gives {n_cpus} whole CPUs but chooses which: the plan's are {list_cores(sorted(cores))}"
    ]
    if n_cpus > len(cores):
        notes.append("whole cores are asked for, of which the plan leaves some threads resting")
    text = POD.format(n_cpus=n_cpus, options=options, topology=topology)
    return Emitted(text, tuple(notes))


POD = """\
# kubelet: --cpu-manager-policy=static --cpu-manager-policy-options={options}
#          --topology-manager-policy={topology}
apiVersion: v1
kind: Pod
metadata:
  name: phasewise
spec:
  containers:
    - name: phasewise
      image: IMAGE
      args: ["serve", "MODEL"]
      resources:  # requests equal to limits and whole CPUs: a Guaranteed pod, pinned by the kubelet
        requests: {{cpu: "{n_cpus}", memory: 8Gi}}  # memory: the weights, the KV cache and 1 GiB
        limits: {{cpu: "{n_cpus}", memory: 8Gi}}"""


# ---- tools with one set of cores for both phases -----------------------------------------------------------


def _vllm(plans: Plans, machine: Machine) -> Emitted:
    """vLLM's lists of CPUs, one for every rank."""
    plan, notes = _one_plan(plans, "vLLM")
    lists = "|".join(list_cores(sorted(rank.cores)) for rank in plan.ranks)
    text = f"env VLLM_CPU_OMP_THREADS_BIND='{lists}' vllm serve --tensor-parallel-size {len(plan.ranks)}"
    return Emitted(text, notes)


def _numactl(plans: Plans, machine: Machine) -> Emitted:
    plan, notes = _one_plan(plans, "numactl")

    def line(rank: RankCores) -> str:
        nodes = _nodes_of(machine, set(rank.cores))
        memory = ""
        if len(_memory_nodes(machine)) > 1:
            listed = ",".join(map(str, nodes))
            memory = f" --{'membind' if len(nodes) == 1 else 'interleave'}={listed}"
        return f"numactl --physcpubind={list_cores(sorted(rank.cores))}{memory}"

    return Emitted(_lines(plan, line), notes + _one_process_each(plan))


def _taskset(plans: Plans, machine: Machine) -> Emitted:
    plan, notes = _one_plan(plans, "taskset")
    text = _lines(plan, lambda rank: f"taskset --cpu-list {list_cores(sorted(rank.cores))}")
    return Emitted(text, notes + _one_process_each(plan))


def _openmp(plans: Plans, machine: Machine) -> Emitted:
    """OpenMP's variables, with one place for every thread, so that no thread moves."""
    plan, notes = _one_plan(plans, "OpenMP")

    def line(rank: RankCores) -> str:
        places = ",".join(f"{{{pu}}}" for pu in sorted(rank.cores))
        return f"env OMP_NUM_THREADS={len(rank.cores)} OMP_PLACES='{places}' OMP_PROC_BIND=close"

    return Emitted(_lines(plan, line), notes + _one_process_each(plan))


def _one_plan(plans: Plans, tool: str) -> tuple[ServicePlan, tuple[str, ...]]:
    """The plan for a tool that takes one: decode's if any, since decode takes most of a request's time."""
    chosen = plans.get("decode") or next(iter(plans.values()))
    other = plans.get("prefill")
    if other is None or other.ranks == chosen.ranks:
        return chosen, ()
    return chosen, (
        f"{tool} has one set of cores for both phases: these are decode's (--phase prefill prints the other)",
    )


def _one_process_each(plan: ServicePlan) -> tuple[str, ...]:
    n = len(plan.ranks)
    return (
        ()
        if n == 1
        else (f"{counted(n, 'rank')}, {counted(n, 'process')}: a line for each, to put before its command",)
    )


def _lines(plan: ServicePlan, line: Callable[[RankCores], str]) -> str:
    return "\n".join(map(line, plan.ranks))


def _memory_nodes(machine: Machine) -> list[int]:
    return [node.os_index for node in machine.nodes(Kind.NUMA) if node.cpus and node.os_index is not None]


def _nodes_of(machine: Machine, pus: set[int]) -> list[int]:
    """The NUMA nodes that hold any of the PUs."""
    nodes = (node for node in machine.nodes(Kind.NUMA) if pus & set(node.cpus))
    return [node.os_index for node in nodes if node.os_index is not None]


TOOLS: Mapping[str, Callable[[Plans, Machine], Emitted]] = MappingProxyType(
    {
        "llama.cpp": _llama_cpp,
        "vllm": _vllm,
        "numactl": _numactl,
        "taskset": _taskset,
        "openmp": _openmp,
        "kubernetes": _kubernetes,
    }
)
"""The emitter of each tool's flags."""
