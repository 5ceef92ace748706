"""What rows of `bench kernels` come down to: `python benchmarks/summary.py FILE ...`, of --rows or -o json.

A table by format: the geometric mean of our speed over the best peer's at each point, the worst point, the
shares of the machine's limits. Several files are taken together.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tabulate import tabulate

from phasewise.workflows.bench.kernel_rows import rows_from_json, summarise, summary_fields


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="+")
    files = parser.parse_args().rows
    rows = [row for file in files for row in rows_from_json(file.read_text())]
    lines = [summary_fields(summary) for summary in summarise(rows)]
    print(tabulate(lines, headers="keys", tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
