"""Folders of a user's own files, by the XDG base directory specification."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

Kind = Literal["cache", "config", "data", "state"]
_BELOW_HOME: dict[Kind, str] = {
    "cache": ".cache",
    "config": ".config",
    "data": ".local/share",
    "state": ".local/state",
}


def user_folder(kind: Kind) -> Path:
    """The folder `phasewise` in `$XDG_KIND_HOME`, or in that kind's place below the home directory."""
    named = os.environ.get(f"XDG_{kind.upper()}_HOME", "")
    base = named if named.strip() else os.path.expanduser(f"~/{_BELOW_HOME[kind]}")
    return Path(base, "phasewise")


def cache_folder() -> Path:
    """The cache folder: `$PHASEWISE_CACHE`, or phasewise's folder in the XDG cache directory."""
    named = os.environ.get("PHASEWISE_CACHE")
    return Path(named) if named else user_folder("cache")
