"""`serve --models` over real engines: tokens as alone, a budget that is kept, memory that is given back."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

from tests.support.models.adapters import drawn_pairs, write_peft
from tests.support.models.encoder_models import write_encoder
from tests.support.models.tiny_models import TinyShape, tiny_gguf, tiny_weights, write_tiny_hf
from tests.support.process_trees import children_of, command_line
from tests.support.servers.rude_clients import until
from tests.support.servers.served_command import Server, own_places, serving
from tests.support.tiers import n_examples

NAMES = "abcd"
KV = "4M"
SHAPE = TinyShape(context_length=256)
TIMEOUT_S = 120
NEEDS_TWO_CPUS = pytest.mark.skipif(not {0, 1} <= os.sched_getaffinity(0), reason="needs CPUs 0 and 1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four models of random weights; without a template they need no process of their own for it."""
    place = tmp_path_factory.mktemp("models")
    shape, plain = SHAPE, {"tokenizer.chat_template": None}
    for seed, name in enumerate(NAMES[:3]):
        data = tiny_gguf(shape=shape, seed=seed, metadata=plain).to_bytes()
        (place / f"{name}.gguf").write_bytes(data)
    write_tiny_hf(place / NAMES[3], shape=shape, seed=7)
    (place / "notes.txt").write_text("no model")
    (place / ".hidden.gguf").write_text("no model")
    return place


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return own_places(tmp_path_factory.mktemp("home"))


def asked(server: Server, name: str, prompt: str, n_tokens: int) -> list[Any]:
    """The tokens of an answer, by their numbers."""
    body = {
        "model": name,
        "prompt": prompt,
        "max_tokens": n_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == name
    return [answer.json()["choices"][0]["logprobs"]["token_logprobs"], answer.json()["choices"][0]["text"]]


def metric(server: Server, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=TIMEOUT_S).text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"phasewise_{name} ")))


@pytest.mark.slow
def test_drawn_requests_get_the_tokens_of_their_model_alone(
    folder: Path, environment: dict[str, str]
) -> None:
    requests = [(name, prompt, 6) for name in NAMES for prompt in ("abc", "hello there")]
    alone: dict[tuple[str, str, int], list[Any]] = {}
    size = 0.0
    for name in NAMES:
        path = folder / (name if name == "d" else f"{name}.gguf")
        with serving(path, environment, "--kv-budget", KV, "--served-model-name", name) as server:
            alone |= {request: asked(server, *request) for request in requests if request[0] == name}
    with serving(None, environment, "--models", folder, "--kv-budget", KV) as server:
        for name in NAMES:
            asked(server, name, "abc", 1)
        size = metric(server, "models_bytes") / 4
        assert metric(server, "models_loaded") == 4
    budget = int(2.5 * size)
    memory = ("--kv-budget", KV, "--models-memory", budget)
    with serving(None, environment, "--models", folder, *memory) as server:
        rng = random.Random(5)
        for _ in range(n_examples(50)):
            for request in rng.sample(requests, 2):
                assert asked(server, *request) == alone[request]
            assert 0 < metric(server, "models_bytes") <= budget
            assert metric(server, "models_loaded") <= 2
        assert metric(server, "model_loads_total") - metric(server, "model_unloads_total") <= 2
        assert server.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_what_is_unloaded_gives_its_memory_back(folder: Path, environment: dict[str, str]) -> None:
    """Keys and values are touched when a model is loaded; 20 loads leave less than one of them takes."""
    many = ("--kv-budget", "200M", "--max-sequences", 512, "--keep-alive", "0")
    with serving(None, environment, "--models", folder, *many) as server:

        def resident_mib() -> float:
            lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
            return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1024

        def load_and_leave(name: str) -> None:
            asked(server, name, "abc", 2)
            until(lambda: metric(server, "models_loaded") == 0, "it stays", 60)

        card = httpx.post(f"{server.url}/api/generate", json={"model": "a", "keep_alive": 60}, timeout=60)
        assert card.json()["done_reason"] == "load"
        one_mib = metric(server, "models_bytes") / (1 << 20)
        assert one_mib > 32
        for name in NAMES:
            load_and_leave(name)
        before = resident_mib()
        for _ in range(n_examples(20)):
            load_and_leave("a")
        assert resident_mib() - before < one_mib


def test_names_come_from_files_and_a_folder_that_is_none_is_refused(
    folder: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    from phasewise.serving.http.models.model_shelf import ModelFolder
    from phasewise.serving.model_table import TextRow
    from phasewise.workflows.errors import UsageError
    from phasewise.workflows.serve.model_folder import model_folder
    from phasewise.workflows.serve.opened_models import Opener
    from phasewise.workflows.serve.settings import Residency, ServeSettings

    def folder_of(place: Path) -> ModelFolder[TextRow]:
        return model_folder(Opener(ServeSettings(coming=Residency(place, 1 << 30))))

    served_folder = folder_of(folder)
    assert list(served_folder.files()) == list(NAMES)
    assert served_folder.budget_bytes == 1 << 30
    assert all(file.n_bytes > 1000 for file in served_folder.files().values())
    with pytest.raises(UsageError, match="there is no such folder"):
        folder_of(tmp_path / "none")
    (tmp_path / "twice.gguf").write_bytes(b"x")
    (tmp_path / "twice").mkdir()
    (tmp_path / "twice" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="both called twice"):
        folder_of(tmp_path)


POOLS = ("--prompt-pool", "0", "--token-pool", "1")


@pytest.mark.parametrize("way", [(), pytest.param(POOLS, marks=NEEDS_TWO_CPUS)], ids=["engine", "pools"])
def test_one_server_does_it_all(
    way: tuple[str, ...], folder: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """A folder of text models, adapters, vectors, batches, stored prefixes and receipts, while what computes
    is killed. One that embeds is served once.
    """
    models = tmp_path / "models"
    models.mkdir()
    for name in ("a", "b"):
        (models / f"{name}.gguf").symlink_to(folder / f"{name}.gguf")
    encoder = write_encoder(models / "bert", "bert")
    write_peft(tmp_path / "adapter", drawn_pairs(tiny_weights("llama", SHAPE), "adapter"))
    own = ("--models", models, "--embed-model", encoder, "--batch-dir", tmp_path / "batches")
    own = (*own, "--lora", f"poet={tmp_path / 'adapter'}", "--prefix-cache", tmp_path / "prefixes")
    own = (*own, "--receipts", "--kv-budget", KV, "--no-embed-accelerators", *way)
    with serving(None, environment | {"PHASEWISE_SPLIT_ABOVE": "2"}, *own) as server:
        api = server.api()
        assert [model.id for model in api.models.list()] == ["a", "b", "bert"]
        alone = {name: asked(server, name, "abc", 4)[1] for name in ("a", "b:poet")}
        assert [model.id for model in api.models.list()] == ["a", "a:poet", "b", "b:poet", "bert"]
        with pytest.raises(openai.NotFoundError, match="a:painter"):
            api.completions.create(model="a:painter", prompt="one")
        receipted = api.completions.create(
            model="b:poet", prompt="a", max_tokens=2, temperature=0, extra_body={"receipt": True}
        )
        assert receipted.model == "b:poet"
        assert "receipt" in (receipted.choices[0].model_extra or {})
        for pid in instances_of(server.process.pid):
            os.kill(pid, signal.SIGKILL)
        patient = api.with_options(max_retries=20)  # 429 where a busy host cannot keep the promised time
        assert len(patient.embeddings.create(model="bert", input=["one", "two"]).data) == 2
        with pytest.raises(openai.NotFoundError, match="use /v1/chat/completions"):
            api.embeddings.create(model="a", input="one")
        with pytest.raises(openai.NotFoundError, match="use /v1/embeddings"):
            api.completions.create(model="bert", prompt="one")
        assert answers_of_batch(api, list(alone)) == alone
        assert server.end(signal.SIGTERM) == 0


def instances_of(pid: int) -> list[int]:
    """The child processes of a server that compute: instances of pools, and workers that embed."""
    modules = ("instance_process", "embedding.worker")
    return [child for child in children_of(pid) if any(name in command_line(child) for name in modules)]


def answers_of_batch(api: openai.OpenAI, names: list[str]) -> dict[str, str]:
    body = {"prompt": "abc", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"model": name, **body}}
        for name in names
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = api.files.create(file=("in.jsonl", content), purpose="batch")
    batch = api.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    until(lambda: api.batches.retrieve(batch.id).status == "completed", "the batch does not end")
    output = api.batches.retrieve(batch.id).output_file_id
    assert output is not None
    read = [json.loads(line) for line in api.files.content(output).text.splitlines()]
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in read}


def hostile_entries(place: Path) -> None:
    """Create files that a stranger may put beside a model: none of them can be served."""
    raw = os.fsencode(place)
    for name in (b"caf\xe9.gguf", b"\xff\xfe.gguf"):
        Path(os.fsdecode(raw + b"/" + name)).write_bytes(b"GGUF")
    (place / os.fsdecode(b"dir\xe9")).mkdir()
    (place / os.fsdecode(b"dir\xe9") / "config.json").write_text("{}")
    (place / "cut.gguf").write_bytes(tiny_gguf(shape=TinyShape(context_length=256)).to_bytes()[:5000])
    (place / "empty.gguf").touch()
    (place / "future.gguf").write_bytes(b"GGUF")
    os.utime(place / "future.gguf", (1 << 40, 1 << 40))
    (place / "part-00001-of-00512.gguf").write_bytes(b"GGUF")
    os.mkfifo(place / "pipe.gguf")
    (place / "loop.gguf").symlink_to(place / "loop.gguf")
    (place / "gone.gguf").symlink_to(place / "nowhere")
    (place / "folder.gguf").mkdir()
    (place / ("l" * 250)).mkdir()
    (place / "wrong").mkdir()
    (place / "wrong" / "config.json").write_text('{"model_type": "llama", "hidden_size": 1' + "0" * 400 + "}")
    (place / "piped").mkdir()
    (place / "piped" / "config.json").write_text('{"model_type": "llama"}')
    os.mkfifo(place / "piped" / "model.safetensors")


def test_a_file_that_cannot_be_served_hides_no_other(environment: dict[str, str], tmp_path: Path) -> None:
    """Listings stay as they are, and who names such a file is told what is wrong with it."""
    hostile_entries(tmp_path)
    plain = {"tokenizer.chat_template": None}
    data = tiny_gguf(shape=TinyShape(context_length=256), metadata=plain).to_bytes()
    (tmp_path / "good.gguf").write_bytes(data)
    with serving(None, environment, "--models", tmp_path, "--kv-budget", KV) as server:
        listed = httpx.get(f"{server.url}/v1/models", timeout=TIMEOUT_S)
        names = [card["id"] for card in listed.json()["data"]]
        assert (listed.status_code, "good" in names, "cut" in names) == (200, True, True)
        for path in ("/api/tags", "/api/ps", "/metrics"):
            assert httpx.get(f"{server.url}{path}", timeout=TIMEOUT_S).status_code == 200
        tags = httpx.get(f"{server.url}/api/tags", timeout=TIMEOUT_S).json()["models"]
        (unloaded,) = (model for model in tags if model["name"] == "good")
        assert (unloaded["size"], unloaded["details"]["family"]) == (len(data), "llama")
        assert unloaded["details"]["parameter_size"].endswith("M")
        assert unloaded["details"]["quantization_level"] == "F32"
        for name in names:
            status = 200 if name == "good" else 503
            body = {"model": name, "prompt": "abc", "max_tokens": 2}
            for route in ("/v1/completions", "/api/generate"):
                answer = httpx.post(f"{server.url}{route}", json=body | {"stream": False}, timeout=TIMEOUT_S)
                assert answer.status_code == status, (name, answer.text)
                assert "\n" not in str(answer.json().get("error"))
        assert httpx.get(f"{server.url}/v1/models", timeout=TIMEOUT_S).status_code == 200
        assert any("not UTF-8" in line for line in server.lines)
        assert not any("Traceback" in line for line in server.lines)
        assert server.end(signal.SIGTERM) == 0
