"""`/v1/files` and `/v1/batches` through OpenAI's own client, on a server whose model counts."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.requests import Request

from phasewise.serving.batches import lines as lines_of_batches
from phasewise.serving.batches.lines import read_line
from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.routes.batch_runner import _read_pieces
from phasewise.serving.http.routes.batches import read_form
from tests.support.servers.fake_server import FakeServer, fake_server
from tests.support.servers.rude_clients import ENOUGH_S, until
from tests.support.tiers import first_is_smoke

LIMITS = HttpLimits(api_keys=("one", "two"))
ENDPOINT: Any = "/v1/completions"


def client_of(server: FakeServer, key: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@contextlib.contextmanager
def serving(folder: Path, n_bytes: int = 1 << 20, **settings: Any) -> Iterator[FakeServer]:
    with fake_server(LIMITS, batch_dir=folder, batch_bytes=n_bytes, **settings) as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    with serving(tmp_path / "batches") as server:
        yield server


def line(custom_id: str, *, url: str = ENDPOINT, **body: Any) -> bytes:
    body = {"model": "fake", "prompt": f"say {custom_id}", "max_tokens": 3, "temperature": 0, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode() + b"\n"


def begin(client: openai.OpenAI, lines: bytes, window: Any = "24h", **fields: Any) -> Any:
    file = client.files.create(file=("in.jsonl", io.BytesIO(lines)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window=window, **fields)


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    over = ("completed", "failed", "expired", "cancelled")
    until(lambda: client.batches.retrieve(batch_id).status in over, "the batch does not end")
    return client.batches.retrieve(batch_id)


def slow_down(server: FakeServer, step_s: float) -> None:
    server.ranks.before_step = lambda: time.sleep(step_s)


def read(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(record) for record in client.files.content(file_id).read().splitlines()]


def test_every_line_is_answered_in_order_and_faults_go_to_the_error_file(server: FakeServer) -> None:
    client = client_of(server)
    good = [line(f"n{index}") for index in range(40)]
    bad = [
        b"not json\n",
        line("n0"),
        line("other", url="/v1/embeddings"),
        line("streamed", stream=True),
        line("wrong", max_tokens=-1),
    ]

    batch = begin(client, b"".join([*good, b"\n", *bad]), metadata={"why": "test"})
    assert (batch.status, batch.metadata) == ("validating", {"why": "test"})
    batch = ended(client, batch.id)

    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (45, 40, 5)
    answers, faults = read(client, batch.output_file_id), read(client, batch.error_file_id)
    assert [record["custom_id"] for record in answers] == [f"n{index}" for index in range(40)]
    for answer in answers:
        alone = client.completions.create(
            model="fake", prompt=f"say {answer['custom_id']}", max_tokens=3, temperature=0
        )
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["body"]["choices"][0]["text"] == alone.choices[0].text
    assert [fault["custom_id"] for fault in faults] == [None, "n0", "other", "streamed", "wrong"]
    assert [fault["error"]["message"].split(":")[0] for fault in faults[:4]] == [
        "line 42",
        "line 43",
        "line 44",
        "line 45",
    ]
    assert faults[4]["response"]["status_code"] == 400
    server.wait_until_idle()
    assert server.client.n_answers == 0


def test_lists_have_pages_and_files_go(server: FakeServer) -> None:
    client = client_of(server)
    batches = [begin(client, line(f"a{index}")).id for index in range(5)]
    for batch_id in batches:
        ended(client, batch_id)

    assert [batch.id for batch in client.batches.list(limit=2)] == batches[::-1], "page by page"
    page = client.batches.list(limit=2, after=batches[3])
    assert ([batch.id for batch in page.data], page.has_more) == (batches[2:0:-1], True)
    files = client.files.list(purpose="batch").data
    assert len(files) == 5
    assert len(client.files.list().data) == 10
    assert client.files.delete(files[0].id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(files[0].id)
    for bad in ({"limit": 0}, {"after": "nothing"}):
        with pytest.raises(openai.APIStatusError):
            client.batches.list(**bad)  # type: ignore[arg-type]


def test_a_key_sees_nothing_of_another(server: FakeServer) -> None:
    owner, stranger = client_of(server), client_of(server, "two")
    batch = begin(owner, line("a"))

    assert (stranger.batches.list().data, stranger.files.list().data) == ([], [])
    for refused in (
        lambda: stranger.batches.retrieve(batch.id),
        lambda: stranger.batches.cancel(batch.id),
        lambda: stranger.files.content(batch.input_file_id),
        lambda: stranger.files.delete(batch.input_file_id),
        lambda: stranger.batches.create(
            input_file_id=batch.input_file_id, endpoint=ENDPOINT, completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            refused()
    assert httpx.get(f"{server.url}/v1/files").status_code == 401
    assert ended(owner, batch.id).status == "completed"


def test_a_batch_is_cancelled_and_what_was_not_answered_says_so(server: FakeServer) -> None:
    client = client_of(server)
    go_on = threading.Event()
    server.ranks.before_step = lambda: go_on.wait(ENOUGH_S)
    batch = begin(client, b"".join(line(f"n{index}", max_tokens=100) for index in range(60)))
    with pytest.raises(openai.ConflictError, match="cancel the batch first"):
        client.files.delete(batch.input_file_id)

    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    go_on.set()
    batch = ended(client, batch.id)

    assert batch.status == "cancelled"
    answers, faults = read(client, batch.output_file_id), read(client, batch.error_file_id)
    assert len(answers) + len(faults) == 60
    assert {fault["error"]["code"] for fault in faults} == {"batch_cancelled"}
    server.wait_until_idle()
    assert client.batches.cancel(batch.id).status == "cancelled"


def read_slowly(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Lines are read once the second event is set; the first tells that reading has begun."""
    begun, may_go = threading.Event(), threading.Event()

    def read(*of_line: Any) -> Any:
        begun.set()
        assert may_go.wait(60)
        return read_line(*of_line)

    monkeypatch.setattr(lines_of_batches, "read_line", read)
    return begun, may_go


def test_a_batch_that_is_cancelled_while_it_is_read_is_cancelled(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go = read_slowly(monkeypatch)
    client = client_of(server)
    batch = begin(client, line("a") + line("b"))
    assert begun.wait(60)
    assert client.batches.cancel(batch.id).status == "cancelling"
    may_go.set()
    batch = ended(client, batch.id)

    assert (batch.status, batch.request_counts.total) == ("cancelled", 2)
    faults = read(client, batch.error_file_id)
    assert [(fault["custom_id"], fault["error"]["code"]) for fault in faults] == [
        ("a", "batch_cancelled"),
        ("b", "batch_cancelled"),
    ]


def test_files_that_are_read_for_long_hold_up_neither_requests_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than the event loop has threads. Reading goes on only once the server has ended."""
    begun, may_go = read_slowly(monkeypatch)
    try:
        with serving(tmp_path / "b") as server:
            client = client_of(server)
            batches = [begin(client, line("a") * 3) for _ in range(40)]
            assert begun.wait(60)
            assert {client.batches.cancel(batch.id).status for batch in batches[1::2]} == {"cancelling"}
            assert len(client.batches.list(limit=100).data) == 40
            said = client.completions.create(model="fake", prompt="hello", max_tokens=2)
            assert said.choices[0].finish_reason == "length"
            server.server.end()
            server.server.end()  # a second signal
            until(lambda: server.server.has_ended, "it waits for what is read")
            may_go.set()
    finally:
        may_go.set()


def test_a_line_longer_than_a_body_is_refused_unparsed(tmp_path: Path) -> None:
    limits = HttpLimits(api_keys=("one",), max_body_bytes=2000)
    long = b'{"custom_id": "long", "body": {"prompt": [' + b"[]," * 2000 + b"[]]}}\n"
    deep = b'{"custom_id": "deep", "body": {"prompt": ' + b"[" * 300 + b"]" * 300 + b"}}\n"
    with fake_server(limits, batch_dir=tmp_path, batch_bytes=1 << 20) as server:
        client = client_of(server)
        batch = ended(client, begin(client, line("a") + long + deep + line("b")).id)

        assert [answer["custom_id"] for answer in read(client, batch.output_file_id)] == ["a", "b"]
        faults = [fault["error"]["message"] for fault in read(client, batch.error_file_id)]
    assert faults[0] == "line 2: it is longer than 2000 bytes"
    assert faults[1].startswith("line 3: it is not JSON: it is nested deeper")


@pytest.mark.parametrize(
    "content",
    [
        line("a", prompt="b" * 1500) * 40,
        (b"[" + b"0," * 750 + b"\n") * 40,
        (b" " * 1500 + b"0\n") * 40,
        (b"0" * 2500 + b"\n") * 40,
    ],
    ids=["requests", "no JSON", "spaces", "too long"],
)
def test_lines_are_read_few_bytes_at_a_time_whatever_they_are(tmp_path: Path, content: bytes) -> None:
    """A batch ends, and the thread rests, between two pieces of a file: no piece may be long."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    pieces = [len(some) for some in _read_pieces(path, 2000, ENDPOINT)]

    assert sum(pieces) == 40
    assert max(pieces) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("lines", first_is_smoke([b"\n" * 300_000, b" \n" * 300_000, b"[]\n" * 60_000]))
def test_a_file_of_too_many_lines_fails_empty_ones_or_not(tmp_path: Path, lines: bytes) -> None:
    with serving(tmp_path / "b") as server:
        client = client_of(server)
        batch = ended(client, begin(client, lines).id)

    assert (batch.status, batch.errors.data[0].code) == ("failed", "invalid_file")


def test_a_batch_has_bounded_metadata_and_its_record_is_deleted(server: FakeServer) -> None:
    client = client_of(server)
    largest = {f"{number:064}": "\N{PILE OF POO}" * 512 for number in range(16)}
    batch = begin(client, line("a"), metadata=largest)
    assert batch.metadata == largest
    for metadata in ({"k" * 65: "v"}, {"k": "v" * 513}, {str(number): "" for number in range(17)}):
        with pytest.raises(openai.BadRequestError, match="metadata"):
            begin(client, line("a"), metadata=metadata)
    headers = {"Authorization": "Bearer one"}
    ended(client, batch.id)

    deleted = httpx.delete(f"{server.url}/v1/batches/{batch.id}", headers=headers)

    assert deleted.json() == {"id": batch.id, "object": "batch", "deleted": True}
    assert client.batches.list().data == []
    assert httpx.delete(f"{server.url}/v1/batches/{batch.id}", headers=headers).status_code == 404
    slow_down(server, 0.02)
    batch = begin(client, line("b", max_tokens=400))
    refused = httpx.delete(f"{server.url}/v1/batches/{batch.id}", headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "batch_not_over")
    client.batches.cancel(batch.id)
    ended(client, batch.id)


def test_records_of_batches_count_against_the_bound(tmp_path: Path) -> None:
    """Each with all of its metadata, until there is no room; a list has a page of them."""
    metadata = {f"{number:064}": "v" * 512 for number in range(16)}
    with serving(tmp_path / "b", 100_000) as server:
        client = client_of(server)
        file = client.files.create(file=("in.jsonl", line("a")), purpose="batch")
        given: Any = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h"}

        def fill() -> None:
            for _ in range(12):
                client.batches.create(**given, metadata=metadata)

        with pytest.raises(openai.InternalServerError, match="raise --batch-bytes") as refusal:
            fill()
        assert refusal.value.status_code == 507
        assert len(client.batches.list(limit=100).data) < 12
        with pytest.raises(openai.BadRequestError, match="limit must be a number from 1 to 100"):
            client.batches.list(limit=101)


def test_a_batch_expires(server: FakeServer) -> None:
    client = client_of(server)
    slow_down(server, 0.05)
    batch = ended(client, begin(client, line("slow", max_tokens=400), window="1s").id)

    assert (batch.status, batch.output_file_id) == ("expired", None)
    (fault,) = read(client, batch.error_file_id)
    assert fault["error"]["code"] == "batch_expired"


def test_what_cannot_be_a_batch_is_refused(server: FakeServer) -> None:
    client = client_of(server)
    file = client.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
    for fields, named in (
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"input_file_id": "file-0"}, "file-0"),
    ):
        given: Any = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h", **fields}
        with pytest.raises(openai.APIStatusError, match=named):
            client.batches.create(**given)
    with pytest.raises(openai.BadRequestError, match="purpose must be batch"):
        client.files.create(file=("in.jsonl", b"{}\n"), purpose="fine-tune")
    empty = begin(client, b"\n\n")
    batch = ended(client, empty.id)
    assert (batch.status, batch.errors.data[0].message) == ("failed", "the file has no line")


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Content-Type": "application/json"}, b"{}", 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, b"nothing", 400),
        ({"Content-Type": "multipart/form-data; boundary=x"}, b"y" * 20_000, 400),
        ({"Content-Type": "multipart/form-data; boundary=x", "Origin": "http://a.example"}, b"", 403),
        (
            {"Content-Type": "multipart/form-data; boundary=x"},
            b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n',
            400,
        ),
    ],
)
def test_a_body_that_is_no_form_is_refused(
    server: FakeServer, headers: dict[str, str], body: bytes, status: int
) -> None:
    headers = {"Authorization": "Bearer one", **headers}
    assert httpx.post(f"{server.url}/v1/files", headers=headers, content=body).status_code == status
    assert client_of(server).files.list().data == []


def test_a_full_store_is_told_and_leaves_no_file(tmp_path: Path) -> None:
    with serving(tmp_path / "b", 10_000) as server:
        client = client_of(server)
        with pytest.raises(openai.InternalServerError, match="raise --batch-bytes") as refusal:
            client.files.create(file=("in.jsonl", b"x" * 20_000), purpose="batch")
        assert refusal.value.status_code == 507
        assert list((tmp_path / "b").glob("file-*")) == []
        client.files.create(file=("in.jsonl", b"x" * 5_000), purpose="batch")


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    with serving(tmp_path / "b") as first, serving(tmp_path / "b") as second:
        client_of(first).files.list()
        with pytest.raises(openai.InternalServerError, match="--batch-dir"):
            client_of(second).files.list()
    with serving(tmp_path / "b", 0) as server, pytest.raises(openai.InternalServerError, match="no batches"):
        client_of(server).files.list()


@pytest.mark.slow
def test_a_batch_goes_on_after_ten_restarts_and_every_line_is_answered_once(tmp_path: Path) -> None:
    lines = b"".join(line(f"n{index}", max_tokens=20) for index in range(200))
    batch_id, n_done = "", [0]
    for restart in range(11):
        with serving(tmp_path / "b") as server:
            client = client_of(server)
            if not restart:
                batch_id = begin(client, lines).id
            slow_down(server, 0.002)
            while restart < 10 and n_done[-1] < 15 * (restart + 1):
                counts = client.batches.retrieve(batch_id).request_counts
                n_done.append(counts.completed + counts.failed)
                time.sleep(0.01)
            if restart == 10:
                batch = ended(client, batch_id)
                answers = read(client, batch.output_file_id)
    assert n_done == sorted(n_done), "no answer is lost"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (200, 0)
    assert [answer["custom_id"] for answer in answers] == [f"n{index}" for index in range(200)]


def test_others_get_their_answers_while_a_batch_fills_the_server(server: FakeServer) -> None:
    """A batch takes no place of theirs, in no limit."""
    client = client_of(server)
    has_come, is_seen = threading.Event(), threading.Event()

    def step() -> None:
        n_steps = len(server.ranks.batches)
        assert n_steps < 3 or has_come.wait(ENOUGH_S)
        assert n_steps < 50 or is_seen.wait(ENOUGH_S), "the batch, of 1500 steps, has not ended by then"

    server.ranks.before_step = step
    batch = begin(client, b"".join(line(f"n{index}", max_tokens=200) for index in range(30)))
    until(lambda: server.engine.scheduler.n_in_shadow > 0, "the batch does not begin")

    with ThreadPoolExecutor() as others:
        asked = others.submit(client.completions.create, model="fake", prompt="hello", max_tokens=5)
        until(lambda: server.client.n_live == 1, "the other's request does not come")
        has_come.set()
        said = asked.result()

    assert said.choices[0].finish_reason == "length"
    assert client.batches.retrieve(batch.id).status == "in_progress", "it is done before the batch"
    assert server.client.n_live == 0
    text = httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer one"}).text
    assert "phasewise_ttft_seconds_count 1.0" in text
    client.batches.cancel(batch.id)
    is_seen.set()
    ended(client, batch.id)


def test_the_bytes_of_a_file_are_written_beside_the_event_loop() -> None:
    """The loop has others waiting while a disk takes its time."""
    body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nabc\r\n--b--\r\n'
    pieces: list[dict[str, Any]] = [
        {"type": "http.request", "body": body[start : start + 5], "more_body": True}
        for start in range(0, len(body), 5)
    ]
    pieces.append({"type": "http.request"})
    scope = {"type": "http", "headers": [(b"content-type", b"multipart/form-data; boundary=b")]}
    writers: set[int] = set()
    written = b""

    async def receive() -> dict[str, Any]:
        return pieces.pop(0)

    def write(piece: bytes) -> None:
        nonlocal written
        written += piece
        writers.add(threading.get_ident())

    form = asyncio.run(read_form(Request(scope, receive), write, len(body)))

    assert (form.filename, written) == ("f", b"abc")
    assert threading.get_ident() not in writers


@pytest.mark.parametrize(
    ("written", "name"),
    [
        (b"filename*=utf-8''caf%C3%A9.jsonl", "caf\xe9.jsonl"),
        (b"filename*=UTF-8'de'%E2%82%AC%20x.jsonl; size=3", "\u20ac x.jsonl"),
        (b"filename=\"plain\"; filename*=utf-8''other", "plain"),
        (b"filename*=iso-8859-1''caf%E9", ""),
        (b"filename*=utf-8''%FF%ZZ", "\ufffd%ZZ"),
        (b"filename*" + b"9" * 5000 + b"=x", ""),
        (b"filename*=utf-8''" + b"a" * 5000, ""),
        (b"filename*", ""),
    ],
)
def test_a_file_is_called_what_its_form_says(server: FakeServer, written: bytes, name: str) -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    file = b'Content-Disposition: form-data; name="file"; ' + written + b"\r\n\r\nabc\r\n--b--\r\n"
    headers = {"Authorization": "Bearer one", "Content-Type": "multipart/form-data; boundary=b"}
    stored = httpx.post(f"{server.url}/v1/files", content=head + file, headers=headers)

    assert (stored.status_code, stored.json()["filename"]) == (200, name)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_file_that_is_deleted_while_it_is_asked_for_is_missing_or_whole(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    client, lines = client_of(server), line("a") * 1000
    file_id = client.files.create(file=("in.jsonl", io.BytesIO(lines)), purpose="batch").id
    opened = os.open

    def deletes(path: Any, *flags: Any, **more: Any) -> int:
        is_asked_for = str(path).endswith(file_id)
        if is_asked_for and not is_open:
            os.unlink(path)
        descriptor = opened(path, *flags, **more)
        if is_asked_for and is_open:
            os.unlink(path)
        return descriptor

    monkeypatch.setattr(os, "open", deletes)
    if is_open:
        assert client.files.content(file_id).read() == lines
    else:
        with pytest.raises(openai.NotFoundError):
            client.files.content(file_id)
