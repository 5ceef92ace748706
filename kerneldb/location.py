"""The location of a database: a file, an SQLAlchemy URL, or the user's own.

Free of SQLAlchemy, so that a command that needs no database does not pay for loading it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from phasewise._places import user_folder
from phasewise.kerneldb.errors import DatabaseNameError

FILE_NAME = "phasewise.db"
MEMORY_URL = "sqlite://"

_SQLITE_URL = re.compile(r"sqlite(?:\+pysqlite)?://(?:/([^?#]*))?")
# SQLAlchemy takes all up to the @ for the password, a slash or a question mark too. Where there are several,
# too much is hidden rather than too little.
_PASSWORD = re.compile(r"(://[^:/@]*:).*@", re.DOTALL)
_SECRET_PARAMETER = re.compile(r"(?i)([?&;][^=&;#]*(?:pass|pwd|secret|token|key)[^=&;#]*=)[^&;#]*")


@dataclass(frozen=True)
class Location:
    """The location of a database: either a SQLite file or a URL; exactly one of the two is set."""

    file: Path | None
    url: str | None
    is_default: bool = False

    @property
    def name(self) -> str:
        """The name for people: the file, or the URL without its password."""
        return str(self.file) if self.file else redacted(self.url or "")

    @property
    def is_absent(self) -> bool:
        """True if the database is known not to exist yet; False for every server."""
        return self.file is not None and not os.path.lexists(self.file)


def redacted(url: str) -> str:
    """Return an SQLAlchemy URL without the secrets in it; other text stays as it is."""
    if "://" not in url:
        return url
    return _SECRET_PARAMETER.sub(r"\1***", _PASSWORD.sub(r"\1***@", url))


def default_file() -> Path:
    """The user's own database: `phasewise/phasewise.db` in the XDG data directory."""
    return user_folder("data") / FILE_NAME


def locate(db: str | os.PathLike[str] | None) -> Location:
    """Find the location that `--db` names: the default file for None, a path (`~` is expanded), or a URL such
    as `postgresql://host/name`. `sqlite:///relative/file` and `sqlite:////absolute/file` are files too;
    `sqlite://` and `:memory:` are databases in memory."""
    if db is None:
        return Location(default_file(), None, is_default=True)
    text = os.fspath(db)
    if not text or "\0" in text:
        raise DatabaseNameError("the database name is empty or has a NUL in it: give a file or a URL")
    sqlite = _SQLITE_URL.fullmatch(text)
    if text == ":memory:" or (sqlite and sqlite[1] in (None, "", ":memory:")):
        return Location(None, MEMORY_URL)
    if sqlite:
        return Location(Path(sqlite[1]).absolute(), None)
    if text.startswith(("sqlite:", "sqlite+")):
        raise DatabaseNameError(
            f"database {redacted(text)}: for SQLite give the path of a file, without parameters"
        )
    if "://" in text:
        return Location(None, text)
    try:
        return Location(Path(text).expanduser().absolute(), None)
    except RuntimeError:
        raise DatabaseNameError(f"database {text}: there is no home directory of that user") from None
