"""A short run of what tests/soak/fuzz_api.py does at length: bombs, and requests from our own document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from phasewise.serving.grammar.guides import GuideCompiler, TokenView
from tests.support.models.encoder_models import write_encoder
from tests.support.servers.api_bombs import KINDS, bombs
from tests.support.servers.api_fuzz import drop, generate
from tests.support.servers.fake_embedding import embedding_server
from tests.support.servers.fake_engine import END, VOCAB_SIZE, encode, piece
from tests.support.servers.fake_server import FakeServer, fake_server
from tests.support.tiers import first_is_smoke, n_examples

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


def test_the_document_is_valid_and_names_every_route(server: FakeServer) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    routes = {route.path.replace(":path", "") for route in server.app.routes if hasattr(route, "endpoint")}

    assert routes - {"/openapi.json"} == set(document["paths"])
    for path in document["paths"].values():
        for name in ("get", "post"):
            for status, answer in path.get(name, {"responses": {}})["responses"].items():
                assert answer["description"], status


@pytest.mark.slow
def test_generated_requests_for_vectors_get_only_what_the_document_states(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "bert", "bert")
    with embedding_server(folder) as server:
        tally = generate(server.url, n_examples(40), BOUND_S)

        assert tally.statuses["200"] > 0
        assert server.client.n_live == 0
