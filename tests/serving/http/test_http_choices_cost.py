"""Several choices of one prompt, and log-probabilities, cost what they add: the prompt is computed once."""

from __future__ import annotations

import pytest

from tests.support.servers.fake_server import fake_server

PROMPT = list(range(5, 25)) * 10
"""200 tokens."""
ALIGNED = 16
"""Keys and values are taken over in panels of so many."""


@pytest.mark.parametrize("fields", [{}, {"logprobs": 5}, {"best_of": 4}, {"echo": True, "logprobs": 2}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_choices_share_the_prefill_of_their_prompt(path: str, fields: dict[str, object]) -> None:
    is_chat = path.endswith("chat/completions")
    if is_chat and fields:
        fields = {"logprobs": True, "top_logprobs": 5}
    prompt = {"messages": [{"role": "user", "content": "a" * 200}]} if is_chat else {"prompt": PROMPT}
    with fake_server(max_sequences=8) as server:
        alone = server.n_computed(path, max_tokens=4, **prompt, cache_salt="one")  # type: ignore[arg-type]
        four = server.n_computed(path, max_tokens=4, n=4, **prompt, **fields, cache_salt="four")  # type: ignore[arg-type]

    assert alone >= 200
    assert four <= alone + 3 * ALIGNED


def test_log_probabilities_of_tokens_compute_nothing_more() -> None:
    with fake_server() as server:
        steps = []
        for fields in ({}, {"logprobs": 20}):
            before = len(server.ranks.batches)
            salt = f"salt {len(steps)}"
            server.n_computed("/v1/completions", prompt=PROMPT, max_tokens=9, cache_salt=salt, **fields)
            steps.append([(batch.phase, batch.n_tokens) for batch in server.ranks.batches[before:]])

    assert steps[0] == steps[1]
