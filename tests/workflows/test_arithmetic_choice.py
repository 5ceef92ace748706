"""`--arithmetic`: what was asked for holds for weights that have both ways, in both phases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.models.tiny_models import TinyShape, tiny_gguf

pytest.importorskip(
    "phasewise.cython_kernels._native", reason="the kernels are not built", exc_type=ImportError
)

from phasewise.cython_kernels.blocks import BLOCKS
from phasewise.kerneldb.records import MachineKey, Measurement, Origin, Problem, Sample
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.loaders import load_model
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks.open_ranks import KvSettings, LocalRanks, RankOptions
from phasewise.topology import read_machine
from phasewise.tuner import native
from phasewise.tuner.lookup import ScheduleTable
from phasewise.tuner.plans import default_plan
from phasewise.tuner.search.space import Arithmetic
from phasewise.tuner.weights import blank_weight
from phasewise.workflows.opening.arithmetic_choice import PATHS, ArithmeticChoice

WIDE = TinyShape(hidden=256, ffn=512, head_dim=64)
TOKENS = [5, 9, 200, 31, 77, 12]


def lookup(choice: ArithmeticChoice, *tuned: Measurement) -> ScheduleTable:
    return ScheduleTable(tuned).asked(choice, PATHS.get(choice))


def tuned_to(path: str, kind: str) -> Measurement:
    weight = blank_weight(kind, 64, 512)
    schedule = native.default_schedule(weight, 4, 1, Arithmetic(path))
    origin = Origin(MachineKey("core", "placement"), "0", 1)
    return Measurement(Problem("gemm", kind, 64, 512, 4), Sample(schedule, (9,), 9, None, 1), "abi", origin)


@pytest.mark.parametrize("kind", [*BLOCKS, "q8", "bf16"])
def test_kinds_with_sub_scales_take_what_is_asked_for_and_all_others_what_they_had(kind: str) -> None:
    weight = blank_weight({"q8": "int8"}.get(kind, kind), 64, 512)
    has_both = kind in BLOCKS and BLOCKS[kind].has_subs

    assert lookup("tuned").arithmetic(weight) == (None, 1)
    assert lookup("blocks").arithmetic(weight) == (("int8_block", 1) if has_both else (None, 1))
    assert lookup("groups").arithmetic(weight) == (("int8_dot", 1) if has_both else (None, 1))


@pytest.mark.parametrize("path", ["int8_dot", "int8_block"])
def test_schedules_tuned_for_the_other_arithmetic_are_left_alone(path: str) -> None:
    weight, row = blank_weight("q4_k", 64, 512), tuned_to(path, "q4_k")
    own: ArithmeticChoice = "groups" if path == "int8_dot" else "blocks"
    other: ArithmeticChoice = "blocks" if path == "int8_dot" else "groups"

    assert lookup("tuned", row).arithmetic(weight)[0] == path
    assert lookup(own, row).products(weight, 4)[-1].schedule is not None
    assert [(one.last_m, one.schedule) for one in lookup(other, row).products(weight, 64)] == [(64, None)]


def logits(model: PackedModel, choice: ArithmeticChoice, threads: int, cut: int) -> np.ndarray:
    """After the last token: `cut` of them as a prompt, the others one by one."""
    machine = read_machine()
    plans = {phase: default_plan(machine, phase, threads=threads) for phase in ("prefill", "decode")}
    lookups = {phase: lookup(choice) for phase in ("prefill", "decode")}
    ranks = LocalRanks(model, plans, RankOptions(KvSettings(64), 64, max_sequences=1, schedules=lookups))
    try:
        found = ranks.all_logits(Batch("prefill", (SequenceSlice(TOKENS[:cut], 0, 0, True),)))
        for at in range(cut, len(TOKENS)):
            found = ranks.all_logits(Batch("decode", (SequenceSlice(TOKENS[at : at + 1], at, 0, True),)))
        return np.array(found[-1])
    finally:
        ranks.close()


def test_a_model_computes_the_same_by_blocks_in_any_phase_and_on_any_threads(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf(types={"": "Q4_K", "attn_v": "Q6_K"}, shape=WIDE).to_bytes())
    model = load_model(str(path), "native", tmp_path)
    whole = logits(model, "blocks", 1, len(TOKENS))

    for threads, cut in ((1, 1), (2, len(TOKENS)), (2, 3)):
        assert np.array_equal(logits(model, "blocks", threads, cut), whole)
    groups = logits(model, "groups", 1, len(TOKENS))
    assert np.array_equal(groups, logits(model, "tuned", 1, len(TOKENS)))
    assert not np.array_equal(groups, whole)
    assert np.abs(groups - whole).max() <= 0.1 * np.abs(groups).max()
