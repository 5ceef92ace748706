"""ProcessRanks: several ranks compute what one computes, and none is left behind, however it ends."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.errors import RanksError, ServingError
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks import worker_processes
from phasewise.serving.ranks.open_ranks import KvSettings, LocalRanks, RankOptions, Ranks, open_ranks
from phasewise.serving.ranks.process_ranks import ProcessRanks
from phasewise.tuner.plans import PHASES, Phase, RankCores, ServicePlan
from tests.support import ROOT
from tests.support.models.reference_forward import tiny_config, tiny_model
from tests.support.models.tiny_models import TinyShape, tiny_gguf
from tests.support.servers.rude_clients import until

Teams = tuple[int, ...]

PROMPT = [5, 7, 11, 13, 2, 3, 40, 41]
BOUND_S = 60.0
"""More than any wait after a death may take, on a machine that does other things."""

ONE: Teams = (1,)
TWO: Teams = (1, 1)
DIVISIONS: list[tuple[Teams, Teams]] = [
    *((TWO, TWO), (ONE, TWO), (TWO, (2,)), ((2, 1), (1, 1, 2))),
    *(((1,) * 4, (1,) * 4), (ONE, (1,) * 5)),  # three KV heads are shared
]


def plans(prefill: Teams, decode: Teams, nodes: tuple[int | None, ...] = ()) -> dict[Phase, ServicePlan]:
    """Ranks with N threads each, on any cores: they are opened unpinned."""
    by_phase: dict[Phase, ServicePlan] = {}
    for phase, sizes in zip(PHASES, (prefill, decode), strict=True):
        firsts = [sum(sizes[:rank]) for rank in range(len(sizes))]
        cores = [tuple(range(first, first + size)) for first, size in zip(firsts, sizes, strict=True)]
        ranks = [RankCores(own, nodes[rank] if nodes else None) for rank, own in enumerate(cores)]
        by_phase[phase] = ServicePlan(phase, tuple(ranks))
    return by_phase


def opened(model: PackedModel, prefill: Teams, decode: Teams, nodes: tuple[int | None, ...] = ()) -> Ranks:
    return open_ranks(
        model, plans(prefill, decode, nodes), RankOptions(KvSettings(700), 100, 3, pinned=False)
    )


def token_by_token(ranks: Ranks, phases: tuple[Phase, ...], n_tokens: int = 12) -> np.ndarray:
    """Logits of a prompt and of greedy tokens after it, each computed in the next of `phases`."""
    rows = [ranks.forward(Batch("prefill", (SequenceSlice(PROMPT, 0, 16, True),))).copy()]
    for i in range(n_tokens):
        last = int(rows[-1][0].argmax())
        step = SequenceSlice([last], len(PROMPT) + i, 16, True)
        rows.append(ranks.forward(Batch(phases[i % len(phases)], (step,))).copy())
    return np.concatenate(rows)


def greedy(logits: np.ndarray) -> list[int]:
    ids: list[int] = logits.argmax(axis=1).tolist()
    return ids


def alive(pid: int) -> bool:
    """True if a process runs; an ended one that is not reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def shared_mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "phasewise-" in line]


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


@pytest.fixture(scope="module")
def eight_heads(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    """Mapped from a packed file, as models of users are."""
    folder = tmp_path_factory.mktemp("eight")
    shape = TinyShape(hidden=128, ffn=224, n_heads=16, n_kv_heads=8)
    (folder / "eight.gguf").write_bytes(tiny_gguf(types="Q8_0", shape=shape).to_bytes())
    return load_model(str(folder / "eight.gguf"), "native", folder / "cache")


@pytest.fixture(scope="module")
def three_heads() -> PackedModel:
    """Arrays of this process: no file stands behind them. Neither heads nor panels divide by two."""
    return tiny_model(tiny_config(n_heads=9, n_kv_heads=3, hidden=144, ffn=176))


@pytest.fixture(scope="module")
def one_rank(eight_heads: PackedModel, three_heads: PackedModel) -> Mapping[str, np.ndarray]:
    wanted = {}
    for name, model in (("eight_heads", eight_heads), ("three_heads", three_heads)):
        ranks = opened(model, ONE, ONE)
        assert isinstance(ranks, LocalRanks)
        wanted[name] = token_by_token(ranks, ("decode",))
        ranks.close()
    return wanted


@pytest.fixture
def two(three_heads: PackedModel) -> Iterator[ProcessRanks]:
    ranks = opened(three_heads, ONE, TWO)
    assert isinstance(ranks, ProcessRanks)
    yield ranks
    ranks.close()


@pytest.mark.many
@pytest.mark.parametrize("model_name", ["eight_heads", "three_heads"])
@pytest.mark.parametrize(("prefill", "decode"), DIVISIONS)
def test_no_division_changes_a_bit(
    model_name: str,
    prefill: Teams,
    decode: Teams,
    one_rank: Mapping[str, np.ndarray],
    request: pytest.FixtureRequest,
) -> None:
    """Nor does the phase that computes a token, if it changes with every one."""
    ranks = opened(request.getfixturevalue(model_name), prefill, decode)
    try:
        steady = token_by_token(ranks, ("decode",))
        switching = token_by_token(ranks, ("decode", "prefill"))
    finally:
        ranks.close()

    assert greedy(steady) == greedy(switching) == greedy(one_rank[model_name])
    assert (steady == one_rank[model_name]).all()
    assert (switching == one_rank[model_name]).all()


def test_every_row_and_copied_slots_are_those_of_one_rank(
    three_heads: PackedModel, two: ProcessRanks
) -> None:
    local = opened(three_heads, ONE, ONE)
    batch = Batch("prefill", (SequenceSlice(PROMPT, 0, 0, False), SequenceSlice(PROMPT[:3], 0, 100, True)))
    every_row = [ranks.all_logits(batch) for ranks in (local, two)]
    for ranks in (local, two):
        ranks.copy_kv(0, 200, len(PROMPT))
    after = Batch("decode", (SequenceSlice([1], len(PROMPT), 200, True),))

    assert (every_row[0] == every_row[1]).all()
    assert (local.forward(after) == two.forward(after)).all()
    local.close()


# ---- deaths ----------------------------------------------------------------------------------------------


def test_a_rank_killed_in_the_middle_of_a_step_ends_it(two: ProcessRanks) -> None:
    """The rank is stopped first, so that the step certainly waits for it."""
    token_by_token(two, ("decode",), 2)
    (pid,) = two.pids.values()
    os.kill(pid, signal.SIGSTOP)
    errors: list[Exception] = []

    def step() -> None:
        try:
            token_by_token(two, ("decode",), 2)
        except Exception as error:
            errors.append(error)

    stepping = threading.Thread(target=step)
    stepping.start()
    stepping.join(0.2)
    assert stepping.is_alive()
    os.kill(pid, signal.SIGKILL)
    stepping.join(BOUND_S)

    assert not stepping.is_alive()
    assert isinstance(errors[0], RanksError)
    assert "\n" not in str(errors[0])
    assert str(errors[0]).startswith(f"rank 1 (pid {pid}) was killed by SIGKILL")
    with pytest.raises(RanksError, match="was killed by SIGKILL"):
        two.forward(Batch("decode", (SequenceSlice([1], 0, 0, True),)))
    two.close()
    assert not alive(pid)


def test_one_dead_rank_takes_the_others_along(three_heads: PackedModel) -> None:
    ranks = opened(three_heads, ONE, (1, 1, 1))
    assert isinstance(ranks, ProcessRanks)
    pids = ranks.pids
    os.kill(pids[2], signal.SIGABRT)

    until(lambda: not any(map(alive, pids.values())), "they live on")
    with pytest.raises(RanksError, match=rf"rank 2 \(pid {pids[2]}\) was killed by SIGABRT"):
        token_by_token(ranks, ("decode",), 1)
    ranks.close()


def test_nothing_is_left_after_closing(three_heads: PackedModel) -> None:
    gc.collect()
    before, mapped = descriptors(), len(shared_mappings())
    ranks = opened(three_heads, TWO, TWO)
    assert isinstance(ranks, ProcessRanks)
    pids = ranks.pids.values()
    logits = ranks.forward(Batch("prefill", (SequenceSlice(PROMPT, 0, 0, True),)))
    kept = logits.copy()
    ranks.close()
    ranks.close()

    assert not any(map(alive, pids))
    assert (logits == kept).all()
    with pytest.raises(RanksError, match="closed"):
        ranks.forward(Batch("prefill", (SequenceSlice([1], 0, 0, True),)))
    del logits
    gc.collect()
    assert len(shared_mappings()) == mapped
    assert descriptors() == before


SCRIPT = """
    import json, os, signal, sys
    from tests.support.models.reference_forward import tiny_config, tiny_model
    from phasewise.serving.ranks.open_ranks import KvSettings, RankOptions, open_ranks
    from phasewise.tuner.plans import RankCores, ServicePlan

    two = (RankCores((0,)), RankCores((1,)))
    plans = {phase: ServicePlan(phase, two) for phase in ("prefill", "decode")}
    ranks = open_ranks(tiny_model(tiny_config()), plans, RankOptions(KvSettings(100), 10, 1, pinned=False))
    print(json.dumps(list(ranks.pids.values())), flush=True)
"""


@pytest.mark.many
@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(0)", "os._exit(3)"])
def test_workers_end_with_the_engine_however_it_ends(ending: str) -> None:
    engine = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT) + ending],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    pids = json.loads(engine.stdout)

    assert len(pids) == 1
    until(lambda: not any(map(alive, pids)), "they live on")


def test_ranks_outlive_the_thread_that_opened_them(three_heads: PackedModel) -> None:
    handed_over: list[Ranks] = []
    opening = threading.Thread(target=lambda: handed_over.append(opened(three_heads, ONE, TWO)))
    opening.start()
    opening.join()
    time.sleep(0.1)

    assert token_by_token(handed_over[0], ("decode",), 2).shape[0] == 3
    handed_over[0].close()


def test_a_fork_of_the_engine_can_neither_use_nor_end_its_ranks(two: ProcessRanks) -> None:
    token_by_token(two, ("decode",), 1)
    child = os.fork()
    if child == 0:
        refused = 1
        try:
            two.forward(Batch("decode", (SequenceSlice([1], 0, 0, True),)))
        except RanksError:
            refused = 0
        two.close()
        os._exit(refused)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert token_by_token(two, ("decode",), 2).shape[0] == 3


# ---- requests that cannot be met -------------------------------------------------------------------------


def test_more_ranks_than_query_heads_are_refused(three_heads: PackedModel) -> None:
    with pytest.raises(RanksError, match=r"decode plan has 10 ranks, but .* has 9 query heads"):
        opened(three_heads, ONE, (1,) * 10)


def test_a_core_that_another_rank_cannot_have_is_named(three_heads: PackedModel) -> None:
    cores = (RankCores((min(os.sched_getaffinity(0)),)), RankCores((8000,)))
    gc.collect()
    before = descriptors()

    with pytest.raises(RanksError, match=r"^rank 1 cannot start: cannot pin a thread to CPU 8000") as caught:
        open_ranks(three_heads, {"decode": ServicePlan("decode", cores)}, RankOptions(KvSettings(100), 10, 1))
    assert "\n" not in str(caught.value)
    del caught
    gc.collect()
    assert descriptors() == before


def test_more_memory_than_there_is_is_refused(three_heads: PackedModel) -> None:
    with pytest.raises(ServingError, match=r"KV cache of \d+ slots .* need \d+ MiB"):
        open_ranks(three_heads, plans(ONE, TWO), RankOptions(KvSettings(1 << 30), 10, 1, pinned=False))


# ---- NUMA nodes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_name", ["eight_heads", "three_heads"])
def test_weights_copied_to_the_nodes_of_their_ranks_are_the_same(
    model_name: str,
    one_rank: Mapping[str, np.ndarray],
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A plan for nodes that this machine need not have: then the kernel refuses, and is reported once."""
    nodes = (0, 1)
    with caplog.at_level(logging.WARNING):
        ranks = opened(request.getfixturevalue(model_name), ONE, TWO, nodes)
    logits = token_by_token(ranks, ("decode", "prefill"))
    ranks.close()

    assert (logits == one_rank[model_name]).all()
    assert len(caplog.records) <= 1


def test_pinned_ranks_stay_on_their_cores(eight_heads: PackedModel) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    home = os.sched_getaffinity(0)
    by_phase: dict[Phase, ServicePlan] = {
        "prefill": ServicePlan("prefill", (RankCores((cpus[0], cpus[1])),)),
        "decode": ServicePlan("decode", (RankCores((cpus[0],)), RankCores((cpus[1],)))),
    }
    ranks = open_ranks(eight_heads, by_phase, RankOptions(KvSettings(300), 100, 2))
    token_by_token(ranks, ("decode", "prefill"))

    assert ranks.observed_cpus() == {"prefill": (cpus[0], cpus[1]), "decode": (cpus[0], cpus[1])}
    ranks.close()
    assert os.sched_getaffinity(0) == home


SAYS_ITS_CORES = """
import os
from phasewise.serving.ranks.rank_instructions import Report
os.write(1, Report(error=f"it may run on {sorted(os.sched_getaffinity(0))}").to_line())
"""


@pytest.mark.parametrize("pinned", [True, False])
def test_a_rank_is_on_its_own_cores_from_its_first_import_on(
    three_heads: PackedModel, monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    def start(_module: str, _told: bytes, more: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", SAYS_ITS_CORES], env={**os.environ, **more}, **options)

    monkeypatch.setattr(worker_processes, "start_child", start)
    everywhere = sorted(os.sched_getaffinity(0))
    cores = (RankCores((everywhere[0],)), RankCores((everywhere[-1],)))
    with pytest.raises(RanksError, match="rank 1 cannot start") as caught:
        open_ranks(
            three_heads,
            {"decode": ServicePlan("decode", cores)},
            RankOptions(KvSettings(100), 10, 1, pinned=pinned),
        )
    assert str([everywhere[-1]] if pinned else everywhere) in str(caught.value)
    assert sorted(os.sched_getaffinity(0)) == everywhere
