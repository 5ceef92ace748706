"""docs/reference/http-api.md says what the server has now."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("made", ROOT / "docs" / "make_http_reference.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), "run make docs"
    for needed in ("`tool_choice`", "`previous_response_id`", "`queue_full` | 429", "phasewise_ttft_seconds"):
        assert needed in made.page(), needed
