"""`phasewise serve` as a process: it starts, answers, and ends well in every way that it can be ended."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import openai
import pytest

from phasewise.workflows.serve.address import address_of
from phasewise.workflows.serve.settings import Listening
from tests.cli import command
from tests.support.machines.kerneldb_server import new_database_url, postgres_socket
from tests.support.process_trees import children_of, command_line
from tests.support.servers.rude_clients import until
from tests.support.servers.served_command import Server, own_places, serving
from tests.support.tiers import first_is_smoke

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return own_places(tmp_path_factory.mktemp("home"))


def refused(model: object, environment: dict[str, str], *arguments: object) -> str:
    """The one line of a server that cannot start."""
    return command.run("serve", model, *arguments, env=environment).refusal


def test_it_answers_and_a_signal_ends_it(roomy: Path, environment: dict[str, str]) -> None:
    with serving(roomy, environment, "--port", 0, "--api-key", "any") as server:
        api = server.api()
        assert [listed.id for listed in api.models.list()] == ["tiny"]
        whole = api.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=8, temperature=0, seed=1
        )
        assert whole.usage is not None
        assert whole.usage.completion_tokens >= 1
        assert api.completions.create(model=str(roomy), prompt="a", max_tokens=2).choices
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        with pytest.raises(openai.BadRequestError, match="but the prompt has 3000000 characters"):
            api.completions.create(model="tiny", prompt="a" * 3_000_000, max_tokens=2)

        assert server.end(signal.SIGTERM) == 0
    assert server.lines[-1] == "stopping"
    said = "\n".join(server.lines)
    assert "KV cache: " in said
    assert "\nprefill: 1 rank on core" in said


def test_while_the_model_is_read_the_port_does_not_answer() -> None:
    """Its address is taken by then, and nobody listens there."""
    with address_of(Listening(port=0), None) as place, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(place.url.rpartition(":")[2])), 60)


@pytest.mark.slow
@pytest.mark.parametrize("form", [("--api-key", "secret-1", "--api-key=secret-2"), ("--api-key=secret-1",)])
def test_keys_are_not_on_the_command_line_that_others_see(
    roomy: Path, environment: dict[str, str], form: tuple[str, ...]
) -> None:
    with serving(roomy, environment, *form, "--port", 0, exec_anew=True) as server:
        shown = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
        assert b"secret" not in shown
        assert b"--port\x000" in shown
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        answer = httpx.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer secret-1"})
        assert answer.status_code == 200
    assert any("PHASEWISE_API_KEY" in line and "secret" not in line for line in server.lines)


def test_over_https_a_tls_key_that_others_can_read_is_said(
    roomy: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    tls = Path(__file__).parents[2] / "data" / "tls"
    key = tmp_path / "key.pem"
    key.write_bytes((tls / "key.pem").read_bytes())
    arguments = ("--port", 0, "--tls-cert", tls / "cert.pem", "--tls-key", key)
    key.chmod(0o604)
    with serving(roomy, environment, *arguments) as server:
        said = f"warning: everybody on this machine can read the TLS key in {key}; chmod 600 it"
        assert said in server.lines
    key.chmod(0o640)
    with serving(roomy, environment, *arguments) as server:
        assert not any("warning" in line for line in server.lines)
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=tls / "cert.pem")
        assert httpx.get(f"{server.url}/ready", verify=trusting).status_code == 200
        assert server.end(signal.SIGTERM) == 0


def test_a_key_from_the_environment_stays_there_and_no_rank_has_it(
    roomy: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    surroundings = environment | {
        "PHASEWISE_API_KEY": "secret-1",
        "PHASEWISE_DB": str(tmp_path / "secret.db"),
    }
    cores = [part for core in sorted(os.sched_getaffinity(0))[:2] for part in ("--cores", str(core))]
    if len(cores) < 4:
        pytest.skip("two ranks need two cores")
    for phase in ("prefill", "decode"):
        command.text_of("db", "set-plan", roomy, "--phase", phase, *cores, env=surroundings)
    with serving(roomy, surroundings, "--port", 0) as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        children = children_of(server.process.pid)
        assert children
        for pid in children:
            assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert not any("secret-1" in line or "warning" in line for line in server.lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_stream_with_an_error(
    roomy: Path, environment: dict[str, str], number: int
) -> None:
    with serving(roomy, environment, "--port", 0) as server:
        stream = server.stream()
        server.process.send_signal(number)
        while not any(line.startswith("stopping: 1 in progress") for line in server.lines):
            next(iter(stream))  # two signals at once would be one
        server.process.send_signal(number)
        with pytest.raises(openai.APIError, match="stopping"):
            list(stream)
        assert server.process.wait(timeout=60) == 0
    assert [line for line in server.lines if line.startswith("stopping")] == server.lines[-1:]


@pytest.mark.slow
@pytest.mark.parametrize("number", first_is_smoke([signal.SIGINT, signal.SIGTERM]))
def test_one_signal_lets_answers_in_progress_end(
    roomy: Path, environment: dict[str, str], number: int
) -> None:
    with serving(roomy, environment, "--port", 0, "--drain", 3600) as server:
        stream = server.api().completions.create(  # type: ignore[call-overload]
            model="tiny", prompt="a", stream=True, max_tokens=3000, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        server.process.send_signal(number)
        reasons = [piece.choices[0].finish_reason for piece in stream]

        assert reasons[-1] == "length"
        assert server.process.wait(timeout=60) == 0
    assert any(line.startswith("stopping") for line in server.lines)


@pytest.mark.slow
def test_a_terminal_that_goes_ends_it_in_order(roomy: Path, environment: dict[str, str]) -> None:
    """Its last lines may go unread, and two hangups cut nothing short."""

    def have_a_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the tests, and all they start, ignore it

    whole = [sys.executable, "-m", "phasewise", "serve", str(roomy), "--kv-budget", "64M", "--port", "0"]
    process = subprocess.Popen(
        whole, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=have_a_terminal
    )
    assert process.stderr is not None
    try:
        url = next(line.split()[-1] for line in process.stderr if line.startswith("listening on"))
        process.stderr.close()
        body = {"model": "tiny", "prompt": "a", "max_tokens": 200, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            said = [next(lines)]
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGHUP)
            said += lines

        assert "data: [DONE]" in said
        assert not any('"error"' in line for line in said)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_under_nohup_it_stays(roomy: Path, environment: dict[str, str]) -> None:
    with serving(roomy, environment, "--port", 0, hangup=False) as server:
        server.process.send_signal(signal.SIGHUP)

        assert httpx.get(f"{server.url}/ready").status_code == 200
        assert server.end(signal.SIGTERM) == 0


def test_answers_that_take_longer_than_the_drain_are_told(roomy: Path, environment: dict[str, str]) -> None:
    with serving(roomy, environment, "--port", 0, "--drain", 0.3) as server:
        stream = server.stream()
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="stopping"):
            list(stream)

        assert server.process.wait(timeout=60) == 0


def test_a_unix_socket_keys_from_a_file_and_a_log_of_lengths(
    roomy: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    path, keys, lengths = tmp_path / "s.sock", tmp_path / "keys", tmp_path / "lengths.jsonl"
    keys.write_text("# of the team\nsesame\n\nother\n")
    keys.chmod(0o600)
    arguments = ("--unix-socket", path, "--api-key-file", keys, "--length-log", lengths)

    with serving(roomy, environment, *arguments) as server:
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://phasewise", timeout=60) as client:
            assert client.get("/ready").status_code == 200
            assert client.get("/v1/models").status_code == 401
            bearer = {"Authorization": "Bearer other"}
            body = {"model": "tiny", "prompt": "a", "max_tokens": 3, "ignore_eos": True}
            assert client.post("/v1/completions", json=body, headers=bearer).status_code == 200
            lengths.rename(tmp_path / "old")
            server.process.send_signal(signal.SIGHUP)
            assert client.post("/v1/completions", json=body, headers=bearer).status_code == 200
            server.wait_until_said("API keys read again: 2, ")
            keys.write_text("sesame\nnew\n")
            server.process.send_signal(signal.SIGHUP)
            until(lambda: client.get("/v1/models", headers=bearer).status_code == 401, "it is still right")
            assert client.get("/v1/models", headers={"Authorization": "Bearer new"}).status_code == 200
            keys.write_text("# none\n")
            server.process.send_signal(signal.SIGHUP)
            server.wait_until_said("stay as they were")
            assert client.get("/v1/models", headers={"Authorization": "Bearer new"}).status_code == 200
        assert server.end(signal.SIGTERM) == 0

    assert not path.exists()
    for log in (tmp_path / "old", lengths):
        line = json.loads(log.read_text())
        assert (line["output_tokens"], line["finish_reason"], line["max_tokens"]) == (3, "length", 3)
    assert any("token ids of every prompt" in line for line in server.lines)


def test_killed_while_it_streams_the_client_sees_an_end_and_the_next_start_is_clean(
    roomy: Path, environment: dict[str, str]
) -> None:
    """It shares no memory by name, so that nothing of it can be left in /dev/shm."""
    with serving(roomy, environment, "--port", 0) as server:
        stream = server.stream()
        assert "/dev/shm/" not in Path(f"/proc/{server.process.pid}/maps").read_text()
        server.end(signal.SIGKILL)
        with pytest.raises((httpx.HTTPError, openai.APIError)):
            list(stream)
        port = server.port

    with serving(roomy, environment, "--port", port) as again:
        assert again.api().completions.create(model="tiny", prompt="a", max_tokens=2).choices
        assert again.end(signal.SIGINT) == 0


def test_many_clients_get_what_each_gets_alone(roomy: Path, environment: dict[str, str]) -> None:
    with serving(roomy, environment, "--port", 0, "--max-sequences", 4, "--format", "f32") as server:
        api = server.api()

        def ask(index: int) -> str:
            got = api.completions.create(
                model="tiny", prompt="abc"[: 1 + index % 3] * (1 + index), max_tokens=30, temperature=0,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            return got.choices[0].text

        alone = [ask(index) for index in range(10)]
        together: dict[int, str] = {}
        threads = [
            threading.Thread(target=lambda index=index: together.update({index: ask(index)}))  # type: ignore[misc]
            for index in range(10)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert [together[index] for index in range(10)] == alone


def test_a_port_in_use_is_one_line(roomy: Path, environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port}" in refused(roomy, environment, "--port", port)


@pytest.mark.slow
def test_what_keeps_it_from_starting_is_one_line(
    roomy: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    assert "no-such-model" in refused("no-such-model", environment, "--port", 0)
    assert "address" in refused(roomy, environment, "--host", "no.such.host.invalid", "--port", 0)
    assert "context" in refused(roomy, environment, "--port", 0, "--context", 1_000_000)
    cert, key = Path(__file__).parents[2] / "data/tls/cert.pem", roomy
    assert "cannot be read" in refused(roomy, environment, "--tls-cert", tmp_path / "none.pem")
    assert "cannot be set up" in refused(roomy, environment, "--tls-cert", cert, "--tls-key", key)
    assert "no socket" in refused(roomy, environment, "--unix-socket", roomy)
    assert "cannot be read" in refused(roomy, environment, "--api-key-file", tmp_path / "none")
    log = tmp_path / "missing" / "lengths.jsonl"
    assert "No such file" in refused(roomy, environment, "--port", 0, "--length-log", log)
    assert "too small" in refused(roomy, environment, "--port", 0, "--kv-budget", 10)


def test_requests_are_logged_and_answers_sampled_as_the_operator_says(
    roomy: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    logged = ("--log-level", "info", "--access-log", tmp_path / "log", "--log-format", "json")
    config = tmp_path / "config.toml"
    config.write_text("[serve]\ntemperature = 0.3\nmin_p = 0.1\n")
    sampled = {**environment, "PHASEWISE_CONFIG": str(config)}
    with serving(roomy, sampled, "--port", 0, *logged, "--cors-origin", "https://chat.example") as server:
        httpx.get(f"{server.url}/health")
        (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert server.end(signal.SIGTERM) == 0
    assert (card["default_sampling"]["temperature"], card["default_sampling"]["min_p"]) == (0.3, 0.1)
    (line,) = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert (line["path"], line["status"]) == ("/v1/models", 200)


@pytest.mark.parametrize(
    "running",
    [
        pytest.param((), id="one engine"),
        pytest.param(("--ranks", 2), id="ranks", marks=pytest.mark.slow),
        pytest.param(("--prompt-pool", "0", "--token-pool", "1"), id="pools", marks=pytest.mark.slow),
    ],
)
def test_every_line_of_a_server_is_json_where_its_log_is(
    roomy: Path, environment: dict[str, str], running: tuple[object, ...]
) -> None:
    """Its start, its warnings, its requests, the words of ranks and instances, and its end."""
    environment = environment | {"PHASEWISE_LOG_LEVEL": "info"}
    arguments = ("--port", 0, "--host", "0.0.0.0", "--log-format", "json", *running)
    with serving(roomy, environment, *arguments) as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        until(lambda: httpx.get(f"{url}/ready").status_code == 200, "it is ready")
        body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        assert server.end(signal.SIGTERM) == 0
    objects = [json.loads(line) for line in server.lines]

    assert all(isinstance(each, dict) and "at" in each for each in objects)
    assert any(each.get("message") == "stopping" for each in objects)
    assert any(each.get("level") == "warning" for each in objects)
    (asked,) = [each for each in objects if each.get("path") == "/v1/completions"]
    assert (asked["model"], asked["address"]) == ("tiny", "127.0.0.1")


def test_the_last_words_of_a_server_that_cannot_start_are_json(
    roomy: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.touch()
    arguments = ("serve", roomy, "--log-format", "json", "--api-key-file", keys)
    _, said = command.start(*arguments, env=environment).communicate()
    *_, last = map(json.loads, said.splitlines())

    assert last["level"] == "error"
    assert f"{keys} has no key" in last["message"]


def _instances_of(server: Server) -> list[int]:
    """The processes of its instances, by what they run."""
    return [child for child in children_of(server.process.pid) if "instance_process" in command_line(child)]


@pytest.mark.slow
@pytest.mark.parametrize("running", [(), ("--prompt-pool", "0", "--token-pool", "1")], ids=["one", "pools"])
def test_a_database_server_that_is_down_costs_one_line_and_a_count(
    roomy: Path, environment: dict[str, str], tmp_path: Path, running: tuple[str, ...]
) -> None:
    """At the first start without it, and, in pools, for each instance that is killed meanwhile."""
    body = {"model": "tiny", "prompt": "hello" * 20, "max_tokens": 6, "temperature": 0, "ignore_eos": True}

    def of_database(server: Server) -> list[str]:
        return [line for line in server.lines if "database" in line.replace(str(tmp_path), "")]

    def answer(server: Server) -> str:
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, "it is ready", 120)
        answered = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answered.status_code == 200, answered.text
        return str(answered.json()["choices"][0]["text"])

    with postgres_socket() as socket_folder:
        url = new_database_url(socket_folder)
        surroundings = environment | {"PHASEWISE_DB": url, "XDG_CACHE_HOME": str(tmp_path)}
        with serving(roomy, surroundings, "--port", 0, *running) as server:
            wanted = answer(server)
            assert not of_database(server)
    with serving(roomy, surroundings, "--port", 0, *running) as server:
        assert answer(server) == wanted
        for instance in _instances_of(server):
            os.kill(instance, signal.SIGKILL)
            until(lambda pid=instance: pid not in _instances_of(server), "it has ended")
            until(lambda: len(_instances_of(server)) == 2, "a new one runs", 120)
            assert answer(server) == wanted
        counted = re.search(
            r"^phasewise_starts_without_database_total (\d+)", httpx.get(f"{server.url}/metrics").text, re.M
        )
        assert server.end(signal.SIGTERM) == 0
    told = of_database(server)
    assert len(told) >= 1
    assert len(told) == len(set(told)) or running, "one line for each process"
    assert not [line for line in server.lines if "Traceback" in line]
    assert counted is not None
    assert int(counted[1]) >= 1


@pytest.mark.slow
def test_an_open_address_without_keys_is_warned_of(roomy: Path, environment: dict[str, str]) -> None:
    for host, keys, n_warnings in (("0.0.0.0", {}, 1), ("0.0.0.0", {"PHASEWISE_API_KEY": "k"}, 0)):
        with serving(roomy, environment | keys, "--port", 0, "--host", host) as server:
            warnings = [
                line for line in server.lines if line.startswith("warning: every machine that reaches")
            ]
            assert len(warnings) == n_warnings


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ("--context", 90_000, "--kv-budget", "4M"),
            r"needed for the context; --kv-budget \d+M would do; --context",
        ),
        (("--kv-budget", "900000G"), r"does not fit: this machine has \d+ MiB of free memory"),
        (("--kv-budget", "64K"), r"256 are needed for the context; --kv-budget \d+M would do"),
    ],
)
def test_sizes_that_cannot_be_kept_are_errors_that_say_what_fits(
    roomy: Path, environment: dict[str, str], options: tuple[object, ...], says: str
) -> None:
    assert re.search(says, refused(roomy, environment, "--port", 0, *options))


def test_requests_call_the_model_as_the_operator_says(
    roomy: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """Also beside another: engines, answers and metrics go by the names."""
    other = shutil.copy(roomy, tmp_path / "other.gguf")
    arguments = ("--served-model-name", "mine", "--served-model-name", "m", "--also", other)
    with serving(roomy, environment, "--port", 0, *arguments) as server:
        asked = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
        answers = [
            httpx.post(f"{server.url}/v1/completions", json={**asked, "model": name}, timeout=60)
            for name in ("mine", "m", "other")
        ]
        metrics = httpx.get(f"{server.url}/metrics").text
        listed = [listed_model["id"] for listed_model in httpx.get(f"{server.url}/v1/models").json()["data"]]
        assert server.end(signal.SIGTERM) == 0
    assert [answer.json()["model"] for answer in answers] == ["mine", "mine", "other"]
    assert listed == ["mine", "other"]
    assert 'phasewise_generated_tokens_total{model="mine"} 4.0' in metrics
    assert 'phasewise_generated_tokens_total{model="other"} 2.0' in metrics


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_ranks_by_hand_answer_the_same(roomy: Path, environment: dict[str, str]) -> None:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    texts = []
    for arguments in ((), ("--ranks", 2)):
        with serving(roomy, environment, "--port", 0, *arguments) as server:
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
            texts.append(answer["choices"][0]["text"])
            assert server.end(signal.SIGTERM) == 0
            assert any("2 ranks on cores" in line for line in server.lines) == bool(arguments)
    assert texts[0] == texts[1]
