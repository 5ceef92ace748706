"""The kernels of the reference build: the names that a release's wheels carry, by machine.

A name is a hash over sources, flags and compiler (`abi`), so a tree that is built at home with the same three
has the same names, and timings of the wheels are its own. `python setup.py reference_names` writes the file,
into wheels and sdists as `make dist` makes them.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cache
from importlib.resources import files

FILE = "reference_build.json"


@cache
def reference_names() -> frozenset[str]:
    """All of every machine, instruction set and family; none in a checkout that no release was made of."""
    names_by_machine = json.loads((files("phasewise.kerneldb") / FILE).read_text())
    return frozenset(name for names in names_by_machine.values() for name in names)


def is_reference_build(kernel_abis: Collection[str]) -> bool | None:
    """True where all of these kernels are the release's; None where the release's are not known."""
    return reference_names().issuperset(kernel_abis) if reference_names() else None
