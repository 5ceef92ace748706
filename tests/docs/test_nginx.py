"""deploy/nginx.conf as nginx runs it: sessions stay on their server, and leave it with nothing lost."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.routes.batches import MOST_FILE_BYTES
from tests.support import ROOT
from tests.support.servers.fake_server import FakeServer, fake_server
from tests.support.servers.ports import reserved_port
from tests.support.servers.rude_clients import until

CONF = (ROOT / "deploy" / "nginx.conf").read_text()
AROUND = """user root; daemon off; pid {folder}/pid; error_log {folder}/error.log; worker_processes 1;
events {{ worker_connections 256; }}
http {{ access_log off; {places} include {folder}/phasewise.conf; }}
"""
PLACES = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
BODY = {"model": "fake", "prompt": "a", "max_tokens": 3, "ignore_eos": True}

needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")


@dataclass
class Behind:
    """Servers, and the address of the nginx in front of them."""

    url: str
    servers: list[FakeServer]

    def ask(self, session: str | None = None, client: httpx.Client | None = None) -> int:
        """The server that answers a request."""
        before = [len(server.ranks.batches) for server in self.servers]
        headers = {} if session is None else {"X-Session-Id": session}
        post = httpx.post if client is None else client.post
        answer = post(f"{self.url}/v1/completions", json=BODY, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        (index,) = (
            index for index, server in enumerate(self.servers) if len(server.ranks.batches) > before[index]
        )
        return index


@contextlib.contextmanager
def behind_nginx(
    folder: Path, n_servers: int = 3, limits: HttpLimits | None = None, batch_bytes: int = 0
) -> Iterator[Behind]:
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                fake_server(limits, batch_dir=folder / f"batches {n}", batch_bytes=batch_bytes)
            )
            for n in range(n_servers)
        ]
        ports = [server.url.rpartition(":")[2] for server in servers]
        port = reserved_port()
        conf, n_upstreams = re.subn(
            r"(    server 10\.0\.0\.\d+:8000 (.*)\n)+",
            lambda upstream: "".join(f"server 127.0.0.1:{own} {upstream[2]}\n" for own in ports),
            CONF,
        )
        assert n_upstreams == 2
        assert "listen 80;" in conf
        (folder / "phasewise.conf").write_text(conf.replace("listen 80;", f"listen 127.0.0.1:{port};"))
        places = "".join(f"{name}_temp_path {folder}/{name}; " for name in PLACES)
        (folder / "nginx.conf").write_text(AROUND.format(folder=folder, places=places))
        process = subprocess.Popen(
            ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")], stderr=subprocess.DEVNULL
        )
        stack.callback(process.wait)
        stack.callback(process.terminate)
        url = f"http://127.0.0.1:{port}"

        def listens() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{url}/ready").status_code == 200
            return False

        until(listens, "nginx does not listen")
        yield Behind(url, servers)


@needs_nginx
def test_a_session_stays_on_its_server_and_sessions_are_spread(tmp_path: Path) -> None:
    with behind_nginx(tmp_path) as behind:
        first = {f"session {n}": behind.ask(f"session {n}") for n in range(30)}

        assert set(first.values()) == {0, 1, 2}
        assert {session: behind.ask(session) for session in first} == first


@needs_nginx
def test_a_client_that_names_no_session_gets_one_as_a_cookie(tmp_path: Path) -> None:
    with behind_nginx(tmp_path) as behind:
        for _ in range(10):
            with httpx.Client() as client:
                index = behind.ask(client=client)
                assert len(client.cookies["phasewise_session"]) == 32
                assert [behind.ask(client=client) for _ in range(3)] == [index] * 3
        assert "set-cookie" not in httpx.get(f"{behind.url}/ready", headers={"X-Session-Id": "a"}).headers


@needs_nginx
@pytest.mark.parametrize("is_drained", [True, False], ids=["drained", "gone"])
def test_sessions_of_a_server_that_leaves_go_to_the_others_and_no_other_moves(
    tmp_path: Path, is_drained: bool
) -> None:
    with behind_nginx(tmp_path) as behind:
        sessions = {f"session {n}": behind.ask(f"session {n}") for n in range(20)}
        leaving = behind.servers[1]
        if is_drained:
            leaving.life.drain(30)
        else:
            leaving.server.end(at_once=True)
            until(lambda: leaving.server.has_ended, "it does not end")
        after = {session: behind.ask(session) for session in sessions}

    assert 1 in sessions.values()
    assert 1 not in after.values()
    assert all(after[session] == index for session, index in sessions.items() if index != 1)


@needs_nginx
def test_tokens_come_as_they_are_made(tmp_path: Path) -> None:
    with behind_nginx(tmp_path, 1) as behind:
        (server,) = behind.servers
        seen: list[int] = []
        server.ranks.before_step = lambda: until(lambda: len(server.ranks.batches) <= 3 or bool(seen), "held")
        body = {**BODY, "max_tokens": 20, "stream": True}
        with httpx.stream("POST", f"{behind.url}/v1/completions", json=body, timeout=60) as answer:
            pieces = (line for line in answer.iter_lines() if line.startswith("data: {"))
            seen.extend(len(server.ranks.batches) for _ in pieces)

        assert seen[0] <= 5  # of 20 steps: the rest were not made before the first was read
        assert len(seen) >= 20


@needs_nginx
def test_counts_of_one_server_are_not_given_out_as_those_of_all(tmp_path: Path) -> None:
    with behind_nginx(tmp_path) as behind:
        assert httpx.get(f"{behind.url}/metrics").status_code == 404


def test_it_retries_only_what_has_computed_nothing() -> None:
    """Without nginx, too: what it says to do."""
    retried, of_batches = re.findall(r"proxy_next_upstream (.*);", CONF)

    assert of_batches == "off"
    assert set(retried.split()) == {"error", "http_503", "non_idempotent"}
    assert "proxy_buffering off;" in CONF


@needs_nginx
def test_a_client_finds_its_stored_response(tmp_path: Path) -> None:
    """By its cookie, or by the session that it names."""
    with behind_nginx(tmp_path) as behind:
        for headers in ({}, {"X-Session-Id": "one"}):
            with openai.OpenAI(
                base_url=f"{behind.url}/v1", api_key="any", max_retries=0, default_headers=headers
            ) as client:
                answer = client.responses.create(model="fake", input="a", max_output_tokens=2)
                assert all(client.responses.retrieve(answer.id).id == answer.id for _ in range(4))


@needs_nginx
def test_an_answer_that_has_begun_ends_with_its_connection(tmp_path: Path) -> None:
    """nginx asks nobody else for the rest."""
    with behind_nginx(tmp_path, 2) as behind:
        held = threading.Event()
        for server in behind.servers:
            server.ranks.before_step = lambda own=server: len(own.ranks.batches) < 4 or held.wait(60)  # type: ignore[misc]
        body = {**BODY, "max_tokens": 400, "stream": True}
        pieces: list[str] = []
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("POST", f"{behind.url}/v1/completions", json=body, timeout=60) as answer,
        ):
            for line in answer.iter_lines():
                pieces.append(line)
                if len(pieces) == 1:
                    serving = max(behind.servers, key=lambda server: len(server.ranks.batches))
                    serving.server.end(at_once=True)  # of an answer that cannot end meanwhile
        held.set()
        (other,) = (server for server in behind.servers if server is not serving)

    assert pieces
    assert not any("[DONE]" in piece for piece in pieces)
    assert not other.ranks.batches


KEYS = tuple(f"key of client {n}" for n in range(4))
LINE = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}\n'


def reaches(client: openai.OpenAI, file_id: str) -> bool:
    """False where the server of the client's files is away. NotFoundError where another one answers."""
    try:
        return client.files.content(file_id).read().startswith(LINE)
    except openai.InternalServerError:
        return False


def has_file(url: str, key: str, file_id: str) -> bool:
    answer = httpx.get(f"{url}/v1/files/{file_id}", headers={"x-api-key": key}, timeout=60)
    return answer.status_code == 200


@needs_nginx
@pytest.mark.parametrize("asks_for_keys", [True, False])
def test_files_and_batches_are_found_where_they_lie_and_wait_for_their_server(
    tmp_path: Path, asks_for_keys: bool
) -> None:
    """By every request, in either header of the key; also a file beyond the limit of other bodies."""
    large = LINE + b" " * HttpLimits().max_body_bytes
    limits = HttpLimits(api_keys=KEYS if asks_for_keys else ())
    with behind_nginx(tmp_path, limits=limits, batch_bytes=1 << 30) as behind:
        files: dict[str, str] = {}
        lies_on: dict[str, int] = {}
        clients = {
            key: openai.OpenAI(base_url=f"{behind.url}/v1", api_key=key, max_retries=0) for key in KEYS
        }
        for key, client in clients.items():
            files[key] = client.files.create(file=("line.jsonl", LINE), purpose="batch").id
            for _ in range(4):
                assert reaches(client, files[key])
                assert has_file(behind.url, key, files[key])
            (lies_on[key],) = (
                index for index, server in enumerate(behind.servers) if has_file(server.url, key, files[key])
            )
            batch = client.batches.create(
                input_file_id=files[key], endpoint="/v1/completions", completion_window="1h"
            )
            until(
                lambda client=client, batch=batch: client.batches.retrieve(batch.id).status == "completed",  # type: ignore[misc]
                "a batch does not end",
            )
        assert client.files.create(file=("lines.jsonl", large), purpose="batch").bytes == len(large)
        leaving = behind.servers[lies_on[key]]
        leaving.server.end(at_once=True)
        until(lambda: leaving.server.has_ended, "it does not end")
        away = {key for key, client in clients.items() if not reaches(client, files[key])}
        again = {key for key, client in clients.items() if not reaches(client, files[key])}
        for client in clients.values():
            client.close()

    assert away == again == {each for each in KEYS if lies_on[each] == lies_on[key]}


def test_a_body_is_as_large_as_the_server_takes() -> None:
    limits = HttpLimits()
    (most_mib,) = re.findall(r"client_max_body_size (\d+)m; # --max-body\n", CONF)
    (file_mib,) = re.findall(r"client_max_body_size (\d+)m; # a file of 200 MiB in its form\n", CONF)

    assert int(most_mib) << 20 == limits.max_body_bytes
    assert int(file_mib) << 20 >= MOST_FILE_BYTES + (1 << 16)
