"""Reading a JSON body within a limit, whatever the sender does."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from phasewise.serving.http.errors import ApiError, bad_request, from_validation

Body = TypeVar("Body", bound=BaseModel)

_DISCARD_UP_TO_BYTES = (
    64 * 1024 * 1024
)  # read on past the limit so far, so that the sender gets to see the answer

_MOST_VALUES = 160 * 1024  # token ids of a long context
_MOST_CONTAINERS = 64 * 1024


async def read_body(request: Request, model: type[Body], max_bytes: int) -> Body:
    """The request's body as `model`, or an ApiError: 413 where too large, 400 where not what `model` says."""
    raw = await _read_limited(request, max_bytes)
    _refuse_floods(raw)
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from error


async def _read_limited(request: Request, max_bytes: int) -> bytes:
    kept, n_read = [], 0
    async for part in request.stream():
        n_read += len(part)
        if n_read <= max_bytes:
            kept.append(part)
        elif n_read > _DISCARD_UP_TO_BYTES:
            break
    if n_read > max_bytes:
        raise ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
    return b"".join(kept)


def _refuse_floods(raw: bytes) -> None:
    """Every value of JSON costs far more than its bytes, and nothing else runs while JSON is read.

    Signs inside of texts are counted too; a text with so many of them is longer than any context.
    """
    if raw.count(b",") >= _MOST_VALUES or raw.count(b"[") + raw.count(b"{") > _MOST_CONTAINERS:
        raise bad_request(
            f"the body has more than {_MOST_VALUES} values or {_MOST_CONTAINERS} lists and objects; "
            "send less at a time",
            code="too_many_values",
        )
