"""Names of sparse formats: density in sixteenths, one arithmetic for both storages."""

from __future__ import annotations

import pytest

from phasewise.cython_kernels import sparse
from phasewise.tuner.errors import TunerError
from phasewise.tuner.lookup import ScheduleTable
from phasewise.tuner.native import arithmetics
from phasewise.tuner.weights import dense_format, format_name, random_weight, sparse_format, split_format


@pytest.mark.parametrize("name", ["bf16", "int8", "int8g16", "int8c"])
@pytest.mark.parametrize("density", [1 / 16, 0.5, 15 / 16])
def test_a_sparse_weight_is_named_after_what_it_keeps(name: str, density: float) -> None:
    weight = random_weight(sparse_format(name, density), 256, 512)

    assert weight.is_sparse
    assert format_name(weight) == sparse_format(name, density)
    assert dense_format(weight) == name
    assert split_format(format_name(weight)) == (name, density)
    assert sparse.kept_share(weight) == pytest.approx(sparse.density(weight), abs=0.005)


def test_names_that_mean_nothing_are_refused() -> None:
    with pytest.raises(TunerError):
        sparse_format("int4", 0.5)
    with pytest.raises(TunerError):
        sparse_format("bf16", 1.5)
    with pytest.raises(TunerError):
        split_format("bf16s17")
    assert split_format("iq4_xs") == ("iq4_xs", None)


def test_both_storages_have_one_arithmetic() -> None:
    """A database's word on a dense weight is that on the sparse one; searches do not look for another."""
    schedules = ScheduleTable([])

    assert schedules.arithmetic(random_weight("bf16s8", 64, 64)) == schedules.arithmetic(
        random_weight("bf16", 64, 64)
    )
    assert arithmetics("bf16s8", 64, 64, 2) == arithmetics("bf16", 64, 64, 2)[:1]
