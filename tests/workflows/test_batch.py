"""Offline batches: every line once, in its order, whatever ends a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.workflows.batch.run import answer_batch, read_requests
from phasewise.workflows.errors import UsageError, WorkflowError
from tests.support.models.tiny_models import write_tiny_gguf
from tests.support.tiers import examples


class Busy:
    """A server that answers with what it is sent, after refusing some requests as busy."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.refuses: set[int] = set()
        """Requests, by their `n`, that get 429 once."""
        self.slow: dict[int, float] = {}
        """Seconds by `n`."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                n = body["n"]
                time.sleep(outer.slow.get(n, 0))
                status = 400 if n < 0 else 429 if n in outer.refuses else 200
                outer.refuses.discard(n)
                if status != 429:
                    outer.seen.append(n)
                said = json.dumps({"path": self.path, "n": n}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(said)))
                self.send_header("X-Request-Id", f"req_{n}")
                self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def busy() -> Iterator[Busy]:
    busy_server = Busy()
    yield busy_server
    busy_server.server.shutdown()
    busy_server.server.server_close()


def line(custom_id: str, n: int, url: str = "/v1/completions") -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"n": n}})


def answers_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(answer_line) for answer_line in path.read_text().splitlines()]


def test_answers_are_in_the_order_of_their_lines(busy: Busy, tmp_path: Path) -> None:
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text("\n".join([line(f"id {n}", n) for n in range(100)]))
    busy.slow, busy.refuses = {0: 0.3, 50: 0.2}, {3, 77}

    result = answer_batch(requests, answers, busy.url, concurrency=8)

    assert (result.n_answered, result.n_refused, result.n_earlier) == (100, 0, 0)
    got = answers_in(answers)
    assert [answer["custom_id"] for answer in got] == [f"id {n}" for n in range(100)]
    assert [answer["response"]["body"]["n"] for answer in got] == list(range(100))
    assert got[5]["response"] == {
        "status_code": 200,
        "request_id": "req_5",
        "body": {"path": "/v1/completions", "n": 5},
    }
    assert sorted(busy.seen) == list(range(100))


def test_an_interrupt_waits_for_no_answer(busy: Busy, tmp_path: Path) -> None:
    """A request that is on its way is asked again by the next run."""
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text("\n".join([line("quick", 0), line("slow", 1)]))
    busy.slow = {0: 0.3, 1: 600}

    def interrupted(_result: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_batch(requests, answers, busy.url, concurrency=2, progress=interrupted)

    senders = [thread for thread in threading.enumerate() if thread.name.startswith("phasewise-batch")]
    for thread in senders:
        thread.join(60)
    assert not any(thread.is_alive() for thread in senders)
    assert [answer["custom_id"] for answer in answers_in(answers)] == ["quick"]


@pytest.mark.parametrize("n_there", [0, 1, 7, 20])
def test_a_batch_goes_on_behind_what_is_answered(busy: Busy, tmp_path: Path, n_there: int) -> None:
    """Half a line at the end of the answers is what a kill left: it is asked again."""
    requests, answers, whole = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "whole.jsonl"))
    requests.write_text("\n".join([line(f"id {n}", n) for n in range(20)]))
    answer_batch(requests, whole, busy.url)
    lines = whole.read_text().splitlines(keepends=True)
    answers.write_text("".join(lines[:n_there]) + "".join(lines[n_there : n_there + 1])[:10])
    busy.seen.clear()

    result = answer_batch(requests, answers, busy.url)

    assert (result.n_earlier, result.n_answered) == (n_there, 20 - n_there)
    assert sorted(busy.seen) == list(range(n_there, 20))
    assert answers.read_text() == whole.read_text()


def test_what_cannot_be_sent_has_a_line_too(busy: Busy, tmp_path: Path) -> None:
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        line("a", 1),
        "{",
        "[]",
        '{"custom_id": ""}',
        line("a", 2),
        line("b", 3, "/v1/files"),
        '{"custom_id": "c", "url": "/v1/completions", "method": "GET", "body": {}}',
        '{"custom_id": "d", "url": "/v1/completions", "body": []}',
        '{"custom_id": "e", "url": "/v1/completions", "body": {"stream": true}}',
        "",
        line("f", -1),
    ]
    requests.write_text("\n".join(lines))

    result = answer_batch(requests, answers, busy.url)

    assert (result.n_answered, result.n_refused) == (1, 9)
    got = answers_in(answers)
    assert [answer["custom_id"] for answer in got] == ["a", None, None, None, "a", "b", "c", "d", "e", "f"]
    assert got[-1]["response"]["status_code"] == 400
    told = [answer["error"]["message"] for answer in got if answer["error"]]
    assert [text.split(":")[0] for text in told] == [f"line {n}" for n in range(2, 10)]
    assert all("\n" not in text for text in told)


def test_other_files_are_left_alone(busy: Busy, tmp_path: Path) -> None:
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text(line("a", 1))
    for content in ("not JSON\n", '{"custom_id": "z"}\n', '{"custom_id": "a"}\n{"custom_id": "b"}\n'):
        answers.write_text(content)
        with pytest.raises(WorkflowError, match="no answer to these requests"):
            answer_batch(requests, answers, busy.url)
        assert answers.read_text() == content
    answers.unlink()
    with pytest.raises(WorkflowError, match="cannot be read"):
        answer_batch(tmp_path / "none", answers, busy.url)
    with pytest.raises(WorkflowError, match="cannot be written"):
        answer_batch(requests, tmp_path / "none" / "out", busy.url)
    with pytest.raises(UsageError, match="no address"):
        answer_batch(requests, answers, "localhost:8000")
    with pytest.raises(WorkflowError, match="cannot be reached"):
        answer_batch(requests, answers, "http://127.0.0.1:1")


@examples(200)
@given(st.lists(st.binary(max_size=60), max_size=12))
def test_any_bytes_are_lines_with_a_fault_each(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("bytes") / "in"
    data = b"\n".join(parts)
    path.write_bytes(data)
    read = list(read_requests(path))
    assert len(read) == sum(bool(piece.strip()) for piece in data.split(b"\n"))
    assert all(request.fault for request in read)


@pytest.mark.slow
@pytest.mark.smoke
def test_what_is_said_of_other_servers_does_not_keep_the_batch_s_own_from_answering(tmp_path: Path) -> None:
    """Keys of the configuration file, and variables by which `serve` serves something else."""
    model, keys, config = write_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "keys", tmp_path / "config.toml"
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": "m", "prompt": "a", "max_tokens": 2}
    requests.write_text(json.dumps({"custom_id": "a", "url": "/v1/completions", "body": body}))
    keys.write_text("sesame\n")
    keys.chmod(0o600)
    ways = 'also = ["nothing.gguf"]\ncluster = "auto"\nmodels = "nowhere"\nmixed_pool = ["900"]\n'
    config.write_text(f'[serve]\napi_key_file = "{keys}"\n{ways}embed_model = "nothing"\n')
    others = {"PHASEWISE_CLUSTER": "auto", "PHASEWISE_MODELS": str(tmp_path), "PHASEWISE_ALSO": "nobody"}
    environment = {"PHASEWISE_CONFIG": str(config), "XDG_CACHE_HOME": str(tmp_path / "cache"), **others}

    command = [sys.executable, "-m", "phasewise", "batch", str(requests), str(model), "-o", str(answers)]
    subprocess.run(command, env=os.environ | environment, check=True, timeout=120)

    assert [answer["response"]["status_code"] for answer in answers_in(answers)] == [200]


@pytest.mark.slow
def test_a_killed_batch_answers_every_line_once(tmp_path: Path) -> None:
    """The command itself, with a model: killed at any moment, it leaves no server and goes on."""
    model = write_tiny_gguf(tmp_path / "m.gguf")
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = [{"model": "m", "prompt": f"number {n}", "max_tokens": 24, "temperature": 0} for n in range(300)]
    requests.write_text(
        "\n".join(
            json.dumps({"custom_id": f"{n}", "url": "/v1/completions", "body": body})
            for n, body in enumerate(bodies)
        )
    )
    command = [sys.executable, "-m", "phasewise", "batch", str(requests), str(model), "-o", str(answers)]
    environment = os.environ | {"PHASEWISE_CONFIG": "/dev/null", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    n_runs = 0
    while n_runs < 10:
        n_runs += 1
        run = subprocess.Popen([*command, "--concurrency", "4"], env=environment, stderr=subprocess.PIPE)
        before = answers.read_text().count("\n") if answers.exists() else 0
        while run.poll() is None:
            n_there = answers.read_text().count("\n") if answers.exists() else 0
            if n_there > before + 10 * n_runs:
                run.send_signal(signal.SIGKILL)
                break
            time.sleep(0.01)
        assert run.wait() in (0, -signal.SIGKILL), run.stderr
        if run.returncode == 0:
            break
    assert run.returncode == 0 or subprocess.run(command, env=environment, check=True).returncode == 0
    got = answers_in(answers)
    assert [answer["custom_id"] for answer in got] == [str(n) for n in range(300)]
    assert {answer["response"]["status_code"] for answer in got} == {200}
