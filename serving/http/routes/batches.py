"""`/v1/files` and `/v1/batches`, as in OpenAI's API. A client sees only what was sent with its API key."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, TypeVar
from urllib.parse import unquote_to_bytes

from pydantic import Field
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from phasewise.serving.batches.lines import GENERATING, Json
from phasewise.serving.batches.store import (
    CANCELLABLE,
    ENDS_AS,
    BatchStore,
    BatchStoreError,
    Page,
    StoredBatch,
    StoredFile,
)
from phasewise.serving.http.errors import ApiError, bad_request
from phasewise.serving.http.requests.body import BodyReader, RestedThread, refuse_other_types
from phasewise.serving.http.requests.schemas import OpenRequest
from phasewise.serving.http.routes.batch_runner import BatchRunner
from phasewise.serving.http.routes.middleware import client_of
from phasewise.serving.http.routes.openapi import Routes

_MOST_HEADERS = 8
_MOST_HEADER_BYTES = 8 << 10
_MOST_FIELD_BYTES = 1 << 10
_MOST_PARTS = 16
_MOST_BOUNDARY_BYTES = 200

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of every form that it refuses

_ENCODED_NAME = re.compile(rb"filename\*\s*=\s*utf-8'[^']{0,20}'([\w.!#$&+^`|~%-]{1,1024})(?=;|\s|$)", re.I)
"""A file name that is not ASCII, as in `filename*=utf-8''caf%C3%A9.jsonl`."""


class FormReader:
    """Parses a multipart form in pieces; the bytes of its file go to `write`."""

    def __init__(self, boundary: bytes, write: Callable[[bytes], None]) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """Name of the part `file`; None: no such part so far."""
        self.is_over = False
        self._write = write
        self._n_parts = 0
        self._name = ""
        """Name of the part that is being parsed."""
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
        """Parse a piece. Raises ApiError if the form is invalid."""
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
            if self.filename is not None:
                raise _no_form("it has several files")
            encoded = _ENCODED_NAME.search(self._disposition)
            given = unquote_to_bytes(encoded[1]) if encoded else b""
            self.filename = names.get(b"filename", given).decode("utf-8", "replace")

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _MOST_FIELD_BYTES:
            raise _no_form(f"its field {self._name[:40]!r} is longer than {_MOST_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        if self._name != "file":
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self.is_over = True


def _no_form(why: str) -> ApiError:
    return bad_request(f"the body is no multipart/form-data: {why}", code="invalid_form")


def boundary_of(request: Request) -> bytes:
    """The boundary of a form. Raises ApiError if there is none, or the form comes from another origin."""
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


async def read_form(request: Request, write: Callable[[bytes], None], most_bytes: int) -> FormReader:
    """Read a form; `write` takes its file's bytes on a thread. Raises ApiError if invalid or too large."""
    reader, thread, n_bytes = FormReader(boundary_of(request), write), RestedThread(), 0
    async for piece in request.stream():
        n_bytes += len(piece)
        if n_bytes > most_bytes:
            raise ApiError(
                413, f"the file is larger than {most_bytes} bytes", code="file_too_large", closes=True
            )
        await thread.run(partial(reader.feed, piece))
    if not reader.is_over:
        raise _no_form("it ends before its last boundary")
    return reader


def _refuse_pages(request: Request) -> None:
    """Raise ApiError for a page of another origin: it may post a form without a preflight (CSRF)."""
    site = request.headers.get("sec-fetch-site", "same-origin" if "origin" not in request.headers else "")
    if site not in ("same-origin", "none"):
        raise ApiError(403, "pages of other origins may not send files here", closes=True)


_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class BatchRequest(OpenRequest):
    """A batch to begin. `metadata`: up to 16 texts within OpenAI's limits, returned unchanged."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=64)]
    endpoint: str
    completion_window: Annotated[str, Field(max_length=16)] = "24h"
    metadata: Annotated[dict[_Key, _Value], Field(max_length=16)] | None = None


MOST_FILE_BYTES = 200 << 20
"""Size limit of a file, as in OpenAI's API."""
_FORM: Json = {
    "type": "object",
    "properties": {"purpose": {"const": "batch"}, "file": {"type": "string", "format": "binary"}},
    "required": ["purpose", "file"],
}
_PAGE = ("limit", "after")
_MOST_LISTED = 10_000
_MOST_BATCHES_LISTED = 100
_LISTED = 20
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MOST_WINDOW_S = 30 * 86_400
Made = TypeVar("Made")


def _refusal(error: BatchStoreError) -> ApiError:
    match error.kind:
        case "missing":
            return ApiError(404, str(error), code="not_found")
        case "in_use":
            return ApiError(409, str(error), code="file_in_use")
        case "unfinished":
            return ApiError(409, str(error), code="batch_not_over")
        case "full":
            return ApiError(507, str(error), code="insufficient_storage")
        case "too_many":
            return ApiError(429, str(error), code="too_many_batches", retry_after_s=60)
        case _:
            return ApiError(503, str(error), code="no_batches", retry_after_s=60)


async def _stored(runner: BatchRunner, work: Callable[[BatchStore], Made]) -> Made:
    """Run `work` on a thread. Raises ApiError in place of BatchStoreError."""
    try:
        return await asyncio.to_thread(lambda: work(runner.store()))
    except BatchStoreError as error:
        raise _refusal(error) from None


class _KeptFile(FileResponse):
    """A file that may be deleted meanwhile: 404 before its first byte, and the whole file after that."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            descriptor = await asyncio.to_thread(os.open, self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ApiError(404, "the file has just been deleted", code="not_found") from None
        try:
            self.path = f"/proc/self/fd/{descriptor}"
            await super().__call__(scope, receive, send)
        finally:
            os.close(descriptor)


def add_batches(routes: Routes, runner: BatchRunner, bodies: BodyReader) -> None:
    """Add the routes of files and batches."""

    _add_files(routes, runner)

    @routes.add("/v1/batches", "POST", BatchRequest)
    async def create_batch(request: Request) -> Json:
        """Answer the requests of a file, when nobody else asks."""
        runner.life.refuse_unless_open()
        body = await bodies.read(request, BatchRequest)
        owner = _owner(request)
        if body.endpoint not in GENERATING:
            raise bad_request(f"endpoint must be one of {', '.join(GENERATING)}", "endpoint")
        fields = _new_batch(body, int(time.time()), _seconds(body.completion_window))
        source = await _stored(runner, lambda kept: kept.file(owner, body.input_file_id))
        if source.purpose != "batch":
            raise bad_request(
                "input_file_id names a file that was not sent with purpose batch", "input_file_id"
            )
        batch = await _stored(runner, lambda kept: kept.add_batch(owner, source.id, fields))
        runner.wake()
        return _shown(batch)

    @routes.add("/v1/batches", "GET", query=_PAGE)
    async def list_batches(request: Request) -> Json:
        """The batches of this client, the newest first."""
        page = _page_of(request, _LISTED, _MOST_BATCHES_LISTED)
        batches, has_more = await _stored(runner, lambda kept: kept.batches(_owner(request), page))
        return _list([_shown(batch) for batch in batches], has_more)

    @routes.add("/v1/batches/{batch_id}", "GET")
    async def show_batch(request: Request, batch_id: str) -> Json:
        """A batch, and its counts so far."""
        return _shown(await _stored(runner, lambda kept: kept.batch(_owner(request), batch_id)))

    @routes.add("/v1/batches/{batch_id}", "DELETE")
    async def delete_batch(request: Request, batch_id: str) -> Json:
        """Keep the record of a batch no longer; its files stay."""
        await _stored(runner, lambda kept: kept.delete_batch(_owner(request), batch_id))
        return {"id": batch_id, "object": "batch", "deleted": True}

    @routes.add("/v1/batches/{batch_id}/cancel", "POST")
    async def cancel_batch(request: Request, batch_id: str) -> Json:
        """End a batch; what was answered stays."""
        refuse_other_types(request)

        def cancelled(kept: BatchStore) -> StoredBatch:
            batch, now_s = kept.batch(_owner(request), batch_id), int(time.time())
            return kept.update(batch, among=CANCELLABLE, status="cancelling", cancelling_at=now_s)

        batch = await _stored(runner, cancelled)
        if batch.fields["status"] == "cancelling":
            runner.wake()
        elif batch.fields["status"] != "cancelled":
            raise ApiError(409, f"the batch is {batch.fields['status']} already", code="batch_over")
        return _shown(batch)


def _add_files(routes: Routes, runner: BatchRunner) -> None:
    @routes.add("/v1/files", "POST", _FORM)
    async def create_file(request: Request) -> Json:
        """Keep a file of requests, for a batch."""
        runner.life.refuse_unless_open()
        boundary_of(request)  # or why not, before anything is opened
        file = await _stored(runner, BatchStore.begin_file)
        try:
            form = await read_form(request, file.write, MOST_FILE_BYTES)
            if form.fields.get("purpose") != "batch":
                raise bad_request("purpose must be batch: files are for batches alone here", "purpose")
            if form.filename is None:
                raise bad_request("the form has no part called file", "file")
        except BaseException as error:
            await asyncio.shield(asyncio.to_thread(file.drop))
            if isinstance(error, BatchStoreError):
                raise _refusal(error) from None
            raise
        name = form.filename[:255]
        return _file(await _stored(runner, lambda kept: kept.keep_file(file, _owner(request), name, "batch")))

    @routes.add("/v1/files", "GET", query=_PAGE)
    async def list_files(request: Request) -> Json:
        """The files of this client, the newest first."""
        page, purpose = _page_of(request, _MOST_LISTED, _MOST_LISTED), request.query_params.get("purpose")
        files, has_more = await _stored(runner, lambda kept: kept.files(_owner(request), page, purpose))
        return _list([_file(file) for file in files], has_more)

    @routes.add("/v1/files/{file_id}", "GET")
    async def show_file(request: Request, file_id: str) -> Json:
        """A file, without its bytes."""
        return _file(await _stored(runner, lambda kept: kept.file(_owner(request), file_id)))

    @routes.add("/v1/files/{file_id}/content", "GET")
    async def file_content(request: Request, file_id: str) -> Response:
        """The bytes of a file."""
        path = await _stored(runner, lambda kept: kept.path_of(kept.file(_owner(request), file_id).id))
        return _KeptFile(path, media_type="application/octet-stream")

    @routes.add("/v1/files/{file_id}", "DELETE")
    async def delete_file(request: Request, file_id: str) -> Json:
        """Keep a file no longer."""
        await _stored(runner, lambda kept: kept.delete_file(_owner(request), file_id))
        return {"id": file_id, "object": "file", "deleted": True}


def _owner(request: Request) -> str:
    """Digest of the API key that owns files and batches; empty if none is required: all see the same."""
    return client_of(request.scope).cache_space


def _seconds(window: str) -> int:
    match = re.fullmatch(r"([1-9][0-9]{0,6})([smhd])", window)
    seconds = int(match[1]) * _UNITS_S[match[2]] if match else 0
    if not 0 < seconds <= _MOST_WINDOW_S:
        raise bad_request("completion_window must be a time such as 24h, at most 30d", "completion_window")
    return seconds


_INSTANTS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def _new_batch(body: BatchRequest, now_s: int, window_s: int) -> Json:
    return {
        "object": "batch",
        "endpoint": body.endpoint,
        "errors": None,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now_s,
        "expires_at": now_s + window_s,
        **{f"{name}_at": None for name in _INSTANTS},
        "n_lines": 0,
        "metadata": body.metadata,
    }


def _shown(batch: StoredBatch) -> Json:
    fields = {name: value for name, value in batch.fields.items() if name != ENDS_AS}
    total = fields.pop("n_lines")
    counts = {"total": total, "completed": batch.n_completed, "failed": batch.n_failed}
    return {**fields, "request_counts": counts}


def _file(file: StoredFile) -> Json:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.n_bytes,
        "created_at": file.created_s,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def _page_of(request: Request, default: int, most: int) -> Page:
    """The requested page of a list: `limit` entries after the id `after`. Raises ApiError."""
    asked = request.query_params
    given = asked.get("limit", str(default))
    limit = int(given) if re.fullmatch(r"[0-9]{1,5}", given) else 0
    if not 1 <= limit <= most:
        raise bad_request(f"limit must be a number from 1 to {most}", "limit")
    return Page(limit, asked.get("after"), asked.get("order", "desc") == "asc")


def _list(data: list[Json], has_more: bool) -> Json:
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
