"""Whose cores the kernels' defaults are made for: this machine's, or those that PHASEWISE_CORE names.

The names (generic, intel, zen, zen4) stand for rows of a table of traits in cpu.c: what default schedules
assume of a core. A trait changes speed and no bit of any result. The override is there to test one vendor's
defaults on another's machine; the machine's signature names it, so that nothing measured under it is taken
for the machine's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from phasewise.cython_kernels import _native


def names() -> tuple[str, ...]:
    """Every name that PHASEWISE_CORE may have."""
    return tuple(_native.core_names())


def active() -> str:
    """The name in use."""
    return str(_native.core_active())


@contextmanager
def using(name: str) -> Iterator[None]:
    """Use the traits of `name` within the block, for the whole process; IsaError for an unknown name."""
    before = active()
    _native.core_select(name)
    try:
        yield
    finally:
        _native.core_select(before)
