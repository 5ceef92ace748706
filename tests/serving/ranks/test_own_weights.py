"""One rank's weights are copied near its cores where there are several NUMA nodes, and nowhere else."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn, cast

import numpy as np
import pytest

from phasewise.cython_kernels import sparse
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.serving.errors import CoresMoved, RanksError
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks import process_ranks, rank_layout, shared_weights
from phasewise.serving.ranks.process_ranks import ProcessRanks
from phasewise.serving.ranks.shared_weights import weights_near
from phasewise.topology import MemoryNodes
from tests.serving.ranks.test_ranks_processes import ONE, TWO, opened, plans, token_by_token
from tests.support.models.tiny_models import TinyShape, write_tiny_gguf

TWO_NODES = MemoryNodes({0: frozenset({0, 2}), 1: frozenset({1, 3})}, (0, 1))
"""As if: what is asked of a second node lies on the first where there is none."""

FORMATS = ["Q8_0", "Q4_K", "BF16"]


@pytest.fixture(scope="module", params=FORMATS)
def in_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    folder = tmp_path_factory.mktemp("own")
    shape = TinyShape(hidden=256, ffn=512, n_heads=8, n_kv_heads=4, head_dim=32)
    path = write_tiny_gguf(folder / "own.gguf", types=request.param, shape=shape)
    return load_model(str(path), "native", folder / "cache")


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_layout, "read_memory_nodes", lambda: TWO_NODES)


def _answer(model: PackedModel, teams: tuple[int, ...]) -> np.ndarray:
    ranks = opened(model, teams, teams)
    try:
        return token_by_token(ranks, ("decode",))
    finally:
        ranks.close()
        gc.collect()


@pytest.mark.many
@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("teams", [ONE, (2,), TWO, (2, 1)])
def test_a_copy_computes_the_same_bits(
    in_file: PackedModel, teams: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = _answer(in_file, teams)
    monkeypatch.undo()

    assert np.array_equal(there, _answer(in_file, ONE))


@pytest.mark.many
@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize(
    ("prefill", "decode"), [(ONE, TWO), ((2,), (1, 1, 1, 1)), ((1, 1, 1), TWO), (TWO, (1, 2, 1))], ids=str
)
def test_prefill_finds_what_decode_s_ranks_have_copied(
    in_file: PackedModel,
    prefill: tuple[int, ...],
    decode: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its ranks have other panels, of pages that two ranks of decode have parts of; and after a restart."""
    ranks = opened(in_file, prefill, decode)
    there = token_by_token(ranks, ("decode", "prefill"))
    cast("ProcessRanks", ranks).reopen()
    again = token_by_token(ranks, ("decode", "prefill"))
    ranks.close()
    monkeypatch.undo()

    assert np.array_equal(there, _answer(in_file, ONE))
    assert np.array_equal(again, there)


def test_a_copy_has_every_array_and_none_of_the_file(in_file: PackedModel) -> None:
    copy = weights_near(in_file, (0,), 0)

    assert copy.file is None
    for name, weight in in_file.weights.items():
        for own, read in zip(copy.weights[name].arrays, weight.arrays, strict=True):
            assert np.array_equal(own, read)
            assert not np.shares_memory(own, read)
    assert all(np.array_equal(copy.vectors[name], vector) for name, vector in in_file.vectors.items())


def test_a_sparse_weight_is_copied_whole(in_file: PackedModel) -> None:
    def sparsely(weight: PackedWeight) -> PackedWeight:
        can_be = sparse.can_be_sparse(weight.kind, weight.mins is not None)
        return sparse.to_sparse(weight) if can_be else weight

    weights = {name: sparsely(weight) for name, weight in in_file.weights.items()}
    model = replace(in_file, weights=weights, file=None)
    copy = weights_near(model, (0,), 0)

    for name, weight in weights.items():
        for own, read in zip(copy.weights[name].arrays, weight.arrays, strict=True):
            assert np.array_equal(own, read)


def test_no_nodes_no_copy(in_file: PackedModel) -> None:
    assert weights_near(in_file, (), 1 << 60) is in_file


def test_too_little_memory_leaves_the_file_mapped(
    in_file: PackedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_weights, "available_bytes", lambda: in_file.weight_bytes)
    with caplog.at_level(logging.WARNING):
        assert weights_near(in_file, (0, 1), 64 << 20) is in_file

    (record,) = caplog.records
    assert "stay where the system has read them" in record.getMessage()


@pytest.mark.usefixtures("two_nodes")
def test_ranks_that_are_opened_again_find_their_copies(
    in_file: PackedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = opened(in_file, TWO, TWO)
    first = token_by_token(ranks, ("decode",))
    again = _copies(monkeypatch)
    ranks.reopen()

    assert np.array_equal(token_by_token(ranks, ("decode",)), first)
    assert again() == 0
    ranks.close()


@pytest.mark.many
@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("to", [ONE, (2, 1), (1, 1, 1, 1)], ids=str)
def test_ranks_that_move_copy_from_the_file_again(
    in_file: PackedModel, to: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often, though its pages were given back; and what they have copied serves a restart."""
    assert in_file.file is not None
    ranks = opened(in_file, TWO, TWO)
    first = token_by_token(ranks, ("decode",))
    for teams in (to, TWO):
        with pytest.raises(CoresMoved):
            ranks.move(plans(teams, teams), None)
        ranks.reopen()
        assert np.array_equal(token_by_token(ranks, ("decode",)), first)
        with monkeypatch.context() as patch:
            again = _copies(patch)
            ranks.reopen()
            assert again() == 0
        assert np.array_equal(token_by_token(ranks, ("decode",)), first)
    ranks.close()


@pytest.mark.usefixtures("two_nodes")
def test_ranks_that_have_not_started_copy_when_they_are_tried_again(
    in_file: PackedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the ranks that move, some may have copied nothing when another one fails."""
    ranks = opened(in_file, TWO, TWO)
    first = token_by_token(ranks, ("decode",))
    with pytest.raises(CoresMoved):
        ranks.move(plans((2, 1), (2, 1)), None)
    with monkeypatch.context() as patch:
        patch.setattr(process_ranks, "WorkerProcesses", _refuse)
        with pytest.raises(RanksError, match="none today"):
            ranks.reopen()
    ranks.reopen()

    assert np.array_equal(token_by_token(ranks, ("decode",)), first)
    ranks.close()


def _refuse(*_: object) -> NoReturn:
    raise RanksError("none today")


def _copies(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts how often this process copies weights from now on."""
    from phasewise.serving.ranks import shared_weights

    copied: list[int] = []
    monkeypatch.setattr(shared_weights, "copy_panels", lambda *_, **__: copied.append(1))
    return lambda: len(copied)
