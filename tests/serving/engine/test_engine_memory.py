"""Memory of an engine before it is open, and what malloc has given out."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import replace

import pytest

from phasewise.serving.engine.engine_size import (
    VOCABULARY_BYTES_A_TOKEN,
    EngineSize,
    engine_bytes,
    program_bytes,
)
from phasewise.serving.loaders import load_model
from phasewise.serving.models.forward import Capacity, build_program, kv_bytes_per_slot
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.pools.contract import ALIGNMENT
from phasewise.serving.processes.headroom import malloc_bytes_in_use
from phasewise.serving.ranks.rank_layout import teams_of
from phasewise.topology import read_machine
from phasewise.tuner.plans import PHASES, RankCores, ServicePlan, default_plan
from tests.support.engine_sizes import engine_size
from tests.support.models.tiny_models import write_tiny_gguf

PLANS = {phase: default_plan(read_machine(), phase) for phase in PHASES}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    folder = tmp_path_factory.mktemp("model")
    return load_model(str(write_tiny_gguf(folder / "m.gguf", "llama", {})), "native", folder)


@pytest.mark.parametrize("capacity", [Capacity(128, 16, 1, 1, 1), Capacity(1024, 64, 8, 8, 2)])
def test_bytes_of_a_program_are_those_that_it_runs_in(model: PackedModel, capacity: Capacity) -> None:
    assert program_bytes(model, capacity) == build_program(model, capacity).bytes()


def test_each_part_is_counted(model: PackedModel) -> None:
    size = EngineSize.for_many(model, 4, None, 1 << 20)
    alone = engine_bytes(model, PLANS, size, None)
    vocabulary = VOCABULARY_BYTES_A_TOKEN * model.config.vocab_size

    assert alone > model.weight_bytes + (1 << 19) + vocabulary
    assert engine_bytes(model, PLANS, size, model) == 2 * alone
    (rank,) = PLANS["prefill"].ranks
    other = replace(rank, cores=tuple(1000 + core for core in rank.cores))
    twice = {phase: replace(plan, ranks=(rank, other)) for phase, plan in PLANS.items()}
    assert alone < engine_bytes(model, twice, size, None) < 2 * alone


def test_copies_of_heads_that_ranks_share_are_counted(model: PackedModel) -> None:
    """By the size, whose slots fit the same budget, and by the memory that is told: two KV heads, 2 to 4
    ranks.
    """
    of_one = kv_bytes_per_slot(model)
    plans = {
        n: {phase: ServicePlan(phase, tuple(RankCores((cpu,)) for cpu in range(n))) for phase in PHASES}
        for n in (2, 3, 4)
    }
    assert (model.config.n_heads, model.config.n_kv_heads) == (4, 2)
    bytes_of = {n: engine_bytes(model, own, engine_size(256, 512, 2), None) for n, own in plans.items()}
    grows = [bytes_of[3] - bytes_of[2], bytes_of[4] - bytes_of[3]]
    scratch = grows[0] - 512 * of_one // 2
    assert grows[0] == grows[1]
    assert 0 < scratch < bytes_of[2] - model.weight_bytes
    for n, own in plans.items():
        teams = teams_of(own)
        size = EngineSize.for_many(model, 64, 256, 2 << 20, teams=teams)
        assert kv_bytes_per_slot(model, teams=teams) == of_one * n // 2
        assert (2 << 20) - ALIGNMENT * of_one * n < size.kv.slots * of_one * n // 2 <= 2 << 20


glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc's malloc, or too old"
)
_ASK = """
import ctypes, threading
from phasewise.serving.processes.headroom import use_one_heap

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
"""
_THREAD = """
{first}
found = []
thread = threading.Thread(target=lambda: found.append(libc.malloc(1000)))
thread.start()
thread.join()
with open("/proc/self/maps") as lines:
    heap = next(line.split()[0] for line in lines if "[heap]" in line)
first, last = (int(end, 16) for end in heap.split("-"))
print(first <= found[0] < last)
"""


def _told(script: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", _ASK + script], capture_output=True, text=True, check=True, timeout=60
    )
    return ran.stdout.strip()


@glibc
def test_threads_allocate_from_the_one_heap() -> None:
    assert _told(_THREAD.format(first="use_one_heap()")) == "True"
    assert _told(_THREAD.format(first="")) == "False"  # what the system would do


@glibc
@pytest.mark.parametrize(("n_bytes", "count"), [(100, 10_000), (50_000, 100), (40 << 20, 3)])
def test_bytes_in_use_are_those_given_out(n_bytes: int, count: int) -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    before = malloc_bytes_in_use()
    held = [libc.malloc(n_bytes) for _ in range(count)]
    after = malloc_bytes_in_use()
    for place in held:
        libc.free(place)
    assert before is not None
    assert after is not None
    assert 0.9 * count * n_bytes <= after - before <= 1.3 * count * n_bytes + 65536
