"""Turns of calls so short that their samples are picoseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phasewise.tuner import timing

PARTS = 1000
"""Picoseconds of a nanosecond: in whole nanoseconds a call of 11.4 ns and one of 11.6 would look alike."""


def call_parts(loop_ns: Sequence[int], calls_a_loop: int) -> timing.Samples:
    """Picoseconds of a call in each of these loops, whose times are in nanoseconds."""
    return tuple(max(1, round(PARTS * ns / calls_a_loop)) for ns in loop_ns)


def take_of(call_ns: Callable[[int, int], Sequence[int]]) -> timing.Take:
    """Turns of one function. call_ns: nanoseconds of each of so many loops, of so many calls."""
    first = max(1, min(call_ns(3, 1)))
    turn = timing.plan_turn(first)
    if turn.calls_a_loop > 1:
        first = max(1, call_ns(1, turn.calls_a_loop)[0] // turn.calls_a_loop)
        turn = timing.plan_turn(first)

    def take() -> timing.Samples:
        return call_parts(call_ns(turn.loops, turn.calls_a_loop), turn.calls_a_loop)

    return take
