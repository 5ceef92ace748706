"""`phasewise db push | pull`: what a person and a script see."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from phasewise.kerneldb.store import open_store
from tests.cli import command
from tests.support.machines.kerneldb_examples import MEASUREMENT, USER_TIMING

pytestmark = pytest.mark.usefixtures("own_places")

run = partial(command.text_of, "db")
run_json = partial(command.fields_of, "db")
invoke = partial(command.run, "db")


@pytest.fixture
def remote(db: Path, tmp_path: Path) -> str:
    with open_store(db) as store:
        store.add([MEASUREMENT])
        store.add([USER_TIMING])
    return str(tmp_path / "remote")


def test_a_push_prints_what_a_pull_pins(remote: str, tmp_path: Path) -> None:
    done = run_json("push", remote)
    there = ("--db", str(tmp_path / "there.db"))

    assert (done["new"], done["serial"], done["bundles"][0]["rows"]) == (1, 1, 1)
    pulled = run_json("pull", remote, "--digest", done["digest"], "--all", *there)
    assert (pulled["read"], pulled["added"], pulled["known"]) == (1, 1, 0)
    assert run("pull", remote, "--digest", done["digest"], "--all", *there) == (
        "1 bundle: 0 rows added, 1 known already\n"
    )
    assert run("push", remote).splitlines() == ["0 new bundles; the index has the digest", done["digest"]]
    assert run_json("push", remote, "--user-kernels")["bundles"][0]["rows"] == 2


def test_a_preview_sends_nothing(remote: str) -> None:
    lines = run("push", remote, "--dry-run").splitlines()

    assert [next(iter(json.loads(line))) for line in lines] == ["file", "measurement", "rows"]
    assert not Path(remote).exists()


def test_a_preview_for_scripts_names_bundles_and_fields(remote: str) -> None:
    fields = run_json("push", remote, "--dry-run")

    assert [bundle["rows"] for bundle in fields["bundles"]] == [1]
    assert {"measurement.kernel_abi", "rows"} <= set(fields["fields"])
    assert not Path(remote).exists()


def test_what_is_told_of_bundles_fits_80_columns(remote: str) -> None:
    for options in (("--dry-run",), ()):
        told = invoke("push", remote, *options).stderr.splitlines()
        assert told
        assert max(map(len, told)) <= 80


def test_nothing_that_fits_is_told(remote: str, tmp_path: Path) -> None:
    digest = run_json("push", remote)["digest"]

    assert "no rows are of a machine with zen9" in invoke("push", remote, "--signature", "zen9").refusal
    pulled = invoke("pull", remote, "--digest", digest, "--db", str(tmp_path / "there.db"))
    assert "--all pulls those of every kind" in pulled.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "is believed by --digest"),
        (("--digest", "0" * 64), "not the one that --digest pins"),
        (("--allowed-signers", "nobody"), "there is no file of allowed signers nobody"),
    ],
)
def test_what_is_not_believed_is_refused(
    remote: str, tmp_path: Path, options: tuple[str, ...], reason: str
) -> None:
    run("push", remote)
    there = tmp_path / "there.db"

    assert reason in invoke("pull", remote, *options, "--db", str(there)).refusal
    assert not there.exists()
