"""A PostgreSQL server for the tests of this room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machines.kerneldb_server import postgres_socket


@pytest.fixture(scope="session")
def postgres() -> Iterator[Path]:
    """Its socket's directory; each test takes a database of its own."""
    with postgres_socket() as socket:
        yield socket
