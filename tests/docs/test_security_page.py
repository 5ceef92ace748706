"""docs/security.md says what is so: rows, tests, flags and limits are those of the code."""

from __future__ import annotations

import re

from phasewise._json import MOST_CONTAINERS, MOST_VALUES
from phasewise.serving.grammar import grammar_limits, guides
from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.requests import request_threads as preparation
from phasewise.serving.http.requests import schemas
from phasewise.serving.http.routes import embeddings, responses
from phasewise.serving.text import chat_template as chat
from tests.soak.hostile import ROWS
from tests.support import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text()
MIB = 1 << 20


def limits() -> dict[str, str]:
    """The table of limits: what is limited, and how."""
    rows = (line.split("|")[1:3] for line in PAGE.splitlines() if line.startswith("| "))
    return {name.strip(): limit.strip() for name, limit in rows}


def test_the_threats_name_every_row_of_the_benchmark_and_tests_that_exist() -> None:
    table = PAGE.partition("## Threats")[2]
    named = re.findall(r"`([a-z_]+)`", table.partition("What was tried before")[0])
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}

    assert set(ROWS) == set(named)
    assert set(re.findall(r"`(test_[a-z_]+\.py)`", table)) <= tests
    assert re.findall(r"^\| (\d+) \|", table, re.MULTILINE) == [str(number) for number in range(1, 17)]


def test_its_flags_are_flags_of_serve() -> None:
    serve = (ROOT / "docs" / "reference" / "cli.md").read_text()
    of_serve = "\n".join(
        line for line in PAGE.splitlines() if "tests.soak" not in line and "Suite" not in line
    )
    flags = set(re.findall(r"`(--[a-z-]+)", of_serve))

    assert {flag for flag in flags if flag not in serve} == set()


def test_its_limits_are_those_of_the_code() -> None:
    told, ours = limits(), HttpLimits()
    expected = {
        "body of a request": (
            f"{ours.max_body_bytes // MIB} MiB; {MOST_VALUES:,} values, {MOST_CONTAINERS:,} lists and objects"
        ),
        "bodies that have not come whole, together": (
            f"{ours.max_unfinished_bytes // MIB} MiB; the one that began first makes room"
        ),
        "open connections; from one address": (
            f"{ours.max_connections:,}; {ours.max_connections_per_address:,}"
        ),
        "memory of an answer until it is sent; of all answers of the engine": (
            f"{ours.max_response_bytes // MIB} MiB; eight times that"
        ),
        "requests waiting to be prepared: texts, conversations, longer than 128 Ki characters, grammars": (
            f"{preparation._MOST_ORDINARY}, {preparation._MOST_ORDINARY}, {preparation._MOST_LONG}, "
            f"{preparation._MOST_GRAMMARS}; then 429"
        ),
        "requests for vectors waiting to be cut into tokens: short, longer than 256 Ki characters": (
            f"{embeddings._MOST_ORDINARY}, {embeddings._MOST_LONG}; then 429"
        ),
        "responses kept for `previous_response_id`; their characters; seconds": (
            f"{responses.MOST_KEPT:,}; {responses.MOST_KEPT_CHARACTERS >> 20} Mi; {responses.STORED_S:,.0f}"
        ),
        "compiling a grammar": (
            f"{guides.BOUNDS.seconds:g} s of processor time, {guides.BOUNDS.memory_bytes // MIB} MiB"
        ),
        "writing a conversation out by the model's template": (
            f"{chat.BOUNDS.seconds:g} s of processor time, {chat.BOUNDS.memory_bytes // MIB} MiB, "
            f"{chat.MOST_CHARACTERS >> 20} Mi characters"
        ),
        "integers in requests (`max_tokens`, `top_k`)": f"{schemas.MOST_INT:,}",
    }

    assert {name: told.get(name) for name in expected} == expected
    assert f"{embeddings.MOST_INPUTS:,}; the depths" in PAGE
    assert f"{grammar_limits.MOST_INTERSECTION:,}" in PAGE
