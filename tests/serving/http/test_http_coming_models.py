"""Models that come and go behind HTTP: whoever asks gets the model that they named, within the budget."""

from __future__ import annotations

import json
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import ollama
import openai
import pytest

from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.models.model_shelf import ModelRoom
from tests.support.servers.fake_folder import FolderServer, fake_folder, said_by
from tests.support.servers.rude_clients import completion, connect, until
from tests.support.tiers import n_examples

FOUR = {"a": 10, "b": 10, "c": 10, "d": 10}
QUICK = HttpLimits(sign_of_life_s=0.05)


@pytest.mark.slow
def test_drawn_requests_get_their_models_within_the_budget() -> None:
    """Fifty sequences over four models under a budget for two, from several clients at a time."""
    for seed in range(n_examples(50)):
        rng = random.Random(seed)
        sizes = {name: rng.randrange(5, 11) for name in FOUR}
        asked = [(rng.choice("abcd"), rng.choice("pqr"), rng.randrange(1, 30)) for _ in range(12)]
        keep_s = rng.choice([0, 0.001, 300])
        with fake_folder(sizes, 20, keep_s) as server:
            folder = server.folder

            def ask(request: tuple[str, str, int], server: FolderServer = server) -> str:
                answer = server.complete(*request, stream=False)
                assert answer.status_code == 200, answer.text
                return str(answer.json()["choices"][0]["text"])

            with ThreadPoolExecutor(rng.randrange(1, 5)) as clients:
                texts = list(clients.map(ask, asked))
            assert texts == [said_by(*request) for request in asked]
            assert 0 < folder.most_bytes <= 20
            assert folder.closed_while_computing == 0
            counts = server.shelf.counts
            until(lambda: counts.loads - counts.unloads == len(folder.opened), "a count is wrong")  # noqa: B023


@pytest.mark.slow
def test_a_batch_has_the_room_that_others_leave(tmp_path: Path) -> None:
    """No model is unloaded for it; whoever waits for room ends its answers, which are computed again."""
    with fake_folder(FOUR | {"xenon": 10}, 10, keep_s=0, batch_dir=tmp_path) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        body = {"prompt": "p", "max_tokens": 200, "temperature": 0}
        lines = [
            {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"model": name, **body}}
            for name in ("a", "b", "xenon")
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("in.jsonl", content), purpose="batch")

        may_run = threading.Event()

        def step() -> None:
            until(lambda: may_run.is_set() or server.states()["c"] != "unloaded", "nobody waits for room")
            may_run.wait(0.05)

        server.folder.before_step = step
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        until(lambda: bool(server.folder.opened), "no model is loaded for the batch")
        answer = server.complete("c", "q", 5)
        assert answer.json()["choices"][0]["text"] == said_by("c", "q", 5)
        may_run.set()
        until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch does not end")
        done = client.batches.retrieve(batch.id)
        assert done.output_file_id is not None
        assert done.error_file_id is not None
        read = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
        texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in read}
        assert texts == {name: said_by(name, "p", 200) for name in "ab"}
        assert "could not be loaded" in client.files.content(done.error_file_id).text
        assert server.folder.most_bytes <= 10
        assert server.shelf.counts.loads == 4


def test_a_model_that_answers_stays_and_whoever_waits_gets_its_room_then() -> None:
    """Nor does a model wait for ever behind one that is asked for again and again."""
    with fake_folder(FOUR, 10) as server:
        gate = threading.Event()
        server.complete("a", "a", 1)
        server.folder.opened["a"].ranks.before_step = lambda: gate.wait(60)
        with ThreadPoolExecutor(3) as clients:
            first = clients.submit(server.complete, "a", "b", 5)
            until(lambda: server.client.n_live == 1, "it does not run")
            other = clients.submit(server.complete, "b", "c", 5)
            until(lambda: server.states()["b"] == "loading", "it is not waited for")
            again = clients.submit(server.complete, "a", "d", 5)
            assert server.states()["a"] == "loaded"
            assert list(server.folder.opened) == ["a"]
            gate.set()
            answers = [future.result().json()["choices"][0]["text"] for future in (first, other, again)]
    assert answers == [said_by("a", "b", 5), said_by("b", "c", 5), said_by("a", "d", 5)]
    assert server.folder.most_bytes == 10


def test_a_model_that_fails_is_told_in_one_line_and_the_server_lives() -> None:
    sizes = {"a": 10, "xylo": 10, "large": 21}
    with fake_folder(sizes, 20) as server:
        for name, why in (("xylo", "it is damaged beyond repair"), ("large", "raise --models-memory")):
            failed = server.complete(name, "a", 3)
            assert failed.status_code == 503
            assert int(failed.headers["retry-after"]) >= 1
            error = failed.json()["error"]
            assert error["code"] == "model_not_loaded"
            assert why in error["message"]
            assert "\n" not in error["message"]
            assert server.states()[name] == "failed"
        for name in ("../a", "a/../a", "/etc/passwd", "none"):
            assert server.complete(name, "a", 3).status_code == 404
        assert server.complete("a", "a", 3).json()["choices"][0]["text"] == said_by("a", "a", 3)
        with pytest.raises(openai.InternalServerError, match="damaged beyond repair"):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="any").completions.create(
                model="xylo", prompt="a"
            )


def test_ollama_lists_what_is_loaded_and_says_how_long_it_stays() -> None:
    with fake_folder(FOUR, 20) as server:
        client = ollama.Client(host=server.url)
        assert [model.model for model in client.list().models] == list(FOUR)
        assert not client.ps().models
        client.generate("a", "a", keep_alive="2h")
        client.generate("b", "a", keep_alive=-1)
        running = {model.model: model.expires_at for model in client.ps().models}
        assert set(running) == {"a", "b"}
        assert running["a"] is not None
        assert running["b"] is None
        client.generate("a", "", keep_alive=0)
        until(lambda: server.states()["a"] == "unloaded", "it stays")
        with pytest.raises(ollama.ResponseError, match="keep_alive"):
            client.generate("a", "a", keep_alive="soon")


def test_an_unused_model_goes_by_itself_and_its_memory_with_it() -> None:
    with fake_folder(FOUR, 20, keep_s=0.05) as server:
        server.complete("a", "a", 1)
        until(lambda: server.states()["a"] == "unloaded", "it stays")
        until(lambda: server.folder.open_bytes == 0, "its memory stays")
        assert server.lines[-1] == "a is unloaded"


def test_a_model_whose_engine_is_lost_is_loaded_anew() -> None:
    with fake_folder(FOUR, 20, is_fragile=True) as server:
        server.complete("a", "a", 1)
        before = server.folder.opened["a"]
        before.ranks.lose()
        until(lambda: server.states()["a"] == "unloaded", "it stays")
        assert server.complete("a", "a", 4).json()["choices"][0]["text"] == said_by("a", "a", 4)
        assert server.folder.opened["a"] is not before
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_client_that_leaves_the_line_gives_its_room_to_others() -> None:
    with fake_folder(FOUR, 10) as server:
        gate = threading.Event()
        server.complete("a", "a", 1)
        server.folder.opened["a"].ranks.before_step = lambda: gate.wait(60)
        with ThreadPoolExecutor(1) as clients:
            first = clients.submit(server.complete, "a", "b", 5)
            until(lambda: server.client.n_live == 1, "it does not run")
            with connect(server.url) as second:
                second.sendall(completion(model="b"))
                until(lambda: server.states()["b"] == "loading", "it is not in line")
            until(
                lambda: not server.shelf._is_wanted("b"), "the server does not know that its client has left"
            )
            gate.set()
            assert first.result().status_code == 200
        until(lambda: server.states()["b"] == "unloaded", "it is still loaded")
        assert server.shelf.counts.loads == 1
        assert server.states()["a"] == "loaded"


def test_metrics_have_the_names_of_models_that_came() -> None:
    with fake_folder(FOUR, 20) as server:
        for name in "ab":
            server.complete(name, "a", 3)
        text = httpx.get(f"{server.url}/metrics").text
    for name in "ab":
        assert f'phasewise_generated_tokens_total{{model="{name}"}} 3.0' in text
        assert f'phasewise_ttft_seconds_count{{model="{name}"}} 1.0' in text
    assert 'model="c"' not in text


def test_without_a_name_the_only_model_answers() -> None:
    for sizes, status in (({"a": 10}, 200), (FOUR, 400)):
        with fake_folder(sizes, None) as server:
            assert server.post("/tokenize", prompt="abc").status_code == status
            assert httpx.get(f"{server.url}/tokenizer_info").status_code == status
            asked = httpx.get(f"{server.url}/tokenizer_info", params={"model": "a"})
            assert json.loads(asked.text) == {"bos_token": None, "eos_token": None}


def test_a_model_that_is_lost_before_it_is_known_to_be_loaded_is_loaded_anew() -> None:
    with fake_folder({"a": 10}, 20) as server:
        server.folder.lost_at_once.add("a")
        server.complete("a", "a", 1)  # it gets what the lost engine says
        until(lambda: server.shelf.counts.unloads == 1, "it stays, though it is lost")

        assert server.complete("a", "a", 3).json()["choices"][0]["text"] == said_by("a", "a", 3)
        assert server.shelf.counts.loads == 2


def test_a_model_whose_end_goes_wrong_gives_its_room_to_others() -> None:
    def fail() -> None:
        raise ValueError("its chore had failed")

    with fake_folder({"a": 10, "b": 10}, 10) as server:
        server.complete("a", "a", 1)
        server.folder.after_close = fail
        answer = server.complete("b", "b", 3)
        server.folder.after_close = lambda: None

        assert answer.json()["choices"][0]["text"] == said_by("b", "b", 3)
        assert server.states() == {"a": "unloaded", "b": "loaded"}


@pytest.mark.parametrize("seed", range(n_examples(50)))
def test_who_makes_way_are_the_longest_unused_and_no_more_than_needed(seed: int) -> None:
    rng = random.Random(seed)
    budget = rng.randrange(20, 60)
    room, now_s = ModelRoom(budget), 0.0
    for number in range(60):
        now_s += rng.random()
        name, n_bytes = str(number), rng.randrange(1, 30)
        assert room.holds_alone(n_bytes) == (n_bytes <= budget)
        if not room.holds_alone(n_bytes):
            continue
        leaving = room.makes_way(n_bytes)
        assert bool(leaving) != room.fits(n_bytes)
        staying = [model for model in room.residents.values() if model not in leaving]
        unused = [model for model in leaving if not model.n_users]
        assert leaving == [*unused, *(model for model in leaving if model.n_users)]
        assert not any(model.n_users for model in leaving) or all(model.n_users for model in staying)
        for stayer in staying:
            if bool(stayer.n_users) == bool(leaving and leaving[-1].n_users):
                assert all(
                    stayer.used_s >= other.used_s for other in leaving if other.n_users == stayer.n_users
                )
        needed = sum(model.n_bytes for model in leaving[:-1])
        assert not leaving or room.n_bytes - needed + n_bytes > budget
        for leaver in leaving:
            while leaver.n_users:
                room.end(leaver.name, now_s, rng.choice([0.5, math.inf]))
            room.leave(leaver.name)
        room.enter(name, n_bytes, now_s, rng.choice([0.5, 2, math.inf]))
        assert room.n_bytes <= budget
        for resident in list(room.residents.values()):
            if rng.random() < 0.5:
                resident.n_users += 1
            elif resident.n_users:
                room.end(resident.name, now_s, 0.5)
        for overdue in room.overdue(now_s):
            assert not overdue.n_users
            assert overdue.used_s + overdue.keep_s <= now_s
            room.leave(overdue.name)
        assert room.next_end_s > now_s


def test_without_a_budget_nobody_makes_way() -> None:
    room = ModelRoom(None)
    for name in "abc":
        assert room.fits(1 << 60)
        assert room.makes_way(1 << 60) == []
        room.enter(name, 1 << 60, 0.0, 1.0)
    assert room.next_end_s == 1.0
