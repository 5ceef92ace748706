"""Products of bf16 on a tile unit by count: cycles of loops over blocks, in millions. None is measured here.

    python benchmarks/tile_counts.py --shape "2048,2048;8192,2048;2048,8192" --m 512
    python benchmarks/tile_counts.py --step

A load, a store, a line and a step take what was measured (benchmarks/notes/tiles.md). Of what waits for
lines from beyond L2, and for L2 to take sums, half goes on beside the products as far as one operand of them
is in L1; nothing where both come from L2. A line is still in a cache where no more was touched since than it
holds. The loops:

- `by blocks`: a pass over k meets all of a block, whose sums wait in L2 for the next pass; today's default;
- `by blocks, best`: the same with the blocks of the least count;
- `no cut of k`: no sums wait, and both operands come from L2;
- `a strip a block`: blocks of two panels, whose sums are in L1;
- `sums in L1, best`: a pass is cut anew for 128 rows of two panels at a time, whose sums stay in L1.

Rows that no tile asks for ahead, in the last loop, are waited for whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, replace
from typing import Annotated

from typer import Option

from benchmarks.harness import Yielded, commands, shapes

PEAK_FLOPS, FLOPS_A_PRODUCT, PRODUCT = 3.81e12, 2 * 16 * 16 * 32, 16
LOAD_L1, LOAD_L2, STORE_L1, STORED_LINE_L2 = 9, 22, 17.5, 14
STEP_L1, STEP_L2 = 74, 98
"""Four products with their loads: one operand in L1, none."""
HZ = PEAK_FLOPS / FLOPS_A_PRODUCT * PRODUCT
FAR_LINE = 64 / 19.0e9 * HZ
"""From beyond L2, at the rate of reads."""
TILE, STRIP = 32, 32
"""Rows of four tiles of sums, columns of two panels."""
LINES = TILE * STRIP * 4 // 64
HELD_ROWS = 4 * TILE
L1, L2 = 40 << 10, int(1.4e6)
"""Bytes that a strip and its sums may take where rows pass through; bytes that a core reads at L2's rate."""
MOST_SUMS = 1 << 17
HIDDEN = 0.5
BY_BLOCKS = "by blocks"


@dataclass(frozen=True)
class Blocks:
    """A loop: rows, columns and inputs of a block, the order of blocks, and the rows whose sums stay."""

    rows: int
    columns: int
    inputs: int
    order: str = "nm"
    held: int = 0


@dataclass(frozen=True)
class Cycles:
    """Cycles that one product takes, by cause."""

    steps: float
    sums: float
    result: float
    weights: float
    rows: float


def count(n: int, k: int, m: int, b: Blocks) -> Cycles:
    """The cycles of y[m][n] = x W^T over k inputs. No block is larger than the product."""
    tiles, passes = m // TILE * (n // STRIP), -(-k // b.inputs)
    pass_k = k / passes  # nearly equal
    sums_bytes = b.rows * b.columns * 4 if passes > 1 else 0
    in_l1, cuts = _in_l1(b, pass_k)
    first = TILE / min(b.held or b.rows, b.rows)  # the share of tiles that bring a strip into L1
    from_l2 = first if in_l1 else 1.0
    shown = 1 - HIDDEN * (1 - from_l2)
    steps = tiles * k / 32 * (STEP_L1 + (STEP_L2 - STEP_L1) * from_l2)

    touched = sums_bytes + 2 * pass_k * (b.rows + b.columns)
    if 2 * pass_k * b.columns + sums_bytes <= L1:
        outer = 4 * (LOAD_L1 + STORE_L1)
    elif touched <= L2:
        outer = 4 * LOAD_L2 + LINES * STORED_LINE_L2 * shown
    else:
        outer = 2 * LINES * FAR_LINE * shown
    inner = 4 * (LOAD_L1 + STORE_L1) * (cuts - 1)
    sums = tiles * ((passes - 1) * outer + passes * inner)

    weights, rows = _far_bytes(n, k, m, b, sums_bytes, pass_k)
    rows_shown = 1 if b.held else shown  # which no tile asks for there
    far = [bytes_ / 64 * FAR_LINE for bytes_ in (m * n * 4, weights, rows)]
    return Cycles(steps, sums, far[0], far[1] * shown, far[2] * rows_shown)


def _in_l1(b: Blocks, pass_k: float) -> tuple[bool, int]:
    """True where a strip stays in L1, and the number of parts that its pass is taken in."""
    if not b.held:
        return 2 * STRIP * pass_k <= L1, 1
    room = L1 - min(b.held, b.rows) * STRIP * 4
    return True, -(-int(2 * STRIP * pass_k) // room)


def _far_bytes(n: int, k: int, m: int, b: Blocks, sums_bytes: int, pass_k: float) -> tuple[float, float]:
    """Weights and rows that come from beyond L2."""
    weights, rows = 2.0 * n * k, 2.0 * m * k
    row_blocks, column_blocks = -(-m // b.rows), -(-n // b.columns)
    of_block = sums_bytes + 2 * k * (b.rows + b.columns)
    if b.order == "nm":
        again_w = row_blocks if of_block > L2 else 1
        again_x = column_blocks if sums_bytes + 2 * k * (m + b.columns) > L2 else 1
    else:
        again_w = row_blocks if sums_bytes + 2 * k * (n + b.rows) > L2 else 1
        again_x = column_blocks if of_block > L2 else 1
    if 2 * pass_k * (b.rows + STRIP) + b.rows * STRIP * 4 > L2:
        again_x *= b.columns // STRIP  # a block's rows do not stay from strip to strip
    return weights * again_w, rows * again_x


def _halves(size: int, unit: int) -> list[int]:
    """A size, its half, its quarter and so on, of whole units."""
    return [(size >> i) // unit * unit for i in range(size.bit_length()) if size >> i >= unit]


def _choices(columns: int, k: int, m: int, held: int, orders: tuple[str, ...]) -> Iterator[Blocks]:
    """Blocks whose sums have room; a loop that holds sums has passes that outgrow L1."""
    inputs = sorted({*_halves(k, 128), *(size for size in (640, 384, 192) if size < k)})
    axes = (_halves(m, TILE), _halves(columns, STRIP), inputs, orders)
    for rows, columns, block_k, order in itertools.product(*axes):
        fits = block_k == k or rows * columns <= MOST_SUMS
        if fits and (not held or 2 * STRIP * block_k > L1):
            yield Blocks(rows, columns, block_k, order, held)


def loops_of(n: int, k: int, m: int, most_columns: int) -> dict[str, Blocks]:
    """A loop of each kind, with the blocks of the least count where its name says so."""
    most = min(n, most_columns)
    orders = ("nm", "mn") if most == n else ("nm",)

    def total(b: Blocks) -> float:
        return sum(astuple(count(n, k, m, b)))

    default = Blocks(min(256, m), min(512, most), -(-k // -(-k // 640) // 32) * 32)
    return {
        BY_BLOCKS: default,
        "by blocks, best": min(_choices(most, k, m, 0, orders), key=total),
        "no cut of k": replace(default, inputs=k),
        "a strip a block": Blocks(min(256, m), STRIP, 128, "mn"),
        "sums in L1, best": min(_choices(most, k, m, HELD_ROWS, orders), key=total),
    }


def share_of_peak(n: int, k: int, m: int, b: Blocks) -> float:
    return n * k * m / (16 * 16 * 32) * PRODUCT / sum(astuple(count(n, k, m, b)))


@dataclass(frozen=True)
class Part:
    """A part of a step of 512 rows of 1.07 B (BF16) on two cores, as it was timed; and the product of one of
    both threads, with the widest block that a team's pieces leave it.
    """

    name: str
    measured_ms: float
    n: int = 0
    k: int = 0
    most_columns: int = 0


STEP_ROWS = 512
STEP_PARTS = (
    Part("gate and up", 190, 8192, 2048, 1344),
    Part("down", 107, 1024, 8192, 160),
    Part("queries, keys, values", 36, 1536, 2048, 256),
    Part("attention's output", 27, 1024, 2048, 160),
    Part("attention", 71),
    Part("all else", 28 + 8 + 9.5 + 12),
)
STEP_SHARE = 0.4 * 346 / 488
"""The timed step's share of the tile peak: the same operations in 346 ms would have 40 % of it."""


def step_rows() -> Yielded:
    """The step by the best loop for each product; then with attention on tiles at a third of its time."""
    counted_ms = {part.name: part.measured_ms for part in STEP_PARTS}
    for part in STEP_PARTS:
        row: dict[str, object] = {"part": part.name, "measured, ms": part.measured_ms}
        if part.n:
            loops = loops_of(part.n, part.k, STEP_ROWS, part.most_columns)
            shares = {name: share_of_peak(part.n, part.k, STEP_ROWS, b) for name, b in loops.items()}
            best = max(shares, key=shares.__getitem__)
            counted_ms[part.name] *= shares[BY_BLOCKS] / shares[best]
            row |= {
                "default by count, %": round(100 * shares[BY_BLOCKS], 1),
                "best by count, %": round(100 * shares[best], 1),
                "loop": best,
            }
        yield row | {"by count, ms": round(counted_ms[part.name], 1)}
    measured, total = sum(part.measured_ms for part in STEP_PARTS), sum(counted_ms.values())
    on_tiles = total - counted_ms["attention"] * 2 / 3
    for name, ms in (("the step", total), ("the step, attention on tiles", on_tiles)):
        share = round(100 * STEP_SHARE * measured / ms, 1)
        yield {"part": name, "measured, ms": measured, "by count, ms": round(ms, 1), "% of the peak": share}


def tile_counts(
    shape: Annotated[str, Option(help="n,k;n,k;...")] = "2048,2048;8192,2048;2048,8192",
    m: int = 512,
    most_columns: Annotated[int, Option(help="of a block, as pieces of a team's region have")] = 1 << 20,
    step: Annotated[bool, Option("--step", help="the whole step whose parts were timed")] = False,
) -> Yielded:
    if step:
        yield from step_rows()
        return
    for n, k in shapes(shape):
        for name, b in loops_of(n, k, m, most_columns).items():
            row = {"n": n, "k": k, "loop": name, "blocks": f"{b.rows}x{b.columns}x{b.inputs} {b.order}"}
            millions = {cause: round(c / 1e6, 2) for cause, c in asdict(count(n, k, m, b)).items()}
            yield row | millions | {"% of the peak": round(100 * share_of_peak(n, k, m, b), 1)}


app = commands(__doc__, tile_counts)

if __name__ == "__main__":
    app()
