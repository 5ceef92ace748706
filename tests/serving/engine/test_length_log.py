"""The length log: what it holds, who may read it, and what becomes of it when the disk does not."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phasewise.serving.engine.messages import Answer, DraftCounts, Submit
from phasewise.serving.errors import ServingError
from phasewise.serving.http.http_settings import RequestFacts
from phasewise.serving.http.length_log import LengthLog
from phasewise.serving.http.requests.lengths import LengthObserver, RealisedLength
from tests.support.servers.fake_server import fake_server
from tests.support.servers.rude_clients import completion, connect, until

LENGTH = RealisedLength(
    RequestFacts((1, 2, 3), 0.7, 64, 2, "abcd"), 9, "stop", 1_699_999_999.5, 1_700_000_000.25
)


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
        log.put("fake", LENGTH._replace(drafts=DraftCounts(3, 2)))

    (line,) = lines_of(path)
    assert (line["drafted_tokens"], line["accepted_tokens"]) == (5, 3)


def test_an_adapter_answers_under_its_own_name(tmp_path: Path, said: list[str]) -> None:
    lengths: list[RealisedLength] = []
    observer = LengthObserver(lengths.append, "fake")
    for adapter in ("", "terse"):
        observer.sent(Submit("r", (1,), model="fake", adapter=adapter), LENGTH.facts)
        observer.delivered([Answer("r", "", (), 1, 5, "stop")], None)
    path = tmp_path / "lengths.jsonl"
    with LengthLog(path, said.append) as log:
        for length in lengths:
            log.put("fake", length)

    assert [line["model"] for line in lines_of(path)] == ["fake", "terse"]


def test_it_is_appended_to(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "lengths.jsonl"
    for _ in range(2):
        with LengthLog(path, said.append) as log:
            log.put("fake", LENGTH)

    assert len(lines_of(path)) == 2


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
    lengths: list[RealisedLength] = []
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

    assert [(length.output_tokens, length.finish_reason) for length in lengths] == [(7, "length")]
    assert lengths[0].facts == RequestFacts((97,), 0.5, 7, 1, None, "a")
    assert observer._sent == {}


def test_an_observer_knows_the_answers_of_its_model_alone() -> None:
    lengths: list[RealisedLength] = []
    own = LengthObserver(lengths.append, "one")
    request = Submit("r", (1,), model="other")
    own.sent(request, LENGTH.facts)
    assert own._sent == {}
    own.sent(replace(request, model="one"), LENGTH.facts)
    assert [sent.facts for sent in own._sent.values()] == [LENGTH.facts]


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
