"""Sizes in words. Units are powers of 1,024, written as the kernel writes them: K, M, G, T."""

from __future__ import annotations

UNITS = (("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10))


def format_size(size_bytes: int | None) -> str:
    """A cache's size, exact to five digits: 48K, 2M, 1.25M; `?` where unknown."""
    return _format(size_bytes, digits=5)


def format_memory(size_bytes: int | None) -> str:
    """A memory's size to three digits: 126G. Equal nodes differ by what the firmware keeps for itself."""
    return _format(size_bytes, digits=3)


def _format(size_bytes: int | None, digits: int) -> str:
    if size_bytes is None:
        return "?"
    for unit, factor in UNITS:
        if size_bytes >= factor:
            scaled = size_bytes / factor
            return f"{round(scaled) if scaled >= 10 ** (digits - 1) else f'{scaled:.{digits}g}'}{unit}"
    return str(size_bytes)
