"""The body that begins a batch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from phasewise.serving.http.requests.schemas import OpenRequest

_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class BatchRequest(OpenRequest):
    """A batch to begin. `metadata`: up to 16 texts, given back, within OpenAI's bounds."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=64)]
    endpoint: str
    completion_window: Annotated[str, Field(max_length=16)] = "24h"
    metadata: Annotated[dict[_Key, _Value], Field(max_length=16)] | None = None
