"""Files in `multipart/form-data`, read piece by piece: a form's fields, and one file that is not held."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from email.message import Message

from fastapi import Request
from starlette.requests import ClientDisconnect

from phasewise.serving.http.errors import ApiError, bad_request

_MOST_HEAD_BYTES = 8 << 10
_MOST_FIELD_BYTES = 1 << 10
_MOST_FIELDS = 16
_BOUNDARY = re.compile(r'boundary=(?:"([^"\r\n]{1,200})"|([^\s;"]{1,200}))', re.ASCII)


@dataclass
class UploadForm:
    """The fields of a form that was read. `filename`: of the part `file`; None: there was none yet."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


class FormReader:
    """A form by its bytes: `feed` gives those of the file to `write`."""

    def __init__(self, boundary: str, write: Callable[[bytes], None]) -> None:
        self.form = UploadForm()
        self.is_over = False
        self._mark = b"\r\n--" + boundary.encode("latin-1", "replace")
        self._write = write
        self._rest = b"\r\n"  # the first mark has no line before it
        self._part: str | None = None
        """The name of the part that is being read; None between two."""
        self._value = b""
        self._has_begun = False

    def feed(self, piece: bytes) -> None:
        """ApiError for what is no such form."""
        self._rest += piece
        while not self.is_over and self._step():
            pass

    def _step(self) -> bool:
        """Read a part's head, or data up to a mark. False: more bytes are needed."""
        if self._part is None:
            return self._read_head() if self._has_begun else self._skip_to_first()
        offset = self._rest.find(self._mark)
        if offset < 0:
            keep = len(self._mark) - 1
            self._take(self._rest[:-keep])
            self._rest = self._rest[-keep:]
            return False
        self._take(self._rest[:offset])
        self._rest = self._rest[offset + len(self._mark) :]
        self._end_part()
        return True

    def _skip_to_first(self) -> bool:
        offset = self._rest.find(self._mark)
        if offset < 0 and len(self._rest) > _MOST_HEAD_BYTES:
            raise _no_form("it does not begin with its boundary")
        if offset < 0:
            return False
        self._rest = self._rest[offset + len(self._mark) :]
        self._has_begun = True
        return True

    def _read_head(self) -> bool:
        if self._rest.startswith(b"--"):
            self.is_over = True
            return False
        offset = self._rest.find(b"\r\n\r\n")
        if offset < 0:
            if len(self._rest) > _MOST_HEAD_BYTES:
                raise _no_form("the head of a part is too long")
            return False
        names = _disposition(self._rest[:offset])
        self._rest = self._rest[offset + 4 :]
        self._part, self._value = names.get("name", ""), b""
        if self._part == "file":
            if self.form.filename is not None:
                raise _no_form("it has several files")
            self.form.filename = names.get("filename", "")
        return True

    def _take(self, piece: bytes) -> None:
        if self._part == "file":
            if piece:
                self._write(piece)
            return
        self._value += piece
        if len(self._value) > _MOST_FIELD_BYTES:
            raise _no_form(f"its field {self._part!r:.40} is longer than {_MOST_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        assert self._part is not None
        if self._part != "file":
            self.form.fields[self._part] = self._value.decode("utf-8", "replace")
            if len(self.form.fields) > _MOST_FIELDS:
                raise _no_form(f"it has more than {_MOST_FIELDS} fields")
        self._part = None


def _disposition(head: bytes) -> dict[str, str]:
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            message = Message()
            message["Content-Disposition"] = value.strip()
            given = message.get_params(header="content-disposition", unquote=True) or []
            return {key.lower(): str(text) for key, text in given}
    return {}


def _no_form(why: str) -> ApiError:
    return bad_request(f"the body is no multipart/form-data: {why}", code="invalid_form")


def boundary_of(request: Request) -> str:
    """The boundary of a request's form. ApiError for what has none, or comes from a page elsewhere."""
    _refuse_pages(request)
    kind = request.headers.get("content-type", "")
    boundary = _BOUNDARY.search(kind)
    if not kind.lower().startswith("multipart/form-data") or boundary is None:
        raise ApiError(
            415,
            "a file is sent as multipart/form-data, with the fields purpose and file",
            code="unsupported_media_type",
            closes=True,
        )
    return boundary[1] or boundary[2]


async def read_form(request: Request, write: Callable[[bytes], None], most_bytes: int) -> UploadForm:
    """The form of a request; a thread gives its file to `write`. ApiError: it is no form, or too large."""
    reader = FormReader(boundary_of(request), write)
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
        await asyncio.to_thread(reader.feed, piece)
    if not reader.is_over:
        raise _no_form("it ends before its last boundary")
    return reader.form


def _refuse_pages(request: Request) -> None:
    """A page of another origin may post a form without asking whether it may (CSRF)."""
    site = request.headers.get("sec-fetch-site", "same-origin" if "origin" not in request.headers else "")
    if site not in ("same-origin", "none"):
        raise ApiError(403, "pages of other origins may not send files here", closes=True)
