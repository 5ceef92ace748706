"""A PostgreSQL server of our own for the tests: a socket in a temporary directory, no network."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

_OPTIONS = ("-c", "listen_addresses=", "-c", "fsync=off", "-c", "shared_buffers=16MB", "-c", "autovacuum=off")


@contextlib.contextmanager
def postgres_socket() -> Iterator[Path]:
    """The socket's directory, of a server that lives as long as the block. Skips without PostgreSQL."""
    pytest.importorskip("psycopg", reason="the PostgreSQL driver is not installed")
    initdb, postgres, is_ready = (_program(name) for name in ("initdb", "postgres", "pg_isready"))
    with tempfile.TemporaryDirectory(prefix="phasewise-pg-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        as_user = _unprivileged(folder)
        subprocess.run(
            [initdb, "-D", folder / "data", "-U", "phasewise", "-A", "trust", "-E", "UTF8", "--no-sync"],
            check=True, capture_output=True, user=as_user, cwd=folder,
        )  # fmt: skip
        server = subprocess.Popen(
            [postgres, "-D", folder / "data", "-k", folder, *_OPTIONS],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, user=as_user, cwd=folder,
        )  # fmt: skip
        stack.callback(server.wait, 20)
        stack.callback(server.send_signal, signal.SIGINT)  # ends its clients too
        for _ in range(200):
            if subprocess.run([is_ready, "-q", "-h", folder], check=False).returncode == 0:
                break
            assert server.poll() is None, "the PostgreSQL server ended"
        yield folder


def _program(name: str) -> str:
    """Debian keeps the server's programs out of PATH, in a folder for each version."""
    folders = [*map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))]
    program = shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))
    return program or pytest.skip(f"PostgreSQL is not installed: there is no {name}")


def _unprivileged(folder: Path) -> int | None:
    """PostgreSQL refuses to run as root: then it runs as the user `nobody`, which owns the folder."""
    if os.geteuid() != 0:
        return None
    folder.chmod(0o755)
    os.chown(folder, 65534, 65534)
    return 65534


def new_database_url(socket: Path) -> str:
    """The URL of an empty database."""
    import psycopg

    name = f"test_{uuid.uuid4().hex}"
    with psycopg.connect(
        host=str(socket), user="phasewise", dbname="postgres", autocommit=True
    ) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"postgresql+psycopg://phasewise@/{name}?host={socket}"
