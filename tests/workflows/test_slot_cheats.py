"""A kernel for a slot that is not what it says is refused: 1,000 cheats, by mutation of true kernels."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip(
    "phasewise.cython_kernels._native", reason="the kernels are not built", exc_type=ImportError
)

from phasewise.ir.running.inspection import problem_of
from phasewise.kerneldb.store import open_store
from phasewise.workflows.report import silent
from phasewise.workflows.user_kernels.slots import SlotProcess
from tests.ir.samples import HOME, why_not
from tests.support.kernels.slot_cheats import (
    TRUE,
    Cheat,
    c_cheats,
    c_library,
    library_cheats,
    refused_library,
    spinning_cheat,
    text_cheats,
    text_library,
    true_library,
)
from tests.support.tiers import first_is_smoke

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="needs a machine with avx2"),
    pytest.mark.skipif(why_not(HOME) is not None, reason=str(why_not(HOME))),
]

SEED = 20261126
SECONDS = 300
"""Processor time, of which a check takes a half: nothing here depends on it."""

of_tiers = pytest.mark.parametrize("every", first_is_smoke([12, 1]))
"""The quick tier takes one cheat of twelve."""


@pytest.fixture
def process() -> Iterator[SlotProcess]:
    with SlotProcess() as own:
        yield own


def test_there_are_a_thousand() -> None:
    assert len(c_cheats(SEED)) + len(text_cheats()) + len(library_cheats(SEED)) >= 1000


@pytest.mark.parametrize("slot", TRUE)
def test_true_kernels_are_not_refused(slot: str, process: SlotProcess, tmp_path: Path) -> None:
    with open_store(":memory:", silent) as store:
        library = true_library(slot, tmp_path, store)

    assert problem_of(library) is None
    assert process.problem(slot, library, SEED, seconds=SECONDS) is None
    assert process.problem(slot, library, SEED + 1, seconds=SECONDS) is None


@pytest.mark.slow
@of_tiers
@pytest.mark.parametrize("slot", TRUE)
def test_cheats_around_a_true_kernel_are_refused(
    slot: str, every: int, process: SlotProcess, tmp_path: Path
) -> None:
    """The true kernel that they call is not: a refusal is for what they add."""
    cheats = [cheat for cheat in c_cheats(SEED) if cheat.slot == slot][::every]
    library = c_library(cheats, slot, tmp_path)
    assert process.problem(slot, library, SEED, symbol="cheat_true", seconds=SECONDS) is None

    unseen = [
        f"{cheat.kind}: {cheat.body}"
        for number, cheat in enumerate(cheats)
        if process.problem(slot, library, SEED, symbol=f"cheat_{number}", seconds=SECONDS) is None
    ]

    assert not unseen


@pytest.mark.slow
@of_tiers
@pytest.mark.parametrize("slot", TRUE)
def test_texts_that_compute_something_else_are_refused(
    slot: str, every: int, process: SlotProcess, tmp_path: Path
) -> None:
    cheats = [cheat for cheat in text_cheats() if cheat.slot == slot][::every]
    library, numbers = text_library(cheats, tmp_path)
    assert len(numbers) > len(cheats) // 2

    unseen = [
        cheats[number].kind
        for number in numbers
        if process.problem(slot, library, SEED, symbol=f"cheat_{number}", seconds=SECONDS) is None
        and process.problem(
            slot, library, SEED, symbol=f"cheat_{number}", seconds=SECONDS, every_float=slot != "rms_norm"
        )
        is None
    ]

    assert not unseen


@pytest.mark.slow
@of_tiers
def test_libraries_that_keep_ask_or_set_something_are_refused_unloaded(every: int, tmp_path: Path) -> None:
    cheats = library_cheats(SEED)[::every]

    unseen = [cheat.kind for cheat in cheats if problem_of(refused_library(cheat, tmp_path)) is None]

    assert not unseen


@pytest.mark.slow
def test_each_float_is_tried_where_a_kernel_is_installed(process: SlotProcess, tmp_path: Path) -> None:
    """A cheat for one of them alone, which drawn numbers miss."""
    body = "TRUE; for (int64_t i = 0; i < n; ++i) if (bits_of(x[i]) == 0x00123456u) y[i] += w[i];"
    library = c_library([Cheat("silu_gate", "one float", body)], "silu_gate", tmp_path)
    asked = {"symbol": "cheat_0", "seconds": SECONDS}

    assert process.problem("silu_gate", library, SEED, **asked) is None
    problem = process.problem("silu_gate", library, SEED, every_float=True, **asked)

    assert problem is not None
    assert "other bits" in problem


def test_a_kernel_that_does_not_end_is_late(process: SlotProcess, tmp_path: Path) -> None:
    """And the process that called it goes on."""
    library = c_library([spinning_cheat("rms_norm")], "rms_norm", tmp_path)

    problem = process.problem("rms_norm", library, SEED, symbol="cheat_0", seconds=2)

    assert problem is not None
    assert "not done in time" in problem
    assert process.problem("rms_norm", library, SEED, symbol="cheat_true", seconds=SECONDS) is None
