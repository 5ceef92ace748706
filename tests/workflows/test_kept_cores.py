"""Commands that keep the plans of their start tell once for each change of what they may use."""

from __future__ import annotations

from collections.abc import Iterator

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


def test_steps_pass_with_a_look_after_each() -> None:
    """The last one too; an interrupt between two of them ends them as it would without."""
    lines: list[str] = []
    limits = iter([(3, None), (3, None), (1, None), (1, None)])
    assert [*KeptCores(lines.append, lambda: next(limits)).between("abc")] == ["a", "b", "c"]
    assert len(lines) == 1

    def interrupted() -> Iterator[str]:
        yield "a"
        raise KeyboardInterrupt

    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        done.extend(KeptCores(lines.append, lambda: (3, None)).between(interrupted()))
    assert done == ["a"]
