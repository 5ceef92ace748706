"""Settings of `phasewise batch`."""

from __future__ import annotations

from dataclasses import dataclass

from phasewise._options import option
from phasewise.workflows.options import DRAFT, DRAFT_TOKENS, KV_FORMAT


@dataclass(frozen=True)
class OwnServing:
    """The way a model is served for one batch."""

    concurrency: int = option(32, "requests at the same time", min=1, max=512, metavar="N")
    draft: str | None = DRAFT(None)
    draft_tokens: int | None = DRAFT_TOKENS(None)
    kv_format: str = KV_FORMAT("auto")
