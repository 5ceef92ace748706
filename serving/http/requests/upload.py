"""Files in `multipart/form-data`, read piece by piece: a form's fields, and one file that is not held."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from phasewise.serving.http.errors import ApiError, bad_request
from phasewise.serving.http.requests.fair_lane import RestedThread

_MOST_HEADERS = 8
_MOST_HEADER_BYTES = 8 << 10
_MOST_FIELD_BYTES = 1 << 10
_MOST_PARTS = 16
_MOST_BOUNDARY_BYTES = 200

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of every form that it refuses

_ENCODED_NAME = re.compile(rb"filename\*\s*=\s*utf-8'[^']{0,20}'([\w.!#$&+^`|~%-]{1,1024})(?=;|\s|$)", re.I)
"""As some clients write a name that is not ASCII: `filename*=utf-8''caf%C3%A9.jsonl`."""


@dataclass
class UploadForm:
    """The fields of a form that was read. `filename`: of the part `file`; None: there was none yet."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


class FormReader:
    """A form by its bytes: `feed` gives those of the file to `write`."""

    def __init__(self, boundary: bytes, write: Callable[[bytes], None]) -> None:
        self.form = UploadForm()
        self.is_over = False
        self._write = write
        self._n_parts = 0
        self._name = ""
        """The name of the part that is being read."""
        self._disposition = self._header = self._header_value = self._value = b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._take_header,
                "on_header_value": self._take_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._name_part,
                "on_part_data": self._take,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
            max_header_count=_MOST_HEADERS,
            max_header_size=_MOST_HEADER_BYTES,
        )

    def feed(self, piece: bytes) -> None:
        """ApiError for what is no such form."""
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise _no_form(str(error)) from None

    def _begin_part(self) -> None:
        self._n_parts += 1
        if self._n_parts > _MOST_PARTS:
            raise _no_form(f"it has more than {_MOST_PARTS} parts")
        self._disposition = self._value = b""

    def _take_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _take_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header = self._header_value = b""

    def _name_part(self) -> None:
        names = parse_options_header(self._disposition)[1]
        self._name = names.get(b"name", b"").decode("utf-8", "replace")
        if self._name == "file":
            if self.form.filename is not None:
                raise _no_form("it has several files")
            encoded = _ENCODED_NAME.search(self._disposition)
            given = unquote_to_bytes(encoded[1]) if encoded else b""
            self.form.filename = names.get(b"filename", given).decode("utf-8", "replace")

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _MOST_FIELD_BYTES:
            raise _no_form(f"its field {self._name[:40]!r} is longer than {_MOST_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        if self._name != "file":
            self.form.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self.is_over = True


def _no_form(why: str) -> ApiError:
    return bad_request(f"the body is no multipart/form-data: {why}", code="invalid_form")


def boundary_of(request: Request) -> bytes:
    """The boundary of a request's form. ApiError for what has none, or comes from a page elsewhere."""
    _refuse_pages(request)
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= _MOST_BOUNDARY_BYTES:
        raise ApiError(
            415,
            "a file is sent as multipart/form-data, with the fields purpose and file",
            code="unsupported_media_type",
            closes=True,
        )
    return boundary


async def read_form(request: Request, write: Callable[[bytes], None], most_bytes: int) -> UploadForm:
    """The form of a request; a thread gives its file to `write`. ApiError: it is no form, or too large."""
    reader, thread = FormReader(boundary_of(request), write), RestedThread()
    n_bytes, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece, more = message.get("body", b""), message.get("more_body", False)
        n_bytes += len(piece)
        if n_bytes > most_bytes:
            raise ApiError(
                413, f"the file is larger than {most_bytes} bytes", code="file_too_large", closes=True
            )
        await thread.run(partial(reader.feed, piece))
    if not reader.is_over:
        raise _no_form("it ends before its last boundary")
    return reader.form


def _refuse_pages(request: Request) -> None:
    """A page of another origin may post a form without asking whether it may (CSRF)."""
    site = request.headers.get("sec-fetch-site", "same-origin" if "origin" not in request.headers else "")
    if site not in ("same-origin", "none"):
        raise ApiError(403, "pages of other origins may not send files here", closes=True)
