"""The machines of the Sandwich paper (sections 3.3 and 8.1), built from facts that lscpu and data sheets
state, and what a modelled evaluator needs to know of them.

Rates are assumptions of the right size, from data sheets; no such machine was measured. Those of the
Kunpeng's tag arrays and of its slower nodes were chosen so that the paper's Fig. 3 (a) can happen at all:
that its orderings come out shows the mechanism at work, and predicts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from phasewise.topology import Cpu, Kind, Machine, Node
from phasewise.tuner.config.rates import MachineRates
from phasewise.tuner.config.sharing import HiddenResource
from phasewise.tuner.config.steps import ModelShape

Level = tuple[Kind, int]
"""A kind, and how many of it each node of the level outside it has."""


def build(
    source: str, levels: Sequence[Level], threads_a_core: int = 1, architecture: str = "x86_64"
) -> Machine:
    """A symmetric machine. Second PUs of cores are numbered after all first ones, as Linux does."""
    cores = 1
    for _, arity in levels:
        cores *= arity
    indices = {kind: count() for kind, _ in levels}
    tree = _node(Kind.MACHINE, None, levels, indices, (cores, threads_a_core))
    cpu = Cpu(architecture=architecture, name=source)
    return Machine(source, tree, cpu, tuple(range(cores * threads_a_core)))


def _node(
    kind: Kind,
    index: int | None,
    inside: Sequence[Level],
    indices: dict[Kind, count[int]],
    cores_and_threads: tuple[int, int],
) -> Node:
    if kind is Kind.CORE and index is not None:
        cores, threads = cores_and_threads
        pus = tuple(index + cores * turn for turn in range(threads))
        return Node(kind, index, pus, children=tuple(Node(Kind.PU, pu, (pu,)) for pu in pus))
    (child, arity), *rest = inside
    children = tuple(
        _node(child, next(indices[child]), rest, indices, cores_and_threads) for _ in range(arity)
    )
    cpus = tuple(sorted(pu for child in children for pu in child.cpus))
    return Node(kind, index, cpus, children=children)


def kunpeng() -> Machine:
    """4x Kunpeng 920 5250: 8 NUMA nodes of 24 cores and one L3 each; no level shows the clusters of 4."""
    levels = ((Kind.PACKAGE, 4), (Kind.NUMA, 2), (Kind.L3, 1), (Kind.CORE, 24))
    return build("4x Kunpeng 920", levels, architecture="aarch64")


def epyc(threads_a_core: int = 2) -> Machine:
    """2x EPYC 7H12, one NUMA node a package (NPS1): 16 L3s of 4 cores in each."""
    levels = ((Kind.PACKAGE, 2), (Kind.NUMA, 1), (Kind.L3, 16), (Kind.CORE, 4))
    return build("2x EPYC 7H12", levels, threads_a_core)


def xeon(threads_a_core: int = 1) -> Machine:
    """2x Xeon Gold 6230: one NUMA node and one L3 of 20 cores in each package."""
    levels = ((Kind.PACKAGE, 2), (Kind.NUMA, 1), (Kind.L3, 1), (Kind.CORE, 20))
    return build("2x Xeon Gold 6230", levels, threads_a_core)


def tag_clusters(machine: Machine, cores: int = 4) -> tuple[tuple[int, ...], ...]:
    """The PUs of every `cores` neighbouring cores: what shares an LLC tag array on a Kunpeng 920."""
    of_cores = machine.allowed_cores()
    groups = (of_cores[start : start + cores] for start in range(0, len(of_cores), cores))
    return tuple(tuple(pu for core in group for pu in core) for group in groups)


def kunpeng_rates() -> MachineRates:
    """NEON at 2.6 GHz; four channels of DDR4-2933 a node; the nodes of packages 2 and 3 are slower."""
    return MachineRates(
        flops_per_core=40e9,
        core_read_bytes_per_s=7e9,
        l3_read_bytes_per_s=None,
        numa_read_bytes_per_s=90e9,
        node_share=dict.fromkeys((4, 5, 6, 7), 0.75),
    )


def kunpeng_tags(machine: Machine) -> tuple[HiddenResource, ...]:
    """Three cores of four saturate a cluster's tag array, the fourth costs three tenths of it: with all cores
    active, the tag arrays of a node serve less than its memory. Many requests fit into it at a time, so
    where a request takes longer it serves fewer (Little's law).
    """
    shares = kunpeng_rates().node_share
    nodes = {pu: node.os_index or 0 for node in machine.nodes(Kind.NUMA) for pu in node.cpus}
    return tuple(
        HiddenResource(pus, 15.0 * shares.get(nodes[pus[0]], 1.0), 0.3) for pus in tag_clusters(machine)
    )


def epyc_rates() -> MachineRates:
    """AVX2 at 2.6 GHz; eight channels of DDR4-3200 a node; what a CCX's port to the fabric takes."""
    return MachineRates(
        flops_per_core=83e9, core_read_bytes_per_s=14e9, l3_read_bytes_per_s=30e9, numa_read_bytes_per_s=160e9
    )


def llama_2_7b() -> ModelShape:
    """In bf16; as many KV heads as heads, so that up to 32 ranks may divide it."""
    shape = {"n_layers": 32, "hidden": 4096, "n_heads": 32, "n_kv_heads": 32, "head_dim": 128}
    weights = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 4096 * 32000
    return ModelShape(
        "llama-2-7b",
        **shape,
        ffn=11008,
        vocab=32000,
        weight_bytes=2 * weights,
        kv_bytes_per_slot=2 * 32 * 2 * 4096,
    )
