"""Refusals in the words that clients look for, of the fields that were sent, with what helps instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from phasewise.serving.http.monitoring.live import MachineFacts
from phasewise.serving.http.routes.app import ServedEmbeddings, ServerContext
from tests.support.models.encoder_models import write_encoder
from tests.support.servers.fake_embedding import embedding_server
from tests.support.servers.fake_server import CONTEXT, FakeServer, fake_server

MESSAGES = [{"role": "user", "content": "a"}]


def refusal(server: FakeServer, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json={"model": "fake", **body})
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert "\n" not in error["message"]
    assert "()" not in error["message"]  # no name of a function of ours
    return error


LONG = "a" * (CONTEXT + 1)


@pytest.mark.many
@pytest.mark.parametrize("most", [None, 100])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "prompt", LONG),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": LONG}]),
        ("/v1/responses", "input", LONG),
    ],
)
def test_too_long_a_prompt_is_refused_in_openais_words(
    path: str, field: str, value: object, stream: bool, most: int | None
) -> None:
    with fake_server(model=lambda model: replace(model, max_prompt_tokens=most)) as server:
        error = refusal(server, path, **{field: value}, stream=stream)

    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert f"This model's maximum context length is {CONTEXT} tokens" in error["message"]  # litellm's sign


def test_what_the_engine_refuses_has_the_words_too() -> None:
    """A KV cache that holds less than the context."""
    with fake_server(model=lambda model: replace(model, context_length=100 * CONTEXT)) as server:
        long = "a" * (5 * CONTEXT)
        error = refusal(server, "/v1/chat/completions", messages=[{"role": "user", "content": long}])

    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert "This model's maximum context length is" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [
                {"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
            ]}]},
            "messages",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [
                {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
            ]}]},
            "input",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages",
        ),
    ],
)  # fmt: skip
def test_an_image_is_refused_in_a_clear_sentence(
    server: FakeServer, path: str, body: dict[str, Any], field: str
) -> None:
    error = refusal(server, path, **body)

    assert error["param"] == field
    assert "this server reads text alone, and a part of type " in error["message"]
    assert "list of dict" not in error["message"]


@pytest.mark.parametrize("content", [["a"], [["a"]], [1], 1, {"text": "a"}, True])
def test_a_content_of_no_kind_says_what_one_is(server: FakeServer, content: object) -> None:
    error = refusal(server, "/v1/chat/completions", messages=[{"role": "user", "content": content}])

    assert error["message"].startswith("messages.0.content: it must be a text or a list of parts")


def message_of(refusal: httpx.Response) -> str:
    """The message, in the shape of Ollama's API or of OpenAI's."""
    error = refusal.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v1", "base_url of a client"),
        ("/v1/", "base_url of a client"),
        ("/docs", "/openapi.json"),
        ("/redoc", "/openapi.json"),
        ("/", "POST /v1/chat/completions"),
        ("/api/pull", "/api/generate"),
        ("/api/create", "/api/tags"),
        ("/v1/complete", "POST /v1/chat/completions"),
        ("/v1/v1/chat/completions", "use /v1/chat/completions"),
        ("/v1/chat/completions/", "use /v1/chat/completions"),
        ("/v1/health", "use /health"),
        ("/v1/embeddings", "--embed-model"),
        ("/nowhere", "/openapi.json"),
    ],
)
def test_a_wrong_path_has_one_sentence_that_helps(server: FakeServer, path: str, says: str) -> None:
    for method in ("GET", "POST"):
        answer = httpx.request(method, f"{server.url}{path}")
        assert answer.status_code == 404
        assert says in message_of(answer)


def test_beside_a_page_a_post_to_the_root_has_the_same_sentence() -> None:
    """Clients of text-generation-inference send their prompts there."""
    with fake_server(surroundings=ServerContext(page=MachineFacts())) as server:
        assert httpx.get(server.url).status_code == 200
        answer = httpx.post(server.url, json={"inputs": "a", "parameters": {"max_new_tokens": 3}})
        assert answer.status_code == 404
        assert "POST /v1/chat/completions" in message_of(answer)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v1/chat/completions", "makes vectors and no text: POST /v1/embeddings"),
        ("/v1/responses", "makes vectors and no text"),
        ("/api/embedding", "/openapi.json"),
    ],
)
def test_so_has_that_of_a_server_that_embeds(vectors: Path, path: str, says: str) -> None:
    with embedding_server(vectors) as server:
        answer = httpx.post(f"{server.url}{path}", json={})
    assert answer.status_code == 404
    assert says in message_of(answer)


def test_a_wrong_method_names_the_right_one(server: FakeServer) -> None:
    answer = httpx.get(f"{server.url}/v1/chat/completions")
    assert answer.json()["error"]["message"].endswith("use POST")


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("words") / "bert", "bert")


def test_models_that_are_served_for_something_else_say_so(vectors: Path) -> None:
    with embedding_server(vectors) as beside:
        embeddings = ServedEmbeddings(beside.served, beside.client)
        with (
            fake_server(embeddings=embeddings) as server,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as api,
        ):
            with pytest.raises(openai.NotFoundError, match="makes vectors and no text: use /v1/embeddings"):
                api.chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[arg-type]
            with pytest.raises(openai.NotFoundError, match="no vectors: use /v1/chat/completions"):
                api.embeddings.create(model="fake", input="a")
            with pytest.raises(openai.NotFoundError, match="is not served here"):
                api.embeddings.create(model="nothing", input="a")
