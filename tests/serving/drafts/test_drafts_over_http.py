"""Drafts as clients and operators see them: the same answers, tokens counted in usage and metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.serving.drafts.test_draft_laws import lookup_drafter
from tests.support.servers.fake_server import FakeServer, fake_server


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server(drafter=lookup_drafter()) as running:
        yield running


@pytest.fixture(scope="module")
def plain() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


def asked(server: FakeServer, **fields: object) -> dict[str, Any]:
    body = {"model": "fake", "prompt": "a", "max_tokens": 200, "temperature": 0, **fields}
    response = httpx.post(f"{server.url}/v1/completions", json=body)
    assert response.status_code == 200
    return dict(response.json())


def counted(server: FakeServer, name: str) -> float | None:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    samples = [line for line in lines if line.startswith(f"phasewise_{name} ")]
    return float(samples[0].split()[1]) if samples else None


def test_usage_and_metrics_tell_accepted_and_drafted_tokens(server: FakeServer, plain: FakeServer) -> None:
    before = counted(server, "generated_tokens_total") or 0
    got, want = asked(server), asked(plain)

    assert got["choices"] == want["choices"]
    details = got["usage"].pop("completion_tokens_details")
    assert got["usage"] == want["usage"]
    assert details["accepted_prediction_tokens"] > 100
    drafted, accepted = (counted(server, f"drafted_tokens{which}_total") for which in ("", "_accepted"))
    assert drafted is not None
    assert accepted is not None
    assert drafted >= accepted >= details["accepted_prediction_tokens"]
    assert (counted(server, "generated_tokens_total") or 0) - before == 200
    assert counted(plain, "drafted_tokens_total") is None
    assert "completion_tokens_details" not in want["usage"]


def test_a_stream_has_the_same_text_and_the_same_usage(server: FakeServer, plain: FakeServer) -> None:
    texts = []
    for target in (server, plain):
        api = openai.OpenAI(base_url=f"{target.url}/v1", api_key="any", max_retries=0)
        stream = api.completions.create(
            model="fake", prompt="xyz", max_tokens=150, temperature=0, stop=["yzab", "kl"], n=2, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = list(stream)
        usage = chunks[-1].usage
        assert usage is not None
        details = usage.completion_tokens_details
        assert (details is not None) == (target is server)
        texts.append(
            (
                [
                    "".join(c.choices[0].text for c in chunks if c.choices and c.choices[0].index == i)
                    for i in (0, 1)
                ],
                usage.completion_tokens,
            )
        )

    assert texts[0] == texts[1]


def test_the_api_description_names_the_counts(server: FakeServer) -> None:
    schemas = httpx.get(f"{server.url}/openapi.json").json()["components"]["schemas"]

    assert "accepted_prediction_tokens" in json.dumps(schemas["Usage"])
