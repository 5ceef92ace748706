"""Do products keep the two laws of rows, untuned, for every format on every instruction set?

    python benchmarks/row_laws.py                       everything: hours
    python benchmarks/row_laws.py --short               a few numbers of rows, one shape: minutes
    python benchmarks/row_laws.py --isa avx2 --format q6_k --shape 4096,2048

With t(m) the time of a product of m rows by the default schedule, for every m up to 64:
- more rows never cost less: t(m) is at most t(m') for every m' above m;
- no product is slower than two smaller ones: t(a + b) is at most t(a) + t(b).
Both to within an allowance. All numbers of rows take turns, round after round, forwards and backwards; t(m)
is the least of its rounds, since other work can only add to it. A law that looks broken is asked about again,
with more rounds of the rows that break it, before it is called broken.

One line for each product: what breaks each law most, as the ratio of the two sides. Exit code 1 where a
ratio is above 1 plus the allowance.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

from phasewise.cython_kernels import _native, isa
from phasewise.tuner.weights import copies_of, random_weight

FORMATS = (
    "bf16,int8,int8m,int8g16,int8c,int4,int4m,q2_k,q3_k,q4_k,q5_k,q6_k,iq4_xs,iq4_nl,mxfp4,q5_0,q5_1,"
    "bf16s8,int8s8"
)
SHAPES = "2048,2048;8192,2048;4096,14336"
"""Of models of 1 and 8 billion parameters: attention, and both ways through the feed-forward part."""
ROWS = tuple(range(1, 65))
SHORT_SHAPES = "4096,2048"
SHORT_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 25, 32, 33, 48, 64)

TURN_NS = 1_000_000
"""Length of one turn of one number of rows: shorter than what a scheduler gives to other work."""

Times = Mapping[int, float]
"""Time by number of rows."""


class Breach(NamedTuple):
    """The largest ratio of a law's two sides, and the numbers of rows on them."""

    ratio: float
    dearer: int
    others: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.ratio:.2f} ({self.dearer} against {' + '.join(map(str, self.others))})"


def more_rows_cost_less(times: Times) -> Breach:
    """Where a product takes longest beside one with more rows."""
    pairs = ((m, more) for m in times for more in times if more > m)
    return max((Breach(times[m] / times[more], m, (more,)) for m, more in pairs), default=Breach(0.0, 0, ()))


def slower_than_two(times: Times) -> Breach:
    """Where a product takes longest beside two that share out its rows."""
    cuts = ((a, m - a) for m in times for a in times if a <= m - a and m - a in times)
    return max(
        (Breach(times[a + b] / (times[a] + times[b]), a + b, (a, b)) for a, b in cuts),
        default=Breach(0.0, 0, ()),
    )


LAWS: Sequence[Callable[[Times], Breach]] = (more_rows_cost_less, slower_than_two)


class Product:
    """A weight times any of some numbers of rows, on a team."""

    def __init__(
        self, team: _native.Team, weight_format: str, shape: tuple[int, int], cold_bytes: int
    ) -> None:
        self._team = team
        self._packs = copies_of(random_weight(weight_format, *shape), cold_bytes)
        self._rows: dict[int, tuple[_native.TeamProduct, int]] = {}
        self.times: dict[int, float] = {}

    def take_turns(self, rows: Sequence[int], rounds: int) -> None:
        """Time each number of rows once a round; `times` keeps the least."""
        for number in range(rounds):
            for m in rows if number % 2 else reversed(rows):
                self.times[m] = min(self.times.get(m, float("inf")), self._turn(m))

    def _turn(self, m: int) -> float:
        if m not in self._rows:
            product = _native.TeamProduct(self._team, self._packs, m)
            once_ns = float(product.time(None, 2, prepare=True).min())
            self._rows[m] = product, max(2, round(TURN_NS / once_ns))
        product, calls = self._rows[m]
        return float(product.time(None, calls, prepare=True).mean())


def breaches(product: Product, rows: Sequence[int], rounds: int, allowance: float) -> list[Breach]:
    """What breaks each law most, once what looked broken was asked about again."""
    product.take_turns(rows, rounds)
    for _ in range(rounds):
        worst = [law(product.times) for law in LAWS]
        again = sorted(
            {m for each in worst if each.ratio > 1 + allowance for m in (each.dearer, *each.others)}
        )
        if not again:
            break
        product.take_turns(again, rounds)
    return [law(product.times) for law in LAWS]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--isa", default="all", help="comma-separated, or 'all' that this machine runs")
    parser.add_argument("--format", default=FORMATS, help="comma-separated")
    parser.add_argument("--shape", help=f"n,k;n,k;... [default: {SHAPES}; short: {SHORT_SHAPES}]")
    parser.add_argument("--short", action="store_true", help="fewer rows, one shape")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--allow", type=float, default=0.05, help="above a ratio of 1")
    parser.add_argument("--cold-mib", type=int, default=64, help="of the copies of a weight used in turn")
    parser.add_argument("--times", action="store_true", help="microseconds by rows, too")
    options = parser.parse_args()
    options.shape = options.shape or (SHORT_SHAPES if options.short else SHAPES)
    return options


def main() -> int:
    options = parsed()
    rows = SHORT_ROWS if options.short else ROWS
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    broken = 0
    print("isa format n k more_rows_cost_less slower_than_two", flush=True)
    for name in isa.usable() if options.isa == "all" else options.isa.split(","):
        with isa.using(name), closing(_native.Team(cores)) as team:
            for shape in options.shape.split(";"):
                n, k = map(int, shape.split(","))
                for weight_format in options.format.split(","):
                    product = Product(team, weight_format, (n, k), options.cold_mib << 20)
                    worst = breaches(product, rows, options.rounds, options.allow)
                    broken += any(each.ratio > 1 + options.allow for each in worst)
                    print(name, weight_format, n, k, *worst, flush=True)
                    if options.times:
                        print(*(f"{m}:{product.times[m] / 1e3:.0f}" for m in rows), flush=True)
                    del product
    print(f"{broken} products break a law" if broken else "both laws hold", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
