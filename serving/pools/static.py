"""Static pre-allocation: every request gets the longest block, so that nothing ever has to grow."""

from __future__ import annotations

from phasewise.serving.pools.contiguous import Size
from phasewise.serving.pools.contract import Demand


class StaticSizes:
    """`longest_request` positions for everyone."""

    policy = "static"
    bounds: tuple[int, ...] = ()
    reserve_share = 0.0
    squeezes = False

    def __init__(self, longest_request: int) -> None:
        self.large_bound = longest_request

    def first(self, demand: Demand) -> Size:
        return Size(self.large_bound, self.large_bound, None)

    def next(self, demand: Demand, n_positions: int) -> Size:
        return Size(n_positions, n_positions, None)

    def ended(self, demand: Demand, answer_tokens: int) -> None:
        """Nothing is learnt."""

    def refresh(self) -> bool:
        return False

    def counts(self) -> dict[str, int]:
        return {}
