"""/v1/embeddings, /v1/rerank and /rerank: OpenAI's clients, limits, refusals, and what strangers send."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from phasewise.serving.embedding.client import Asker, EmbeddingClient
from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.embedding.encoder.pooling import PRECISIONS, Precision, truncated
from phasewise.serving.embedding.lane import BATCH_INPUTS, BATCHES_AHEAD
from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.routes import embeddings
from phasewise.serving.http.transport.connection import Connection
from tests.support.models.encoder_models import MAX_TOKENS, TASKS, write_encoder
from tests.support.servers.fake_embedding import POISON, WIDTH, EmbeddingServer, embedding_server, vector_of
from tests.support.servers.rude_clients import connect, until


def served(kind: str, fixture: str, prepare: Callable[[Path], None] = lambda folder: None) -> Any:
    """A fixture for a module: a server of one of `encoder_models.CASES`."""

    @pytest.fixture(scope="module", name=fixture)
    def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddingServer]:
        folder = write_encoder(tmp_path_factory.mktemp(fixture) / kind, kind)
        prepare(folder)
        with embedding_server(folder) as running:
            yield running

    return serving


def with_a_bare_prompt(folder: Path) -> None:
    path = folder / "config_sentence_transformers.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["prompts"]["bare"] = ""
    path.write_text(json.dumps(settings), encoding="utf-8")


_bert = served("bert", "server")
_reranker = served("cross-bert", "reranker")
_with_prompts = served("modernbert", "prompting", with_a_bare_prompt)
_with_tasks = served("jina-v3", "tasking")
_with_instructions = served("qwen3-reranker", "asking")


def post(server: EmbeddingServer, path: str = "/v1/embeddings", **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"model": "tiny", **body}, timeout=60)


def embedding_of(inputs: str | list[str]) -> bytes:
    """A whole request, head and body."""
    body = json.dumps({"model": "tiny", "input": inputs}).encode()
    return b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def vectors(response: httpx.Response) -> np.ndarray:
    assert response.status_code == 200, response.text
    return np.array([entry["embedding"] for entry in response.json()["data"]], np.float32)


def error_of(response: httpx.Response) -> dict[str, Any]:
    return dict(response.json()["error"])


def test_a_text_a_list_and_token_arrays(server: EmbeddingServer) -> None:
    texts = ["the cat sat", "a dog."]
    tokens = server.text.tokens(texts)

    many = post(server, input=texts)
    single = post(server, input=texts[0])
    ids = post(server, input=tokens[0].ids)
    id_lists = post(server, input=[text_tokens.ids for text_tokens in tokens])

    assert (
        vectors(many).tobytes()
        == np.stack([vector_of(Tokens(text_tokens.ids)) for text_tokens in tokens]).tobytes()
    )
    assert vectors(single).tobytes() == vectors(ids).tobytes() == vectors(many)[:1].tobytes()
    assert vectors(id_lists).tobytes() == vectors(many).tobytes()
    n_tokens = sum(len(text_tokens.ids) for text_tokens in tokens)
    assert many.json()["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    assert [entry["index"] for entry in many.json()["data"]] == [0, 1]
    assert many.json()["model"] == "tiny"


def test_base64_is_the_same_vector_as_floats(server: EmbeddingServer) -> None:
    floats = vectors(post(server, input="the cat", encoding_format="float"))
    coded = post(server, input="the cat", encoding_format="base64").json()["data"][0]["embedding"]

    assert np.frombuffer(base64.b64decode(coded), "<f4").tobytes() == floats[0].tobytes()


@pytest.mark.parametrize("precision", ["int8", "binary", "ubinary"])
def test_vectors_of_fewer_bits_are_those_of_the_floats(server: EmbeddingServer, precision: Precision) -> None:
    texts = ["the cat", "a dog."]
    few = 5

    response = post(server, input=texts, encoding_format=precision, dimensions=few)

    floats = vectors(post(server, input=texts, dimensions=few))
    want = [PRECISIONS[precision](vector).tolist() for vector in floats]
    assert [entry["embedding"] for entry in response.json()["data"]] == want


def test_a_kind_of_input_puts_the_model_s_prompt_before_texts(prompting: EmbeddingServer) -> None:
    as_query = post(prompting, input="the cat", input_type="query")

    assert (
        vectors(as_query).tobytes()
        == vectors(post(prompting, input="query: the cat", input_type="bare")).tobytes()
    )
    by_default = vectors(post(prompting, input=["the cat"]))
    assert by_default.tobytes() == vectors(post(prompting, input="the cat", input_type="document")).tobytes()
    assert by_default.tobytes() != vectors(as_query).tobytes()


def test_kinds_of_input_that_a_model_does_not_have_are_refused(
    prompting: EmbeddingServer, server: EmbeddingServer
) -> None:
    unknown = post(prompting, input="the cat", input_type="clustering")
    of_tokens = post(prompting, input=[5, 6], input_type="query")

    assert (unknown.status_code, of_tokens.status_code) == (400, 400)
    assert error_of(unknown)["message"] == (
        "input_type is 'clustering' is no kind of input of this model: query, document, bare"
    )
    assert error_of(unknown)["param"] == error_of(of_tokens)["param"] == "input_type"
    assert (
        vectors(post(server, input="a", input_type="query")).tobytes()
        == vectors(post(server, input="a")).tobytes()
    )


def test_a_task_reaches_the_worker_with_its_instruction(tasking: EmbeddingServer) -> None:
    """As in Jina's API. Token ids have no instruction put before them."""
    seen = tasking.workers[0].tasks
    for number, (task, instruction) in enumerate(TASKS.items(), 1):
        of_text = post(tasking, input="the cat", task=task)
        assert seen.pop() == number
        bare = post(tasking, input=f"{instruction}the cat")
        assert seen.pop() == 0
        assert vectors(of_text).tobytes() == vectors(bare).tobytes()  # of the fake: of the ids alone
        assert post(tasking, input=[[5, 6], [7]], task=task).status_code == 200
        assert [seen.pop(), seen.pop()] == [number, number]


def test_tasks_that_a_model_does_not_have_are_refused(
    tasking: EmbeddingServer, server: EmbeddingServer
) -> None:
    unknown = post(tasking, input="a", task="clustering")
    both = post(tasking, input="a", task="separation", input_type="query")
    none = post(server, input="a", task="separation")

    assert {each.status_code for each in (unknown, both, none)} == {400}
    assert {error_of(each)["param"] for each in (unknown, both, none)} == {"task"}
    assert error_of(unknown)["message"] == (
        f"task is 'clustering' is no task of this model: {', '.join(TASKS)}"
    )
    assert error_of(none)["message"] == "task is 'separation' is no task of this model: it has none"


def test_an_instruction_reaches_the_model_that_takes_one(
    asking: EmbeddingServer, reranker: EmbeddingServer
) -> None:
    body = {"query": "cat", "documents": ["mat", "dog"]}
    seen = asking.workers[0].seen

    first = post(asking, "/v1/rerank", **body)
    other = post(asking, "/v1/rerank", instruction="seven", **body)

    assert first.status_code == other.status_code == 200
    pairs = [("cat", "mat"), ("cat", "dog")]
    for wanted in (asking.text.tokens(pairs), asking.text.tokens(pairs, instruction="seven")):
        assert all(pair_tokens.ids in seen for pair_tokens in wanted)
    refused = post(reranker, "/v1/rerank", instruction="seven", **body)
    assert (refused.status_code, error_of(refused)["param"]) == (400, "instruction")


@pytest.mark.slow
def test_the_official_client_reads_both_forms(server: EmbeddingServer) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")

    by_default = client.embeddings.create(model="tiny", input=["the cat", "a dog"])
    floats = client.embeddings.create(model="tiny", input=["the cat", "a dog"], encoding_format="float")

    assert [entry.embedding for entry in by_default.data] == [entry.embedding for entry in floats.data]
    assert by_default.usage.prompt_tokens == floats.usage.prompt_tokens > 0


def test_the_client_of_ollama_gets_the_same_vectors(server: EmbeddingServer) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=server.url)
    texts = ["the cat sat", "a dog."]
    expected = vectors(post(server, input=texts))

    many = client.embed("tiny:latest", texts)
    short = client.embed("tiny", texts[0], dimensions=3, options={"num_ctx": 9})

    assert np.array(many["embeddings"], np.float32).tobytes() == expected.tobytes()
    assert many["prompt_eval_count"] == sum(len(text_tokens.ids) for text_tokens in server.text.tokens(texts))
    assert np.float32(short["embeddings"][0]).tobytes() == truncated(expected[0], 3).tobytes()
    assert client.embed("tiny", "")["embeddings"] == []
    assert client.embed("tiny", "the cat " * 5000)["embeddings"]
    with pytest.raises(ollama.ResponseError, match="tokens"):
        client.embed("tiny", "the cat " * 5000, truncate=False)
    with pytest.raises(ollama.ResponseError, match="not served"):
        client.embed("another", "the cat")


def test_dimensions_are_the_first_numbers_with_length_one(server: EmbeddingServer) -> None:
    whole = vectors(post(server, input="the cat"))[0]

    got = vectors(post(server, input="the cat", dimensions=3))[0]

    assert got.tobytes() == truncated(whole, 3).tobytes()
    assert math.isclose(float(np.linalg.norm(got)), 1, rel_tol=1e-6)
    refused = post(server, input="the cat", dimensions=WIDTH + 1)
    assert (refused.status_code, error_of(refused)["param"]) == (400, "dimensions")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input": []}, "input"),
        ({"input": ["the", 3]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": None}, "input"),
        ({}, "input"),
        ({"input": "the", "encoding_format": "int4"}, "encoding_format"),
        ({"input": "the", "dimensions": 0}, "dimensions"),
        ({"input": [-1]}, "token ids"),
        ({"input": [1 << 40]}, "token ids"),
        ({"input": ["a"] * 2049}, "2048"),
    ],
)
def test_what_cannot_be_embedded_is_a_400_that_says_why(
    server: EmbeddingServer, body: dict[str, Any], says: str
) -> None:
    response = post(server, **body)

    assert response.status_code == 400
    assert says in error_of(response)["message"]


@pytest.mark.parametrize(
    "text", ["cat " * (MAX_TOKENS + 1), "." * 1_000_000, "x" * 2_000_000], ids=["words", "dots", "letters"]
)
def test_too_long_an_input_names_the_limit_unless_it_may_be_cut(server: EmbeddingServer, text: str) -> None:
    refused = post(server, input=["the", text])
    cut = post(server, input=["the", text], truncate=True)

    assert refused.status_code == 400
    assert error_of(refused)["code"] == "context_length_exceeded"
    assert f"maximum context length is {MAX_TOKENS} tokens" in error_of(refused)["message"]
    assert "input 1 has" in error_of(refused)["message"]
    assert cut.status_code == 200
    assert cut.json()["usage"]["prompt_tokens"] <= MAX_TOKENS + 3


def test_strangers_bodies_are_refused_and_the_server_stays(server: EmbeddingServer) -> None:
    url = f"{server.url}/v1/embeddings"
    kinds = {"Content-Type": "application/json"}
    answers = [
        httpx.post(url, content=b'{"model": "tiny", "input": "\xff\xfe"}', headers=kinds),
        httpx.post(url, content=b'{"model": "tiny", "input": "' + b"a" * (10 << 20) + b'"}', headers=kinds),
        httpx.post(url, content=json.dumps({"model": "tiny", "input": ["a"] * 100_000}), headers=kinds),
        httpx.post(url, content=b"[" * 5000, headers=kinds),
        httpx.post(url, content=b"", headers=kinds),
    ]

    assert [answer.status_code for answer in answers] == [400, 413, 400, 400, 400]
    assert post(server, input="the cat").status_code == 200


def test_half_a_surrogate_pair_is_text(server: EmbeddingServer) -> None:
    response = httpx.post(
        f"{server.url}/v1/embeddings",
        content=b'{"model": "tiny", "input": "a \\ud800 b"}',
        headers={"Content-Type": "application/json"},
    )

    assert response.status_code in (200, 400)


def test_another_model_a_batch_that_fails_and_a_reranker_asked_of_an_embedder(
    server: EmbeddingServer,
) -> None:
    assert httpx.post(f"{server.url}/v1/embeddings", json={"model": "gpt", "input": "a"}).status_code == 404
    failed = post(server, input=[POISON])
    assert (failed.status_code, error_of(failed)["code"]) == (500, "engine_error")
    refused = post(server, "/v1/rerank", query="a", documents=["b"])
    assert refused.status_code == 400
    assert "cross-encoder" in error_of(refused)["message"]


def test_the_model_is_listed_and_metrics_name_its_devices(server: EmbeddingServer) -> None:
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    metrics = httpx.get(f"{server.url}/metrics").text

    assert [(model["id"], model["max_model_len"]) for model in listed] == [("tiny", MAX_TOKENS)]
    assert httpx.get(f"{server.url}/v1/models/alias").status_code == 200
    assert 'phasewise_embedding_up{device="cpu:0"} 1.0' in metrics
    assert {"/v1/embeddings", "/v1/rerank", "/rerank"} <= set(
        httpx.get(f"{server.url}/openapi.json").json()["paths"]
    )


@contextlib.contextmanager
def held(running: EmbeddingServer) -> Iterator[None]:
    """The first worker computes nothing until the end of `with`."""
    gate = running.workers[0].gate = asyncio.Event()
    try:
        yield
    finally:
        assert running.client._loop is not None
        running.client._loop.call_soon_threadsafe(gate.set)


def test_busy_is_429_with_retry_after_for_one_input_as_for_many(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "bert", "bert")
    with embedding_server(folder, depths=[(2, 1000)]) as running:
        with held(running), httpx.Client(timeout=60) as client:
            first = threading.Thread(target=lambda: post(running, input=["a", "b"]))
            first.start()
            until(lambda: running.client.n_live == 2, "the first request is in progress")
            for body in ("c", ["c", "d"]):
                busy = client.post(f"{running.url}/v1/embeddings", json={"model": "tiny", "input": body})
                assert busy.status_code == 429
                assert int(busy.headers["Retry-After"]) >= 1
        first.join()
        assert (
            post(running, input=["a", "b", "c", "d"]).status_code == 200
        )  # larger than the depth, but alone


def test_a_client_that_comes_while_all_is_full_is_read_as_one_that_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its next request, which is accepted, would be read late."""
    vouched: list[Connection] = []

    def mark_answered(connection: Connection) -> None:
        vouched.append(connection)

    monkeypatch.setattr(Connection, "mark_answered", mark_answered)
    folder = write_encoder(tmp_path / "bert", "bert")
    with (
        embedding_server(folder, depths=[(2, 1000)]) as running,
        httpx.Client(timeout=60) as client,
        ThreadPoolExecutor(1) as other,
    ):
        with held(running):
            first = other.submit(post, running, input=["a", "b"])
            until(lambda: running.client.n_live == 2, "the first request is in progress")
            url = f"{running.url}/v1/embeddings"
            assert client.post(url, json={"model": "none", "input": "c"}).status_code == 404
            assert len(vouched) == 0
            assert client.post(url, json={"model": "tiny", "input": "c"}).status_code == 429
            assert len(vouched) == 1
        assert first.result().status_code == 200


def test_the_time_in_which_a_request_waits_to_be_read_counts(
    server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop stands still while the second request lies in its socket."""
    embed, loop, ages_s = EmbeddingClient.embed, server.client._loop, list[float]()
    assert loop is not None

    async def noted(client: EmbeddingClient, inputs: list[Tokens], asker: Asker) -> list[np.ndarray]:
        assert asker.arrived_s is not None
        ages_s.append(loop.time() - asker.arrived_s)
        return await embed(client, inputs, asker)

    monkeypatch.setattr(EmbeddingClient, "embed", noted)
    stands, sent = threading.Event(), threading.Event()

    def stand_still() -> None:
        stands.set()
        assert sent.wait(60)
        time.sleep(0.6)

    with connect(server.url) as client:
        client.sendall(embedding_of("the cat"))
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        loop.call_soon_threadsafe(stand_still)
        assert stands.wait(60)
        client.sendall(embedding_of("the cat"))
        sent.set()
        until(lambda: len(ages_s) == 2, "the second request is not read")

    assert ages_s[0] >= 0
    assert ages_s[1] >= 0.5


def test_a_client_that_leaves_frees_its_places(tmp_path: Path) -> None:
    """Its request is forgotten, and the next one is answered."""
    folder = write_encoder(tmp_path / "bert", "bert")
    with embedding_server(folder, depths=[(2, 1000)]) as running:
        with held(running):
            with connect(running.url) as leaving:
                leaving.sendall(embedding_of(["a", "b"]))
                until(lambda: running.client.n_live == 2, "it is not in progress")
            until(lambda: running.client.n_live == 0, "it is still waited for")
        until(lambda: post(running, input=["c", "d"]).status_code == 200, "its places are not free")
        assert running.client.lanes()[0].queue.inputs == 0


def test_documents_come_back_by_their_scores(reranker: EmbeddingServer) -> None:
    documents = ["a dog", "the cat sat", "one two"]
    tokens = reranker.text.tokens([("cat", text) for text in documents])
    logits = [float(vector_of(pair_tokens, 1)[0]) for pair_tokens in tokens]
    order = sorted(range(3), key=lambda index: -logits[index])

    cohere = post(reranker, "/v1/rerank", query="cat", documents=documents, top_n=2, return_documents=True)
    objects = post(reranker, "/v1/rerank", query="cat", documents=[{"text": text} for text in documents])

    results = cohere.json()["results"]
    assert [result["index"] for result in results] == order[:2]
    assert results[0]["relevance_score"] == pytest.approx(1 / (1 + math.exp(-logits[order[0]])), rel=1e-6)
    assert results[0]["document"] == {"text": documents[order[0]]}
    assert cohere.json()["usage"]["prompt_tokens"] == sum(len(pair_tokens.ids) for pair_tokens in tokens)
    assert [result["index"] for result in objects.json()["results"]] == order
    assert post(reranker, input="a").status_code == 400
    assert post(reranker, "/rerank", query="cat", documents=[]).status_code == 400


def test_one_form_of_rerank_is_at_every_path(reranker: EmbeddingServer) -> None:
    """Jina's clients ask /rerank, Cohere's /v2/rerank; the model needs no name there."""
    body = {"query": "cat", "documents": ["a dog", "the cat sat"], "top_n": 1}
    paths = ("/rerank", "/v1/rerank", "/v2/rerank")
    answers = [httpx.post(f"{reranker.url}{path}", json=body).json() for path in paths]
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0]["results"]) == 1
    assert httpx.post(f"{reranker.url}/rerank", json={"query": "cat"}).status_code == 400


def test_the_page_s_open_path_takes_no_body_without_a_key(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "bert", "bert")
    with embedding_server(folder, limits=HttpLimits(api_keys=("secret",))) as locked:
        for path in ("/", "/rerank", "/embeddings"):
            assert httpx.post(f"{locked.url}{path}", json={"inputs": "a"}).status_code == 401


@pytest.mark.parametrize("digits", [10, 4299, 4300])
@pytest.mark.parametrize("body", ['"dimensions":N', '"input":[N]', '"input":[[N]]'])
def test_integers_of_thousands_of_digits_are_mistakes(
    server: EmbeddingServer, body: str, digits: int
) -> None:
    text = f'{{"model":"tiny","input":"a",{body.replace("N", "9" * digits)}}}'
    answer = httpx.post(
        f"{server.url}/v1/embeddings", content=text, headers={"Content-Type": "application/json"}
    )

    assert answer.status_code == 400
    assert len(answer.text) < 500


def test_vectors_are_written_beside_the_loop(
    server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = embeddings._written
    seen: set[str] = set()

    def noted(*arguments: Any) -> bytes:
        seen.add(threading.current_thread().name)
        return written(*arguments)

    monkeypatch.setattr(embeddings, "_written", noted)
    assert vectors(post(server, input=["a", "b"])).shape == (2, WIDTH)
    assert all(name.startswith("asyncio_") for name in seen)
    assert seen


def test_an_answer_that_takes_too_much_memory_is_refused_before_it_is_computed(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "bert", "bert")
    most = 10 * WIDTH * 24
    with embedding_server(folder, limits=HttpLimits(max_response_bytes=most)) as small:
        fits, refused, coded = (
            post(small, input=["a"] * n, encoding_format=kind)
            for n, kind in ((10, "float"), (11, "float"), (40, "base64"))
        )
        n_seen = sum(len(worker.seen) for worker in small.workers)

    assert (fits.status_code, refused.status_code, coded.status_code) == (200, 400, 200)
    assert n_seen == 50
    assert "more than" in error_of(refused)["message"]


def test_a_key_with_many_inputs_waits_for_itself(tmp_path: Path) -> None:
    """It holds every place; the other key's input is in the batch after those that were sent."""
    folder = write_encoder(tmp_path / "bert", "bert")
    keys = {name: {"Authorization": f"Bearer {name}"} for name in ("greedy", "modest")}

    def ask(name: str, *inputs: str) -> int:
        body = {"model": "tiny", "input": inputs}
        return httpx.post(f"{small.url}/v1/embeddings", json=body, headers=keys[name], timeout=60).status_code

    limits = HttpLimits(api_keys=tuple(keys))
    with (
        embedding_server(folder, depths=[(8, 10_000)], limits=limits) as small,
        ThreadPoolExecutor() as clients,
    ):
        with held(small):
            greedy = clients.submit(ask, "greedy", *["a"] * 2000)
            until(lambda: small.client.n_live == 2000, "the greedy key holds every place")
            modest = clients.submit(ask, "modest", "b")
            until(lambda: small.client.n_live == 2001, "the other key's input has not come")
        assert greedy.result() == modest.result() == 200
    seen = [tuple(ids) for ids in small.workers[0].seen]
    (modest_ids,) = {*seen} - {seen[0]}
    assert seen.index(modest_ids) <= (BATCHES_AHEAD + 1) * BATCH_INPUTS
