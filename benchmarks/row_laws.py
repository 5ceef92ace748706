"""Do products keep the laws of rows, untuned, for every format on every instruction set?

    python benchmarks/row_laws.py                       everything: ten minutes, or --budget SECONDS
    python benchmarks/row_laws.py --short               a few numbers of rows, one shape
    python benchmarks/row_laws.py --isa avx2 --format q6_k --shape 4096,2048 --json

With t(m) the time of a product of m rows by the default schedule, for every m up to 64:
- more rows never cost less: t(m) is at most t(m') for every m' above m;
- no product is slower than two smaller ones: t(a + b) is at most t(a) + t(b);
- the roof: t(m) is at most 1.35 times the longer of reading the weight once at the rate of plain reading and
  of multiplying at the format's own peak, both taken in the same run.
The first two to within an allowance. All numbers of rows take turns, round after round, forwards and
backwards; t(m) is the least of its rounds, since other work can only add to it. A law that looks broken is
asked about again, with more rounds of the rows that break it, before it is called broken.

Every product has an equal share of what is left of the budget, and two rounds at least. Where 64 rows would
take longer than 4 ms, as in portable C, fewer outputs are computed: the column n says how many.

A row for each product: what breaks each law most, as the ratio of the two sides (of the roof: t(m) over it),
and all numbers of rows that break one. The last line names the products that do; the exit code is 1 then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from typing import Annotated

from typer import Option

from benchmarks.harness import Broken, Rounds, Threads, Yielded, commands, cores_of, listed, numbers, shapes
from phasewise.cython_kernels import _native, isa
from phasewise.tuner.machine_limits import StreamingRead, peak_flops, peak_kinds
from phasewise.tuner.task_division import (
    ALLOWANCE,
    MOST_ROWS,
    Breach,
    Times,
    beside_more,
    beside_two,
    breaking,
)
from phasewise.tuner.weights import copies_of, random_weight, split_format

FORMATS = (
    "bf16,int8,int8m,int8g16,int8c,int4,int4m,q2_k,q3_k,q4_k,q5_k,q6_k,iq4_xs,iq4_nl,mxfp4,nvfp4,fp8,q5_0,q5_1,"
    "bf16s8,int8s8"
)
SHAPES = "2048,2048;8192,2048;4096,14336"
"""Of models of 1 and 8 billion parameters: attention, and both ways through the feed-forward part."""
ROWS = tuple(range(1, MOST_ROWS + 1))
SHORT_SHAPES = "4096,2048"
SHORT_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 25, 32, 33, 48, 64)

LEAST_ROUNDS = 2
LONGEST_NS = 4_000_000
LEAST_OUTPUTS = 64

TURN_NS = 1_000_000
"""Length of one turn of one number of rows: shorter than what a scheduler gives to other work."""


def worst_of_laws(times: Times) -> list[Breach]:
    """The largest breach of each law."""
    return [max(law(times), default=Breach(0.0, 0, ())) for law in (beside_more, beside_two)]


def told(breach: Breach) -> str:
    """A breach's ratio, and the numbers of rows on its two sides."""
    against = f" against {' + '.join(map(str, breach.others))}" if breach.others else ""
    return f"{breach.ratio:.2f} ({breach.dearer}{against})"


@dataclass(frozen=True)
class Roof:
    """Lower bound of a product's time: bytes of its weight, operations of each row, the rates of both."""

    weight_bytes: int
    ops_a_row: int
    read_bytes_per_s: float
    peak_ops_per_s: float

    def ns(self, m: int) -> float:
        reading_s, computing_s = (
            self.weight_bytes / self.read_bytes_per_s,
            m * self.ops_a_row / self.peak_ops_per_s,
        )
        return 1e9 * max(reading_s, computing_s)

    def worst(self, times: Times) -> Breach:
        """The number of rows whose time is farthest above the roof."""
        return max(Breach(times[m] / self.ns(m), m, ()) for m in times)


class Product:
    """A weight times any of some numbers of rows, on a team."""

    def __init__(
        self, team: _native.Team, weight_format: str, shape: tuple[int, int], cold_bytes: int
    ) -> None:
        self._team = team
        weight = random_weight(weight_format, *shape)
        self.weight_bytes = weight.nbytes
        self._packs = copies_of(weight, cold_bytes)
        self._rows: dict[int, tuple[_native.TeamProduct, int]] = {}
        self.times: dict[int, float] = {}

    def take_turns(self, rows: Sequence[int], rounds: int, end_s: float) -> None:
        """Time each number of rows once a round; `times` keeps the least.

        No round after LEAST_ROUNDS begins later than `end_s`.
        """
        for number in range(rounds):
            if number >= LEAST_ROUNDS and time.monotonic() > end_s:
                return
            for m in rows if number % 2 else reversed(rows):
                self.times[m] = min(self.times.get(m, float("inf")), self._turn(m))

    def _turn(self, m: int) -> float:
        if m not in self._rows:
            product = _native.TeamProduct(self._team, self._packs, m)
            once_ns = float(product.time(None, 1, prepare=True).min())
            self._rows[m] = product, max(1, round(TURN_NS / once_ns))
        product, calls = self._rows[m]
        return float(product.time(None, calls, prepare=True).mean())


def outputs_within(team: _native.Team, weight_format: str, n: int, k: int) -> int:
    """The outputs of a product that MOST_ROWS rows compute in LONGEST_NS; at least LEAST_OUTPUTS, or all."""
    few = min(n, LEAST_OUTPUTS)
    weight = random_weight(weight_format, few, k)
    once_ns = float(_native.TeamProduct(team, [weight], MOST_ROWS).time(None, 2, prepare=True).min())
    return min(n, max(few, int(few * LONGEST_NS / once_ns) // few * few))


def breaches(
    timed: Product, rows: Sequence[int], rounds: int, allowance: float, end_s: float
) -> list[Breach]:
    """The worst breach of each law, once what looked broken was timed again."""
    timed.take_turns(rows, rounds, end_s)
    for _ in range(rounds):
        worst = worst_of_laws(timed.times)
        again = sorted(
            {m for each in worst if each.ratio > 1 + allowance for m in (each.dearer, *each.others)}
        )
        if not again or time.monotonic() > end_s:
            break
        timed.take_turns(again, rounds, end_s)
    return worst_of_laws(timed.times)


def row_laws(
    isas: Annotated[str, Option("--isa", help="comma-separated, or `all` that this machine runs")] = "all",
    formats: Annotated[str, Option("--format", help="comma-separated")] = FORMATS,
    shape: Annotated[str | None, Option(help=f"n,k;n,k;... [{SHAPES}; short: {SHORT_SHAPES}]")] = None,
    m: Annotated[str, Option(help="numbers of rows [default: 1 to 64; short: a few]")] = "",
    short: Annotated[bool, Option("--short", help="fewer rows, one shape")] = False,
    rounds: Rounds = 10,
    threads: Threads = 2,
    allow: Annotated[float, Option(help="above a ratio of 1")] = ALLOWANCE,
    roof: Annotated[float, Option(help="times the roof that is allowed, e.g. 1.35; 0: any")] = 0.0,
    budget: Annotated[float, Option(help="seconds for all products together")] = 600.0,
    cold_mib: Annotated[int, Option(help="of the copies of a weight used in turn")] = 64,
    with_times: Annotated[bool, Option("--times", help="microseconds by rows, too")] = False,
) -> Yielded:
    rows = numbers(m) or (SHORT_ROWS if short else ROWS)
    cores, broken, deadline_s = cores_of(threads), list[str](), time.monotonic() + budget
    names = isa.usable() if isas == "all" else listed(isas)
    asked = [*product(shapes(shape or (SHORT_SHAPES if short else SHAPES)), listed(formats))]
    left = len(names) * len(asked)
    with closing(StreamingRead(cores)) as reading:
        for name in names:
            with isa.using(name), closing(_native.Team(cores)) as team:
                kinds = {
                    weight_format: peak_kinds(split_format(weight_format)[0])
                    for weight_format in listed(formats)
                }
                peaks = {
                    kind: peak_flops(kind, cores) for kind in {kind for own in kinds.values() for kind in own}
                }
                for (whole, k), weight_format in asked:
                    n = outputs_within(team, weight_format, whole, k)
                    timed = Product(team, weight_format, (n, k), cold_mib << 20)
                    peak = max(peaks[kind] for kind in kinds[weight_format])
                    bound = Roof(timed.weight_bytes, 2 * n * k, reading.rate(), peak)
                    now_s = time.monotonic()
                    less, two = breaches(timed, rows, rounds, allow, now_s + (deadline_s - now_s) / left)
                    left -= 1
                    highest, cliffs = bound.worst(timed.times), breaking(timed.times, allow)
                    if cliffs or 0 < roof < highest.ratio:
                        broken.append(f"{name} {weight_format} {n}x{k}")
                    yield {
                        "isa": name,
                        "format": weight_format,
                        "n": n,
                        "k": k,
                        "more rows cost less": told(less),
                        "slower than two": told(two),
                        "rows that break a law": " ".join(map(str, cliffs)),
                        "over the roof": told(highest),
                        "reads, GB/s": bound.read_bytes_per_s / 1e9,
                        "peak, GOP/s": peak / 1e9,
                    }
                    if with_times:
                        yield " ".join(f"{count}:{timed.times[count] / 1e3:.0f}" for count in rows)
                    del timed
    yield Broken("a law is broken by " + ", ".join(broken)) if broken else "the laws hold"


app = commands(__doc__, row_laws)

if __name__ == "__main__":
    app()
