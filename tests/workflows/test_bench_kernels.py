"""The comparison of products with peers: turns, summaries, cold weights, line charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.topology import read_machine
from phasewise.tuner.weights import blank_weight
from phasewise.workflows.bench import kernels as bench_kernels
from phasewise.workflows.bench.kernel_rows import summarise
from phasewise.workflows.bench.kernels import BITS, Point, TimedSystem, take_turns
from phasewise.workflows.bench.peers import processes as kernel_peers
from phasewise.workflows.bench.peers.processes import NAMES, Peer, PeerCell
from phasewise.workflows.line_chart import LEFT, PLOT_HEIGHT, Chart, Panel, draw_chart
from tests.support.kernels.kernel_rows import kernel_row

CORE = read_machine().allowed_pus[0]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.many
@pytest.mark.parametrize(
    ("peer", "weight_format", "largest_error"),
    [
        ("openblas", "f32", 1e-5),
        ("torch", "f32", 1e-5),
        ("torch", "bf16", 0.01),
        ("torch", "int8", 0.03),
        ("torch", "int4", 0.2),
        ("mkl", "f32", 1e-5),
        ("mkl", "bf16", 0.01),
        ("openvino", "f32", 1e-5),
        ("openvino", "bf16", 0.01),
        ("openvino", "int8", 0.03),
        ("openvino", "int4", 0.2),
        ("ggml", "f32", 1e-5),
        ("ggml", "bf16", 0.01),
        ("ggml", "int8", 0.03),
        ("ggml", "int4", 0.2),
        ("ggml", "int4m", 0.2),
    ],
)
def test_a_peer_computes_the_product_that_it_is_timed_at(
    peer: str, weight_format: str, largest_error: float
) -> None:
    opened = Peer(peer, [CORE])
    if opened.absent is not None:
        opened.close()
        pytest.skip(f"{opened.absent}; PHASEWISE_PEERS_PYTHON may name an interpreter that has {peer}")

    prepared = opened.prepare(PeerCell(weight_format, n=64, k=128, m=3, copies=2))
    assert prepared is not None
    ns = opened.time(calls=3)
    opened.close()

    assert prepared.error < largest_error
    assert ns > 0


def test_every_system_takes_one_turn_a_round_and_the_order_changes() -> None:
    order: list[str] = []

    def turn(name: str) -> float:
        order.append(name)
        return float(len(order))

    reader, *others = (TimedSystem(name, lambda name=name: turn(name)) for name in "rab")  # type: ignore[misc]
    samples = take_turns(reader, others, 3, sleep=lambda _: None)

    assert {name: len(taken) for name, taken in samples.items()} == {"r": 3, "a": 3, "b": 3}
    assert order in (list("rabrbarab"), list("rbarabrba"))


def test_the_summary_is_of_the_best_peer_at_each_point() -> None:
    rows = [
        kernel_row(m=1, median_ns=100, peers={"torch": 400, "mkl": 200}, bandwidth_fraction=0.7),
        kernel_row(m=128, median_ns=100, peers={"torch": 50}, peak_fraction=0.9),
        kernel_row(m=256, median_ns=100, peak_fraction=0.8),
        kernel_row(m=1, bandwidth_fraction=0.95, weight_bytes=5_000_000),
    ]

    (summary,) = summarise(rows)

    assert summary.points == 2
    assert summary.speedup is not None
    assert summary.worst_speedup is not None
    assert summary.speedup.gain == pytest.approx(math.sqrt(2.0 * 0.5))
    assert (summary.worst_speedup.gain, summary.worst_point) == (0.5, "512x1024, m = 128")
    assert summary.peak == (0.8, pytest.approx(0.85))
    assert (summary.bandwidth_large, summary.bandwidth_small) == ((0.95, 0.95), (0.7, 0.7))


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=9), st.integers(2, 1000))
def test_a_summary_scales_with_our_speed(peer_ns: Sequence[int], factor: int) -> None:
    slow = [kernel_row(m=m + 1, median_ns=1000 * factor, peers={"torch": ns}) for m, ns in enumerate(peer_ns)]
    fast = [kernel_row(m=m + 1, median_ns=1000, peers={"torch": ns}) for m, ns in enumerate(peer_ns)]

    before, after = summarise(slow)[0].speedup, summarise(fast)[0].speedup

    assert before is not None
    assert after is not None
    assert after.gain == pytest.approx(before.gain * factor)


@given(st.integers(1, 4096), st.sampled_from(["f32", "bf16", "int8"]), st.integers(1, 1 << 29))
def test_as_many_weights_as_a_turn_takes_or_as_no_cache_holds(
    m: int, weight_format: str, cold_bytes: int
) -> None:
    packs = [blank_weight(weight_format, 64, 96)] * 10_000
    point = Point(weight_format, 64, 96, m, packs, 2e11)

    copies = point.copies(cold_bytes)

    weight_bytes = 64 * 96 * BITS[weight_format] // 8
    turn = bench_kernels.TURN_NS / (2e9 * m * 64 * 96 / 2e11)
    assert 1 <= copies <= len(packs)
    assert copies >= min(turn, cold_bytes / weight_bytes, len(packs)) or copies == len(packs)
    assert (copies - 1) * weight_bytes < cold_bytes
    assert copies <= max(2, math.ceil(turn))


pairs = st.tuples(st.integers(1, 1 << 16), st.floats(1e-3, 1e7))
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


def test_a_peer_needs_nothing_of_ours() -> None:
    """It runs under interpreters that have no phasewise."""
    sources = list(Path(kernel_peers.__file__).with_name("peer_worker").glob("*.py"))

    assert len(sources) > len(NAMES)
    for source in sources:
        assert "import phasewise" not in source.read_text()
        assert "from phasewise" not in source.read_text()
