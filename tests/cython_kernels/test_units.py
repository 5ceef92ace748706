"""The C of the executor is layered: no unit depends on one that depends on it."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "cython_kernels"
INCLUDE = re.compile(r'^#include "(?:\w+/)?(\w+)\.h"', re.MULTILINE)
LAYERS = ("division", "program", "run", "attend", "executor", "orders")


def units() -> dict[str, set[str]]:
    """Each unit, a .c and a .h of one name, with the units whose headers it includes."""
    included: dict[str, set[str]] = {}
    for path in KERNELS.rglob("*.[ch]"):
        if path.name != "_native.c" and not {"families", "isa", "simd"} & set(path.parts):
            included.setdefault(path.stem, set()).update(set(INCLUDE.findall(path.read_text())) - {path.stem})
    return included


def test_units_form_no_circle() -> None:
    order = list(TopologicalSorter(units()).static_order())  # CycleError names the units of a circle

    assert [unit for unit in order if unit in LAYERS] == list(LAYERS)
