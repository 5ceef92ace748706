"""The search against the whole grid, on frontiers drawn at random and on a small simulated cluster."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cluster.errors import ClusterError
from phasewise.cluster.simulated.metrics import broken, parse_slo, summarise
from phasewise.cluster.simulated.provision import (
    NEIGHBOURHOOD,
    Cell,
    Outcome,
    Search,
    cheapest,
    fastest,
    highest_rate,
)
from phasewise.cluster.simulated.simulate import Link, simulate
from phasewise.cluster.simulated.simulated_requests import poisson
from tests.support.clusters import machine, split
from tests.support.tiers import examples


def staircase(least: list[int], tight: float = 0.5) -> Search:
    """Feasible where token machines t meet at least `least[t - 1]` prompt machines."""

    def run(cell: Cell) -> Outcome:
        prompts, tokens = cell
        is_feasible = prompts >= least[tokens - 1]
        return Outcome(is_feasible, tight + 1 / (prompts + 2 * tokens) if is_feasible else 2.0)

    return Search((1.0, 1.0), run, most=len(least))


frontiers = st.lists(st.integers(1, 13), min_size=12, max_size=12).map(
    lambda rows: sorted(rows, reverse=True)
)


def whole_grid(search: Search) -> Cell | None:
    """The answer by running every cell; None: no cell keeps its promises."""
    sides = [range(1, search.most + 1)] * len(search.weights)
    feasible = [cell for cell in product(*sides) if search.outcome(cell).is_feasible]
    return min(
        feasible,
        key=lambda cell: (round(search.objective(cell), 9), search.outcome(cell).tightness, cell),
        default=None,
    )


@examples(200)
@given(
    least=frontiers,
    weights=st.tuples(st.sampled_from([1.0, 2.0, 17.68]), st.sampled_from([1.0, 2.5, 38.08])),
    guess=st.tuples(st.floats(0.1, 12), st.floats(0.1, 12)),
)
def test_any_frontier_has_the_answer_of_the_whole_grid(
    least: list[int], weights: tuple[float, float], guess: tuple[float, float]
) -> None:
    """The same objective always; the same cell unless cells of equal cost lie apart from each other."""
    search, grid = staircase(least), staircase(least)
    search.weights = grid.weights = weights
    expected = whole_grid(grid)
    if expected is None:
        with pytest.raises(ClusterError, match="no cluster of up to 12"):
            cheapest(search, guess)
        return

    answer = cheapest(search, guess)

    assert answer.objective == pytest.approx(grid.objective(expected))
    assert answer.outcome.is_feasible


def test_a_large_grid_needs_few_runs() -> None:
    """39 x 39 cells, as in the authors' sweep: at most 5 % of them."""
    least = [max(24, 40 - 4 * tokens) for tokens in range(1, 40)]
    search = staircase(least)

    answer = cheapest(search, (20.0, 2.0))

    assert answer.objective == 28
    assert answer.n_runs <= 0.05 * 39 * 39


def test_one_axis_is_bisected() -> None:
    search = Search((2.0,), lambda cell: Outcome(cell[0] >= 37, 37 / cell[0] * 0.9), most=80)

    answer = cheapest(search, (30.0,))

    assert answer.cell == (37,)
    assert answer.n_runs < 16


@examples(100)
@given(frontiers, st.sets(st.tuples(st.integers(1, 12), st.integers(1, 12)), max_size=20))
def test_near_the_answer_cheaper_clusters_were_run_or_ruled_out(least: list[int], dents: set[Cell]) -> None:
    """Some clusters keep the promises against the rule: a failed one rules out smaller ones alone."""

    def run(cell: Cell) -> Outcome:
        return Outcome(cell in dents or cell[0] >= least[cell[1] - 1], 0.5)

    search = Search((1.0, 1.0), run, most=12)
    try:
        answer = cheapest(search, (8.0, 3.0))
    except ClusterError:
        return
    near = product(*(range(max(1, n - NEIGHBOURHOOD), min(12, n + NEIGHBOURHOOD) + 1) for n in answer.cell))
    failed = [cell for cell, outcome in search.outcomes.items() if not outcome.is_feasible]

    assert run(answer.cell).is_feasible
    for cell in near:
        if sum(cell) < answer.objective:
            assert any(other[0] >= cell[0] and other[1] >= cell[1] for other in failed), (cell, answer)


@given(limit=st.integers(0, 300), most=st.integers(1, 300), above=st.integers(0, 50))
def test_the_highest_rate_is_where_promises_break(limit: int, most: int, above: int) -> None:
    highest = highest_rate(lambda rate: rate <= limit, 1.0, most, min(above, most - 1))

    assert highest == max(min(limit, most), min(above, most - 1))


@given(peak=st.integers(0, 38), start=st.integers(0, 38))
def test_a_budget_is_divided_at_the_peak(peak: int, start: int) -> None:
    """39 divisions, whose rates rise to a peak and fall."""
    cells: list[Cell] = [(index + 1, 39 - index) for index in range(39)]
    answer = fastest(cells, start, lambda cell, rate: rate <= 200 - 4 * abs(cell[0] - 1 - peak), 1.0, 400)

    assert answer.cell == cells[peak]
    assert answer.rate == 200
    assert answer.n_runs < 0.05 * 39 * 250


@pytest.mark.slow
def test_a_simulated_cluster_is_provisioned_as_by_the_grid() -> None:
    """The production scheduler, 12 requests/s for 15 s, at most 5 x 5 machines."""
    kind = machine(link=Link(1e7))
    slo = parse_slo("ttft=700ms,tbt=30ms")
    arrivals = poisson([(100, 20), (300, 5), (50, 60)], 12.0, 15.0, seed=1)

    def run(cell: Cell) -> Outcome:
        summary = summarise(simulate(split(*cell, kind), arrivals), None)
        used = [summary.times_s[bound.metric][bound.percentile] / bound.below for bound in slo.bounds]
        return Outcome(not broken(summary, slo), max(used))

    grid = Search((1.0, 1.0), run, most=5)
    answer = cheapest(Search((1.0, 1.0), run, most=5), (2.0, 1.0))

    assert answer.cell == whole_grid(grid)
    assert answer.n_runs < len(grid.outcomes)
