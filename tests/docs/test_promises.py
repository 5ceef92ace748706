"""Every sentence of the guides about several machines has a row in `promises.toml`: the tests that hold it to
what it promises, or that it promises nothing."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

import pytest

from tests.support import ROOT

ROWS = tomllib.loads((ROOT / "tests" / "docs" / "promises.toml").read_text())
FILES = {str(path): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}


def sentences(page: str) -> Iterator[str]:
    """Those of a guide, and each row of its tables; links alone are none."""
    text = re.sub(r"```.*?```|<!--.*?-->", "\n", (ROOT / "docs" / "guide" / page).read_text(), flags=re.S)
    text = re.sub(r"^\|.*\|\n(?=\|[-|]+$)", "", text, flags=re.M)  # heads of tables
    for paragraph in re.split(r"\n\s*\n|\n(?=[-|#] ?)", text):
        line = " ".join(paragraph.split())
        if not line or line.startswith("#") or set(line) <= set("|- "):
            continue
        if line.startswith("|"):
            yield line
            continue
        for sentence in re.split(r"(?<=[.:?!]) (?=[A-Z`*\[])", line.removeprefix("- ")):
            if not re.fullmatch(r"\[[^\]]*\]\([^)]*\)\.?", sentence):
                yield sentence


@pytest.mark.parametrize("page", ROWS)
def test_every_sentence_has_a_row(page: str) -> None:
    """One of which only the words changed keeps its row: by its first words."""
    there = list(sentences(page))
    for sentence in there:
        rows = [words for words in ROWS[page] if sentence.startswith(words)]
        assert len(rows) == 1, f"{page}: {sentence!r} has {len(rows)} rows in tests/docs/promises.toml"
    unused = [words for words in ROWS[page] if not any(sentence.startswith(words) for sentence in there)]
    assert not unused


@pytest.mark.parametrize("page", ROWS)
def test_every_row_names_tests_that_are_there(page: str) -> None:
    for words, named in ROWS[page].items():
        file = ""
        for name in named.split():
            if name.startswith("notes/"):
                assert (ROOT / "benchmarks" / name).exists(), f"{page}: {words}: {name}"
                continue
            file = name.partition("::")[0] if "::" in name else file
            test = name.rpartition("::")[2]
            (text,) = (text for path, text in FILES.items() if path.endswith(f"/{file}"))
            assert re.search(rf"^(?:async )?def {test}\(", text, re.M), f"{page}: {words}: {file} {test}"
