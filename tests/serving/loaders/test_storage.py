"""Storage of packed weights: chosen by zeros, the same tokens and checksum, checked when a file is opened."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from phasewise.cython_kernels import _native, isa, packing, sparse
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.source import BF16, INT4, INT8, WeightForm
from phasewise.serving.loaders.storage import (
    StorageChoice,
    StorageDecision,
    break_even,
    bytes_share,
    worth_bytes,
)
from phasewise.serving.models.forward import Capacity, build_program
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.models.storage_modes import SPARSE_MODES
from phasewise.serving.ranks.open_ranks import KvSettings, RankOptions, open_ranks
from phasewise.tuner.plans import PHASES, Phase, RankCores, ServicePlan
from tests.support.models.tiny_models import TinyShape, write_sparse_hf, write_tiny_hf

SHAPE = TinyShape(n_layers=2, hidden=128, ffn=256, head_dim=32)


@pytest.fixture
def pruned(tmp_path: Path) -> Path:
    """A directory of a model whose layers have lost most of their weights."""
    return write_sparse_hf(tmp_path / "model", SHAPE, 0.8)


def load(directory: Path, mode: str, weight_format: str = "native", **options: bool) -> PackedModel:
    choice = StorageChoice(mode)  # type: ignore[arg-type]
    return load_model(str(directory), weight_format, directory.parent / "cache", storage=choice, **options)


@pytest.mark.parametrize("weight_format", ["bf16", "int8"])
def test_every_choice_holds_the_same_numbers(pruned: Path, weight_format: str) -> None:
    """always: all that can be; never: none; auto, where the CPU expands: those that are smaller for it."""
    models = {mode: load(pruned, mode, weight_format) for mode in SPARSE_MODES}
    expands = StorageChoice("auto").wants_sparse

    for name, weight in models["never"].weights.items():
        assert not weight.is_sparse
        assert models["always"].weights[name].is_sparse
        assert models["auto"].weights[name].is_sparse == (expands and name != "embed")
        for mode in ("auto", "always"):
            assert np.array_equal(packing.unpack(models[mode].weights[name]), packing.unpack(weight))
    assert len({model.content_hash for model in models.values()}) == 1


def test_a_packed_file_is_kept_while_the_choice_is_the_same(pruned: Path) -> None:
    """Whatever other choices made beside it; a checksum covers sparse weights too."""
    for mode in SPARSE_MODES:
        load(pruned, mode)
    files = {path: path.stat().st_ino for path in (pruned.parent / "cache" / "packed").iterdir()}

    for mode in SPARSE_MODES:
        load(pruned, mode, pack="check")

    assert {path: path.stat().st_ino for path in (pruned.parent / "cache" / "packed").iterdir()} == files


def test_a_dense_model_has_one_packed_file_for_auto_and_never(tmp_path: Path) -> None:
    directory = write_tiny_hf(tmp_path / "model", "llama")

    for mode in ("auto", "never"):
        load(directory, mode, "bf16")

    assert len(list((tmp_path / "cache" / "packed").iterdir())) == 1


def test_a_measured_preference_overrules_bytes(pruned: Path) -> None:
    asked = []

    def measured(form: WeightForm, n: int, k: int, density: float) -> StorageDecision:
        asked.append((form.kind, n, k, round(density, 1)))
        return StorageDecision(False, "measured")

    model = load_model(
        str(pruned), "native", pruned.parent / "cache", storage=StorageChoice("auto", measured)
    )

    assert not any(weight.is_sparse for weight in model.weights.values())
    assert ("bf16", 128, 256, 0.2) in asked


def test_a_measured_preference_makes_auto_sparse_where_nothing_expands(pruned: Path) -> None:
    """Weights that were not compared stay dense there; packed files of one choice do not serve the other."""

    def measured(form: WeightForm, n: int, k: int, density: float) -> StorageDecision | None:
        del form, density
        return StorageDecision(True, "measured") if (n, k) == (128, 256) else None

    cache = pruned.parent / "cache"
    with isa.using("portable"):
        plain = load_model(str(pruned), "native", cache, storage=StorageChoice())
        told = load_model(str(pruned), "native", cache, storage=StorageChoice("auto", measured))
        again = load_model(str(pruned), "native", cache, storage=StorageChoice())

    assert not any(weight.is_sparse for weight in (plain.weights | again.weights).values())
    assert {name for name, weight in told.weights.items() if weight.is_sparse} == {
        "layers.0.down",
        "layers.1.down",
    }


@pytest.mark.parametrize(
    ("choice", "kept", "why"),
    [
        (StorageChoice("always"), 1, "--sparse always"),
        (StorageChoice("never"), 1, "--sparse never"),
        (StorageChoice("auto", lambda *_: None), 64 * 64, "nearly all weights are kept"),
        (StorageChoice("auto", lambda *_: StorageDecision(True, "measured")), 2048, "measured"),
    ],
)
def test_a_decision_says_why(choice: StorageChoice, kept: int, why: str) -> None:
    assert choice.decide(BF16, 64, 64, kept).why == why
    assert not choice.decide(INT4, 64, 64, kept).is_sparse


def test_a_changed_stream_is_packed_anew(pruned: Path) -> None:
    """Masks that do not count what the offsets say: the file is not believed."""
    model = load(pruned, "always")
    weight = model.weights["layers.0.down"]
    (path,) = (pruned.parent / "cache" / "packed").iterdir()
    content = bytearray(path.read_bytes())
    assert model.file is not None
    offset = weight.values.ctypes.data - model.file.address
    content[offset : offset + 4] = b"\xff\xff\xff\xff"
    path.with_suffix(".new").write_bytes(content)
    path.with_suffix(".new").chmod(0o600)
    path.with_suffix(".new").replace(path)

    again = load(pruned, "always")

    assert np.array_equal(packing.unpack(again.weights["layers.0.down"]), packing.unpack(weight))
    assert sparse.kept(again.weights["layers.0.down"]) == sparse.kept(
        load(pruned, "never").weights["layers.0.down"]
    )


def test_the_break_even_is_where_the_bytes_are() -> None:
    for form in (BF16, INT8):
        zeros = break_even(form, 1024, 1024)
        assert bytes_share(form, 1024, 1024, 1 - zeros) == pytest.approx(worth_bytes(form))
    assert not StorageChoice("always").is_sparse(INT4, 64, 64, 100)


def test_auto_is_dense_where_nothing_expands() -> None:
    with isa.using("portable"):
        assert not StorageChoice().wants_sparse
    _native.let_expand(False)
    try:
        assert not StorageChoice().wants_sparse
    finally:
        _native.let_expand(True)


def test_a_model_gives_the_same_logits_by_either_storage(pruned: Path) -> None:
    """Bit for bit, in a step of many rows and of one."""
    by_mode = []
    for mode in ("never", "always"):
        model = load(pruned, mode)
        program = build_program(model, Capacity(64, 32, 1, 32, 1))
        team = _native.Team([0])
        try:
            rows = program.run(team, [SequenceSlice(list(range(5, 36)), 0, 0, True)], every_row=True)
            many = np.array(program)[:rows].copy()
            rows = program.run(team, [SequenceSlice([7], 31, 0, True)])
            by_mode.append((many, np.array(program)[:rows].copy()))
        finally:
            team.close()

    for dense, stored in zip(*by_mode, strict=True):
        assert np.array_equal(dense, stored)


@pytest.mark.parametrize("weight_format", ["bf16", "int8"])
def test_two_ranks_share_out_sparse_weights(pruned: Path, weight_format: str) -> None:
    """Panels and parts of k of a sparse weight, by two processes: the bits of the dense one by one or two."""
    prompt = list(range(5, 25))
    by_mode_and_ranks: dict[tuple[str, int], np.ndarray] = {}
    for mode in ("never", "always"):
        for n_ranks in (1, 2):
            ranks = tuple(RankCores((core,)) for core in range(n_ranks))
            plans: dict[Phase, ServicePlan] = {phase: ServicePlan(phase, ranks) for phase in PHASES}
            options = RankOptions(KvSettings(64), 32, 1, pinned=False)
            with closing(open_ranks(load(pruned, mode, weight_format), plans, options)) as opened:
                slices = (SequenceSlice(prompt, 0, 0, True), SequenceSlice([7], len(prompt), 0, True))
                rows = [
                    opened.forward(Batch(phase, (piece,))).copy()
                    for phase, piece in zip(PHASES, slices, strict=True)
                ]
            by_mode_and_ranks[mode, n_ranks] = np.concatenate(rows)

    assert np.isfinite(by_mode_and_ranks["never", 1]).all()
    for logits in by_mode_and_ranks.values():
        assert np.array_equal(logits, by_mode_and_ranks["never", 1])
