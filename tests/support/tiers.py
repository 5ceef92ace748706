"""The tiers of the tests: how many examples are drawn in each, and which instruction sets are taken.

- `quick`, by `make test`: the lowest and the highest usable instruction set, a fifth of the drawn examples
  and of the parameters of what is marked `many`; of what is marked `slow` only what is marked `smoke` too.
- `all`, by `make test-all`: everything but what is marked `soak`.
- `rest`: what `all` has and `quick` has not. CI runs it after `quick`.
- `soak`, by `make test-soak`: everything, with twenty times the examples.

tests/conftest.py chooses the tests; pytest's option `--tier` names the tier.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import settings

TIERS = ("quick", "rest", "all", "soak")
VARIABLE = "PHASEWISE_TEST_TIER"
"""Set by tests/conftest.py before test modules are imported; processes that tests start inherit it."""

QUICK_SHARE = 5
_SOAK_FACTOR = 20


def tier() -> str:
    """The tier of this run; `all` where a module is imported outside pytest."""
    return os.environ.get(VARIABLE, "all")


def n_examples(n: int, *, soak: int = 0) -> int:
    """Number of examples where `all` draws n: in `quick` a fifth; in `soak` the number `soak`, or 20 n."""
    if tier() == "quick":
        return -(-n // QUICK_SHARE)
    return (soak or n * _SOAK_FACTOR) if tier() == "soak" else n


def examples(n: int, *, soak: int = 0, **more: Any) -> settings:
    """Hypothesis settings of a test that draws `n_examples(n)`; no deadline: no test asserts a time."""
    return settings(max_examples=n_examples(n, soak=soak), deadline=None, **more)


def first_is_smoke(values: Iterable[Any]) -> list[Any]:
    """Parameters of a test that is marked `slow`: `quick` runs it with the first of them alone."""
    first, *others = values
    parts = first if isinstance(first, tuple) else (first,)
    return [pytest.param(*parts, marks=pytest.mark.smoke), *others]


def isas() -> Sequence[str]:
    """The usable instruction sets, lowest first, that a test takes in this tier.

    Call it in the test itself: by its name there, `rest` knows that `quick` has left some out. Then it gives
    these and the lowest, with which others are compared.
    """
    from phasewise.cython_kernels import isa

    names, middle = isa.usable(), middle_isas()
    if tier() == "quick":
        return [name for name in names if name not in middle]
    if tier() == "rest" and middle:
        return names[:-1]
    return names


def middle_isas() -> Sequence[str]:
    """The usable instruction sets that `quick` leaves out; none before the kernels are compiled.

    Tests of what needs no kernel (schedulers, routers, searches) run without a compiled extension.
    """
    if find_spec("phasewise.cython_kernels._native") is None:
        return ()
    from phasewise.cython_kernels import isa

    return isa.usable()[1:-1]
