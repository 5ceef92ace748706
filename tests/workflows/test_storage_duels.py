"""Duels between storages, from a model with zeros to what `--sparse auto` stores; no speed is asserted."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from phasewise.cython_kernels._native import kernel_abi
from phasewise.kerneldb.records import Comparison, Problem, StorageDuel
from phasewise.kerneldb.store import open_store
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.storage import StorageChoice
from phasewise.serving.models.packed_model import PackedModel
from phasewise.topology import Machine, read_machine
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.tuner.plans import Phase, ServicePlan, machine_key, rank_on
from phasewise.workflows.opening import tuned_schedules
from phasewise.workflows.opening.open_model import storage_choice
from phasewise.workflows.tune_kernels.rounds import Round, Tuning, plan_rounds, shapes_of
from phasewise.workflows.tune_kernels.run import fight_storage_duels, storage_problems
from tests.support.machines.kerneldb_examples import STORAGE_DUEL
from tests.support.models.tiny_models import TinyShape, write_sparse_hf

SHAPE = TinyShape(n_layers=1, hidden=64, ffn=96, head_dim=32)
CORE = sorted(os.sched_getaffinity(0))[:1]
PHASES: dict[Phase, tuple[int, ...]] = {"prefill": tuple(CORE), "decode": tuple(CORE)}


@pytest.fixture
def model(tmp_path: Path) -> PackedModel:
    """Half of the weights of its layers are zero."""
    directory = write_sparse_hf(tmp_path / "model", SHAPE, 0.5)
    return load_model(str(directory), "native", tmp_path / "cache", storage=StorageChoice("never"))


def round_of(model: PackedModel, machine: Machine) -> Round:
    (tuning_round,) = plan_rounds(machine, PHASES, shapes_of(model), 16)
    return tuning_round


def test_a_model_is_compared_by_its_shapes_densities_and_phases(model: PackedModel) -> None:
    """Weights that keep nearly everything are not."""
    problems = storage_problems(model, round_of(model, read_machine()))

    assert {problem.m for problem in problems} == {1, 8, 16}, "as far as a step has rows"
    assert {problem.format for problem in problems} == {"bf16s8"}
    assert {(problem.n, problem.k) for problem in problems} == {
        (weight.n, weight.k) for name, weight in model.weights.items() if name.startswith("layers.")
    }


@pytest.mark.slow
def test_auto_goes_by_the_duels_that_were_fought_here(model: PackedModel, tmp_path: Path) -> None:
    """Kept under the cores they were fought on, they are not fought again; the reason names them."""
    machine, db = read_machine(), str(tmp_path / "tuned.db")
    tuning_round = round_of(model, machine)
    problems = storage_problems(model, tuning_round)[:2]
    with open_store(db) as store:
        tuning = Tuning(machine, store, MeasurementLock())
        fought = fight_storage_duels(problems, tuning_round, tuning, 60.0)
        again = fight_storage_duels(problems, tuning_round, tuning, 0.0)
        kept = store.rows(
            StorageDuel, machine=machine_key(machine, CORE), kernel_abi=kernel_abi("gemm"), verified=True
        )
    plans = {phase: ServicePlan(phase, (rank_on(machine, CORE),), "default") for phase in PHASES}
    choice = storage_choice("auto", db, machine, plans)

    assert [duel.problem for duel in fought] == problems
    assert again == fought
    assert all(duel.origin.verified for duel in kept)
    assert len(kept) == len(fought)
    assert choice.wants_sparse
    first = next(weight for weight in model.weights.values() if weight.n == problems[0].n)
    storage, why = tuned_schedules._storage_of(first, choice)
    assert storage.endswith("kept")
    assert why.startswith("measured: sparse against dense")
    assert storage_choice("auto", str(tmp_path / "none.db"), machine, plans) == StorageChoice("auto")
    assert storage_choice("never", db, machine, plans) == StorageChoice("never")


@pytest.mark.parametrize(("sequences", "is_sparse"), [(1, True), (8, False), (32, False)])
def test_a_whole_tuning_keeps_what_one_sequence_gains_and_a_server_dense(
    model: PackedModel, tmp_path: Path, sequences: int, is_sparse: bool
) -> None:
    """By a planted timer: 1.42 for one row, 0.88 for eight and more, and a prompt between 0.19 and 6.1."""
    machine, db = read_machine(), str(tmp_path / "tuned.db")
    planted = {1: Comparison(1.42, 1.4, 1.45, 0.99, 15), 512: Comparison(0.95, 0.19, 6.1, 0.99, 15)}
    slower = Comparison(0.88, 0.86, 0.9, 0.99, 15)
    weight = next(weight for name, weight in model.weights.items() if name.startswith("layers."))
    origin = replace(STORAGE_DUEL.origin, machine=machine_key(machine, CORE))
    with open_store(db) as store:
        store.add(
            replace(
                STORAGE_DUEL,
                problem=Problem("gemm", "bf16s8", weight.n, weight.k, m),
                comparison=planted.get(m, slower),
                kernel_abi=kernel_abi("gemm"),
                origin=origin,
            )
            for m in (1, 8, 16, 32, 512)
        )
    plans = {phase: ServicePlan(phase, (rank_on(machine, CORE),), "default") for phase in PHASES}
    choice = storage_choice("auto", db, machine, plans, sequences=sequences)
    unmeasured = storage_choice("auto", str(tmp_path / "none.db"), machine, plans, sequences=sequences)

    stored = load_model(str(tmp_path / "model"), "native", tmp_path / "other cache", storage=choice)
    alike = [own.is_sparse for own in stored.weights.values() if (own.n, own.k) == (weight.n, weight.k)]
    assert set(alike) == {is_sparse}
    assert unmeasured == StorageChoice("auto", sequences=sequences)
    assert sequences <= 8 or not unmeasured.wants_sparse
