"""Fields of configs: the mark of those that files and fingerprints leave out where a field has its default,
and checks of numbers that a stranger's file states."""

from __future__ import annotations

from phasewise.serving.errors import ModelError

LATER = {"later": True}
"""Metadata of a field that was added later: files without it stay valid."""

MOST_FACTOR = 1e6
"""The largest factor of rows, and one over the smallest."""


def check_whole(what: str, value: object, least: int, most: int) -> None:
    """Raise ModelError unless `value` is a whole number from `least` to `most`. `what`: its name."""
    if type(value) is not int or not least <= value <= most:
        raise ModelError(f"{what} is {value!r:.80}: a whole number from {least} to {most} expected")


def check_factor(what: str, value: float | None) -> None:
    """Raise ModelError unless `value`, if there is one, is a factor of rows. `what`: its name."""
    if value is not None and not 1 / MOST_FACTOR <= value <= MOST_FACTOR:
        raise ModelError(f"{what} is {value!r:.80}: a number from 1e-6 to 1e6 expected")
