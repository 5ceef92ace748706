"""Search for the number of machines of each kind that a load needs (Splitwise IV-D), without running the
whole grid.

A design has one axis (mixed machines) or two (prompt and token machines); a cell is a number of machines on
each. More machines keep more promises, so the feasible cells lie behind a frontier. The search finds one
feasible cell, then asks of each column only whether it holds a better cell than the best one known; a cell
that is known to be dominated is never run. The answer is certified by its neighbours: every cell around it
that would be better was run and broke a promise, or lies below a cell that did.

Pure: the caller runs cells and returns their outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Literal, NamedTuple, get_args

from phasewise._words import counted
from phasewise.cluster.errors import ClusterError

Objective = Literal["cost", "power", "machines"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

Cell = tuple[int, ...]
"""A number of machines for each axis of a design, at least one each."""

NEIGHBOURHOOD = 2
"""Cells in each direction around an answer that must be checked to certify it."""


class Outcome(NamedTuple):
    """The result of running one cell."""

    is_feasible: bool
    tightness: float
    """The largest share of a promise's bound that was used; below 1 where all were kept."""


Run = Callable[[Cell], Outcome]


@dataclass
class Search:
    """The cells that were run, for one design at one rate. weights: a machine's objective on each axis."""

    weights: tuple[float, ...]
    run: Run
    most: int
    """Most machines on one axis."""
    outcomes: dict[Cell, Outcome] = field(default_factory=dict)

    def objective(self, cell: Cell) -> float:
        return sum(weight * count for weight, count in zip(self.weights, cell, strict=True))

    def outcome(self, cell: Cell) -> Outcome:
        if cell not in self.outcomes:
            self.outcomes[cell] = self.run(cell)
        return self.outcomes[cell]

    def is_feasible(self, cell: Cell) -> bool:
        """True if the cell keeps the promises: inferred from other cells, else by running the cell."""
        implied = self._implied(cell)
        return self.outcome(cell).is_feasible if implied is None else implied

    def _implied(self, cell: Cell) -> bool | None:
        if cell in self.outcomes:
            return self.outcomes[cell].is_feasible
        for other, outcome in self.outcomes.items():
            if outcome.is_feasible and all(a <= b for a, b in zip(other, cell, strict=True)):
                return True
            if not outcome.is_feasible and all(a >= b for a, b in zip(other, cell, strict=True)):
                return False
        return None

    def frontier(self) -> list[Cell]:
        """Feasible cells that were run, without those that another one undercuts on every axis."""
        feasible = [cell for cell, outcome in self.outcomes.items() if outcome.is_feasible]
        return sorted(
            cell
            for cell in feasible
            if not any(
                other != cell and all(a <= b for a, b in zip(other, cell, strict=True)) for other in feasible
            )
        )


class BestCell(NamedTuple):
    """The best numbers of machines that a search found, and the outcome of their simulation."""

    cell: Cell
    objective: float
    outcome: Outcome
    n_runs: int
    frontier: list[Cell]


def cheapest(search: Search, guess: Sequence[float]) -> BestCell:
    """Find the feasible cell with the least objective; of equals the least tight one, then the smaller first
    axis. guess: machines that the load keeps busy on each axis, where the search begins. ClusterError if no
    cell within `search.most` keeps the promises."""
    best = _first_feasible(search, guess)
    if len(best) == 1:
        best = (_least(search, lambda count: (count,), 1, best[0]),)
    else:
        best = _improved(search, best)
    best = _least_tight(search, best)
    while (better := _better_neighbour(search, best)) is not None:
        best = _least_tight(search, better)
    outcome = search.outcome(best)
    return BestCell(best, search.objective(best), outcome, len(search.outcomes), search.frontier())


def _rank(search: Search, cell: Cell) -> tuple[float, float, Cell]:
    return round(search.objective(cell), 9), search.outcome(cell).tightness, cell


def _first_feasible(search: Search, guess: Sequence[float]) -> Cell:
    """The first feasible cell along a ray through the guess: doubled until feasible, then halved back."""

    def cell(scale: float) -> Cell:
        return tuple(min(search.most, max(1, math.ceil(scale * guessed))) for guessed in guess)

    scale = 1.0
    while not search.is_feasible(cell(scale)):
        if all(count == search.most for count in cell(scale)):
            most = counted(search.most, "machine")
            raise ClusterError(f"no cluster of up to {most} of each kind keeps the promises at this rate")
        scale *= 1.5
    low, high = (scale / 1.5 if scale > 1 else 0.0), scale
    while cell(low) != cell(high) and high - low > 0.02 * high:
        middle = (low + high) / 2
        if search.is_feasible(cell(middle)):
            high = middle
        else:
            low = middle
    return cell(high)


def _least(search: Search, cell: Callable[[int], Cell], low: int, high: int) -> int:
    """The least count from `low` to `high` whose cell is feasible; the cell of `high` must be."""
    while low < high:
        middle = (low + high) // 2
        if search.is_feasible(cell(middle)):
            high = middle
        else:
            low = middle + 1
    return high


def _improved(search: Search, best: Cell) -> Cell:
    """Find the best cell by one look at every column; `best` if none has a better one. For each column: does
    its dearest cell that is still better keep the promises, and if so, how few machines do?"""
    for tokens in _outwards(best[1], search.most):
        prompts = _most_below(search, tokens, search.objective(best))
        if prompts >= 1 and search.is_feasible((prompts, tokens)):
            best = _least(search, partial(_beside, tokens), 1, prompts), tokens
    return best


def _beside(tokens: int, prompts: int) -> Cell:
    return prompts, tokens


def _outwards(start: int, most: int) -> Iterator[int]:
    """The numbers from `start` outwards within 1 .. most: start, one less, one more, and so on."""
    yield start
    for step in range(1, most):
        if start - step >= 1:
            yield start - step
        if start + step <= most:
            yield start + step


def _most_below(search: Search, tokens: int, objective: float) -> int:
    """The most prompt machines beside `tokens` token machines that stay below an objective."""
    room = (objective - tokens * search.weights[1]) / search.weights[0]
    return min(search.most, math.ceil(room - 1e-9) - 1)


def _least_tight(search: Search, best: Cell) -> Cell:
    """The least tight of the feasible cells next to `best` that cost as much."""
    if len(best) == 1:
        return best
    cells = [best]
    objective = round(search.objective(best), 9)
    for direction in (-1, 1):
        for step in range(1, search.most):
            tokens = best[1] + direction * step
            room = (objective - tokens * search.weights[1]) / search.weights[0]
            prompts = round(room)
            if not (1 <= tokens <= search.most and 1 <= prompts <= search.most):
                break
            if abs(prompts - room) > 1e-6:
                continue
            if not search.is_feasible((prompts, tokens)):
                break
            cells.append((prompts, tokens))
    return min(cells, key=lambda cell: _rank(search, cell))


def _better_neighbour(search: Search, best: Cell) -> Cell | None:
    """Find a better feasible cell around `best`; None certifies `best`. Only infeasibility is inferred."""
    objective = round(search.objective(best), 9)
    around = product(*(range(max(1, count - NEIGHBOURHOOD), count + NEIGHBOURHOOD + 1) for count in best))
    cheaper = [
        cell for cell in around if max(cell) <= search.most and round(search.objective(cell), 9) < objective
    ]
    # a cell below another that was run and is infeasible would have to be better with fewer machines
    for cell in sorted(cheaper, key=search.objective, reverse=True):
        implied = search._implied(cell)
        is_open = cell in search.outcomes or implied is None or implied
        if is_open and search.outcome(cell).is_feasible:
            return cell
    return None


def highest_rate(feasible: Callable[[float], bool], step: float, most: float, above: float = 0.0) -> float:
    """Find the highest feasible multiple of `step` in (above, most], by bisection; `above` if none is."""
    low, high = round(above / step), math.floor(most / step)
    if not feasible((low + 1) * step):
        return above
    low += 1
    reach = 1
    while low + reach <= high and feasible((low + reach) * step):
        low += reach
        reach *= 2
    high = min(high, low + reach - 1)
    while low < high:
        middle = (low + high + 1) // 2
        if feasible(middle * step):
            low = middle
        else:
            high = middle - 1
    return low * step


class Fastest(NamedTuple):
    """The division of a budget with the highest rate."""

    cell: Cell
    rate: float
    n_runs: int


def fastest(
    cells: Sequence[Cell], start: int, run: Callable[[Cell, float], bool], step: float, most: float
) -> Fastest:
    """Find the cell, of those that spend a budget, that keeps the promises at the highest rate. The walk
    begins at index `start`; a neighbour is tried at one step above the best rate, and the walk goes on from
    the better one, in strides that are halved until strides of one bring nothing."""
    n_runs = 0
    rates: dict[tuple[Cell, float], bool] = {}

    def feasible(cell: Cell, rate: float) -> bool:
        nonlocal n_runs
        if (cell, rate) not in rates:
            n_runs += 1
            rates[cell, rate] = run(cell, rate)
        return rates[cell, rate]

    def rate_at(index: int, above: float) -> float:
        return highest_rate(lambda rate: feasible(cells[index], rate), step, most, above)

    best_index = start
    best = rate_at(start, 0.0)
    stride = max(1, len(cells) // 8)
    while stride:
        moved = False
        for other in (best_index - stride, best_index + stride):
            if 0 <= other < len(cells):
                rate = rate_at(other, best)
                if rate > best:
                    best_index, best, moved = other, rate, True
                    break
        if not moved:
            stride //= 2
    if not best:
        raise ClusterError("no way to spend the budget keeps the promises, even at the lowest rate")
    return Fastest(cells[best_index], best, n_runs)
