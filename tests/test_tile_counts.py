"""The counts of loops on a tile unit: they add up, and what is nearer never costs more."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest

from benchmarks.tile_counts import BY_BLOCKS, STEP_PARTS, count, loops_of, share_of_peak, step_rows

SHAPES = ((1024, 2048), (2048, 2048), (2048, 8192))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_no_loop_passes_the_peak_and_the_best_blocks_are_no_worse_than_the_default(n: int, k: int) -> None:
    loops = loops_of(n, k, 512, n)
    shares = {name: share_of_peak(n, k, 512, b) for name, b in loops.items()}

    assert all(0 < share < 1 for share in shares.values())
    assert shares["by blocks, best"] >= shares[BY_BLOCKS]


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_twice_the_rows_take_at_most_twice_as_long_and_more_than_once(n: int, k: int) -> None:
    blocks = loops_of(n, k, 512, n)[BY_BLOCKS]
    once, twice = (sum(astuple(count(n, k, m, blocks))) for m in (512, 1024))

    assert once < twice <= 2 * once


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_pass_over_all_of_k_keeps_no_sums_waiting(n: int, k: int) -> None:
    blocks = replace(loops_of(n, k, 512, n)[BY_BLOCKS], inputs=k)
    assert count(n, k, 512, blocks).sums == 0


def test_a_step_by_count_is_the_sum_of_its_parts_and_no_slower_than_it_was() -> None:
    rows = list(step_rows())
    parts, (whole, on_tiles) = rows[:-2], rows[-2:]

    assert whole["by count, ms"] == pytest.approx(sum(row["by count, ms"] for row in parts), abs=0.5)
    assert whole["measured, ms"] == sum(part.measured_ms for part in STEP_PARTS)
    assert on_tiles["by count, ms"] < whole["by count, ms"] <= whole["measured, ms"]
