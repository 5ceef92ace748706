"""An author's C takes part in the tuning of the kernel that was raised from it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from phasewise.ir.build import target_named
from phasewise.ir.errors import UserKernelError
from phasewise.ir.printing import is_original, original_of
from phasewise.ir.raising.raising import raise_file
from phasewise.ir.reading import read
from phasewise.kerneldb.portable import import_rows, rows_of
from phasewise.kerneldb.records import UserPromotion
from phasewise.kerneldb.store import open_store
from phasewise.topology import core_signature, read_machine
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.workflows.report import silent
from phasewise.workflows.user_kernels.files import emit
from phasewise.workflows.user_kernels.tune import KernelSetting, tune_user_kernel
from tests.ir.samples import HOME, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not(HOME) is not None, reason=str(why_not(HOME)))]

ONCE = """
/* @arg x count=n low=-1 high=1
   @arg y count=n
   @arg n low=1 high=500 */
#include <stdint.h>
static inline float twice(float x) { return x + x; }
void f(const float *x, float *y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] = twice(x[i]);
}
"""
SLOWER = ONCE.replace(
    "y[i] = twice(x[i]);", "for (int64_t r = 0; r < 300; ++r) y[i] = r < 299 ? y[i] - 1.0f : twice(x[i]);"
)
"""The same results: the last round writes over the others."""
CORE_SIG = core_signature(read_machine())


@pytest.mark.parametrize(("is_kernel_slow", "is_original_kept"), [(True, True), (False, False)])
def test_what_is_slower_than_the_original_does_not_come_into_use(
    tmp_path: Path, is_kernel_slow: bool, is_original_kept: bool
) -> None:
    """Nor does the original stay where a kernel is proven faster. What is emitted holds the one in use."""
    ours, authors = tmp_path / "ours.c", tmp_path / "authors.c"
    ours.write_text(SLOWER if is_kernel_slow else ONCE)
    authors.write_text(ONCE if is_kernel_slow else SLOWER)
    kernel = tmp_path / "f.kir"
    kernel.write_text(raise_file(ours, "f"))
    function, target = read(kernel.read_text()), target_named(HOME.name)
    original = original_of(authors, function, target)
    core = read_machine().allowed_cores()[-1][0]
    with open_store(":memory:", silent) as store:
        setting = KernelSetting(
            kernel.read_text(),
            "f.kir",
            target,
            CORE_SIG,
            core,
            store,
            MeasurementLock(),
            silent,
            60.0,
            True,
            original,
        )
        first = tune_user_kernel(setting, [(("n", 400),)])[0]
        second = tune_user_kernel(setting, [(("n", 400),)])[0]

        assert is_original(dict(first.choice)) == is_original_kept
        assert first.gain >= 1
        assert second.choice == first.choice
        assert first.baseline == second.baseline == original.choice
        assert first.over_baseline == second.over_baseline
        assert (first.over_baseline is not None) != is_original_kept
        assert (second.before, second.over_before) == (first.choice, None)
        assert len(store.rows(UserPromotion, verified=True)) == 1, "no duel is fought twice"
        with open_store(":memory:", silent) as elsewhere:
            import_rows(elsewhere, rows_of(store))
            assert elsewhere.rows(UserPromotion, verified=True) == [], (
                "what was imported is not in use before a duel"
            )
            there = tune_user_kernel(replace(setting, store=elsewhere), [(("n", 400),)])[0]
            assert there.choice == first.choice
        text, _, _ = emit(kernel, store, CORE_SIG, None, authors)
        assert ("/* the original */" in text) == is_original_kept
        source = tmp_path / "emitted.c"
        source.write_text(text)
        for flags in ([], list(target.flags)):
            command = [
                "cc",
                "-O2",
                "-Wall",
                "-Wextra",
                "-Werror",
                *flags,
                "-c",
                str(source),
                "-o",
                "/dev/null",
            ]
            subprocess.run(command, check=True, cwd=tmp_path)
        if is_original_kept:
            with pytest.raises(UserKernelError, match="give the file"):
                emit(kernel, store, CORE_SIG, None)
            authors.write_text(ONCE.replace("x + x", "2.0f * x"))
            with pytest.raises(UserKernelError, match="give the file"):
                emit(kernel, store, CORE_SIG, None, authors)


@pytest.mark.smoke
def test_an_original_with_other_arguments_is_refused(tmp_path: Path) -> None:
    ours, authors = tmp_path / "ours.c", tmp_path / "authors.c"
    ours.write_text(ONCE)
    authors.write_text(ONCE.replace("int64_t n)", "int n)").replace("int64_t i", "int i"))
    function = read(raise_file(ours, "f"))
    with pytest.raises(UserKernelError, match="other arguments"):
        original_of(authors, function, target_named(HOME.name))
