"""`phasewise bench kernels`: rows that agree with themselves, peers that may be missing or die, a picture."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

from phasewise.cli.commands.bench.kernels import csv_of, draw_rows, table_of
from phasewise.cli.tables import as_json
from phasewise.cython_kernels import _native
from phasewise.kerneldb.records import Problem, Schedule
from phasewise.topology import read_machine
from phasewise.workflows.bench.kernel_rows import KernelRow, rows_from_json
from phasewise.workflows.bench.peers import processes as kernel_peers
from phasewise.workflows.bench.peers.processes import NAMES, PeerError, opened_peers
from tests.cli import command
from tests.support.kernels.kernel_rows import kernel_row
from tests.support.tuned_here import here, keep_in_use, timed

SMALL = ("bench", "kernels", "--threads", "1", "--shape", "48,64", "-r", "2", "--cold-mib", "1")
ISSUED = (
    "format", "n", "k", "m", "threads", "median_ns", "gflops", "gbps", "peak_fraction", "bandwidth_fraction",
    "schedule", "peers",
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("own_places")

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


def text_of(rows: Sequence[KernelRow], **options: bool) -> str:
    return "\n".join(map(str, table_of(rows, **options)))


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


bench = partial(command.text_of, *SMALL)


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


def test_a_product_runs_by_what_was_tuned_for_it(db: Path) -> None:
    """And says so; a number of rows that nothing was tuned near runs by the default."""
    schedule = Schedule(1, 1, 3, 16, 32, 1, 1, 1, _native.compute_paths("f32")[0], 1, 640, "mn")
    keep_in_use(db, [timed(Problem("gemm", "f32", 48, 64, 4), schedule, machine=here(1))])

    rows = json.loads(bench("--format", "f32", "--m", "4,64", "--peers", "none", "-o", "json"))

    assert [r["schedule_source"] for r in rows] == ["exact", "default"]
    assert rows[0]["schedule"] == asdict(schedule)


@pytest.mark.usefixtures("fake_peers")
def test_peers_stand_in_every_row_that_they_can_do() -> None:
    """A format that a peer does not have is told once."""
    done = command.run(*SMALL, "--format", "f32,int8", "--m", "1,7,8", "-o", "json")
    rows = json.loads(done.stdout)

    present = [name for name in NAMES if name != "mkl"]
    for name in present:
        assert done.stderr.count(f"peer {name} has no int8: its columns are empty there") == 1
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
    with (
        pytest.raises(PeerError, match="mkl is not installed"),
        opened_peers(["torch", "mkl"], [read_machine().allowed_pus[0]]),
    ):
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
    assert command.run(*SMALL, "--peers", "none", *arguments).usage_error


def test_every_form_has_every_row() -> None:
    rows = [
        kernel_row(m=1, peers={"torch": 2000}, n_rounds=6),
        kernel_row(m=8),
        kernel_row(m=8, weight_format="f32", peers={"mkl": 500}, n_rounds=6),
        kernel_row(m=4, weight_format="f16", peers={"torch": 4000}, n_rounds=5),
    ]

    table = list(csv.DictReader(io.StringIO(csv_of(rows))))

    assert rows_from_json(as_json(rows)) == rows
    assert [(r["format"], r["m"], r["torch_ns"], r["mkl_ns"]) for r in table] == [
        ("bf16", "1", "2000", ""),
        ("bf16", "8", "", ""),
        ("f32", "8", "", "500"),
        ("f16", "4", "4000", ""),
    ]
    assert text_of(rows, wide=True).count("default: 1x32") == 4
    header, _, *lines = [
        [cell.strip() for cell in line.split("|")] for line in text_of(rows, wide=True).splitlines()[:6]
    ]
    columns = [header.index(peer) for peer in ("torch", "mkl")]
    assert [[line[column] for column in columns] for line in lines] == [
        ["2.00x", ""],
        ["", ""],
        ["", "0.50x"],
        ["no verdict", ""],
    ]
    assert "2.00x" in text_of(rows)
    assert "0.50x" in text_of(rows)
    assert "4.00x" not in text_of(rows), "five rounds prove nothing"
    assert "worst point" in text_of(rows)


def test_without_peers_there_is_no_table_of_them() -> None:
    table = text_of([kernel_row(m=1), kernel_row(m=8)])

    assert "worst point" not in table
    assert "\n\n" not in table


def test_the_plot_has_a_line_for_each_system_and_the_limit(tmp_path: Path) -> None:
    rows = [kernel_row(m=m, median_ns=1000 + m, peers={"torch": 2000 + m}) for m in (1, 8, 64)]

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
    ends = [index + 1 for index, letter in enumerate(text) if letter == "\n"]
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

    assert command.run(*SMALL, "--peers", "none", "--rows", kept).usage_error
    assert kept.read_text() == "no rows\n"


def test_the_plot_is_written_beside_the_rows(tmp_path: Path) -> None:
    plot = tmp_path / "figure.svg"

    out = bench("--format", "f32", "--m", "1,2", "--peers", "none", "--plot", str(plot))

    assert "48x64" in out
    assert ElementTree.fromstring(plot.read_text()).tag == f"{SVG}svg"
