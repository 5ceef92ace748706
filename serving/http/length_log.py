"""The opt-in log of prompts and how long their answers became: JSON lines for `predict-len` to learn from."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from phasewise.serving.http.requests.lengths import RealisedLength
from phasewise.serving.processes.line_log import LineLog

SCHEMA_VERSION = 3
"""2: `lookup`, and where drafts are on `drafted_tokens` and `accepted_tokens`; 3: `lookup` is gone."""


class LengthLog(LineLog):
    """Appends to `path`, of mode 0600. ServingError where it cannot be opened."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        super().__init__("length log", path, report, is_private=True)

    def put(self, model_name: str, length: RealisedLength) -> None:
        """From any thread; never waits."""
        self.write(partial(_written, model_name, length))


def _written(model_name: str, length: RealisedLength) -> bytes:
    facts, drafts = length.facts, length.drafts
    fields = {
        "schema_version": SCHEMA_VERSION,
        "model": length.adapter or model_name,
        "prompt_token_ids": facts.token_ids,
        "temperature": facts.temperature,
        "max_tokens": facts.max_tokens,
        "n_messages": facts.n_messages,
        "system_prompt_id": facts.system_prompt_id,
        "output_tokens": length.output_tokens,
        "finish_reason": length.finish_reason,
        "arrived_at_s": round(length.arrived_at_s, 3),
        "at_s": round(length.at_s, 3),
    }
    if drafts is not None:
        fields |= {"drafted_tokens": drafts.drafted, "accepted_tokens": drafts.accepted}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
