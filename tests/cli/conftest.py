"""Places and models that the tests of many commands use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models.tiny_models import TinyShape, tiny_gguf


@pytest.fixture
def own_places(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the user's: no settings, a database of this test's, a cache and data of these tests'."""
    base = tmp_path_factory.getbasetemp()
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(base / "data"))
    monkeypatch.setenv("PHASEWISE_CONFIG", "/dev/null")
    monkeypatch.setenv("PHASEWISE_DB", str(tmp_path / "tuned.db"))
    monkeypatch.delenv("PHASEWISE_FORMAT", raising=False)


@pytest.fixture
def db(own_places: None, tmp_path: Path) -> Path:
    """The database by default; nothing is there yet."""
    return tmp_path / "tuned.db"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with a context of 256 tokens."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    path.write_bytes(tiny_gguf().to_bytes())
    return path


@pytest.fixture(scope="session")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny` with a context of 100,000 tokens."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    path.write_bytes(tiny_gguf(shape=TinyShape(context_length=100_000)).to_bytes())
    return path
