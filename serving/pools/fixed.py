"""S3's buckets: of equal width, chosen beforehand from the longest answer (Jin et al., NeurIPS 2023).

A request gets the bucket that its estimate falls into. An answer that outgrows it is moved to a block with
room for twice the answer, as S3's supervisor does. Without an estimate a request gets the longest bucket.
"""

from __future__ import annotations

from bisect import bisect_left

from phasewise.serving.pools.contiguous import Size
from phasewise.serving.pools.contract import Demand


class FixedSizes:
    """`n_buckets` buckets up to answers of `longest_answer` tokens."""

    policy = "fixed"
    reserve_share = 0.0
    squeezes = False

    def __init__(self, longest_answer: int, n_buckets: int) -> None:
        self.bounds = tuple(-(-longest_answer * bucket // n_buckets) for bucket in range(1, n_buckets + 1))
        self.large_bound = longest_answer
        self._estimated = self._mispredicted = 0

    def first(self, demand: Demand) -> Size:
        answered = demand.held_tokens - demand.prompt_tokens
        bucket = self._bucket(max(_expected(demand, self.large_bound), answered + 1))
        return self._size(demand, self.bounds[bucket], bucket)

    def next(self, demand: Demand, n_positions: int) -> Size:
        doubled = 2 * (n_positions - 1 - demand.prompt_tokens)
        return self._size(demand, doubled, None)

    def ended(self, demand: Demand, answer_tokens: int) -> None:
        if demand.estimate is not None:
            self._estimated += 1
            predicted = self._bucket(demand.estimate.output_tokens)
            self._mispredicted += predicted != self._bucket(answer_tokens)

    def refresh(self) -> bool:
        return False

    def counts(self) -> dict[str, int]:
        return {"estimated": self._estimated, "mispredicted": self._mispredicted}

    def _bucket(self, answer_tokens: float) -> int:
        return min(bisect_left(self.bounds, answer_tokens), len(self.bounds) - 1)

    def _size(self, demand: Demand, answer_tokens: int, bucket: int | None) -> Size:
        n_positions = min(demand.most_tokens, demand.prompt_tokens + answer_tokens)
        return Size(n_positions, n_positions, bucket)


def _expected(demand: Demand, longest: int) -> float:
    return longest if demand.estimate is None else demand.estimate.output_tokens
