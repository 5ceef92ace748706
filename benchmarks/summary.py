"""What rows of `bench kernels` come down to: `python benchmarks/summary.py FILE ...`, of --rows or -o json.

A table by format: the geometric mean of our speed over the best peer's at each point, the worst point, the
shares of the machine's limits. Several files are taken together.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from phasewise.cli.kernel_formats import rows_from_json, summary_table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="+")
    files = parser.parse_args().rows
    print(summary_table([row for file in files for row in rows_from_json(file.read_text())]), end="")


if __name__ == "__main__":
    main()
