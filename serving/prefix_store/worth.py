"""The order in which blocks leave a full folder. Pure: sizes, seconds and ages in, names out.

A block is worth the seconds that it saves for each byte, and less the longer nobody has read it. What comes
before a block is worth no less than the block, which nobody can read without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

YOUNG_S = 600.0
"""The age at which a block's worth is half of that of a new one."""


class KeptBlock(NamedTuple):
    """A block in a folder. parent: the name before it; seconds: to compute it; age_s: since it was read."""

    parent: bytes
    begin: int
    n_bytes: int
    seconds: float
    age_s: float


def worth(block: KeptBlock) -> float:
    """Seconds a byte, by age."""
    return block.seconds / max(1, block.n_bytes) / (1 + max(0.0, block.age_s) / YOUNG_S)


def order_of_leaving(blocks: Mapping[bytes, KeptBlock]) -> list[bytes]:
    """Names, the least worth first, and what comes after a block before it. Blocks whose beginning is gone
    leave first of all."""
    deepest_first = sorted(blocks, key=lambda name: blocks[name].begin, reverse=True)
    value = {name: worth(block) for name, block in blocks.items()}
    for name in deepest_first:
        parent = blocks[name].parent
        if parent in value:
            value[parent] = max(value[parent], value[name])
    reached: dict[bytes, bool] = {}
    for name in reversed(deepest_first):
        block = blocks[name]
        reached[name] = block.begin == 0 or reached.get(block.parent, False)
    return sorted(deepest_first, key=lambda name: (reached[name], value[name], -blocks[name].begin))


def to_leave(blocks: Mapping[bytes, KeptBlock], most_bytes: int) -> Iterable[bytes]:
    """The names that must leave, so that the others have at most `most_bytes`."""
    n_bytes = sum(block.n_bytes for block in blocks.values())
    for name in order_of_leaving(blocks):
        if n_bytes <= most_bytes:
            return
        n_bytes -= blocks[name].n_bytes
        yield name
