"""The docs' front page names every version that is there, and `latest` leads to the newest."""

from __future__ import annotations

import re
from pathlib import Path
from runpy import run_path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiers import examples

INDEX = run_path(str(Path(__file__).parents[2] / "docs" / "site_index.py"))
NUMBERS = st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))


@given(drawn=st.sets(NUMBERS, min_size=1, max_size=6))
@examples(20)
def test_every_version_is_listed_and_latest_is_the_newest(
    tmp_path_factory: pytest.TempPathFactory, drawn: set[tuple[int, int, int]]
) -> None:
    site = tmp_path_factory.mktemp("site")
    names = {number: ".".join(map(str, number)) for number in drawn}
    for name in (*names.values(), "assets"):
        (site / name).mkdir()

    INDEX["write"](site)
    INDEX["write"](site)  # a version more, or the same again

    listed = re.findall(r'href="([\d.]+)/"', (site / "index.html").read_text())
    assert listed == [names[number] for number in sorted(drawn, reverse=True)]
    (leads,) = re.findall(r"url=\.\./([\d.]+)/", (site / "latest" / "index.html").read_text())
    assert leads == names[max(drawn)]
