"""Commands that keep the plans of their start tell once for each change of what they may use."""

from __future__ import annotations

import pytest

from phasewise.workflows.opening.kept_cores import KeptCores, Limits


def told(*seen: Limits | OSError) -> list[str]:
    """The lines of a command that saw these limits, the first of them at its start."""
    lines: list[str] = []
    steps = iter(seen)

    def look() -> Limits:
        limits = next(steps)
        if isinstance(limits, OSError):
            raise limits
        return limits

    cores = KeptCores(lines.append, look)
    for _ in seen[1:]:
        cores.tell_changes()
    return lines


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ((0b1, None), "core 0 now"),
        ((0b1011, None), "cores 0-1,3 now"),
        ((0b11, 1.5), "cores 0-1, and the time of 1.5 CPUs now"),
        ((None, None), "all cores now"),
    ],
)
def test_a_change_is_told_once(limits: Limits, words: str) -> None:
    lines = told((0b11, None), (0b11, None), limits, limits)
    assert lines == [f"this process may use {words}: its plans stay those of its start"]


def test_each_change_is_told_also_back_to_what_was() -> None:
    assert len(told((3, None), (1, None), (3, None))) == 2


def test_what_cannot_be_read_now_is_no_change() -> None:
    assert told((3, None), OSError(), (3, None)) == []
