"""The order of pairs to measure, when there are too many for the time: pure, and the same for the same seed.

Symmetry (A.1) makes the inside of one shared part stand for all of them, so its pairs come first and whole;
then the insides of its likes; then pairs across parts, of which a sample tells enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from random import Random

Pair = tuple[int, int]


def ordered_pairs(parts: Sequence[Sequence[int]], rng: Random) -> list[Pair]:
    """Every pair of the indices in `parts` once, in the order in which to measure them."""
    inside = [_shuffled(combinations(part, 2), rng) for part in parts]
    across = [
        pair
        for first, second in combinations(range(len(parts)), 2)
        for pair in product(parts[first], parts[second])
    ]
    return [*(pair for pairs in inside for pair in pairs), *_shuffled(across, rng)]


def _shuffled(pairs: Iterable[Pair], rng: Random) -> list[Pair]:
    mixed = list(pairs)
    rng.shuffle(mixed)
    return mixed
