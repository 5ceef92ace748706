"""`phasewise bench kernels`: rows that agree with themselves, peers that may be missing or die, a picture."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from phasewise.cli.main import app
from phasewise.cli.render.kernel_formats import as_csv, as_json, as_md, draw_rows
from phasewise.cython_kernels import _native
from phasewise.kerneldb.records import (
    Comparison,
    MachineKey,
    Measurement,
    Origin,
    Problem,
    Promotion,
    Sample,
    Schedule,
)
from phasewise.kerneldb.store import open_store
from phasewise.topology import core_signature, placement_signature, read_machine
from phasewise.tuner.plans import default_plan
from phasewise.tuner.weights import blank_weight
from phasewise.workflows.bench import kernels as bench_kernels
from phasewise.workflows.bench.kernel_rows import KernelRow, rows_from_json, summarise
from phasewise.workflows.bench.kernels import BITS, Point, TimedSystem, take_turns
from phasewise.workflows.bench.peers import processes as kernel_peers
from phasewise.workflows.bench.peers.processes import NAMES, Peer, PeerCell, PeerError, opened_peers
from phasewise.workflows.line_chart import LEFT, PLOT_HEIGHT, Chart, Panel, draw_chart

CORE = read_machine().allowed_pus[0]
SMALL = ("bench", "kernels", "--threads", "1", "--shape", "48,64", "-r", "2", "--cold-mib", "1")
ISSUED = (
    "format", "n", "k", "m", "threads", "median_ns", "gflops", "gbps", "peak_fraction", "bandwidth_fraction",
    "schedule", "peers",
)  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"

# A peer that says what it is asked to be, dies of a product with 13 rows, and of being timed at one with 11.
FAKE_PEER = """
import json, sys
name = sys.argv[1]
if name == "mkl":
    print(json.dumps({"absent": "not here"}), flush=True)
    sys.exit()
print(json.dumps({"peer": name, "version": "1", "formats": ["f32", "bf16"]}), flush=True)
rows = 0
for line in sys.stdin:
    request = json.loads(line)
    rows = request.get("m", rows)
    if rows == 13:
        sys.exit(3)
    if request.get("m") == 7:
        answer = {"refused": "seven is odd"}
    elif "calls" in request and rows == 11:
        sys.exit(3)
    elif "calls" in request:
        answer = {"ns": 1000 * request["calls"], "products": request["calls"]}
    else:
        answer = {"setting": "only", "ns": 1000, "error": 0.0}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def fake_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(FAKE_PEER)
    monkeypatch.setattr(kernel_peers, "WORKER", [str(worker)])
    monkeypatch.setenv("PHASEWISE_PEERS_PYTHON", sys.executable)


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are not about speed."""
    monkeypatch.setattr("phasewise.tuner.machine_limits.REPEAT_S", 0.001)
    monkeypatch.setattr("phasewise.tuner.machine_limits.LEAST_READ_BYTES", 1 << 20)
    monkeypatch.setattr("phasewise.workflows.bench.kernels.TURN_NS", 100_000)


@pytest.fixture(autouse=True)
def own_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASEWISE_DB", str(tmp_path / "tuned.db"))
    monkeypatch.setenv("PHASEWISE_CONFIG", "/dev/null")


def bench(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*SMALL, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


SCHEDULE = {
    "mr": 1, "panels": 2, "block_m": 1, "block_n": 32, "block_k": 64, "threads_m": 1, "threads_n": 2,
    "threads_k": 1, "compute_path": "fma", "k_parts": 1, "prefetch_bytes": 0, "loop_order": "nm",
}  # fmt: skip


def row(
    m: int = 1,
    median_ns: int = 1000,
    peers: dict[str, int] | None = None,
    peak_fraction: float = 0.5,
    bandwidth_fraction: float = 0.5,
    weight_bytes: int = 1 << 20,
    weight_format: str = "bf16",
) -> KernelRow:
    """As measured, with a few numbers chosen."""
    peers = peers or {}
    return KernelRow(
        weight_format, 512, 1024, m, 2, median_ns, 2.0 * m * 512 * 1024 / median_ns, weight_bytes / median_ns,
        peak_fraction, bandwidth_fraction, SCHEDULE, peers, "default", weight_bytes, 1e12, 1e11, "portable",
        "core", "place", 0.0, [median_ns] * 3, {peer: [ns] * 3 for peer, ns in peers.items()},
        dict.fromkeys(peers, "packed"),
    )  # fmt: skip


def test_json_rows_hold_what_was_asked_and_agree_with_themselves() -> None:
    rows = json.loads(bench("--format", "f32,int8", "--m", "1,5", "--peers", "none", "-o", "json"))

    assert [(r["format"], r["n"], r["k"], r["m"]) for r in rows] == [
        (name, 48, 64, m) for name in ("f32", "int8") for m in (1, 5)
    ]
    for r in rows:
        assert set(ISSUED) <= set(r)
        assert r["threads"] == 1
        assert r["peers"] == {}
        assert len(r["samples_ns"]) == 2
        assert r["gflops"] == pytest.approx(2 * r["m"] * 48 * 64 / r["median_ns"], rel=0.01)
        assert r["gbps"] == pytest.approx(r["weight_bytes"] / r["median_ns"], rel=0.01)
        assert r["peak_fraction"] == pytest.approx(r["gflops"] * 1e9 / r["peak_flops_per_s"])


def test_a_product_runs_by_what_was_tuned_for_it(tmp_path: Path) -> None:
    """And says so; a number of rows that nothing was tuned near runs by the default."""
    machine = read_machine()
    cores = default_plan(machine, "decode", 1).ranks[0].cores
    key = MachineKey(core_signature(machine), placement_signature(machine, cores))
    origin = Origin(key, "0.1.0", 1_795_000_000_000)
    problem, abi = Problem("gemm", "f32", 48, 64, 4), _native.kernel_abi("gemm")
    schedule = Schedule(1, 1, 3, 16, 32, 1, 1, 1, _native.compute_paths("f32")[0], 1, 640, "mn")
    with open_store(tmp_path / "tuned.db") as store:
        store.add_measurements([Measurement(problem, Sample(schedule, (9,), 9, None, 9), abi, origin)])
        won = Comparison(1.5, 1.25, 2.0, 0.95, 40)
        store.add_promotions([Promotion(problem, schedule, None, won, abi, origin)])

    rows = json.loads(bench("--format", "f32", "--m", "4,64", "--peers", "none", "-o", "json"))

    assert [r["schedule_source"] for r in rows] == ["exact", "default"]
    assert rows[0]["schedule"] == asdict(schedule)


@pytest.mark.usefixtures("fake_peers")
def test_peers_stand_in_every_row_that_they_can_do() -> None:
    rows = json.loads(bench("--format", "f32,int8", "--m", "1,7,8", "-o", "json"))

    present = [name for name in NAMES if name != "mkl"]
    for r in rows:
        can = r["format"] == "f32" and r["m"] != 7
        assert r["peers"] == (dict.fromkeys(present, 1000) if can else {})


@pytest.mark.usefixtures("fake_peers")
@pytest.mark.parametrize("deadly_m", [11, 13])
def test_a_peer_that_dies_is_left_out_from_there_on(deadly_m: int) -> None:
    rows = json.loads(bench("--format", "f32", "--m", f"1,{deadly_m},2", "--peers", "torch", "-o", "json"))

    assert [list(r["peers"]) for r in rows] == [["torch"], [], []]
    assert [list(r["peer_settings"]) for r in rows] == [["torch"], [], []]


@pytest.mark.usefixtures("fake_peers")
def test_a_peer_that_was_named_must_be_there() -> None:
    with pytest.raises(PeerError, match="mkl is not installed"), opened_peers(["torch", "mkl"], [CORE]):
        pass


@pytest.mark.parametrize(
    "arguments",
    [
        ["--format", "f31"],
        ["--shape", "48"],
        ["--shape", "0,64"],
        ["--shape", "9999999999,1"],
        ["--m", "0"],
        ["--m", ""],
        ["--peers", "fftw"],
        ["--plot", "/nowhere/at/all.svg"],
    ],
)
def test_impossible_grids_are_wrong_usage(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, [*SMALL, "--peers", "none", *arguments])

    assert result.exit_code == 2


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
        row(m=1, median_ns=100, peers={"torch": 400, "mkl": 200}, bandwidth_fraction=0.7),
        row(m=128, median_ns=100, peers={"torch": 50}, peak_fraction=0.9),
        row(m=256, median_ns=100, peak_fraction=0.8),
        row(m=1, bandwidth_fraction=0.95, weight_bytes=5_000_000),
    ]

    (found,) = summarise(rows)

    assert found.points == 2
    assert found.speedup == pytest.approx(math.sqrt(2.0 * 0.5))
    assert (found.worst_speedup, found.worst_point) == (0.5, "512x1024, m = 128")
    assert found.peak == (0.8, pytest.approx(0.85))
    assert (found.bandwidth_large, found.bandwidth_small) == ((0.95, 0.95), (0.7, 0.7))


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=9), st.integers(2, 1000))
def test_a_summary_scales_with_our_speed(peer_ns: Sequence[int], factor: int) -> None:
    slow = [row(m=m + 1, median_ns=1000 * factor, peers={"torch": ns}) for m, ns in enumerate(peer_ns)]
    fast = [row(m=m + 1, median_ns=1000, peers={"torch": ns}) for m, ns in enumerate(peer_ns)]

    before, after = summarise(slow)[0].speedup, summarise(fast)[0].speedup

    assert before is not None
    assert after == pytest.approx(before * factor)


def test_every_form_has_every_row() -> None:
    rows = [row(m=1, peers={"torch": 2000}), row(m=8), row(m=8, weight_format="f32", peers={"mkl": 500})]

    table = list(csv.DictReader(io.StringIO(as_csv(rows))))

    assert rows_from_json(as_json(rows)) == rows
    assert [(r["format"], r["m"], r["torch_ns"], r["mkl_ns"]) for r in table] == [
        ("bf16", "1", "2000", ""),
        ("bf16", "8", "", ""),
        ("f32", "8", "", "500"),
    ]
    assert as_md(rows).count("default: 1x32") == 3
    assert "2.00x" in as_md(rows)
    assert "0.50x" in as_md(rows)


def test_the_plot_has_a_line_for_each_system_and_the_limit(tmp_path: Path) -> None:
    rows = [row(m=m, median_ns=1000 + m, peers={"torch": 2000 + m}) for m in (1, 8, 64)]

    root = ElementTree.fromstring(draw_rows(rows))

    lines = [line.attrib["points"].split() for line in root.iter(f"{SVG}polyline")]
    assert sum(len(points) == 3 for points in lines) == 3
    words = {text.text for text in root.iter(f"{SVG}text")}
    assert {"phasewise", "torch", "rows m", "GFLOP/s", "bf16, 512x1024"} <= words


@pytest.mark.usefixtures("fake_peers")
def test_a_grid_that_is_killed_and_begun_again_neither_repeats_nor_loses_a_row(tmp_path: Path) -> None:
    """Wherever the file ends, in the middle of a row too: rows that it has stay, byte for byte."""
    kept = tmp_path / "grid.jsonl"
    asked = ("--format", "f32,int8", "--m", "1,5", "--peers", "torch", "--rows", str(kept), "-o", "json")
    whole = json.loads(bench(*asked))
    text = kept.read_text()
    ends = [at + 1 for at, letter in enumerate(text) if letter == "\n"]
    assert [json.loads(line)["samples_ns"] for line in text.splitlines()] == [r["samples_ns"] for r in whole]

    for cut in (0, 1, ends[0] - 1, ends[0], ends[0] + 1, ends[2] + 40, ends[3]):
        kept.write_text(text[:cut])

        again = json.loads(bench(*asked))

        rows = rows_from_json(kept.read_text())
        survived = sum(end <= cut for end in ends)
        assert kept.read_text().startswith(text[: ends[survived - 1]] if survived else "")
        assert [row.key for row in rows] == [
            (r["format"], r["n"], r["k"], r["m"], r["threads"]) for r in whole
        ]
        assert again[:survived] == whole[:survived]


def test_a_grid_takes_of_a_file_only_its_own_points(tmp_path: Path) -> None:
    kept = tmp_path / "grid.jsonl"
    bench("--format", "f32", "--m", "1,5", "--peers", "none", "--rows", str(kept))

    out = json.loads(
        bench("--format", "f32", "--m", "5,2", "--peers", "none", "--rows", str(kept), "-o", "json")
    )

    assert [r["m"] for r in out] == [5, 2]
    assert [row.m for row in rows_from_json(kept.read_text())] == [1, 5, 2]


def test_a_file_of_something_else_is_wrong_usage(tmp_path: Path) -> None:
    kept = tmp_path / "notes.txt"
    kept.write_text("no rows\n")

    result = CliRunner().invoke(app, [*SMALL, "--peers", "none", "--rows", str(kept)])

    assert result.exit_code == 2
    assert kept.read_text() == "no rows\n"


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


def test_the_plot_is_written_beside_the_rows(tmp_path: Path) -> None:
    plot = tmp_path / "figure.svg"

    out = bench("--format", "f32", "--m", "1,2", "--peers", "none", "--plot", str(plot))

    assert "48x64" in out
    assert ElementTree.fromstring(plot.read_text()).tag == f"{SVG}svg"


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
