"""`--db` names a file, memory or a server, whose password is never shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phasewise.kerneldb.connect import engine_for
from phasewise.kerneldb.errors import KernelDbError
from phasewise.kerneldb.location import MEMORY_URL, Location, locate


def test_the_default_is_in_the_xdg_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))

    assert locate(None) == Location(tmp_path / "phasewise" / "phasewise.db", None, is_default=True)
    assert locate(None).is_absent


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("tuned.db", "{cwd}/tuned.db"),
        ("/data/a b%20?.db", "/data/a b%20?.db"),
        ("~/x.db", "{home}/x.db"),
        ("sqlite:///tuned.db", "{cwd}/tuned.db"),
        ("sqlite:////data/x.db", "/data/x.db"),
        ("sqlite+pysqlite:////data/x.db", "/data/x.db"),
    ],
)
def test_a_path_or_a_sqlite_url_is_a_file(text: str, path: str) -> None:
    expected = Path(path.format(cwd=Path.cwd(), home=Path.home()))

    assert locate(text) == Location(expected, None)
    assert locate(text).name == str(expected)


@pytest.mark.parametrize(
    "text", [":memory:", "sqlite://", "sqlite:///:memory:", "sqlite:///", "sqlite+pysqlite://"]
)
def test_memory_has_several_names(text: str) -> None:
    assert locate(text) == Location(None, MEMORY_URL)
    assert not locate(text).is_absent


@pytest.mark.parametrize(
    "text", ["", "a\0b", "sqlite:odd", "sqlite:///x?mode=ro", "sqlite+aiosqlite:///x", "~no-such-user/x"]
)
def test_what_names_no_database_is_refused(text: str) -> None:
    with pytest.raises(KernelDbError):
        locate(text)


def test_a_kind_of_database_that_is_not_known_is_named() -> None:
    with pytest.raises(KernelDbError, match=r"unknown kind.*nosuchkind"):
        engine_for(locate("nosuchkind://host/db"), read_only=False)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("postgresql://me:secret@host:5432/db", "postgresql://me:***@host:5432/db"),
        ("postgresql+psycopg://me:se:cr@et@host/db", "postgresql+psycopg://me:***@host/db"),
        ("postgresql://me:pa/ss@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me:pa?ss#w@host/db", "postgresql://me:***@host/db"),
        ("postgresql://:secret@host/db", "postgresql://:***@host/db"),
        ("postgresql://host/db?user=me&password=secret", "postgresql://host/db?user=me&password=***"),
        ("postgresql://host/db?PassWord=s%20t&x=1", "postgresql://host/db?PassWord=***&x=1"),
        ("postgresql://host/db?sslpassword=s&sslkey=k", "postgresql://host/db?sslpassword=***&sslkey=***"),
        ("mysql://host/db?passwd=secret", "mysql://host/db?passwd=***"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("postgresql://host:5432/db", "postgresql://host:5432/db"),
        ("postgresql:///db?host=/run", "postgresql:///db?host=/run"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, name: str) -> None:
    assert locate(url).url == url
    assert locate(url).name == name


@pytest.mark.parametrize(
    "url", ["sqlite+pysqlcipher://:secret@/file.db", "sqlite:///file.db?password=secret"]
)
def test_a_refused_url_is_told_without_its_password(url: str) -> None:
    with pytest.raises(KernelDbError) as refusal:
        locate(url)

    assert "secret" not in str(refusal.value)


def test_finding_the_database_does_not_load_sqlalchemy() -> None:
    """A first `generate`, without any database, starts without paying for it."""
    code = (
        "import sys, phasewise.tuner.plans, phasewise.kerneldb.location; "
        "print([name for name in ('sqlalchemy', 'alembic') if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert loaded.strip() == "[]"
