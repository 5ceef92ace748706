"""Sets of CPUs as the kernel and hwloc write them.

Inside this room a set of CPUs is an int whose bit i is CPU i: inclusion and intersection are single
operations, however large the machine.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_CPU_INDEX = 16_383
"""The highest CPU number believed. Linux stops at 8,191; a larger number is a damaged file."""

MAX_LIST_CHARS = 1_000_000
HEX_DIGITS = frozenset("0123456789abcdefABCDEF")


def mask_of(cpus: Iterable[int]) -> int:
    mask = 0
    for cpu in cpus:
        mask |= 1 << cpu
    return mask


def cpus_of(mask: int) -> tuple[int, ...]:
    """The CPUs of a mask, ascending."""
    cpus = []
    while mask:
        lowest = mask & -mask
        cpus.append(lowest.bit_length() - 1)
        mask ^= lowest
    return tuple(cpus)


def first_cpu(mask: int) -> int:
    """The lowest CPU of a mask that is not empty."""
    return (mask & -mask).bit_length() - 1


def parse_list(text: str) -> int:
    """The mask of a kernel list such as `0-3,8,10-14`; empty text is the empty set. ValueError if bad."""
    if len(text) > MAX_LIST_CHARS:
        raise ValueError("CPU list is too long")
    mask = 0
    for piece in text.strip().split(","):
        if not piece:
            continue
        first, dash, last = piece.partition("-")
        low, high = _index(first), _index(last if dash else first)
        if low > high:
            raise ValueError(f"CPU range {piece!r} runs backwards")
        mask |= (1 << (high + 1)) - (1 << low)
    return mask


def parse_kernel_mask(text: str) -> int:
    """The mask of a kernel bitmap such as `ff,00000003`: hex words of 32 bits, highest first."""
    return _join_words(text.strip().split(","))


def parse_hwloc_mask(text: str) -> int:
    """The mask of an hwloc bitmap such as `0x00000001,0x0,0xffff0000`. ValueError if bad or infinite."""
    words = text.strip().split(",")
    if words[0] == "0xf...f":
        raise ValueError("CPU set is infinite")
    return _join_words([word[2:] if word.startswith("0x") else word for word in words])


def format_list(cpus: Iterable[int]) -> str:
    """CPUs as a kernel list: `0-3,8`."""
    pieces: list[str] = []
    run: list[int] = []
    for cpu in [*sorted(cpus), None]:
        if run and cpu == run[-1] + 1:
            run.append(cpu)
            continue
        if run:
            pieces.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
        run = [] if cpu is None else [cpu]
    return ",".join(pieces)


def _join_words(words: list[str]) -> int:
    if len(words) * 32 > MAX_CPU_INDEX + 1:
        raise ValueError("CPU set is too large")
    for word in words:
        if len(word) > 8 or not HEX_DIGITS.issuperset(word):
            raise ValueError(f"CPU set word {word[:16]!r} is not hexadecimal of 32 bits")
    return int("".join(word.zfill(8) for word in words), 16)


def _index(text: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 5 and int(digits) <= MAX_CPU_INDEX):
        raise ValueError(f"{text[:16]!r} is not a CPU number below {MAX_CPU_INDEX + 1}")
    return int(digits)
