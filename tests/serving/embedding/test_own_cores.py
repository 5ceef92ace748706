"""Embeddings keep to their own cores as long as one is left, and no vector changes for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip(
    "phasewise.serving.embedding.encoder.embedder", reason="the kernels are not built", exc_type=ImportError
)
from phasewise.serving.embedding.encoder.embedder import Embedder, Floats
from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.embedding.worker import OnOwnCores, cores_now
from phasewise.serving.errors import RanksError
from phasewise.serving.loaders import load_model
from phasewise.topology import Machine, read_machine
from tests.support.machines.paper_machines import epyc, kunpeng, xeon
from tests.support.models.encoder_models import write_encoder
from tests.support.tiers import examples

MACHINES = {"epyc": epyc(), "kunpeng": kunpeng(), "xeon": xeon()}
CPUS = tuple(sorted(os.sched_getaffinity(0)))
INPUTS = [Tokens([5, 6, 7]), Tokens([9] * 40)]


class MovedEmbedder:
    """Notes where it computes."""

    def __init__(self, cores: Sequence[int]) -> None:
        self.places = [tuple(cores)]
        self.refuses = False
        self.n_batches = 0

    def move(self, cores: Sequence[int]) -> None:
        if self.refuses:
            raise RanksError("core 1 cannot be had")
        self.places.append(tuple(cores))

    def embed(self, inputs: Sequence[Tokens]) -> Floats:
        self.n_batches += 1
        return np.zeros((len(inputs), 1), np.float32)

    def close(self) -> None: ...


class Allowed:
    """The CPUs that the worker may use, as the system would tell."""

    def __init__(self, machine: Machine, *pus: int) -> None:
        self._machine, self.pus = machine, pus
        self.n_reads = 0

    def look(self) -> object:
        return self.pus

    def machine(self) -> Machine:
        self.n_reads += 1
        return replace(self._machine, allowed_pus=self.pus)

    def follow(self, own: Sequence[int], every_s: float = 0.0) -> tuple[OnOwnCores, MovedEmbedder]:
        following = OnOwnCores(
            lambda cores: cast("Embedder", MovedEmbedder(cores)), own, 0, self.look, self.machine, every_s
        )
        return following, cast("MovedEmbedder", following.embedder)


@examples(60)
@given(data=st.data())
def test_a_worker_keeps_its_own_cores_as_long_as_it_has_one(data: st.DataObject) -> None:
    """And takes them all again once they have come back; else as many others."""
    machine = MACHINES[data.draw(st.sampled_from(sorted(MACHINES)))]
    own = data.draw(st.lists(st.sampled_from(machine.allowed_pus), min_size=1, max_size=8, unique=True))
    changes = st.lists(st.sets(st.sampled_from(machine.allowed_pus), min_size=1), min_size=1, max_size=5)
    allowed = Allowed(machine, *machine.allowed_pus)
    following, embedder = allowed.follow(own)
    for pus in [*data.draw(changes), set(machine.allowed_pus)]:
        allowed.pus = tuple(sorted(pus))
        following.embed(INPUTS)

        assert embedder.places[-1] == following.cores
        assert set(following.cores) <= pus
        assert 1 <= len(following.cores) <= len(own)
        if kept := tuple(core for core in own if core in pus):
            assert following.cores == kept
    following.close()


def test_a_worker_that_starts_while_cores_are_gone_takes_them_when_they_come() -> None:
    allowed = Allowed(xeon(), 0, 1)
    following, embedder = allowed.follow((1, 2, 3))
    assert embedder.places == [(1,)]
    allowed.pus = (0, 1, 2, 3)
    following.embed(INPUTS)
    following.close()

    assert embedder.places == [(1,), (1, 2, 3)]


def test_cores_that_cannot_be_had_yet_are_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    allowed = Allowed(xeon(), 0, 1)
    following, embedder = allowed.follow((0, 1))
    embedder.refuses, allowed.pus = True, (0,)
    for _ in range(3):
        following.embed(INPUTS)
    assert following.cores == (0, 1)
    embedder.refuses = False
    following.embed(INPUTS)
    following.close()

    assert embedder.places[1:] == [(0,)]
    assert embedder.n_batches == 4
    assert sum("cannot be had" in record.message for record in caplog.records) == 1


def test_the_machine_is_read_only_where_something_has_changed() -> None:
    allowed = Allowed(xeon(), 0, 1)
    following, _ = allowed.follow((0, 1))
    for _ in range(3):
        following.embed(INPUTS)
    following.close()

    assert allowed.n_reads == 1


@pytest.mark.parametrize("left", [(0, 1), (6, 7), tuple(range(8))])
def test_where_no_own_core_is_left_the_highest_are_taken(left: tuple[int, ...]) -> None:
    """A language model beside them takes the lowest."""
    machine = replace(xeon(), allowed_pus=left)
    assert cores_now((20, 21), machine) == left[-2:]


@pytest.mark.parametrize(
    ("quota", "n_others", "expected"),
    [(None, 6, (4, 5, 6, 7)), (8.0, 4, (4, 5, 6, 7)), (4.0, 4, (4, 5)), (4.0, 12, (4,)), (0.5, 0, (4,))],
)
def test_a_worker_keeps_to_its_share_of_a_quota(
    quota: float | None, n_others: int, expected: tuple[int, ...]
) -> None:
    machine = replace(xeon(), cpu_quota=quota)
    assert cores_now((4, 5, 6, 7), machine, n_others) == expected


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_no_bit_of_a_vector_depends_on_where_its_worker_has_moved(tmp_path: Path) -> None:
    model = load_model(str(write_encoder(tmp_path / "bert", "bert")), "int8", tmp_path)
    machine, allowed = read_machine(), Allowed(read_machine(), *CPUS[:2])
    following = OnOwnCores(
        lambda cores: Embedder(model, cores, most_threads=2), CPUS[:2], 0, allowed.look, allowed.machine, 0.0
    )
    wanted = following.embed(INPUTS).tobytes()
    for cores in (CPUS[1:2], CPUS[:2], CPUS[:1], CPUS[:2]):
        allowed.pus = cores
        assert following.embed(INPUTS).tobytes() == wanted
        assert following.cores == cores
    with pytest.raises(RanksError, match="3 threads do not fit: there is room for 2"):
        following.embedder.move((*CPUS[:2], max(CPUS) + 1))
    following.close()

    assert os.sched_getaffinity(0) == set(machine.allowed_pus)
