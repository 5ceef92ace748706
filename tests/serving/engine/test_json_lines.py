"""All that a server writes to stderr, as JSON."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime

from hypothesis import example, given
from hypothesis import strategies as st

from phasewise.serving.processes.json_lines import as_json, copy_lines


@given(st.binary(max_size=200))
@example(b"[" * 100_000)
@example(b"\xff\n{}\n\n1e999\nwarning: x\nphasewise: y\r\n")
def test_whatever_is_written_becomes_lines_of_objects(written: bytes) -> None:
    out = io.BytesIO()
    copy_lines(io.BytesIO(written), out)

    lines = out.getvalue().split(b"\n")
    assert lines.pop() == b""
    assert all(isinstance(json.loads(line), dict) for line in lines)
    assert len(lines) >= sum(bool(line.strip()) for line in written.split(b"\n"))


def test_a_line_says_how_bad_it_is() -> None:
    def told(line: bytes) -> tuple[str, str]:
        fields = json.loads(as_json(line, datetime.now(UTC)))
        return fields["level"], fields["message"]

    assert told(b"listening on http://localhost\n") == ("info", "listening on http://localhost")
    assert told(b"warning: no key\n") == ("warning", "no key")
    assert told(b"phasewise: it failed\n") == ("error", "phasewise: it failed")
    assert as_json(b'{"path": "/v1/models"}\n', datetime.now(UTC)) == b'{"path": "/v1/models"}\n'
