"""What rows of `bench kernels` come down to: `python benchmarks/summary.py FILE ...`, of --rows or -o json.

A table by format: the geometric mean of our speed over the best peer's at each point, the worst point, the
shares of the machine's limits. Several files are taken together.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tabulate import tabulate

from phasewise.workflows.bench.kernel_rows import LARGE_M, Summary, rows_from_json, summarise


def fields(summary: Summary) -> dict[str, str]:
    def ratio(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}x"

    def shares(found: tuple[float, float] | None) -> str:
        return "" if found is None else f"{found[0]:.0%}, {found[1]:.0%}"

    return {
        "format": summary.format,
        "points": str(summary.points),
        "over the best peer": ratio(summary.speedup),
        "worst": ratio(summary.worst_speedup),
        "worst point": summary.worst_point,
        f"peak, m >= {LARGE_M}: lowest, median": shares(summary.peak),
        "bandwidth, m = 1, 4 MB and more": shares(summary.bandwidth_large),
        "below 4 MB": shares(summary.bandwidth_small),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="+")
    files = parser.parse_args().rows
    rows = [row for file in files for row in rows_from_json(file.read_text())]
    lines = [fields(summary) for summary in summarise(rows)]
    print(tabulate(lines, headers="keys", tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
