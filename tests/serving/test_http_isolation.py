"""What one user's requests tell, or do, to another's: prompts reused, failures counted."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from phasewise.serving.http.http_settings import HttpLimits
from tests.support.fake_server import FakeServer, fake_server

PROMPT = "a prompt that nobody else must learn of " * 8
KEYS = ("first key", "second key")


def n_computed(server: FakeServer, key: str = "", **fields: object) -> int:
    """Prompt tokens that were computed for one request, not copied."""
    before = len(server.ranks.batches)
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json={"model": "fake", "prompt": PROMPT, "max_tokens": 1, **fields},
        headers={"Authorization": f"Bearer {key}"} if key else {},
    )
    assert answer.status_code == 200, answer.text
    server.wait_until_idle()
    return sum(batch.n_tokens for batch in server.ranks.batches[before:] if batch.phase == "prefill")


def test_a_prompt_is_reused_within_a_key_and_never_across_keys() -> None:
    with fake_server(HttpLimits(api_keys=KEYS)) as server:
        whole = n_computed(server, KEYS[0])
        again = n_computed(server, KEYS[0])
        others = n_computed(server, KEYS[1])

    assert whole == others == len(PROMPT)
    assert again < whole / 2


def test_a_salt_isolates_within_a_key_too() -> None:
    with fake_server() as server:
        mine = [n_computed(server, cache_salt="mine") for _ in range(2)]
        others = [n_computed(server, cache_salt="yours"), n_computed(server)]

    assert mine[0] == others[0] == others[1] == len(PROMPT)
    assert mine[1] < mine[0] / 2


@pytest.mark.parametrize("digits", [10, 4299, 4300])
@pytest.mark.parametrize("field", ["max_tokens", "top_k", "best_of", "n"])
def test_an_integer_of_thousands_of_digits_is_a_mistake_of_the_sender(field: str, digits: int) -> None:
    with fake_server() as server:
        body = f'{{"model":"fake","prompt":"a","{field}":{"9" * digits}}}'
        answer = httpx.post(f"{server.url}/v1/completions", content=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_a_failure_that_nobody_foresaw_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError("surprise")

    monkeypatch.setattr("phasewise.serving.http.app.completion_requests", fails)
    with fake_server() as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={"model": "fake", "prompt": "a"})
        metrics = httpx.get(f"{server.url}/metrics").text

    assert answer.status_code == 500
    assert 'phasewise_http_responses_total{path="/v1/completions",status="500"} 1.0' in metrics
