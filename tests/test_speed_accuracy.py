"""Fig. 10 of SparAMX: points are measured once, kept with their settings, and drawn from the dense one on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.papers.speed_accuracy import DENSE, KeptPoints, Point, picture
from benchmarks.pruning_table import method_options
from phasewise.workflows.prune.masks import Pattern
from phasewise.workflows.prune.run import PruneSettings

SETTINGS = {"model": "tiny", "choices": ["a.jsonl"], "questions": None}


class Measured:
    """Counts what it is asked for; a share of 0.9 is interrupted."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, str]] = []

    def __call__(self, zeros: float, method: str) -> Point:
        self.asked.append((zeros, method))
        if zeros == 0.9:
            raise KeyboardInterrupt
        return Point(zeros, method, 100 / (1 - zeros), 1 / (1 - zeros), 20 + zeros, None)


def test_a_point_is_measured_once_and_kept_through_an_interrupt(tmp_path: Path) -> None:
    first, again = Measured(), Measured()
    kept = KeptPoints(tmp_path / "points.json", SETTINGS)
    points = [kept.take(0.0, DENSE, first), kept.take(0.5, "wanda", first)]
    with pytest.raises(KeyboardInterrupt):
        kept.take(0.9, "wanda", first)

    reopened = KeptPoints(tmp_path / "points.json", SETTINGS)

    assert [reopened.take(point.zeros, point.method, again) for point in points] == points
    assert again.asked == []
    assert reopened.take(0.5, "magnitude", again).method == "magnitude"
    assert again.asked == [(0.5, "magnitude")]


def test_points_of_other_settings_are_refused(tmp_path: Path) -> None:
    KeptPoints(tmp_path / "points.json", SETTINGS).take(0.0, DENSE, Measured())

    with pytest.raises(SystemExit, match="other settings"):
        KeptPoints(tmp_path / "points.json", SETTINGS | {"questions": 5})


def test_every_method_s_line_begins_with_the_model_that_is_not_pruned() -> None:
    measure = Measured()
    shares = (0.3, 0.5, 0.7)
    points = [
        measure(0.0, DENSE),
        *(measure(share, name) for share in shares for name in ("magnitude", "wanda")),
    ]

    svg = picture(points, "a model", "perplexity", lambda point: point.perplexity)

    lines = re.findall(r'<polyline points="([^"]+)" fill="none" stroke="#', svg)
    whole = [line for line in lines if len(line.split()) == 1 + len(shares)]
    assert len(whole) == 2
    assert len({line.split()[0] for line in whole}) == 1
    assert all(name in svg for name in ("magnitude", "wanda", DENSE))


@pytest.mark.parametrize(
    "method", ["magnitude", "wanda", "sparsegpt", "magnitude+recover", "sparsegpt+recover"]
)
def test_prune_is_given_a_text_where_it_reads_one_and_nowhere_else(method: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    name, _, recover = method.partition("+")

    options = method_options(method, text, 512)

    settings = PruneSettings("model", tmp_path, Pattern(0.5), name, text, recover=bool(recover))  # type: ignore[arg-type]
    assert options[:2] == ["--method", name]
    assert ("--calibration" in options) == settings.reads_inputs
    assert ("--recover" in options) == settings.recover
