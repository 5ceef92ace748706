"""The number of trees, and the bounds that the paper gives for it (section 5.2, appendix A)."""

from __future__ import annotations

from math import exp2, factorial, log2, prod

from phasewise.tuner.topotree.group_chains import chains
from phasewise.tuner.topotree.tree import TopoTree


def count_grouped(tree: TopoTree, *, power_of_two: bool = True) -> int:
    """The number of groupings of a fundamental tree, without making them."""
    return prod(count_groupings_of_levels(tree, power_of_two=power_of_two))


def count_groupings_of_levels(tree: TopoTree, *, power_of_two: bool = True) -> tuple[int, ...]:
    """The number of ways in which the nodes of each level of a fundamental tree nest below one parent."""
    return tuple(len(chains(arity, power_of_two)) for arity in tree.base.arities)


def group_bound(n: int, *, power_of_two: bool = True) -> float:
    """Proposition 1: the most groupings of `n` PUs.

    Without A.3 it is n^n / (n - 1)!. With A.3 the paper prints n^(log2(n) / 2) over the same factorial, which
    is less than one from n = 4 on, although the ungrouped tree always exists; the product that it bounds, (7)
    of the appendix over powers of two, has the numerator alone, and so has this.
    """
    if power_of_two:
        return exp2(log2(n) ** 2 / 2)
    return float(n**n // factorial(n - 1))


def removal_bound(n: int) -> int:
    """Proposition 2: the most trees by removals from one grouped tree of `n` PUs.

    Under A.1 they are exactly the product of the arities, which is n.
    """
    return n * n
