"""Ranks that move to other cores: every token stays, in place or by opening them again."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest

from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.errors import CoresMoved, RanksError
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks.open_ranks import LocalRanks, open_ranks
from phasewise.serving.ranks.process_ranks import ProcessRanks
from phasewise.serving.ranks.ranks_contract import KvSettings, RankOptions
from phasewise.tuner.plans import MAX_PU, PHASES, Phase, RankCores, ServicePlan
from tests.serving.ranks.test_ranks_processes import ONE, PROMPT, TWO, alive, opened, plans, token_by_token
from tests.support.models.reference_forward import tiny_config, tiny_model

ALLOWED = sorted(os.sched_getaffinity(0))
BOTH: tuple[Phase, Phase] = ("decode", "prefill")


@pytest.fixture(scope="module")
def model() -> PackedModel:
    return tiny_model(tiny_config(n_heads=8, n_kv_heads=4, hidden=128, ffn=176))


@pytest.fixture(scope="module")
def wanted(model: PackedModel) -> np.ndarray:
    ranks = opened(model, ONE, ONE)
    tokens = token_by_token(ranks, BOTH)
    ranks.close()
    return tokens


def plans_on(cores: Sequence[int]) -> dict[Phase, ServicePlan]:
    return {phase: ServicePlan(phase, (RankCores(tuple(cores)),)) for phase in PHASES}


def open_local(model: PackedModel, threads: int = 4) -> LocalRanks:
    options = RankOptions(KvSettings(700), 100, 3, pinned=False, threads=threads)
    ranks = open_ranks(model, plans(ONE, ONE), options)
    assert isinstance(ranks, LocalRanks)
    return ranks


def test_one_rank_keeps_its_keys_and_values_on_other_cores(model: PackedModel, wanted: np.ndarray) -> None:
    """Each token on another number of threads than the one before it, after one prompt."""
    ranks = open_local(model)
    rows = [ranks.forward(Batch("prefill", (SequenceSlice(PROMPT, 0, 16, True),))).copy()]
    for i in range(len(wanted) - 1):
        ranks.move(plans_on(range(1 + i % 4)), None)
        step = SequenceSlice([int(rows[-1][0].argmax())], len(PROMPT) + i, 16, True)
        rows.append(ranks.forward(Batch(BOTH[i % 2], (step,))).copy())
    ranks.close()

    assert (np.concatenate(rows) == wanted).all()


def test_a_plan_that_one_rank_cannot_run_leaves_it_as_it_was(model: PackedModel, wanted: np.ndarray) -> None:
    ranks = open_local(model, threads=2)
    with pytest.raises(RanksError, match="3 threads do not fit: there is room for 2"):
        ranks.move(plans_on(range(3)), None)
    with pytest.raises(RanksError, match="2 ranks"):
        ranks.move(plans(TWO, TWO), None)

    assert (token_by_token(ranks, BOTH) == wanted).all()
    ranks.close()


def test_a_core_that_is_not_there_is_refused_and_the_former_ones_go_on(
    model: PackedModel, wanted: np.ndarray
) -> None:
    options = RankOptions(KvSettings(700), 100, 3)
    ranks = open_ranks(model, plans_on(ALLOWED[:1]), options)
    try:
        with pytest.raises(RanksError, match="cannot pin"):
            ranks.move(plans_on((MAX_PU,)), None)
        assert (token_by_token(ranks, BOTH) == wanted).all()
    finally:
        ranks.close()


def test_pinned_threads_are_seen_on_the_cores_they_have_moved_to(model: PackedModel) -> None:
    """One that was pinned in the caller's place too."""
    before = os.sched_getaffinity(0)
    ranks = open_ranks(model, plans_on(ALLOWED[:1]), RankOptions(KvSettings(700), 100, 3, threads=2))
    try:
        for cores in (ALLOWED[-1:], ALLOWED[:2], ALLOWED[:1]):
            ranks.move(plans_on(cores), None)
            token_by_token(ranks, BOTH, 4)
            assert ranks.observed_cpus() == dict.fromkeys(PHASES, tuple(cores))
    finally:
        ranks.close()

    assert os.sched_getaffinity(0) == before


@pytest.mark.many
@pytest.mark.parametrize("to", [(2, 1), ONE, (2,), (1, 1, 1, 1)], ids=str)
def test_ranks_of_processes_are_opened_again_by_other_plans(
    model: PackedModel, wanted: np.ndarray, to: tuple[int, ...]
) -> None:
    """Fewer, more, or the first one alone; and back. No process of before is left."""
    ranks = opened(model, TWO, TWO)
    assert isinstance(ranks, ProcessRanks)
    assert (token_by_token(ranks, BOTH) == wanted).all()
    for sizes in (to, TWO):
        pids = ranks.pids
        with pytest.raises(CoresMoved, match="move to cores 0"):
            ranks.move(plans(sizes, sizes), None)
        ranks.reopen()
        assert len(ranks.pids) == len(sizes) - 1
        assert not any(map(alive, pids.values()))
        assert (token_by_token(ranks, BOTH) == wanted).all()
        assert ranks.lost is None
    ranks.close()


def test_weights_that_lie_on_nodes_are_divided_anew(model: PackedModel, wanted: np.ndarray) -> None:
    """Two ranks on two nodes, then one on one, and back: the copies are let go and made again."""
    options = RankOptions(KvSettings(700), 100, 3, pinned=False)
    ranks = open_ranks(model, plans(TWO, TWO, (0, 1)), options)
    for sizes, nodes in ((ONE, (0,)), (TWO, (0, 1))):
        with pytest.raises(CoresMoved):
            ranks.move(plans(sizes, sizes, nodes), None)
        ranks.reopen()
        assert (token_by_token(ranks, BOTH) == wanted).all()
    ranks.close()


def test_more_ranks_than_heads_are_refused(model: PackedModel, wanted: np.ndarray) -> None:
    ranks = opened(model, TWO, TWO)
    nine = (1,) * 9
    with pytest.raises(RanksError, match=r"9 ranks, but .* 8 query heads"):
        ranks.move(plans(nine, nine), None)

    assert (token_by_token(ranks, BOTH) == wanted).all()
    ranks.close()
