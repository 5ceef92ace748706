"""Forms of files: an encoder's form is read back however it is cut; no form is a fault of the server."""

from __future__ import annotations

import contextlib

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phasewise.serving.http.errors import ApiError
from phasewise.serving.http.requests.upload import FormReader, UploadForm
from tests.support.tiers import examples

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
    assert reader.form.fields == {"purpose": "batch"}
    assert reader.form.filename == name


@examples(300)
@given(HEADS | st.binary(max_size=80), st.binary(max_size=30), st.integers(0, 60))
@example(b"Content-Disposition: form-data; name=file; filename*=utf-8''caf%C3%A9.jsonl", b"", 0)
def test_no_form_is_a_fault_of_the_server(head: bytes, content: bytes, cut: int) -> None:
    body = b"--b\r\n" + head + b"\r\n\r\n" + content + b"\r\n--b--\r\n"
    with contextlib.suppress(ApiError):
        reader, _ = read(body, [min(cut, len(body))])
        assert "('" not in (reader.form.filename or "")
        assert all(isinstance(value, str) for value in reader.form.fields.values())


@pytest.mark.parametrize(
    "head",
    [
        b"X" * 9000 + b": y",
        b"X: " + b"y" * 9000,
        b"\r\n".join(b"X: y" for _ in range(20)),
    ],
)
def test_the_head_of_a_part_is_bounded(head: bytes) -> None:
    with pytest.raises(ApiError) as refusal:
        read(b"--b\r\n" + head, [])

    assert refusal.value.status == 400


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


def test_a_form_without_parts_has_no_fields() -> None:
    reader, written = read(b"--b--\r\n", [])

    assert (reader.is_over, reader.form, written) == (True, UploadForm(), b"")
