"""`bench serve` against servers that behave, that misbehave, and that are not there."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
import signal
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.cli import command
from tests.support.servers.fake_server import fake_server
from tests.support.servers.scripted_server import (
    Script,
    count_tokens,
    event,
    open_stream,
    prompt_of,
    scripted_server,
    timed_answer,
    whole_answer,
)

invoke = partial(command.run, "bench", "serve")


def bench(url: str, *arguments: str) -> dict[str, Any]:
    """The JSON of one run."""
    fields: dict[str, Any] = json.loads(command.text_of("bench", "serve", url, "-o", "json", *arguments))
    return fields


def unanswered(url: str, *arguments: str) -> dict[str, Any]:
    """The JSON of a run whose every request fails: it is printed, and the exit code and a line say so."""
    done = invoke(url, "-o", "json", *arguments)
    assert done.exit_code == 1
    fields: dict[str, Any] = json.loads(done.stdout)
    assert fields["completed"] == 0
    n_failed = sum(fields["failures"].values())
    assert done.stderr.splitlines()[-1] == (
        f"phasewise: none of {n_failed} requests was answered; the results say why"
    )
    return fields


def raw(*chunks: bytes, holds: bool = False) -> Script:
    """Sends bytes as they are, then closes, or holds the connection."""

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            return await whole_answer(request, body)
        response = await open_stream(request)
        for chunk in chunks:
            await response.write(chunk)
        if holds:
            await asyncio.Event().wait()
        return response

    return script


def refusing(status: int, headers: dict[str, str] | None = None, every: int = 1) -> Script:
    """That status for every `n`th streamed request."""
    n_asked = 0

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal n_asked
        n_asked += bool(body.get("stream"))
        if not body.get("stream") or n_asked % every:
            return await whole_answer(request, body)
        return web.json_response({"error": {"message": "no room"}}, status=status, headers=headers)

    return script


async def cutting(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Closes the connection in the middle of an answer."""
    if not body.get("stream"):
        return await whole_answer(request, body)
    response = await open_stream(request)
    await response.write(event(" word"))
    assert request.transport is not None
    request.transport.abort()
    return response


def test_our_own_server_answers_every_request_in_full() -> None:
    """Completions and chat; the server's own count of tokens is what is summed."""
    with fake_server() as server:
        for endpoint in ("completions", "chat"):
            fields = bench(
                server.url,
                *("--endpoint", endpoint, "--concurrency", "4", "-n", "12", "--ignore-eos"),
                *("--input-len", "40", "--output-len", "8"),
            )
            assert (fields["completed"], fields["failed"], fields["failures"]) == (12, 0, {})
            assert fields["total_output_tokens"] == 12 * 8
            assert fields["total_input_tokens"] > 0
            assert 0 < fields["mean_ttft_ms"] <= fields["mean_e2el_ms"]
            assert fields["max_concurrency"] == 4
        server.wait_until_idle()


def test_prompts_are_token_ids_of_exact_number_and_all_different() -> None:
    with scripted_server() as server:
        fields = bench(server.url, "-n", "20", "--lengths", "uniform:1-300/2-9", "--warmup", "3")

    prompts = [tuple(body["prompt"]) for body in server.streamed]
    assert len(set(prompts)) == len(prompts) == 23
    assert fields["total_input_tokens"] == sum(len(prompt) for prompt in prompts[3:])
    assert all(isinstance(token, int) for prompt in prompts for token in prompt)


@pytest.mark.parametrize("arguments", [["--endpoint", "chat"], []])
def test_where_ids_are_not_taken_texts_have_the_length_by_the_servers_count(arguments: list[str]) -> None:
    with scripted_server(takes_ids=False) as server:
        bench(server.url, "-n", "6", "--input-len", "77", *arguments)

    assert {count_tokens(prompt_of(body)) for body in server.streamed} == {77}


def test_the_same_seed_sends_the_same_load() -> None:
    sent = []
    for seed in ("5", "5", "6"):
        with scripted_server() as server:
            bench(server.url, "-n", "5", "--concurrency", "1", "--seed", seed)
            sent.append([body["prompt"] for body in server.streamed])

    assert sent[0] == sent[1] != sent[2]


@pytest.mark.parametrize("arguments", [[], ["--endpoint", "chat"]])
def test_without_a_seed_each_run_sends_prompts_that_no_other_has_sent(arguments: list[str]) -> None:
    """A second run meets nothing of the first in the server's cache; the seed that gave them is told."""
    told, sent = [], []
    with scripted_server() as server:
        for _ in range(2):
            told.append(bench(server.url, "-n", "5", "--concurrency", "1", *arguments)["prompts"])
            sent.append([str(prompt_of(body)) for body in server.streamed[sum(map(len, sent)) :]])

    assert not {prompt[:40] for prompt in sent[0]} & {prompt[:40] for prompt in sent[1]}
    first, second = (re.search(r" of seed \d+", text) for text in told)
    assert first
    assert second
    assert first[0] != second[0]


def test_what_is_asked_is_in_every_body() -> None:
    with scripted_server(models=("first", "second")) as server:
        bench(
            server.url,
            *("-n", "3", "--ignore-eos", "--temperature", "0.5", "--model", "second"),
            *("--extra-body", '{"cache_prompt": false}'),
        )

    for body in server.streamed:
        assert (body["model"], body["ignore_eos"], body["temperature"]) == ("second", True, 0.5)
        assert body["cache_prompt"] is False
        assert body["stream_options"] == {"include_usage": True}


def answering_together(n_requests: int) -> Script:
    """No answer ends before so many requests have come."""
    all_here, n_here = asyncio.Event(), 0

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal n_here
        if body.get("stream"):
            n_here += 1
            if n_here == n_requests:
                all_here.set()
            await all_here.wait()
        return await whole_answer(request, body)

    return script


def test_an_open_loop_does_not_wait_for_answers_and_a_closed_one_does() -> None:
    with scripted_server(answering_together(10)) as server:
        opened = bench(server.url, "-n", "10", "--rate", "100", "--output-len", "2", "--warmup", "0")
    with scripted_server(timed_answer(0.2, 0.0)) as server:
        gated = bench(server.url, "-n", "6", "--rate", "100", "--output-len", "2", "--concurrency", "2")
        closed = bench(server.url, "-n", "6", "--concurrency", "2", "--output-len", "2")

    assert opened["max_concurrent_requests"] == 10
    assert gated["duration"] >= 3 * 0.2
    assert closed["duration"] >= 3 * 0.2
    assert (opened["arrivals"], closed["arrivals"]) == ("poisson", "closed-loop")


def test_a_trace_is_replayed_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [(0, 11, 3), (40, 13, 4), (80, 17, 5)]
    path.write_text(
        "".join(
            json.dumps({"timestamp": timestamp, "input_length": asked, "output_length": answered}) + "\n"
            for timestamp, asked, answered in rows
        )
    )

    with scripted_server() as server:
        fields = bench(server.url, "--trace", str(path), "--warmup", "0")

    assert [(len(body["prompt"]), body["max_tokens"]) for body in server.streamed] == [
        (11, 3),
        (13, 4),
        (17, 5),
    ]
    assert fields["arrivals"] == "trace"
    assert fields["duration"] >= 0.08
    assert fields["total_output_tokens"] == 3 + 4 + 5


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (raw(b"data: {]\n\n"), "garbage"),
        (raw(b"data: [1, 2]\n\n"), "garbage"),
        (raw(b"data: " + b"[" * 100_000 + b"\n\n"), "garbage"),
        (raw(b"<html>hello</html>"), "garbage"),
        (raw(b"x" * (5 << 20), holds=True), "garbage"),
        (raw(b'data: {"error": {"message": "out of memory"}}\n\n'), "stream_error"),
        (raw(event(" word")), "broken_stream"),
        (raw(), "broken_stream"),
        (cutting, "broken_stream"),
        (raw(holds=True), "timeout"),
        (raw(event(" word"), holds=True), "timeout"),
        (refusing(503), "http_5xx"),
        (refusing(400), "http_4xx"),
    ],
)
def test_every_way_to_fail_is_counted_by_its_kind(
    script: Script, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server can keep the client: what is wrong is seen before its timeout, a silent one is left by it."""
    monkeypatch.setattr("phasewise.loadtest.client.LONGEST_S", 0.5 if kind == "timeout" else 15.0)
    load = ("-n", "3", "--concurrency", "3", "--warmup", "0")
    with scripted_server(script) as server:
        fields = unanswered(server.url, *load)

    assert fields["failures"] == {kind: 3}


@pytest.mark.parametrize(
    "chunks",
    [
        [b": a comment\n\n" + event(" a") + event(" b", "stop")],
        [event(" a").replace(b"\n", b"\r\n"), event(" b", "stop").replace(b"\n", b"\r\n")],
        [bytes([byte]) for byte in event(" a") + event(" b", "stop")],
        [event(" a"), event(" b"), b"data: [DONE]\n\n", b"data: {after the end\n\n"],
        [
            b'event: x\ndata:{"choices": [{"text": " a", "finish_reason": "stop"}]}\n\n',
            b'data: {"usage": 7}\n\n',
        ],
    ],
    ids=["comments", "crlf", "bytes", "after the end", "no space"],
)
def test_every_well_formed_stream_is_read(chunks: list[bytes]) -> None:
    with scripted_server(raw(*chunks)) as server:
        fields = bench(server.url, "-n", "2", "--warmup", "0")

    assert fields["completed"] == 2


def test_usage_that_makes_no_sense_is_not_believed() -> None:
    usage = {"prompt_tokens": -5, "completion_tokens": "many"}
    with scripted_server(raw(event(" a", usage=usage), event(" b", "stop"))) as server:
        fields = bench(server.url, "-n", "2", "--warmup", "0", "--input-len", "9")

    assert (fields["total_input_tokens"], fields["total_output_tokens"]) == (18, 4)


def test_who_is_told_to_come_back_later_does() -> None:
    """A closed loop's client waits as long as the server said, and only those requests are lost."""
    with scripted_server(refusing(429, {"Retry-After": "1"}, every=3)) as server:
        fields = bench(server.url, "-n", "5", "--concurrency", "1", "--warmup", "0")

    assert fields["failures"] == {"http_429": 1}
    assert (fields["completed"], fields["failed"]) == (4, 1)
    assert fields["duration"] >= 1.0


def test_a_server_that_is_not_there_is_one_line_or_counted() -> None:
    """Without a model to ask for there is nothing to do; with one, each refusal is counted."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"

        assert "does not answer" in invoke(url).refusal
        fields = unanswered(url, "--model", "any", "-n", "3", "--warmup", "0")
    assert fields["failures"] == {"refused": 3}


def test_a_unix_socket_is_connected_to(tmp_path: Path) -> None:
    path = str(tmp_path / "server.sock")
    options = ("--unix-socket", path, "--model", "any", "-n", "2", "--warmup", "0")

    assert unanswered("http://localhost", *options)["failures"] == {"refused": 2}
    with scripted_server(socket_path=path) as server:
        assert bench(server.url, *options)["completed"] == 2


def test_the_key_comes_with_every_request() -> None:
    with scripted_server() as server:
        bench(server.url, "-n", "3", "--api-key", "secret")

    assert server.keys == {"Bearer secret"}


def test_a_duration_ends_a_closed_loop_that_has_no_number() -> None:
    """And what was not sent is neither counted nor failed."""
    with scripted_server(timed_answer(0.02, 0.0)) as server:
        fields = bench(server.url, "--duration", "0.3", "--output-len", "2", "--warmup", "0")

    assert fields["num_prompts"] == fields["completed"] == len(server.streamed) > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--goodput", "ttft"], "ttft=1.5s"),
        (["--find-rate"], "--slo"),
        (["--extra-body", "[]"], "JSON object"),
        (["--lengths", "fixed:1/1", "--input-len", "3"], "--lengths"),
    ],
)
def test_options_without_meaning_are_wrong_usage(arguments: list[str], said: str) -> None:
    assert said in invoke("http://127.0.0.1:1", *arguments).usage_error


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:99999", "http://[::1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    assert "is no address of a server" in invoke(url).refusal


def queueing(service_s: float) -> Script:
    """One request at a time: beyond 1 / service_s a second, those that come wait longer and longer."""
    turn = asyncio.Lock()

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body.get("stream"):
            async with turn:
                await asyncio.sleep(service_s)
        return await whole_answer(request, body)

    return script


@pytest.mark.slow  # the search itself: tests/loadtest/test_load_metrics.py
def test_the_rate_of_a_queue_is_found_below_its_capacity(tmp_path: Path) -> None:
    """And the picture is drawn; a queue of 50 a second keeps no rate above that for long."""
    picture = tmp_path / "rate.svg"
    with scripted_server(queueing(0.02)) as server:
        fields = bench(
            server.url,
            *("--find-rate", "--goodput", "ttft:400", "--rate", "10", "--probe", "1", "--output-len", "2"),
            *("--plot", str(picture)),
        )

    rates = {probe["request_rate"]: probe["is_kept"] for probe in fields["probes"]}
    assert fields["goodput_rate"] == max(rate for rate, kept in rates.items() if kept)
    assert fields["goodput_rate"] <= 100
    assert fields["request_rate"] == fields["goodput_rate"]
    assert "attainment over the rate" in picture.read_text()


def test_without_promises_the_picture_is_of_the_latencies(tmp_path: Path) -> None:
    picture = tmp_path / "latencies.svg"
    with scripted_server() as server:
        bench(server.url, "-n", "3", "--plot", str(picture))

    assert "milliseconds, at most" in picture.read_text()
    assert "attainment" not in picture.read_text()


def test_no_picture_is_drawn_of_a_load_without_answers(tmp_path: Path) -> None:
    picture = tmp_path / "latencies.svg"
    with scripted_server(refusing(500)) as server:
        result = invoke(server.url, "-n", "2", "--plot", str(picture))

    assert result.exit_code == 1
    assert not picture.exists()
    assert "no answer is complete" in result.stderr


def test_csv_is_one_row_of_scalars() -> None:
    with scripted_server() as server:
        result = invoke(server.url, "-o", "csv", "-n", "3", "--goodput", "ttft:1000")

    (row,) = csv.DictReader(io.StringIO(result.stdout))
    assert row["completed"] == "3"
    assert float(row["slo_attainment"]) == 1.0


def test_an_interrupt_prints_what_was_measured() -> None:
    """Within a moment, with the requests under way counted as unfinished; the exit code says it."""
    with scripted_server(timed_answer(0.05, 0.0)) as server:
        load = ("-n", 100000, "--concurrency", 2, "--output-len", 2, "--warmup", 0)
        process = command.start("bench", "serve", server.url, "-o", "json", *load, env={"COLUMNS": "80"})
        while len(server.streamed) < 6 and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=60)

    fields = json.loads(out)
    assert process.returncode == 130, said
    assert fields["was_interrupted"] is True
    assert fields["completed"] >= 3
    assert set(fields["failures"]) <= {"unfinished"}
    assert "interrupted" in said
    assert "\x1b" not in said
