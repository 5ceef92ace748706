"""`phasewise serve` with an embedding model, alone and beside a language model, as a process."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest

from phasewise.serving.embedding.depth import LatencyLine
from phasewise.topology import read_machine
from tests.cli import command
from tests.support.modelled_device import command as modelled_device
from tests.support.models.encoder_models import HIDDEN, TASKS, write_encoder
from tests.support.models.jina_v3_reference import plain_vectors
from tests.support.process_trees import children_of
from tests.support.servers.rude_clients import until
from tests.support.servers.served_command import own_places, serving

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

pytestmark = pytest.mark.slow

N_CORES = len(read_machine().allowed_cores()) or len(read_machine().allowed_pus)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder") / "bert", "bert")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return own_places(tmp_path_factory.mktemp("home"))


def refused(environment: dict[str, str], *arguments: object) -> str:
    done = command.run("serve", *arguments, "--port", 0, env=environment)
    return done.refusal if done.exit_code == 1 else done.usage_error


def vector(response: httpx.Response) -> np.ndarray:
    assert response.status_code == 200, response.text
    return np.array(response.json()["data"][0]["embedding"], np.float32)


@pytest.mark.smoke
def test_an_embedding_model_alone_keeps_to_threads_origins_keys_and_the_log(
    encoder: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    logged = ("--log-level", "info", "--access-log", tmp_path / "log", "--log-format", "json")
    arguments = ("--port", 0, "--threads", 1, "--cors-origin", "https://chat.example", "--api-key", "k")
    with serving(encoder, environment, *arguments, *logged) as server:
        bearer = {"Authorization": "Bearer k"}
        body = {"model": "bert", "input": "the cat sat"}
        asked = httpx.post(
            f"{server.url}/v1/embeddings", json=body, headers={**bearer, "Origin": "https://chat.example"}
        )
        foreign = httpx.post(
            f"{server.url}/v1/embeddings", json=body, headers={**bearer, "Origin": "https://other.example"}
        )
        assert httpx.post(f"{server.url}/v1/embeddings", json=body).status_code == 401
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.end(signal.SIGTERM) == 0

    assert vector(asked).shape == (HIDDEN,)
    assert asked.headers["access-control-allow-origin"] == "https://chat.example"
    assert "access-control-allow-origin" not in foreign.headers
    rows = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(row["path"], row["status"]) for row in rows] == [("/v1/embeddings", n) for n in (200, 200, 401)]
    assert rows[0]["prompt_tokens"] == asked.json()["usage"]["prompt_tokens"]
    messages = [json.loads(line)["message"] for line in server.lines]
    (told,) = [message for message in messages if message.startswith("embeddings within ")]
    cores = told.split("on cores ")[1].split(" ")[0]
    assert cores == str(max(read_machine().allowed_pus)) or (N_CORES > 1 and "," not in cores)


def test_vectors_and_chat_from_one_server_whose_cores_are_divided(
    encoder: Path, tiny: Path, environment: dict[str, str]
) -> None:
    if N_CORES < 2:
        pytest.skip("needs two CPUs")
    with serving(encoder, environment, "--port", 0) as alone:
        body = {"model": "bert", "input": "the cat sat"}
        want = vector(httpx.post(f"{alone.url}/v1/embeddings", json=body, timeout=60))
    with serving(tiny, environment, "--port", 0, "--embed-model", encoder) as server:
        responses: dict[str, httpx.Response] = {}

        def chat() -> None:
            asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
            responses["chat"] = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=60)

        thread = threading.Thread(target=chat)
        thread.start()
        answers = [httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60) for _ in range(10)]
        thread.join()
        listed = [model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]]
        metrics = httpx.get(f"{server.url}/metrics").text
        wrong = httpx.post(f"{server.url}/v1/embeddings", json={**body, "model": "tiny"}, timeout=60)
        assert server.end(signal.SIGTERM) == 0

    assert responses["chat"].json()["choices"][0]["message"]["content"]
    assert all(vector(answer).tobytes() == want.tobytes() for answer in answers)
    assert listed == ["tiny", "bert"]
    assert 'phasewise_embedding_embedded_total{device="cpu:0"} 10.0' in metrics
    assert wrong.status_code == 404
    said = "\n".join(server.lines)
    own = {int(core) for core in said.split("on cores ")[1].split(" ")[0].split(",")}
    assert own == {max(read_machine().allowed_pus)} or len(own) == max(1, N_CORES // 4)
    assert "prefill: 1 rank on core" in said


def test_a_task_is_asked_for_alone_and_beside_a_language_model(
    tiny: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """Vectors of each task by its definition, whichever way the model is served."""
    if N_CORES < 2:
        pytest.skip("needs two CPUs")
    model = write_encoder(tmp_path / "v3", "jina-v3")
    for arguments in ((model,), (tiny, "--embed-model", model)):
        with serving(arguments[0], environment, "--port", 0, *arguments[1:]) as server:
            body = {"model": "v3", "input": "the cat sat"}
            bare, *by_task = (
                httpx.post(f"{server.url}/v1/embeddings", json={**body, **task}, timeout=60)
                for task in ({}, *({"task": task} for task in TASKS))
            )
            unknown = httpx.post(f"{server.url}/v1/embeddings", json={**body, "task": "x"}, timeout=60)
            assert server.end(signal.SIGTERM) == 0

        for task, answer in zip((None, *TASKS), (bare, *by_task), strict=True):
            assert np.abs(vector(answer) - plain_vectors(["the cat sat"], task)[0]).max() <= 1e-4
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "task")


def test_a_worker_that_is_killed_is_replaced_and_the_server_stays(
    encoder: Path, environment: dict[str, str]
) -> None:
    with serving(encoder, environment, "--port", 0) as server:
        children = children_of(server.process.pid)
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        body = {"model": "bert", "input": ["the cat"] * 20}
        answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)
        metrics = httpx.get(f"{server.url}/metrics").text
        assert server.end(signal.SIGTERM) == 0

    assert answer.status_code == 200
    assert len(answer.json()["data"]) == 20
    assert 'phasewise_embedding_restarts_total{device="cpu:0"} 1.0' in metrics


def test_what_cannot_be_is_one_line(
    encoder: Path, tiny: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    for flag, value in (("--draft", "lookup"), ("--length-log", "answers.jsonl")):
        assert f"{flag} has no effect where MODEL" in refused(environment, encoder, flag, value)
    assert "--embed-model has no effect" in refused(environment, encoder, "--embed-model", encoder)
    assert "--ranks has no effect" in refused(environment, encoder, "--ranks", 2)
    assert "are there" in refused(environment, encoder, "--threads", N_CORES + 1)
    assert "no embedding model" in refused(environment, tiny, "--embed-model", tiny)
    other = tmp_path / "other.gguf"
    other.write_bytes(tiny.read_bytes())
    assert "no embedding model" in refused(environment, tiny, "--embed-model", other)
    assert "are there" in refused(environment, tiny, "--embed-model", encoder, "--embed-cores", N_CORES)


def test_a_hangup_reads_its_keys_again(encoder: Path, environment: dict[str, str], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    with serving(encoder, environment, "--port", 0, "--api-key-file", keys) as server:

        def status(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.get(f"{server.url}/v1/models", headers=headers).status_code

        assert (status("old"), status("new")) == (200, 401)
        keys.write_text("new\n")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: status("old") == 401, "the old key is still right")
        assert status("new") == 200
        assert server.end(signal.SIGTERM) == 0


def test_an_embedding_model_is_called_as_the_operator_says(
    encoder: Path, environment: dict[str, str]
) -> None:
    with serving(encoder, environment, "--port", 0, "--served-model-name", "mine") as server:
        body = {"model": "mine", "input": "the cat"}
        answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)
        other = httpx.post(f"{server.url}/v1/embeddings", json={**body, "model": "bert"}, timeout=60)
        assert server.end(signal.SIGTERM) == 0
    assert (answer.json()["model"], other.status_code) == ("mine", 404)


def test_what_tune_embed_has_kept_is_what_a_server_uses_alone_and_beside_a_language_model(
    encoder: Path, tiny: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """Devices, cores and depths, by what the server says and by /metrics."""
    if N_CORES < 2:
        pytest.skip("needs two CPUs")
    device = f"exec:{shlex.join(modelled_device(LatencyLine(0.02, 0.05), tmp_path))}"
    own = ("--format", "f32", "--embed-device", device, "--db", tmp_path / "plans.db")
    tuning = (encoder, "--slo", "0.3s", "--tokens", 40, "--instances", 1)
    done = command.run("tune-embed", *tuning, *own, "--json", env=environment)
    assert done.exit_code == 0, done.stderr
    planned = {instance["device"]: instance for instance in json.loads(done.stdout)["plan"]["instances"]}
    accelerated, on_cpu = planned["exec:0"], planned["cpu:0"]
    assert 8 <= accelerated["depth"]["inputs"] <= 11, "0.02 n + 0.05 within 0.27 s"

    said, depths = dict[str, str](), dict[str, dict[str, float]]()
    for way, arguments in {
        "alone": (encoder,),
        "beside": (tiny, "--embed-model", encoder, "--explain"),
    }.items():
        body = {"model": "bert", "input": "a"}
        with serving(arguments[0], environment, *arguments[1:], *own, "--port", 0) as server:
            metrics = httpx.get(f"{server.url}/metrics").text
            asked = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)
        assert asked.status_code == 200
        said[way] = next(line for line in server.lines if line.startswith("embeddings within 0.3 s: "))
        depths[way] = {
            name: float(sample[1])
            for name in planned
            if (sample := re.search(rf'embedding_depth_inputs{{device="{name}"}} (\S+)', metrics))
        }

    assert said["alone"].endswith("(database)")
    for instance in planned.values():
        cores, depth = ",".join(map(str, instance["cores"])), instance["depth"]
        held = f"at most {depth['inputs']} inputs, {depth['tokens']} tokens"
        assert f"{instance['device']} on cores {cores} ({held})" in said["alone"]
    assert f"(at most {accelerated['depth']['inputs']} inputs" in said["beside"]
    for way, of_device in depths.items():
        assert of_device["exec:0"] == accelerated["depth"]["inputs"], way
        assert of_device["cpu:0"] <= on_cpu["depth"]["inputs"]
