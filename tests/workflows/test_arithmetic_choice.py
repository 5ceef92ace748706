"""`--arithmetic`: what was asked for holds for weights that have both ways, in both phases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.models.tiny_models import TinyShape, tiny_gguf

pytest.importorskip(
    "phasewise.cython_kernels._native", reason="the kernels are not built", exc_type=ImportError
)

from phasewise.cython_kernels import _native, isa, packing
from phasewise.cython_kernels._native import compute_paths
from phasewise.cython_kernels.blocks import BLOCKS
from phasewise.cython_kernels.packing import KINDS, PackedWeight
from phasewise.cython_kernels.schedules import SAME_BITS, has_tiles_arithmetic
from phasewise.kerneldb.records import MachineKey, Measurement, Origin, Problem, Sample
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.engine import fingerprint
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.storage import StorageChoice
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks.open_ranks import KvSettings, LocalRanks, RankOptions
from phasewise.topology import read_machine
from phasewise.tuner import native
from phasewise.tuner.lookup import ScheduleTable
from phasewise.tuner.plans import PHASES, Phase, default_plan
from phasewise.tuner.search.space import Arithmetic
from phasewise.tuner.weights import blank_weight, format_name
from phasewise.workflows.errors import UsageError
from phasewise.workflows.opening.tuned_schedules import explain
from phasewise.workflows.options import ARITHMETIC_CHOICES, PATHS, ArithmeticChoice, check_arithmetic

WIDE = TinyShape(hidden=256, ffn=512, head_dim=64)
TOKENS = [5, 9, 200, 31, 77, 12]


def lookup(choice: ArithmeticChoice, *tuned: Measurement) -> ScheduleTable:
    return ScheduleTable(tuned).asked(choice, PATHS.get(choice))


def lookups(choice: ArithmeticChoice) -> dict[Phase, ScheduleTable]:
    return {phase: lookup(choice) for phase in PHASES}


def tuned_to(path: str, weight: PackedWeight, parts: int = 1) -> Measurement:
    schedule = native.default_schedule(weight, 4, 1, Arithmetic(path, parts))
    origin = Origin(MachineKey("core", "placement"), "0", 1)
    return Measurement(
        Problem("gemm", format_name(weight), 64, 512, 4), Sample(schedule, (9,), 9, None, 1), "abi", origin
    )


@pytest.mark.parametrize("kind", [*BLOCKS, "q8", "bf16"])
def test_kinds_with_sub_scales_take_what_is_asked_for_and_all_others_what_they_had(kind: str) -> None:
    weight = blank_weight({"q8": "int8"}.get(kind, kind), 64, 512)
    has_both = kind in BLOCKS and BLOCKS[kind].has_subs

    assert lookup("tuned").arithmetic(weight) == (None, 1)
    assert lookup("blocks").arithmetic(weight) == (("int8_block", 1) if has_both else (None, 1))
    assert lookup("groups").arithmetic(weight) == (("int8_dot", 1) if has_both else (None, 1))


@pytest.mark.parametrize("path", ["int8_dot", "int8_block"])
def test_schedules_tuned_for_the_other_arithmetic_are_left_alone(path: str) -> None:
    weight, row = blank_weight("q4_k", 64, 512), tuned_to(path, blank_weight("q4_k", 64, 512))
    own: ArithmeticChoice = "groups" if path == "int8_dot" else "blocks"
    other: ArithmeticChoice = "blocks" if path == "int8_dot" else "groups"

    assert lookup("tuned", row).arithmetic(weight)[0] == path
    assert lookup(own, row).products(weight, 4)[-1].schedule is not None
    assert [(product.last_m, product.schedule) for product in lookup(other, row).products(weight, 64)] == [
        (64, None)
    ]


@pytest.mark.parametrize("name", isa.usable())
@pytest.mark.parametrize("kind", [*BLOCKS, *KINDS])
def test_canonical_is_one_arithmetic_whatever_was_tuned(kind: str, name: str) -> None:
    """The path of a CPU without dots of 16 bits, on every instruction set and in one part."""
    weight = blank_weight({"q8": "int8", "q4": "int4"}.get(kind, kind), 64, 512)
    dense = kind in (*packing.DENSE_KINDS, "fp8")
    with isa.using(name):
        path, n_parts = lookup("canonical").arithmetic(weight)
        tuned = [
            tuned_to(compute_path, weight, parts) for compute_path in weight_paths(weight) for parts in (1, 2)
        ]
        arithmetics = {lookup("canonical", row).arithmetic(weight) for row in tuned}

    assert (SAME_BITS.get(path, path), n_parts) == ("fma" if dense else "int8_dot", 1)
    assert {(SAME_BITS.get(compute_path, compute_path), parts) for compute_path, parts in arithmetics} == {
        ("fma" if dense else "int8_dot", 1)
    }


def weight_paths(weight: PackedWeight) -> tuple[str, ...]:
    return tuple(compute_paths(weight.kind, weight.group))


@pytest.mark.parametrize("name", isa.usable())
@pytest.mark.parametrize("kind", [*BLOCKS, *KINDS])
def test_tiles_is_the_units_arithmetic_whatever_was_tuned(kind: str, name: str) -> None:
    """In one part; f32 and f16 weights have what they had."""
    weight = blank_weight({"q8": "int8", "q4": "int4"}.get(kind, kind), 64, 512)
    with isa.using(name):
        tuned = [
            tuned_to(compute_path, weight, parts) for compute_path in weight_paths(weight) for parts in (1, 2)
        ]
        arithmetics = {lookup("tiles", row).arithmetic(weight) for row in tuned}
        before = {lookup("tuned", row).arithmetic(weight) for row in tuned}
        has_any = has_tiles_arithmetic()

    if kind in ("f32", "f16") or not has_any:
        assert arithmetics == before
    else:
        assert arithmetics == {("bf16_tile", 1)}


def test_a_choice_that_a_cpu_cannot_follow_is_refused_by_name() -> None:
    for name in isa.usable():
        with isa.using(name):
            if has_tiles_arithmetic():
                check_arithmetic("tiles")
                continue
            with pytest.raises(UsageError, match=f"--arithmetic tiles: {name} has no tile unit"):
                check_arithmetic("tiles")
            for choice in ARITHMETIC_CHOICES[:-1]:
                check_arithmetic(choice)


def test_canonical_keeps_schedules_that_were_tuned_to_it() -> None:
    weight = blank_weight("q4_k", 64, 512)
    for path, parts, is_kept in (("int8_dot", 1, True), ("int8_dot", 2, False), ("int8_block", 1, False)):
        schedule = lookup("canonical", tuned_to(path, weight, parts)).products(weight, 4)[-1].schedule
        assert (schedule is not None) == is_kept


class Dots:
    """A CPU that multiplies bf16 by `own` paths."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, *own: str) -> None:
        real = _native.compute_paths

        def paths(kind: str, group: int = 32) -> tuple[str, ...]:
            return (*own, "fma") if kind == "bf16" else tuple(real(kind, group))

        patch.setattr(_native, "compute_paths", paths)
        patch.setattr(fingerprint, "compute_paths", paths)
        patch.setattr(fingerprint, "isa_active", lambda: name)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("avx512_bf16", ("bf16_dot",)),
        ("avx512_fp16", ("f16_fma", "bf16_dot")),
        ("amx", ("bf16_tile", "bf16_dot")),
        ("neon_bf16_i8mm", ("bf16_dot",)),
    ],
)
def test_a_fingerprint_names_the_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, own: tuple[str, ...]
) -> None:
    """A CPU with dots for bf16 weights has its own arithmetic by default, that of all CPUs if asked."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf().to_bytes())
    model = load_model(str(path), "bf16", tmp_path)
    everywhere = told(model, "canonical")
    assert everywhere.split("/")[1] == "every"

    Dots(monkeypatch, name, *own)

    place = "tiles" if own[0] == "bf16_tile" else name
    assert told(model, "tuned").split("/")[1] == place
    assert told(model, "canonical") == everywhere


def told(model: PackedModel, choice: ArithmeticChoice) -> str:
    schedules = dict.fromkeys(PHASES, lookup(choice))
    return fingerprint.fingerprint_of(model, "int16", schedules, 256).arithmetic


def logits(model: PackedModel, choice: ArithmeticChoice, threads: int, cut: int) -> np.ndarray:
    """After the last token: `cut` of them as a prompt, the others one by one."""
    machine = read_machine()
    plans = {phase: default_plan(machine, phase, threads=threads) for phase in PHASES}
    options = RankOptions(KvSettings(64), 64, max_sequences=1, schedules=lookups(choice))
    ranks = LocalRanks(model, plans, options)
    try:
        all_logits = ranks.all_logits(Batch("prefill", (SequenceSlice(TOKENS[:cut], 0, 0, True),)))
        for position in range(cut, len(TOKENS)):
            all_logits = ranks.all_logits(
                Batch("decode", (SequenceSlice(TOKENS[position : position + 1], position, 0, True),))
            )
        return np.array(all_logits[-1])
    finally:
        ranks.close()


@pytest.mark.parametrize("types", [{"": "Q4_K", "attn_v": "Q6_K"}, {"": "Q8_0"}, {"": "BF16"}], ids=str)
def test_a_model_computes_the_same_by_tiles_in_any_phase_and_on_any_threads(
    tmp_path: Path, types: dict[str, str]
) -> None:
    if not has_tiles_arithmetic():
        pytest.skip("this CPU has no arithmetic of tiles")
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf(types=types, shape=WIDE).to_bytes())
    model = load_model(str(path), "native", tmp_path)
    whole = logits(model, "tiles", 1, len(TOKENS))

    for threads, cut in ((1, 1), (2, len(TOKENS)), (2, 3)):
        assert np.array_equal(logits(model, "tiles", threads, cut), whole)
    others = logits(model, "canonical", 1, len(TOKENS))
    assert not np.array_equal(others, whole)
    assert np.abs(others - whole).max() <= 0.1 * np.abs(others).max()
    tuned, in_tiles = told(model, "tuned"), told(model, "tiles")
    assert in_tiles.split("/")[1] == "tiles"
    assert (in_tiles == tuned) == (types == {"": "BF16"} and isa.active() == "amx")


@pytest.mark.parametrize("choice", ["tuned", "blocks", "tiles"])
def test_explain_names_one_path_of_both_phases_and_they_compute_alike(
    tmp_path: Path, choice: ArithmeticChoice
) -> None:
    if choice == "tiles" and not has_tiles_arithmetic():
        pytest.skip("this CPU has no arithmetic of tiles")
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf(types={"": "Q4_K", "attn_v": "Q8_0"}, shape=WIDE).to_bytes())
    model = load_model(str(path), "native", tmp_path)
    plans = {phase: default_plan(read_machine(), phase, threads=1) for phase in PHASES}
    rows = {phase: len(TOKENS) for phase in PHASES}
    uses = explain(model, plans, lookups(choice), rows, "int16", StorageChoice())
    paths = {
        phase: {use.used_for: use.compute_path for use in uses if use.phase == phase} for phase in PHASES
    }

    assert paths["prefill"] == paths["decode"]
    assert np.array_equal(logits(model, choice, 1, len(TOKENS)), logits(model, choice, 1, 1))


def test_a_model_computes_the_same_by_blocks_in_any_phase_and_on_any_threads(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf(types={"": "Q4_K", "attn_v": "Q6_K"}, shape=WIDE).to_bytes())
    model = load_model(str(path), "native", tmp_path)
    whole = logits(model, "blocks", 1, len(TOKENS))

    for threads, cut in ((1, 1), (2, len(TOKENS)), (2, 3)):
        assert np.array_equal(logits(model, "blocks", threads, cut), whole)
    groups = logits(model, "groups", 1, len(TOKENS))
    default = whole if compute_paths("q4_k")[0] == "int8_block" else groups
    assert np.array_equal(default, logits(model, "tuned", 1, len(TOKENS)))
    assert not np.array_equal(groups, whole)
    assert np.abs(groups - whole).max() <= 0.1 * np.abs(groups).max()
