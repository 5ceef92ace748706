"""The page's files: what a browser is told of them, and that nothing in them comes from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources

import httpx
import pytest

from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.routes.app import ServerContext
from phasewise.serving.http.routes.openapi import OPEN_PATHS, POLICY
from tests.support.servers.fake_server import FakeServer, fake_server


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    limits = HttpLimits(api_keys=("right",))
    with fake_server(limits, surroundings=ServerContext(page=True)) as running:
        yield running


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_files_come_with_a_strict_policy_and_without_a_key(server: FakeServer, path: str) -> None:
    answer = httpx.get(f"{server.url}{path}")
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in POLICY
    assert not re.search(r"https?://(?!www\.w3\.org)", POLICY)


def test_nothing_comes_from_other_hosts_and_no_markup_is_made_of_text() -> None:
    folder = resources.files("phasewise.serving.http").joinpath("page")
    for file in folder.iterdir():
        text = file.read_text(encoding="utf-8")
        for url in re.findall(r"https?://[\w.-]+", text):
            assert url in ("http://www.w3.org",), (file.name, url)
        for dangerous in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "onclick=",
        ):
            assert dangerous not in text, (file.name, dangerous)
        if file.name.endswith(".html"):
            assert "<style" not in text
            assert not re.search(r"<script(?![^>]*src=)", text)


def test_what_the_page_shows_of_the_engine_needs_the_key(server: FakeServer) -> None:
    for path in ("/v1/models", "/page/other.js"):
        assert httpx.get(f"{server.url}{path}").status_code == 401
    key = {"Authorization": "Bearer right"}
    assert httpx.get(f"{server.url}/page/other.js", headers=key).status_code == 404


def test_there_need_be_no_page() -> None:
    with fake_server() as server:
        assert httpx.get(f"{server.url}/").status_code == 404
