"""Fig. 10 of SparAMX: points are measured once, kept with their settings, and drawn from the dense one on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.papers.speed_accuracy import DENSE, KeptPoints, Point, Quality, picture
from benchmarks.pruning_table import method_options
from phasewise.workflows.prune.settings import Pattern, PruneSettings

SETTINGS = {"model": "tiny", "tokens": 3}


class Measured:
    """Counts what it is asked for; a share of 0.9 is interrupted."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, str]] = []
        self.timed: list[list[str]] = []

    def quality(self, zeros: float, method: str) -> Quality:
        self.asked.append((zeros, method))
        if zeros == 0.9:
            raise KeyboardInterrupt
        return Quality(zeros, method, 20 + zeros)

    def speeds(self, points: Sequence[Quality]) -> list[Point]:
        self.timed.append([point.name for point in points])
        return [
            Point(point.zeros, point.method, point.perplexity, 100 / (1 - point.zeros), 1.0)
            for point in points
        ]


def test_a_point_is_measured_once_and_kept_through_an_interrupt(tmp_path: Path) -> None:
    first, again = Measured(), Measured()
    kept = KeptPoints(tmp_path / "points.json", SETTINGS)
    points = [kept.take(0.0, DENSE, first.quality), kept.take(0.5, "wanda", first.quality)]
    with pytest.raises(KeyboardInterrupt):
        kept.take(0.9, "wanda", first.quality)

    reopened = KeptPoints(tmp_path / "points.json", SETTINGS)

    assert [reopened.take(point.zeros, point.method, again.quality) for point in points] == points
    assert again.asked == []
    assert reopened.take(0.5, "magnitude", again.quality).method == "magnitude"
    assert again.asked == [(0.5, "magnitude")]


def test_speeds_are_measured_together_and_only_where_they_are_missing(tmp_path: Path) -> None:
    measure = Measured()
    kept = KeptPoints(tmp_path / "points.json", SETTINGS)
    qualities = [kept.take(0.0, DENSE, measure.quality), kept.take(0.5, "wanda", measure.quality)]
    points = kept.timed(qualities, measure.speeds)

    reopened = KeptPoints(tmp_path / "points.json", SETTINGS)
    again = [reopened.take(point.zeros, point.method, measure.quality) for point in points]
    another = reopened.take(0.7, "wanda", measure.quality)

    assert again == points
    assert reopened.timed(again, measure.speeds) == points
    assert reopened.timed([another, *again], measure.speeds)[1:] == points
    assert measure.timed == [[f"{DENSE} 0", "wanda 0.5"], ["wanda 0.7"]]


def test_points_of_other_settings_are_refused(tmp_path: Path) -> None:
    KeptPoints(tmp_path / "points.json", SETTINGS).take(0.0, DENSE, Measured().quality)

    with pytest.raises(SystemExit, match="other settings"):
        KeptPoints(tmp_path / "points.json", SETTINGS | {"tokens": 5})


def test_every_method_s_line_begins_with_the_model_that_is_not_pruned() -> None:
    measure = Measured()
    shares = (0.3, 0.5, 0.7)
    qualities = [
        measure.quality(0.0, DENSE),
        *(measure.quality(share, name) for share in shares for name in ("magnitude", "wanda")),
    ]

    svg = picture(measure.speeds(qualities), "a model")

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
