"""Machine types for the simulator: fits of the Splitwise authors' profile, and runs of one's own machine."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from typer import Argument

from benchmarks.harness import Row, Yielded
from phasewise.cluster.simulated.steps import Curve, TimedStep, steps_of

KNOTS = {"prompt_time": (128, 512, 2048, 4096, 8192, 32768), "token_time": (128, 4096, 8192, 32768)}
OURS = {"prompt_time": "prefill_ms", "token_time": "decode_ms"}


def machine_types(
    files: Annotated[
        list[Path],
        Argument(help="data/perf_model.csv of splitwise-sim, or runs: `phasewise bench run MODEL -o json`"),
    ],
) -> Yielded:
    """The step times and watts of machine types, as their TOML has them: of a profile, with how far a fit is
    off, or of measured runs.

    A run wants prompts and answers of several sizes, e.g. -p 16,128,512 -n 32 -d 0,2048. Of several runs each
    is told beside the first: so a machine whose power is capped stands beside itself without the cap.
    """
    runs = [path for path in files if path.suffix == ".json"]
    for path in files:
        if path not in runs:
            yield from _fits(path)
    measured = [(path.stem, json.loads(path.read_text(encoding="utf-8"))) for path in runs]
    for name, rows in measured:
        yield {"machine": name} | _machine_of(rows)
    for name, rows in measured[1:]:
        yield {"machine": f"{name} / {measured[0][0]}"} | {
            f"{what}, {phase}": _ratio(rows, measured[0][1], phase, what)
            for phase in PHASES
            for what in ("time", "J/token")
        }


PHASES = ("prefill", "decode")


def _machine_of(rows: Sequence[Mapping[str, Any]]) -> Row:
    """The fields of a `[machines.NAME]` table. power_w: the cap, else what the hungrier phase drew."""
    steps = steps_of(_timed(row) for row in rows if _phase(row) is not None)
    drawn = [row["joules_per_token"] * row["avg_ts"] for row in rows]
    cap = max(row.get("power_cap_w", 0.0) for row in rows)
    return {
        "power_w": cap or max(drawn) or "not measured",
        "cap, W": cap or "none",
        "prefill_ms": _written(steps.prefill),
        "prefill_context_ns": 1e9 * steps.prefill_context_s,
        "decode_ms": _written(steps.decode),
        "decode_sequences_ms": "" if steps.decode_sequences is None else _written(steps.decode_sequences),
    } | {f"J/token, {phase}": _mean(rows, phase, "J/token") or "not measured" for phase in PHASES}


def _phase(row: Mapping[str, Any]) -> str | None:
    """The phase of a test that has one alone."""
    if row["n_prompt"] and not row["n_gen"]:
        return "prefill"
    return "decode" if row["n_gen"] and not row["n_prompt"] else None


def _timed(row: Mapping[str, Any]) -> TimedStep:
    n_sequences = row["n_sequences"]
    if row["n_prompt"]:
        seconds = n_sequences * row["n_prompt"] / row["avg_ts"]
        return TimedStep("prefill", row["n_prompt"], n_sequences, row["n_depth"], seconds)
    context = row["n_depth"] + row["n_gen"] // 2
    return TimedStep("decode", 1, n_sequences, context, n_sequences / row["avg_ts"])


def _written(curve: Curve) -> str:
    return str([[int(x), float(f"{1e3 * y:.4g}")] for x, y in zip(curve.xs, curve.ys, strict=True)])


def _mean(rows: Sequence[Mapping[str, Any]], phase: str, what: str) -> float:
    of_phase = [row for row in rows if _phase(row) == phase and not row["n_depth"]]
    values = [row["joules_per_token"] if what == "J/token" else 1 / row["avg_ts"] for row in of_phase]
    return float(np.mean(values)) if values else 0.0


def _ratio(
    rows: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]], phase: str, what: str
) -> float | str:
    below = _mean(before, phase, what)
    return _mean(rows, phase, what) / below if below else "not measured"


def _fits(perf_model: Path) -> Iterator[Row]:
    """Each curve has its knots where the profile bends; the values there are a least-squares fit to the
    logarithms' neighbourhood (weights 1 / time), rounded to three digits."""
    rows: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    with open(perf_model, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["tensor_parallel"] == "8":
                rows[row["model"], row["hardware"]].append(row)
    for (model, hardware), own in sorted(rows.items()):
        for column, field in OURS.items():
            tokens = np.array([int(row["prompt_size"]) * int(row["batch_size"]) for row in own], float)
            times_ms = np.array([float(row[column]) for row in own])
            knots = np.array([knot for knot in KNOTS[column] if knot <= tokens.max()], float)
            hats = np.array([np.interp(tokens, knots, unit) for unit in np.eye(len(knots))]).T
            fit, *_ = np.linalg.lstsq(hats / times_ms[:, None], np.ones(len(times_ms)), rcond=None)
            fit = np.array([float(f"{value:.3g}") for value in fit])
            off = np.abs(hats @ fit - times_ms) / times_ms
            curve = ", ".join(f"[{int(knot)}, {value:g}]" for knot, value in zip(knots, fit, strict=True))
            yield {
                "model": model,
                "hardware": hardware,
                "field": field,
                "curve": f"[{curve}]",
                "mean error": f"{off.mean():.1%}",
                "largest": f"{off.max():.1%}",
            }
