"""Reading a JSON body within a limit, whatever the sender does."""

from __future__ import annotations

import asyncio
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
_COUNTED_AT_ONCE_BYTES = 256 * 1024
_WORTH_A_THREAD_BYTES = 256 * 1024
"""Checking a larger body takes milliseconds; on a thread Python's lock goes round between its steps."""


class BodyReader:
    """Reads bodies of at most `max_bytes`; one on each event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._large = asyncio.Semaphore(1)  # of many threads that want Python's lock the loop is but one

    async def read(self, request: Request, model: type[Body]) -> Body:
        """The body as `model`, or an ApiError: 413 where too large, 400 where not what `model` says."""
        raw = await _read_limited(request, self._max_bytes)
        if len(raw) <= _WORTH_A_THREAD_BYTES:
            return _checked(raw, model)
        async with self._large:
            return await asyncio.to_thread(_checked, raw, model)


def _checked(raw: bytes, model: type[Body]) -> Body:
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
    n_values = n_containers = 0
    for start in range(0, len(raw), _COUNTED_AT_ONCE_BYTES):
        end = start + _COUNTED_AT_ONCE_BYTES
        n_values += raw.count(b",", start, end)
        n_containers += raw.count(b"[", start, end) + raw.count(b"{", start, end)
        if n_values >= _MOST_VALUES or n_containers > _MOST_CONTAINERS:
            raise bad_request(
                f"the body has more than {_MOST_VALUES} values or {_MOST_CONTAINERS} lists and objects; "
                "send less at a time",
                code="too_many_values",
            )
