"""Servers over a fake engine, and over one whose model answers by a script."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # imported where it is used: most tests of this room need neither
    import openai

    from tests.support.servers.fake_server import FakeServer
    from tests.support.servers.scripted_engine import ScriptedRanks


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    """A server over the fake engine, without limits of its own."""
    from tests.support.servers.fake_server import fake_server

    with fake_server() as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[FakeServer, ScriptedRanks]]:
    from tests.support.models.tool_templates import HERMES
    from tests.support.servers.scripted_engine import scripted_server

    with scripted_server(HERMES, "<|im_start|>assistant\n") as server_and_ranks:
        yield server_and_ranks


@pytest.fixture
def ranks(running: tuple[FakeServer, ScriptedRanks]) -> Iterator[ScriptedRanks]:
    yield running[1]
    running[0].wait_until_idle()


@pytest.fixture(scope="module")
def api(running: tuple[FakeServer, ScriptedRanks]) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{running[0].url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client
