"""Pages of weights, keys, values and scratch lie where plans want them; tokens are the same everywhere."""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import mmap
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from phasewise.cython_kernels._native import bytes_by_node, place_on_nodes
from phasewise.cython_kernels.division import head_share
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import ModelConfig, PackedModel
from phasewise.serving.ranks.open_ranks import KvSettings, LocalRanks, RankOptions, Ranks, open_ranks
from phasewise.serving.ranks.process_ranks import ProcessRanks
from phasewise.serving.ranks.rank_layout import RankLayout
from phasewise.serving.ranks.shared_weights import panels_by_node
from phasewise.topology import Kind, read_machine
from phasewise.tuner.doctor import Host
from phasewise.tuner.doctor.memory import computing_processes
from phasewise.tuner.plans import PHASES, Phase, ServicePlan, rank_on
from phasewise.workflows.opening.memory_placement import place
from tests.numa.checks import Figures, check
from tests.numa.inside.topology_checks import switch_on
from tests.numa.machines import EIGHTY_CPUS, FOUR_NODES, MEMORY_ONLY, NO_MEMORY

MODEL = "MODEL"
"""The variable that names the file of a model, which four ranks divide by KV heads."""
SHARED = "SHARED"
"""The same of one with fewer KV heads than nodes."""
LAYERS = "LAYERS"
"""The same of one of which a rank's share of a weight has few pages."""

PROMPT = [5, 7, 11, 13, 2, 3, 40, 41]
N_STEPS = 4
KV = KvSettings(2048, touched=True)
LEAST_LOCAL = 0.95
MOST_UNEVEN = 0.10
MOST_MEMORY = 1.1
RELEASED_WITHIN_S = 60.0
"""A thread may hold what is closed until its next turn."""

Cores = tuple[tuple[int, ...], ...]


@functools.cache
def model(name: str = MODEL) -> PackedModel:
    return load_model(os.environ[name], "native")


def plans(cores: Cores) -> dict[Phase, ServicePlan]:
    """Of both phases, a rank on each of these sets of cores."""
    machine = read_machine()
    return {phase: ServicePlan(phase, tuple(rank_on(machine, own) for own in cores)) for phase in PHASES}


@contextmanager
def running(cores: Cores, name: str = MODEL) -> Iterator[Ranks]:
    """Ranks that have computed, all of their memory touched, and none of a check before."""
    until_s = time.monotonic() + RELEASED_WITHIN_S
    while left := numa_maps("self", "memfd:phasewise-weights"):
        gc.collect()
        assert time.monotonic() < until_s, left
        time.sleep(0.05)
    ranks = open_ranks(model(name), plans(cores), RankOptions(KV, 64, 2))
    try:
        yield ranks
    finally:
        ranks.close()


def tokens(ranks: Ranks) -> list[int]:
    """Greedy ones after the prompt."""
    logits = ranks.forward(Batch("prefill", (SequenceSlice(PROMPT, 0, 0, True),)))
    chosen = [int(logits[0].argmax())]
    for position in range(len(PROMPT), len(PROMPT) + N_STEPS - 1):
        step = SequenceSlice([chosen[-1]], position, 0, True)
        chosen.append(int(ranks.forward(Batch("decode", (step,)))[0].argmax()))
    return chosen


@functools.cache
def tokens_of_one(name: str = MODEL) -> list[int]:
    """Those of one thread, whose memory lies where the system puts it."""
    with running(((0,),), name) as ranks:
        return tokens(ranks)


def numa_maps(pid: int | str, name: str) -> dict[int, int]:
    """Bytes by node of what a process has touched in files of this name, and in its own pages among them."""
    by_node, is_within = Counter[int](), False
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        is_within = name in line or (is_within and "file=" not in line and "anon=1 " in line)
        if is_within:
            size = re.search(r"kernelpagesize_kB=(\d+)", line)
            for node, pages in re.findall(r"\bN(\d+)=(\d+)", line):
                by_node[int(node)] += int(pages) * 1024 * (int(size[1]) if size else 4)
    return dict(by_node)


def share_on(by_node: Mapping[int, int], node: int) -> float:
    return by_node.get(node, 0) / max(1, sum(by_node.values()))


def unevenness(by_node: Mapping[int, int], nodes: tuple[int, ...]) -> float:
    """The most by which a node has more or less than an equal share, as a share of that."""
    due = sum(by_node.values()) / len(nodes)
    return max(abs(by_node.get(node, 0) - due) / due for node in {*nodes, *by_node})


def _kv_by_rank(ranks: ProcessRanks, n_ranks: int, config: ModelConfig) -> list[Counter[int]]:
    """Bytes by node of the keys and values that each rank reads, as this process maps them."""
    program, memory = ranks.first_rank.program, ranks._step_memory.memory
    np.frombuffer(memory, np.uint8)[::4096].sum()  # maps every page here
    by_rank: list[Counter[int]] = [Counter() for _ in range(n_ranks)]
    for layer in range(config.n_layers):
        for rank in range(n_ranks):
            own = head_share(config.n_heads, config.n_kv_heads, [1] * n_ranks, rank)
            for head in range(own.begin, own.end):
                offset, n_bytes = program.kv_span(layer, head, own.copy)
                by_node = bytes_by_node(memory, offset, offset + n_bytes)
                assert by_node is not None
                by_rank[rank].update(by_node)
    return by_rank


def _assert_ranks_are_local(nodes: tuple[int, ...], name: str = MODEL) -> Figures:
    """A rank on each of these nodes, both of its cores."""
    by_node = {node.os_index: node.cpus for node in read_machine().nodes(Kind.NUMA)}
    cores, wanted = tuple(by_node[node] for node in nodes), tokens_of_one(name)
    own_model = model(name)
    with running(cores, name) as ranks:
        assert isinstance(ranks, ProcessRanks)
        assert tokens(ranks) == wanted
        pids = {0: os.getpid(), **ranks.pids}
        weights = [numa_maps(pids[rank], "memfd:phasewise-weights") for rank in range(len(nodes))]
        kv = _kv_by_rank(ranks, len(nodes), own_model.config)
        scratch = ranks.first_rank.program.memory_by_node()["scratch"]
        observed = ranks.observed_cpus()
        seen = {own.pid for own in computing_processes(Host(Path("/"), read_machine()))}
        assert seen == set(pids.values()), "doctor sees each rank"
        held = sum(sum(own.values()) for own in weights)
    figures: Figures = {
        "weights": [round(share_on(own, node), 3) for own, node in zip(weights, nodes, strict=True)],
        "kv": [round(share_on(own, node), 3) for own, node in zip(kv, nodes, strict=True)],
        "scratch of rank 0": round(share_on(scratch or {}, nodes[0]), 3),
        "weights over model": round(held / own_model.weight_bytes, 3),
        "page cache over model": round(_page_cache(name) / own_model.weight_bytes, 3),
    }
    assert min(figures["weights"]) >= LEAST_LOCAL, (figures, weights)
    assert min(figures["kv"]) >= LEAST_LOCAL, (figures, kv)
    assert held + _page_cache(name) <= MOST_MEMORY * own_model.weight_bytes, figures
    _assert_told(cores, sum(map(Counter, weights), Counter()), name)
    assert observed["decode"] == tuple(cpu for node in nodes for cpu in by_node[node])
    return figures


def _assert_told(cores: Cores, by_node: Mapping[int, int], name: str = MODEL) -> None:
    """`--explain` tells the bytes of each node within a tenth."""
    told = place(model(name), RankLayout.here(plans(cores)))
    assert told is not None
    assert set(told.bytes_by_node) <= set(by_node)
    for node, n_bytes in told.bytes_by_node.items():
        assert abs(by_node[node] - n_bytes) <= MOST_UNEVEN * n_bytes, (told, by_node)


def _page_cache(name: str = MODEL) -> int:
    """Bytes of the model's file that the system still keeps, as this process would map them."""
    file = model(name).file
    assert file is not None
    pages = -(-file.n_bytes // 4096)
    resident = (ctypes.c_ubyte * pages)()
    assert (
        ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(file.address), ctypes.c_size_t(file.n_bytes), resident
        )
        == 0
    )
    return sum(page & 1 for page in resident) * 4096


@check(FOUR_NODES.name)
def three_ranks_are_local() -> Figures:
    return _assert_ranks_are_local((0, 1, 3))


@check(FOUR_NODES.name)
def four_ranks_are_local() -> Figures:
    return _assert_ranks_are_local((0, 1, 2, 3))


@check(FOUR_NODES.name)
def four_ranks_that_share_kv_heads_are_local() -> Figures:
    return _assert_ranks_are_local((0, 1, 2, 3), SHARED)


@check(FOUR_NODES.name)
def four_ranks_of_small_layers_are_local() -> Figures:
    return _assert_ranks_are_local((0, 1, 2, 3), LAYERS)


def _assert_one_rank_lies_on(cores: tuple[int, ...], nodes: tuple[int, ...]) -> Figures:
    before = numa_maps("self", "")
    wanted = tokens_of_one()
    with running((cores,)) as ranks:
        assert isinstance(ranks, LocalRanks)
        assert tokens(ranks) == wanted
        gained = Counter(numa_maps("self", ""))
        gained.subtract(before)
        program = ranks.program.memory_by_node()
        weights = _weights_by_node(ranks)
        observed = ranks.observed_cpus()["decode"]
    kv = program["kv"] or {}
    figures: Figures = {
        "weights": weights,
        "kv": kv,
        "rows": program["rows"],
        "scratch": program["scratch"],
        "gained over model": round(sum(gained.values()) / model().weight_bytes, 3),
    }
    assert unevenness(weights, nodes) <= MOST_UNEVEN, figures
    assert unevenness(kv, nodes) <= MOST_UNEVEN, figures
    assert sum(weights.values()) + _page_cache() <= MOST_MEMORY * model().weight_bytes, figures
    _assert_told((cores,), weights)
    assert observed == cores
    return figures


def _weights_by_node(ranks: LocalRanks) -> dict[int, int]:
    by_node = panels_by_node(ranks._model.weights, None)
    assert by_node is not None
    return dict(by_node)


@check(FOUR_NODES.name)
def one_rank_lies_on_all_nodes_by_turns() -> Figures:
    return _assert_one_rank_lies_on(tuple(range(8)), (0, 1, 2, 3))


@check(FOUR_NODES.name)
def one_rank_lies_on_its_node() -> Figures:
    return _assert_one_rank_lies_on((4, 5), (2,))


@check(MEMORY_ONLY.name)
def memory_without_cpus_is_left_alone() -> Figures:
    return _assert_one_rank_lies_on((0, 1, 2, 3), (0, 1))


@check(NO_MEMORY.name)
def cores_without_memory_use_the_nearest() -> Figures:
    return _assert_one_rank_lies_on((4, 5), (1,))


@check(EIGHTY_CPUS.name)
def many_cores_with_holes_answer() -> Figures:
    switch_on()
    machine = read_machine()
    cores = tuple(core[0] for core in machine.allowed_cores())
    return _assert_one_rank_lies_on(cores, (0, 1))


@check(FOUR_NODES.name)
def a_full_node_is_told_and_answers() -> Figures:
    wanted = tokens_of_one()
    filled = _fill(2)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("phasewise").addHandler(handler)
    try:
        with running(((4, 5),)) as ranks:
            assert tokens(ranks) == wanted
    finally:
        logging.getLogger("phasewise").removeHandler(handler)
        for memory in filled:
            memory.close()
    assert any("found no room on NUMA node 2" in line for line in said), said
    return {"said": said}


def _fill(node: int) -> list[mmap.mmap]:
    """Memory that leaves less of a node than the model takes."""
    chunk, filled = 4 << 20, list[mmap.mmap]()
    while _free_bytes(node) > model().weight_bytes // 2:
        memory = mmap.mmap(-1, chunk, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        assert place_on_nodes(memory, 0, chunk, (node,)) == 0
        memory[:: mmap.PAGESIZE] = b"x" * (chunk // mmap.PAGESIZE)
        if share_on(bytes_by_node(memory, 0, chunk) or {}, node) < LEAST_LOCAL:
            return filled
        filled.append(memory)
    return filled


def _free_bytes(node: int) -> int:
    text = Path(f"/sys/devices/system/node/node{node}/meminfo").read_text()
    free = re.search(r"MemFree:\s+(\d+) kB", text)
    assert free is not None
    return int(free[1]) << 10
