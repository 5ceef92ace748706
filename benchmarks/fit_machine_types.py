"""Fit the step times of the shipped machine types from a profile in the format of splitwise-sim's
`data/perf_model.csv`, and print them as TOML, with how far they are off.

    python benchmarks/fit_machine_types.py path/to/splitwise-sim/data/perf_model.csv

Each curve has its knots where the profile bends; the values there are a least-squares fit to the logarithms'
neighbourhood (weights 1 / time), rounded to three digits.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict

import numpy as np

KNOTS = {"prompt_time": (128, 512, 2048, 4096, 8192, 32768), "token_time": (128, 4096, 8192, 32768)}
FIELDS = {"prompt_time": "prefill_ms", "token_time": "decode_ms"}


def main(path: str) -> None:
    rows: dict[tuple[str, str, str], list[dict[str, str]]] = defaultdict(list)
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["tensor_parallel"] == "8":
                rows[row["model"], row["hardware"], row["tensor_parallel"]].append(row)
    for key, found in sorted(rows.items()):
        print("#", *key)
        for column, field in FIELDS.items():
            tokens = np.array([int(row["prompt_size"]) * int(row["batch_size"]) for row in found], float)
            times_ms = np.array([float(row[column]) for row in found])
            knots = np.array([knot for knot in KNOTS[column] if knot <= tokens.max()], float)
            hats = np.array([np.interp(tokens, knots, unit) for unit in np.eye(len(knots))]).T
            fit, *_ = np.linalg.lstsq(hats / times_ms[:, None], np.ones(len(times_ms)), rcond=None)
            fit = np.array([float(f"{value:.3g}") for value in fit])
            off = np.abs(hats @ fit - times_ms) / times_ms
            pairs = ", ".join(f"[{int(knot)}, {value:g}]" for knot, value in zip(knots, fit, strict=True))
            print(f"{field} = [{pairs}]  # mean error {off.mean():.1%}, largest {off.max():.1%}")


if __name__ == "__main__":
    main(sys.argv[1])
