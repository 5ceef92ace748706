"""The report: what the database knows of this machine is in it, what could tell of people is not."""

from __future__ import annotations

import dataclasses
import getpass
import re
import socket
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from phasewise.kerneldb.location import locate
from phasewise.kerneldb.store import open_store
from phasewise.topology import read_machine
from phasewise.tuner.config.storage import StudyFacts, TrialFacts, open_storage, quiet, read_studies
from phasewise.tuner.plans import machine_key
from phasewise.tuner.roofline import Roofline
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.machine_report.facts import report_of
from phasewise.workflows.machine_report.page import page
from tests.cli import command
from tests.support.machines.kerneldb_examples import MEASUREMENT, ORIGIN, OTHER_MACHINE, PLAN, PROMOTION

HERE = machine_key(read_machine())
OWN = dataclasses.replace(ORIGIN, machine=HERE)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """With a tuned schedule and a plan of this machine, and a row of another one."""
    path = tmp_path / "tuning.db"
    with open_store(path) as store:
        store.add_measurements(
            [
                dataclasses.replace(MEASUREMENT, origin=OWN),
                dataclasses.replace(MEASUREMENT, origin=dataclasses.replace(ORIGIN, machine=OTHER_MACHINE)),
            ]
        )
        store.add_promotions([dataclasses.replace(PROMOTION, origin=OWN)])
        store.add_plan(dataclasses.replace(PLAN, model_key="<b>model</b>@int4", origin=OWN))
    return path


def test_all_that_is_known_of_this_machine_is_gathered(db: Path) -> None:
    found = report_of(db, measure=False)
    (one,) = found.schedules
    assert one.problem == MEASUREMENT.problem
    assert one.promotion is not None
    assert one.promotion.comparison.gain == 1.25
    assert one.flops == pytest.approx(2 * 8 * 1536 * 576 / 1200e-9)
    assert one.weight_bytes > 1536 * 576 / 2
    assert list(found.plans) == ["<b>model</b>@int4"]
    (version,) = found.history
    assert (version.measurements, version.promotions, version.plans) == (1, 1, 1)
    assert found.others == 1
    assert found.roofline is None


class _Names(HTMLParser):
    """The names of all elements, and of what is asked of other places."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "action")]


def test_the_page_stands_alone_and_names_nobody(db: Path) -> None:
    found = dataclasses.replace(
        report_of(db, measure=False),
        roofline=Roofline({"f32": 1e11, "bf16": 2e11, "int8": 4e11}, 2e10),
        studies=[
            StudyFacts(
                "s",
                "m@int4",
                "decode",
                "tpot",
                [
                    TrialFacts(0, "complete", 4.5, 3, "root", {"ranks": 1}),
                    TrialFacts(1, "fail", None, 0, "", {}),
                ],
            )
        ],
    )
    text = page(found, "0.1.0", 1_795_000_000.0)
    names = _Names()
    names.feed(text)
    assert not names.tags & {"script", "img", "link", "iframe", "form"}
    assert names.sources == []
    assert "&lt;b&gt;model&lt;/b&gt;@int4" in text
    assert "<b>model" not in text
    for private in (socket.gethostname(), str(db), str(Path.home())):
        assert private not in text
    assert not re.search(rf"\b{re.escape(getpass.getuser())}\b", re.sub(r">root<|root tree", "", text))
    assert "1.250" in text
    assert "1.125 to 1.500" in text
    assert "4.500" in text
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 2
    for picture in pictures:
        ElementTree.fromstring(picture)


def test_studies_of_this_machine_are_read(db: Path) -> None:
    import optuna

    location = locate(db)
    with quiet():
        storage = open_storage(location)
        for name, core in (("mine", HERE.core_sig), ("other", "another core")):
            study = optuna.create_study(storage=storage, study_name=name)
            study.set_user_attr("machine", [core, "x"])
            study.set_user_attr("model", "m")
            trial = study.ask()
            trial.report(3.0, 0)
            study.tell(trial, 2.5)
    (found,) = read_studies(location, {HERE.core_sig})
    assert (found.name, found.model) == ("mine", "m")
    assert found.best is not None
    assert (found.best.cost_ms, found.best.n_slices) == (2.5, 1)


def test_an_absent_database_is_told(tmp_path: Path) -> None:
    with pytest.raises(WorkflowError, match="there is no database at"):
        report_of(tmp_path / "none.db")
    assert command.run("report", "--db", tmp_path / "none.db").exit_code == 1
    assert not (tmp_path / "none.db").exists()


def test_the_command_writes_the_page(db: Path, tmp_path: Path) -> None:
    command.text_of("report", "--db", db, "-o", tmp_path / "r.html", "--no-measure")
    assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith("<!doctype html>")
