"""tests/soak in short: rows of faults and attacks (a tiny model), fuzzing, and what it judges memory by."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from phasewise.serving.grammar.guides import GuideCompiler, TokenView
from tests.support import ROOT
from tests.support.models.encoder_models import write_encoder
from tests.support.servers.api_bombs import KINDS, bombs
from tests.support.servers.api_fuzz import drop, generate
from tests.support.servers.fake_embedding import embedding_server
from tests.support.servers.fake_engine import END, VOCAB_SIZE, encode, piece
from tests.support.servers.fake_server import FakeServer, fake_server
from tests.support.tiers import first_is_smoke, n_examples

FAULTS = ["killed_while_starting", "killed_in_each_phase", "killed_under_migration", "disk_full"]
ATTACKS = ["schemas_that_explode", "grammars_that_stay", "templates_that_burn", "turns_in_contents"]


def assert_row_holds(program: str, row: str) -> None:
    command = [sys.executable, "-m", f"tests.soak.{program}", "--model", "tiny", "--quick", "--only", row]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    if done.stdout.startswith("skip"):
        pytest.skip(done.stdout.strip())

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"ok   {row}: ")


@pytest.mark.slow
@pytest.mark.parametrize("row", FAULTS)
def test_a_server_holds_what_it_promises(row: str) -> None:
    assert_row_holds("faults", row)


@pytest.mark.slow
@pytest.mark.parametrize("row", ATTACKS)
def test_an_attack_has_no_effect_on_others(row: str) -> None:
    assert_row_holds("hostile", row)


BOUND_S = 120.0  # against hanging; the longest take part of a second on a quiet machine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    guides = GuideCompiler(TokenView(VOCAB_SIZE, frozenset({END}), frozenset({END}), piece, encode))
    folder = tmp_path_factory.mktemp("batches")
    with fake_server(
        model=lambda served: replace(served, guides=guides), batch_dir=folder, batch_bytes=1 << 20
    ) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("kind", first_is_smoke(KINDS))
def test_no_bomb_hangs_breaks_or_surprises_the_server(server: FakeServer, kind: str) -> None:
    drop(server.url, bombs("fake", kind), BOUND_S)
    server.wait_until_idle()


@pytest.mark.slow
def test_generated_requests_get_only_what_the_document_states(server: FakeServer) -> None:
    tally = generate(server.url, n_examples(30), BOUND_S)
    server.wait_until_idle()

    assert tally.statuses["200"] > 0


@pytest.mark.slow
def test_generated_requests_for_vectors_get_only_what_the_document_states(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "bert", "bert")
    with embedding_server(folder) as server:
        tally = generate(server.url, n_examples(40), BOUND_S)

        assert tally.statuses["200"] > 0
        assert server.client.n_live == 0


def test_no_bytes_break_the_server() -> None:
    command = [sys.executable, "-m", "tests.soak.fuzz_http", "--inputs", str(n_examples(1500))]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "200: " in ran.stdout
