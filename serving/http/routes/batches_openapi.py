"""The OpenAPI document's part of files and batches (`openapi`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Json = dict[str, Any]

_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
_ANY: Json = {}


def batch_paths(refusals_of: Callable[..., Json]) -> Json:
    """Paths of files and batches. refusals_of: answers other than 200, by their statuses."""
    form = {
        "type": "object",
        "properties": {"purpose": {"const": "batch"}, "file": {"type": "string", "format": "binary"}},
        "required": ["purpose", "file"],
    }
    upload = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    begin = {"required": True, "content": _content("BatchRequest")}
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    sent = refusals_of(400, 401, 403, 404, 413, 415, 429, 503, 507)
    refusals, listed = refusals_of(401, 404, 503), refusals_of(400, 401, 404, 503)
    busy = refusals_of(401, 404, 409, 503)
    files: Json = {
        **_does("get", "list_files", "Files, the newest first", _content("FileList"), listed),
        **_does("post", "create_file", "Keep a file of requests", _content("File"), sent, upload),
    }
    file: Json = {
        **_does("get", "show_file", "A file", _content("File"), refusals),
        **_does("delete", "delete_file", "Keep a file no longer", _content("DeletedFile"), busy),
    }
    batches: Json = {
        **_does("get", "list_batches", "Batches, the newest first", _content("BatchList"), listed),
        **_does("post", "create_batch", "Answer a file of requests", _content("Batch"), sent, begin),
    }
    batch: Json = {
        **_does("get", "show_batch", "How far a batch is", _content("Batch"), refusals),
        **_does("delete", "delete_batch", "Keep a batch no longer", _content("DeletedBatch"), busy),
    }
    cancel = _does("post", "cancel_batch", "End a batch", _content("Batch"), busy)
    return {
        "/v1/files": {**files, "parameters": _PAGE},
        "/v1/files/{file_id}": {**file, "parameters": [_in_path("file_id")]},
        "/v1/files/{file_id}/content": {
            **_does("get", "file_content", "The bytes of a file", content, refusals),
            "parameters": [_in_path("file_id")],
        },
        "/v1/batches": {**batches, "parameters": _PAGE},
        "/v1/batches/{batch_id}": {**batch, "parameters": [_in_path("batch_id")]},
        "/v1/batches/{batch_id}/cancel": {**cancel, "parameters": [_in_path("batch_id")]},
    }


def batch_answers() -> Json:
    """Schemas of what is given."""
    counts = _object(total=_COUNT, completed=_COUNT, failed=_COUNT)
    return {
        "File": _object(
            id=_TEXT,
            object={"const": "file"},
            bytes=_COUNT,
            created_at=_COUNT,
            filename=_TEXT,
            purpose={"enum": ["batch", "batch_output"]},
        ),
        "DeletedFile": _object(id=_TEXT, object={"const": "file"}, deleted={"const": True}),
        "FileList": _list("File"),
        "Batch": _object(
            id=_TEXT,
            object={"const": "batch"},
            endpoint=_TEXT,
            input_file_id=_TEXT,
            completion_window=_TEXT,
            status={"enum": _STATES},
            output_file_id=_ANY,
            error_file_id=_ANY,
            created_at=_COUNT,
            expires_at=_COUNT,
            request_counts=counts,
        ),
        "BatchList": _list("Batch"),
        "DeletedBatch": _object(id=_TEXT, object={"const": "batch"}, deleted={"const": True}),
    }


_STATES = [
    *("validating", "failed", "in_progress", "finalizing", "completed"),
    *("expired", "cancelling", "cancelled"),
]
_PAGE = [
    {"name": "limit", "in": "query", "schema": _COUNT},
    {"name": "after", "in": "query", "schema": _TEXT},
]


def _in_path(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _does(
    method: str, name: str, summary: str, content: Json, refusals: Json, body: Json | None = None
) -> Json:
    responses = {"200": {"description": "the answer", "content": content}, **refusals}
    operation: Json = {"operationId": name, "summary": summary, "responses": responses}
    return {method: operation if body is None else {**operation, "requestBody": body}}


def _content(schema: str) -> Json:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _list(of: str) -> Json:
    rows = {"type": "array", "items": {"$ref": f"#/components/schemas/{of}"}}
    return _object(object={"const": "list"}, data=rows, has_more={"type": "boolean"})


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}
