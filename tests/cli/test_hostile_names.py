"""Names from files, databases and servers are parts of lines, in every table and picture."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cli.commands import capacity as cluster_text
from phasewise.cli.commands.db import rows as db_text
from phasewise.cli.commands.db.rows import ListedSchedules, PlanRow, ScoreRow, Section
from phasewise.cli.commands.models import list_text
from phasewise.cli.commands.predict_len import report_text
from phasewise.cli.commands.topo.text import topo_lines
from phasewise.cli.commands.tune_config import found as config_text
from phasewise.cli.present import on_one_line
from phasewise.cli.tables import RowTable
from phasewise.topology.picture import draw_svg
from phasewise.topology.svg import escaped
from phasewise.workflows.line_chart import Chart, Panel, draw_chart
from tests.support.machines import machine_shapes

HOSTILE = "a\nb\tc\x1b]0;owned\x07\x00\x9b31m\u202e\u2028</text><script>x|\ufffe\ud800"


def is_tame(text: str, n_lines: int) -> None:
    assert text.count("\n") == n_lines
    assert not any(ord(character) < 32 and character != "\n" for character in text)
    assert not any(character in text for character in "\x9b\u202e\u2028")


def plan_of(name: str) -> PlanRow:
    return PlanRow(name, "prefill", None, None, [], name, True, True, {}, 0, "")


def score_of(name: str) -> ScoreRow:
    return ScoreRow(name, name, "", "", 1, 1, 0.5, {"accuracy": 0.5}, True, 0, "")


def contents(name: str) -> dict[str, Any]:
    row = {"family": name, "format": name, "n": 1, "k": 1, "m": 1, "mr": 1, "panels": 1, "compute_path": name}
    row |= {"threads_m": 1, "threads_n": 1, "threads_k": 1, "estimate_ns": 1, "machine": name, "stale": False}
    machines = [{"machine": "A", "placement": name, "core": name}]
    return {
        "plans": [plan_of(name)],
        "schedules": [row | {"standing": "in use"}],
        "machines": machines,
        "predictor_scores": [score_of(name)],
        "shipped": 0,
        "shipped_kinds": [],
    }


def subject(name: str) -> Any:
    return SimpleNamespace(
        subject=SimpleNamespace(
            model_key=name, key=SimpleNamespace(placement_sig="1"), objective=None, trace=None
        ),
        wish=SimpleNamespace(evaluator="measured"),
    )


STORED = {"n_bytes": 1, "format": "gguf", "is_whole": True}
PACKED = {"file_bytes": 1, "format": "q4", "is_orphan": False}
KNOWN = {"name": "m", "file_bytes": 1, "licence": "x", "about": "x", "is_rounded": False}
LISTED = ListedSchedules(Counter({Section.IN_USE: 1}), [(Section.IN_USE, SimpleNamespace())])  # type: ignore[list-item]
TEXTS = {
    "db show": lambda name: "\n".join(map(str, db_text.contents_text(contents(name), LISTED, wide=False))),
    "db stats": lambda name: "\n".join(map(str, db_text.table_text("t", [{"machine": name, "rows": 1}]))),
    "bench": lambda name: str(RowTable([{"model": name, "t/s": "1"}])),
    "models list": lambda name: list_text(
        [{**KNOWN, "path": name}], [{**STORED, "name": name}], [{**PACKED, "name": name}]
    ),
    "tune-config": lambda name: next(config_text._heading(subject(name))),
    "predict-len": lambda name: next(
        report_text(
            SimpleNamespace(name=name, n_answers=1, scores={}, calibration=None)  # type: ignore[arg-type]
        )
    ),
    "provision": lambda name: cluster_text._provision_row(
        SimpleNamespace(design=SimpleNamespace(name=name), spec=None, reason=None, n_runs=1)  # type: ignore[arg-type]
    )["design"],
    "topo": lambda name: "\n".join(topo_lines(machine_of(name), "utf-8")),
}


def machine_of(name: str) -> Any:
    machine = machine_shapes.machine_of((1, 2))
    return replace(machine, source=name, cpu=replace(machine.cpu, name=name, vendor=name))


@pytest.mark.parametrize("command", TEXTS)
def test_a_name_makes_no_lines_and_gives_no_orders(command: str) -> None:
    plain = TEXTS[command]("a" * len(on_one_line(HOSTILE)))
    is_tame(str(TEXTS[command](HOSTILE)), str(plain).count("\n"))


@given(st.text())
def test_words_of_a_picture_come_back_but_for_what_xml_forbids(words: str) -> None:
    parsed = ET.fromstring(f"<t>{escaped(words)}</t>").text or ""

    read = words.replace("\r\n", "\n").replace("\r", "\n")  # as XML reads the ends of lines
    assert len(parsed) == len(read)
    assert all(character in (other, "\ufffd") for character, other in zip(parsed, read, strict=True))


def test_pictures_of_hostile_names_are_documents_without_elements_of_theirs() -> None:
    chart = Chart(
        title=HOSTILE,
        caption=HOSTILE,
        x_name=HOSTILE,
        y_name=HOSTILE,
        limit_name=HOSTILE,
        emphasised=HOSTILE,
        panels=[Panel(HOSTILE, {HOSTILE: [(1.0, 1.0), (2.0, 2.0)]}, ())],
    )
    for picture in (draw_chart(chart), draw_svg(machine_of(HOSTILE))):
        names = {node.tag.rpartition("}")[2] for node in ET.fromstring(picture).iter()}
        assert "script" not in names
