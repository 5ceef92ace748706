"""`/v1/files` and `/v1/batches`, as OpenAI's API has them. Whoever sends a key sees what that key sent."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from phasewise.serving.batches.lines import GENERATING, Json
from phasewise.serving.batches.store import (
    BROKEN_READS,
    CANCELLABLE,
    ENDS_AS,
    BatchStore,
    BatchStoreError,
    Page,
    StoredBatch,
    StoredFile,
)
from phasewise.serving.http.errors import ApiError, bad_request
from phasewise.serving.http.requests.body import BodyReader, refuse_other_types
from phasewise.serving.http.requests.schemas import OpenRequest
from phasewise.serving.http.requests.upload import boundary_of, read_form
from phasewise.serving.http.routes.batch_runner import BatchRunner
from phasewise.serving.http.routes.middleware import client_of
from phasewise.serving.http.routes.openapi import Routes

_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class BatchRequest(OpenRequest):
    """A batch to begin. `metadata`: up to 16 texts, given back, within OpenAI's bounds."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=64)]
    endpoint: str
    completion_window: Annotated[str, Field(max_length=16)] = "24h"
    metadata: Annotated[dict[_Key, _Value], Field(max_length=16)] | None = None


MOST_FILE_BYTES = 200 << 20
"""OpenAI's own limit."""
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


async def _on_disk(work: Callable[[], Made]) -> Made:
    """The result of `work` of the store, on a thread. ApiError where it cannot."""
    try:
        return await asyncio.to_thread(work)
    except BatchStoreError as error:
        raise _refusal(error) from None


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


class _KeptFile(FileResponse):
    """A file that may be deleted meanwhile: 404 before its first byte, and all of it after that."""

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
    """The routes."""
    _add_files(routes, runner)

    async def store() -> BatchStore:
        return await _on_disk(runner.store)

    @routes.add("/v1/batches", "POST", BatchRequest)
    async def create_batch(request: Request) -> Json:
        """Answer the requests of a file, when nobody else asks."""
        runner.life.refuse_unless_open()
        body = await bodies.read(request, BatchRequest)
        owner, kept = _owner(request), await store()
        if body.endpoint not in GENERATING:
            raise bad_request(f"endpoint must be one of {', '.join(GENERATING)}", "endpoint")
        window_s = _seconds(body.completion_window)
        source = await _on_disk(partial(kept.file, owner, body.input_file_id))
        if source.purpose != "batch":
            raise bad_request(
                "input_file_id names a file that was not sent with purpose batch", "input_file_id"
            )
        fields = _new_batch(body, int(time.time()), window_s)
        batch = await _on_disk(partial(kept.add_batch, owner, source.id, fields))
        runner.wake()
        return _shown(batch)

    @routes.add("/v1/batches", "GET", query=_PAGE)
    async def list_batches(request: Request) -> Json:
        """The batches of this client, the newest first."""
        kept = await store()
        page = _page_of(request, _LISTED, _MOST_BATCHES_LISTED)
        batches, has_more = await _on_disk(partial(kept.batches, _owner(request), page))
        return _list([_shown(batch) for batch in batches], has_more)

    @routes.add("/v1/batches/{batch_id}", "GET")
    async def show_batch(request: Request, batch_id: str) -> Json:
        """A batch, and its counts so far."""
        kept = await store()
        return _shown(await _on_disk(partial(kept.batch, _owner(request), batch_id)))

    @routes.add("/v1/batches/{batch_id}", "DELETE")
    async def delete_batch(request: Request, batch_id: str) -> Json:
        """Keep the record of a batch no longer; its files stay."""
        kept = await store()
        await _on_disk(partial(kept.delete_batch, _owner(request), batch_id))
        return {"id": batch_id, "object": "batch", "deleted": True}

    @routes.add("/v1/batches/{batch_id}/cancel", "POST")
    async def cancel_batch(request: Request, batch_id: str) -> Json:
        """End a batch; what was answered stays."""
        refuse_other_types(request)
        kept = await store()
        batch = await _on_disk(partial(kept.batch, _owner(request), batch_id))
        now_s = int(time.time())
        begin = partial(kept.update, batch, among=CANCELLABLE, status="cancelling", cancelling_at=now_s)
        batch = await _on_disk(begin)
        if batch.fields["status"] == "cancelling":
            runner.wake()
        elif batch.fields["status"] != "cancelled":
            raise ApiError(409, f"the batch is {batch.fields['status']} already", code="batch_over")
        return _shown(batch)


def _add_files(routes: Routes, runner: BatchRunner) -> None:
    async def store() -> BatchStore:
        return await _on_disk(runner.store)

    @routes.add("/v1/files", "POST", _FORM)
    async def create_file(request: Request) -> Json:
        """Keep a file of requests, for a batch."""
        runner.life.refuse_unless_open()
        boundary_of(request)  # or why not, before anything is opened
        kept = await store()
        file = await _on_disk(kept.begin_file)
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
        return _file(await _on_disk(partial(kept.keep_file, file, _owner(request), name, "batch")))

    @routes.add("/v1/files", "GET", query=_PAGE)
    async def list_files(request: Request) -> Json:
        """The files of this client, the newest first."""
        kept = await store()
        page, purpose = _page_of(request, _MOST_LISTED, _MOST_LISTED), request.query_params.get("purpose")
        files, has_more = await _on_disk(partial(kept.files, _owner(request), page, purpose))
        return _list([_file(file) for file in files], has_more)

    @routes.add("/v1/files/{file_id}", "GET")
    async def show_file(request: Request, file_id: str) -> Json:
        """A file, without its bytes."""
        kept = await store()
        return _file(await _on_disk(partial(kept.file, _owner(request), file_id)))

    @routes.add("/v1/files/{file_id}/content", "GET")
    async def file_content(request: Request, file_id: str) -> Response:
        """The bytes of a file."""
        kept = await store()
        file = await _on_disk(partial(kept.file, _owner(request), file_id))
        return _KeptFile(kept.path_of(file.id), media_type="application/octet-stream")

    @routes.add("/v1/files/{file_id}", "DELETE")
    async def delete_file(request: Request, file_id: str) -> Json:
        """Keep a file no longer."""
        kept = await store()
        await _on_disk(partial(kept.delete_file, _owner(request), file_id))
        return {"id": file_id, "object": "file", "deleted": True}


def _owner(request: Request) -> str:
    """The key of a request, by its digest; "" where none is asked for: then all see the same."""
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
    fields = {name: value for name, value in batch.fields.items() if name not in (ENDS_AS, BROKEN_READS)}
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
    """The page of a list that is asked for: `limit` entries behind the one called `after`."""
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
