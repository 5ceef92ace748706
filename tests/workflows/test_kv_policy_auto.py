"""`kv_policy = "auto"`: pages where scattered reads of them are as fast, else contiguous blocks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.pools.opening import POLICIES
from phasewise.tuner.machine_limits import PieceReads
from phasewise.workflows.opening.open_model import open_model
from phasewise.workflows.serve.kv_policy import ENOUGH, piece_bytes, policy_for, resolved, told
from tests.support.models.tiny_models import write_tiny_gguf


@pytest.fixture
def model(tmp_path: Path) -> PackedModel:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    return open_model(str(path), threads=1, db=str(tmp_path / "absent.db")).model


@given(st.floats(1.0, 1e12), st.floats(1.0, 1e12))
def test_pages_are_taken_where_scattered_reads_cost_nothing(in_order: float, scattered: float) -> None:
    reads = PieceReads(16384, in_order, scattered)

    assert policy_for(reads) == ("paged" if scattered / in_order >= ENOUGH else "odma")
    assert policy_for(reads) in POLICIES


def test_what_could_not_be_measured_is_contiguous_and_says_so() -> None:
    assert policy_for(None) == "odma"
    assert "could not be measured" in told(16384, None)


@pytest.mark.parametrize("asked", POLICIES)
def test_a_named_policy_is_taken_without_a_measurement(model: PackedModel, asked: str) -> None:
    said: list[str] = []
    assert resolved(asked, model, "auto", (-1,), said.append) == asked
    assert said == []


def test_auto_measures_this_machine_and_says_what_follows(model: PackedModel) -> None:
    said: list[str] = []
    cores = tuple(sorted(os.sched_getaffinity(0))[:1])

    policy = resolved("auto", model, "auto", cores, said.append)

    (line,) = said
    assert policy in ("odma", "paged")
    assert line.startswith(f"kv_policy auto: {policy}; ")


@pytest.mark.parametrize(("kv_format", "share"), [("f32", 4), ("f16", 2)])
def test_a_piece_is_the_keys_of_one_head_in_a_page(model: PackedModel, kv_format: str, share: int) -> None:
    assert piece_bytes(model, kv_format) == 128 * model.config.head_dim * share
