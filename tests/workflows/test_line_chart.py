"""Line charts as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.workflows.line_chart import LEFT, PLOT_HEIGHT, Chart, Panel, draw_chart

SVG = "{http://www.w3.org/2000/svg}"

pairs = st.tuples(st.integers(1, 1 << 16), st.floats(0, 1))
points = st.lists(pairs, min_size=1, max_size=12, unique_by=lambda pair: pair[0]).map(sorted)
names = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=5)


@settings(deadline=None)
@given(st.dictionaries(names, points, min_size=1, max_size=9), points)
def test_no_line_leaves_its_plot(
    lines: dict[str, Sequence[tuple[float, float]]], limit: Sequence[tuple[float, float]]
) -> None:
    """Whatever the numbers; and whatever the names, the picture is well-formed."""
    drawn = draw_chart(Chart("title <&>", "caption", "x", "y", "limit", None, [Panel("one", lines, limit)]))

    plot = next(rect for rect in ElementTree.fromstring(drawn).iter(f"{SVG}rect") if rect.get("stroke"))
    left, top = float(plot.attrib["x"]), float(plot.attrib["y"])
    right, bottom = left + float(plot.attrib["width"]), top + PLOT_HEIGHT
    assert left > LEFT
    for line in ElementTree.fromstring(drawn).iter(f"{SVG}polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            in_legend = y < top - 20
            assert in_legend or (left - 0.1 <= x <= right + 0.1 and top - 0.1 <= y <= bottom + 0.1)
