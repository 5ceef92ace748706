"""Logs of a server: what they hold, who may read them, and what becomes of lines when a disk takes none."""

from __future__ import annotations

import io
import json
import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from signal import SIG_IGN, SIGXFSZ, signal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phasewise.serving.engine.messages import Answer, DraftCounts, Submit
from phasewise.serving.errors import ServingError
from phasewise.serving.http.answers.client import RequestLife
from phasewise.serving.http.monitoring.access_log import Logging, open_log
from phasewise.serving.http.monitoring.lengths import LengthLog, LengthObserver
from phasewise.serving.processes.json_lines import as_json, copy_lines
from phasewise.serving.processes.line_log import LineLog
from phasewise.serving.sampling.sampling import SamplingParams
from tests.support.servers.fake_server import fake_server
from tests.support.servers.rude_clients import completion, connect, until

LENGTH = RequestLife(
    Submit("r", (1, 2, 3), 64, SamplingParams(temperature=0.7), n_messages=2, system_prompt_id="abcd"),
    sent_at_s=1_699_999_999.5,
    ended_at_s=1_700_000_000.25,
    last=Answer("r", "", (), 9, 5, "stop"),
)
Open = Callable[[Path, Callable[[str], None]], "contextmanager[tuple[LineLog, Callable[[], None]]]"]


@contextmanager
def length_log(path: Path, report: Callable[[str], None]) -> Iterator[tuple[LineLog, Callable[[], None]]]:
    with LengthLog(path, report) as log:
        yield log, lambda: log.put("fake", LENGTH)


@contextmanager
def access_log(path: Path, report: Callable[[str], None]) -> Iterator[tuple[LineLog, Callable[[], None]]]:
    with open_log(Logging(path, "info"), report) as (lines, log):
        assert log is not None
        yield lines, lambda: log._write("x" * 200)


BOTH = pytest.mark.parametrize("opened", [length_log, access_log])


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """A disk that is full, as far as one file can tell."""
    before = signal(SIGXFSZ, SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal(SIGXFSZ, before)


@BOTH
def test_a_full_disk_costs_lines_and_one_warning_and_no_half_line(opened: Open, tmp_path: Path) -> None:
    """Every line is in the file or counted, and the log goes on when there is room."""
    path, said = tmp_path / "log", list[str]()
    with opened(path, said.append) as (log, put):
        with files_of_at_most(300):
            for _ in range(5):
                put()
            until(lambda: log.n_lost == 4, "all are written")
        put()
    lines = path.read_text().splitlines()

    assert len(lines) == 2
    assert lines[0][:40] == lines[1][:40]
    assert len(said) == 1
    assert str(path) in said[0]


@BOTH
def test_the_disk_may_stand_still_and_nobody_waits_for_it(opened: Open, tmp_path: Path) -> None:
    path, said = tmp_path / "pipe", list[str]()
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with opened(path, said.append) as (log, put):
        for _ in range(20_000):
            put()
        assert log.n_lost > 0
        assert len(said) == 1
        os.close(reader)


@BOTH
def test_a_link_and_a_folder_are_refused(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "none")
    for name, why in (("link", "symbolic link"), (".", "directory"), ("no/log", "No such file")):
        with pytest.raises(Exception, match=why), opened(tmp_path / name, print):
            pass
    assert not (tmp_path / "none").exists()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def said() -> list[str]:
    return []


def test_a_line_holds_what_predict_len_reads_and_only_the_owner_reads_it(
    tmp_path: Path, said: list[str]
) -> None:
    path = tmp_path / "lengths.jsonl"
    with LengthLog(path, said.append) as log:
        log.put("fake", LENGTH)
        log.put("fake", LENGTH)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert lines_of(path) == 2 * [
        {
            "schema_version": 3,
            "model": "fake",
            "prompt_token_ids": [1, 2, 3],
            "temperature": 0.7,
            "max_tokens": 64,
            "n_messages": 2,
            "system_prompt_id": "abcd",
            "output_tokens": 9,
            "finish_reason": "stop",
            "arrived_at_s": 1_699_999_999.5,
            "at_s": 1_700_000_000.25,
        }
    ]
    assert (log.n_lost, said) == (0, [])


def test_a_line_tells_the_drafts_of_the_answer(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "lengths.jsonl"
    with LengthLog(path, said.append) as log:
        log.put("fake", replace(LENGTH, last=LENGTH.last._replace(drafts=DraftCounts(3, 2))))

    (line,) = lines_of(path)
    assert (line["drafted_tokens"], line["accepted_tokens"]) == (5, 3)


def test_an_adapter_answers_under_its_own_name(tmp_path: Path, said: list[str]) -> None:
    lengths: list[RequestLife] = []
    observer = LengthObserver(lengths.append, "fake")
    for adapter in ("", "terse"):
        life = RequestLife(Submit("r", (1,), model="fake", adapter=adapter))
        life.add(Answer("r", "", (), 1, 5, "stop"))
        observer.ended(life)
    path = tmp_path / "lengths.jsonl"
    with LengthLog(path, said.append) as log:
        for length in lengths:
            log.put("fake", length)

    assert [line["model"] for line in lines_of(path)] == ["fake", "terse"]


def test_one_that_cannot_be_opened_is_told_at_the_start(tmp_path: Path, said: list[str]) -> None:
    with pytest.raises(ServingError, match="No such file or directory"):
        LengthLog(tmp_path / "missing" / "lengths.jsonl", said.append)


def test_after_a_hangup_it_goes_on_in_a_new_file(tmp_path: Path, said: list[str]) -> None:
    path, old = tmp_path / "lengths.jsonl", tmp_path / "lengths.jsonl.1"
    with LengthLog(path, said.append) as log:
        log.put("fake", LENGTH)
        until(lambda: path.stat().st_size > 0, "nothing is written")
        path.rename(old)
        log.reopen()
        log.put("fake", LENGTH)

    assert (len(lines_of(old)), len(lines_of(path))) == (1, 1)


def test_answers_that_end_by_themselves_are_known_and_no_others() -> None:
    lengths: list[RequestLife] = []
    observer = LengthObserver(lengths.append, "fake")
    with fake_server() as server:
        server.client.observe(observer)
        with connect(server.url) as left:
            left.sendall(completion(max_tokens=400, stream=True))
            left.recv(1)
        with connect(server.url) as raw:
            raw.sendall(completion(max_tokens=7, temperature=0.5))
            raw.recv(1)
        server.wait_until_idle()

    assert [(life.last.n_generated, life.reason) for life in lengths] == [(7, "length")]
    request = lengths[0].request
    assert (request.prompt_token_ids, request.sampling.temperature, request.max_tokens) == ((97,), 0.5, 7)


def no_log(path: Path) -> str:
    """Why it is refused."""
    with pytest.raises(ServingError) as refusal:
        LengthLog(path, print)
    return str(refusal.value)


def test_a_log_that_others_could_read_is_theirs_no_more(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text("{}\n")
    path.chmod(0o644)
    with LengthLog(path, said.append) as log:
        log.put("fake", LENGTH)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(lines_of(path)) == 2
    assert said == [f"length log {path}: others could read it; its mode is 0600 now"]


def test_a_link_is_not_followed_and_what_is_no_file_is_refused(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")

    assert "it is a symbolic link" in no_log(tmp_path / "link")
    assert "it is a symbolic link" in no_log(tmp_path / "dangling")
    assert "Is a directory" in no_log(tmp_path / "folder")
    assert no_log(tmp_path / "fifo")
    assert precious.read_text() == "mine"
    assert not (tmp_path / "none").exists()


@given(st.binary(max_size=200))
@example(b"[" * 100_000)
@example(b"\xff\n{}\n\n1e999\nwarning: x\nphasewise: y\r\n")
def test_whatever_is_written_becomes_lines_of_objects(written: bytes) -> None:
    out = io.BytesIO()
    copy_lines(io.BytesIO(written), out)

    lines = out.getvalue().split(b"\n")
    assert lines.pop() == b""
    assert all(isinstance(json.loads(line), dict) for line in lines)
    assert len(lines) >= sum(bool(line.strip()) for line in written.split(b"\n"))


def test_a_line_says_how_bad_it_is() -> None:
    def told(line: bytes) -> tuple[str, str]:
        fields = json.loads(as_json(line, datetime.now(UTC)))
        return fields["level"], fields["message"]

    assert told(b"listening on http://localhost\n") == ("info", "listening on http://localhost")
    assert told(b"warning: no key\n") == ("warning", "no key")
    assert told(b"phasewise: it failed\n") == ("error", "phasewise: it failed")
    assert as_json(b'{"path": "/v1/models"}\n', datetime.now(UTC)) == b'{"path": "/v1/models"}\n'
