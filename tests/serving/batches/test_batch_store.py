"""The store of files and batches, and the forms that files come in."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phasewise.serving.batches.lines import BatchLine, read_line, read_lines
from phasewise.serving.batches.store import (
    KEPT_DAYS,
    MOST_UNFINISHED,
    BatchStore,
    BatchStoreError,
    NewFile,
    Page,
    StoredFile,
)
from phasewise.serving.http.errors import ApiError
from phasewise.serving.http.routes.batches import FormReader
from tests.support.tiers import examples

ALL = Page(10_000)
MOST_BYTES = 10_000
FIELDS: dict[str, Any] = {"status": "in_progress", "n_lines": 3}
actions = st.lists(
    st.tuples(
        st.sampled_from(["file", "drop", "delete", "answer", "finish", "forget", "again"]),
        st.integers(0, 400),
    ),
    max_size=25,
)


def kept(store: BatchStore, n_bytes: int, owner: str = "o") -> StoredFile:
    file = store.begin_file()
    try:
        file.write(b"x" * n_bytes)
    except BatchStoreError:
        file.drop()
        raise
    return store.keep_file(file, owner, "in.jsonl", "batch")


@given(actions)
def test_bytes_add_up_whatever_comes_and_goes(
    tmp_path_factory: pytest.TempPathFactory, done: list[tuple[str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("batches")
    store = BatchStore(folder, MOST_BYTES)
    number = n_ended = 0
    for action, size in done:
        with contextlib.suppress(BatchStoreError):  # full, or in use
            match action:
                case "file":
                    store.add_batch("o", kept(store, size).id, FIELDS)
                case "drop":
                    file = store.begin_file()
                    try:
                        file.write(b"x" * size)
                    finally:
                        file.drop()
                case "delete":
                    for stored in store.files("o", ALL)[0][:1]:
                        store.delete_file("o", stored.id)
                case "answer":
                    for batch in store.unfinished()[:1]:
                        number += 1
                        store.answer(batch.id, number % 5, b"y" * (size // 10), is_good=size % 2 == 0)
                case "finish":
                    for batch in store.unfinished()[:1]:
                        n_ended += 1
                        store.finish(batch, "completed")
                case "forget":
                    for batch in store.batches("o", ALL)[0][-1:]:
                        store.delete_batch("o", batch.id)
                case _:
                    store.close()
                    store = BatchStore(folder, MOST_BYTES)
        assert store._n_taken == store._count_bytes()
        on_disk = {path.name: path.stat().st_size for path in folder.glob("file-*")}
        assert on_disk == {stored.id: stored.n_bytes for stored in store.files("o", ALL)[0]}
        assert store._n_taken <= MOST_BYTES + 2000 * (1 + number + n_ended)
    store.close()


def test_the_first_answer_of_a_line_stays_and_files_are_in_the_order_of_lines(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 10_000)
    batch = store.add_batch("o", kept(store, 10).id, FIELDS)
    for number, line, is_good in ((3, b"c", True), (1, b"a", True), (1, b"b", True), (2, b"bad", False)):
        store.answer(batch.id, number, line, is_good=is_good)

    batch = store.finish(store.batch("o", batch.id), "completed")

    assert (batch.n_completed, batch.n_failed) == (2, 1)
    output, error = (batch.fields[f"{name}_file_id"] for name in ("output", "error"))
    assert store.path_of(output).read_bytes() == b"a\nc\n"
    assert store.path_of(error).read_bytes() == b"bad\n"
    assert store.unfinished() == []
    with pytest.raises(BatchStoreError):
        store.file("another", output)
    store.close()


def test_a_status_moves_only_from_where_it_is_and_a_cancel_stays(tmp_path: Path) -> None:
    """A cancel comes between any two steps of the runner, whose record of the batch is an older one."""
    store = BatchStore(tmp_path, 10_000)
    before = store.add_batch("o", kept(store, 10).id, {**FIELDS, "status": "validating"})

    assert store.update(before, among=("validating",), status="cancelling").fields["status"] == "cancelling"
    later = store.update(before, among=("validating",), status="in_progress", n_lines=7)
    assert (later.fields["status"], later.fields["n_lines"]) == ("cancelling", 3), "nothing of it changed"
    ended = store.finish(before, "completed")
    assert ended.fields["status"] == "cancelled"
    assert {name for name in ended.fields if name.endswith("_at")} == {"finalizing_at", "cancelled_at"}
    again = store.update(before, among=("validating", "in_progress"), status="cancelling")
    assert again == ended, "what has ended cannot be cancelled"
    assert store.unfinished() == []
    store.close()


def test_a_start_removes_files_that_were_cut_off(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 10_000)
    whole = kept(store, 10)
    store.begin_file().write(b"half")
    store.close()

    store = BatchStore(tmp_path, 10_000)

    assert [path.name for path in tmp_path.glob("file-*")] == [whole.id]
    with pytest.raises(BatchStoreError, match="another server"):
        BatchStore(tmp_path, 10_000)
    store.close()


@given(st.binary(max_size=80))
def test_any_bytes_are_a_line_or_have_a_fault(raw: bytes) -> None:
    line = read_line(7, raw, set())
    assert isinstance(line, BatchLine)
    assert (line.fault is None) == bool(line.url)


def test_a_file_is_dropped_while_a_thread_writes_it(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 1 << 20)
    file = store.begin_file()
    begun, stop = threading.Event(), threading.Event()

    def write() -> None:
        while not stop.is_set():
            file.write(b"x")
            begun.set()

    with ThreadPoolExecutor(1) as executor:
        writing = executor.submit(write)
        assert begun.wait(60)
        file.drop()
        stop.set()
        writing.result()

    whole = kept(store, (1 << 20) - 1000)  # all of the room is there again
    assert [path.name for path in tmp_path.rglob("file-*")] == [whole.id]


def test_an_answer_that_comes_after_the_end_of_its_batch_takes_no_room(tmp_path: Path) -> None:
    """Its thread was on the way to the store when the batch was cancelled."""
    store = BatchStore(tmp_path, 10_000)
    batch = store.add_batch("o", kept(store, 10).id, FIELDS)
    store.answer(batch.id, 1, b"in time", is_good=True)
    batch = store.finish(batch, "cancelled")

    store.answer(batch.id, 2, b"late", is_good=True)

    assert store.answered(batch.id) == set()
    assert store.batch("o", batch.id).n_completed == 1
    assert store._n_taken == store._count_bytes()
    assert batch.fields["output_file_id"] is not None
    store.close()


def test_clients_that_ask_at_once_have_no_batch_more_than_they_may(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 1 << 20)
    source = kept(store, 10)
    for _ in range(MOST_UNFINISHED - 1):
        store.add_batch("o", source.id, FIELDS)

    def add(owner: str) -> str:
        try:
            return store.add_batch(owner, source.id, FIELDS).owner
        except BatchStoreError as error:
            return error.kind

    with ThreadPoolExecutor(4) as clients:
        outcomes = sorted(clients.map(add, ["o"] * 4))

    assert outcomes == ["o", "too_many", "too_many", "too_many"]
    store.finish(store.unfinished()[0], "completed")
    assert add("o") == "o"
    store.close()


def test_a_batch_that_finds_no_room_for_its_files_leaves_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again and again: each time would cost the full disk one more."""
    store = BatchStore(tmp_path, 10_000)
    batch = store.add_batch("o", kept(store, 10).id, FIELDS)
    for number, is_good in ((1, True), (2, False)):
        store.answer(batch.id, number, b"a line", is_good=is_good)
    before = {path.name for path in tmp_path.glob("file-*")}
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_room)
        for _ in range(3):
            with pytest.raises(BatchStoreError, match="No space left"):
                store.finish(batch, "completed")
            assert {path.name for path in tmp_path.glob("file-*")} == before
            assert store._n_taken == store._count_bytes()

    assert store.finish(batch, "completed").fields["status"] == "completed"
    assert store._n_taken == store._count_bytes()
    store.close()


def _no_room(_descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(1, 60))
def test_lines_are_read_one_by_one_and_longer_ones_are_skipped(parts: list[bytes], most: int) -> None:
    data = b"\n".join(parts)
    read = list(read_lines(io.BytesIO(data), most))

    for number, (line, raw) in enumerate(zip(read, io.BytesIO(data), strict=True), 1):
        if len(raw.rstrip(b"\n")) > most:
            assert line == BatchLine(number, None, fault=f"it is longer than {most} bytes")
        else:
            assert (line is None) == (not raw.strip())
            assert line is None or line.number == number


def test_pages_of_a_list_are_the_list(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 1 << 20)
    source = kept(store, 1)
    ids = [store.add_batch("o", source.id, FIELDS).id for _ in range(7)]
    kept(store, 1, "another")
    for is_ascending, whole in ((False, ids[::-1]), (True, ids)):
        for limit in (1, 2, 7, 8):
            read: list[str] = []
            has_more, after = True, None
            while has_more:
                page, has_more = store.batches("o", Page(limit, after, is_ascending))
                read += [batch.id for batch in page]
                after = read[-1]
                assert len(page) <= limit
            assert read == whole
    assert [file.id for file in store.files("o", ALL, "batch")[0]] == [source.id]
    assert store.files("o", ALL, "batch_output") == ([], False)
    with pytest.raises(BatchStoreError, match="nothing called"):
        store.batches("another", Page(1, ids[0]))
    store.close()


def test_records_of_batches_expire(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 1 << 20)
    source = kept(store, 1)
    over, running, young = (store.add_batch("o", source.id, FIELDS) for _ in range(3))
    store.finish(over, "completed")
    store.finish(young, "completed")
    older = f"UPDATE batches SET created_s = created_s - {KEPT_DAYS * 86_400 + 1} WHERE id != ?"
    store._db.execute(older, (young.id,))

    new = store.add_batch("o", source.id, FIELDS)

    assert {batch.id for batch in store.batches("o", ALL)[0]} == {running.id, young.id, new.id}
    assert store._n_taken == store._count_bytes()
    store.close()


def test_others_use_the_store_while_a_batch_ends_and_its_end_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, stop = BatchStore(tmp_path, 1 << 20), threading.Event()
    batch = store.add_batch("o", kept(store, 1).id, {**FIELDS, "status": "cancelling"})
    for number in range(5):
        store.answer(batch.id, number, b"line %d" % number, is_good=number != 3)
    write = NewFile.write

    def write_one(file: NewFile, part: bytes) -> None:
        with ThreadPoolExecutor(1) as other:
            other.submit(store.answer, batch.id, 9, b"late", is_good=True).result()
        write(file, part)
        stop.set()

    monkeypatch.setattr(NewFile, "write", write_one)
    with pytest.raises(BatchStoreError, match="next start"):
        store.finish(batch, "cancelled", stop)
    assert store._n_taken == store._count_bytes()
    store.close()
    store = BatchStore(tmp_path, 1 << 20)
    monkeypatch.setattr(NewFile, "write", write)

    (left,) = store.unfinished()
    ended = store.finish(left, "completed")

    assert ended.fields["status"] == "cancelled"
    assert (ended.n_completed, ended.n_failed) == (4, 1)
    assert store._n_taken == store._count_bytes()
    assert store._db.execute("SELECT count(*) FROM answers").fetchone() == (0,)
    store.close()


NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=["C"], exclude_characters='"\\'), min_size=1, max_size=40
)
HEADS = st.lists(
    st.sampled_from(
        [
            b"Content-Disposition",
            b": ",
            b"form-data",
            b"; name=file",
            b'; filename="a.jsonl"',
            b"; filename*=utf-8''caf%C3%A9.jsonl",
            b"; filename*" + b"1" * 5000 + b"=x",
            b"; filename*0*=x",
            b'; name="',
            b"\\",
            b"\xff",
            b"\r\n",
            b"Content-Type: text/plain",
        ]
    ),
    max_size=12,
).map(b"".join)


def read(body: bytes, cuts: list[int], boundary: bytes = b"b") -> tuple[FormReader, bytes]:
    pieces: list[bytes] = []
    reader = FormReader(boundary, pieces.append)
    for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        reader.feed(body[start:end])
    return reader, b"".join(pieces)


@examples(200)
@given(st.data(), NAMES, st.binary(max_size=300) | st.sampled_from([b"\r\n--b", b"\r\n--", b"\r\n--b\r"]))
def test_what_an_encoder_writes_is_read_back_however_it_is_cut(
    data: st.DataObject, name: str, content: bytes
) -> None:
    files = {"file": (name, content)}
    request = httpx.Request("POST", "http://a", data={"purpose": "batch"}, files=files)
    body = request.read()
    boundary = request.headers["content-type"].partition("boundary=")[2].encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))

    reader, written = read(body, cuts, boundary)

    assert reader.is_over
    assert written == content
    assert reader.fields == {"purpose": "batch"}
    assert reader.filename == name


@examples(300)
@given(HEADS | st.binary(max_size=80), st.binary(max_size=30), st.integers(0, 60))
@example(b"Content-Disposition: form-data; name=file; filename*=utf-8''caf%C3%A9.jsonl", b"", 0)
def test_no_form_is_a_fault_of_the_server(head: bytes, content: bytes, cut: int) -> None:
    body = b"--b\r\n" + head + b"\r\n\r\n" + content + b"\r\n--b--\r\n"
    with contextlib.suppress(ApiError):
        reader, _ = read(body, [min(cut, len(body))])
        assert "('" not in (reader.filename or "")
        assert all(isinstance(value, str) for value in reader.fields.values())


@pytest.mark.parametrize("head", [b"", b"Content-Disposition: form-data; name=purpose\r\n", b"A: b\r\n"])
def test_parts_are_counted_whatever_their_names(head: bytes) -> None:
    """Many empty parts took seconds: the form is refused at the first part that is one too many."""
    part = b"--b\r\n" + head + b"\r\n\r\n"
    read(part * 16, [])

    with pytest.raises(ApiError, match="more than 16 parts"):
        read(part * 17, [])


def test_a_field_is_bounded_and_there_is_one_file() -> None:
    field = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n'
    with pytest.raises(ApiError, match="longer than 1024 bytes"):
        read(field + b"x" * 2000, [])
    file = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n\r\n'
    with pytest.raises(ApiError, match="several files"):
        read(file * 2, [])
