"""Reader of TOML from strangers: text that tomllib would take minutes for is refused before it is parsed."""

from __future__ import annotations

import re
import tomllib
from typing import Any

MAX_KEY_PARTS = 16
_PART = rb"""(?:"[^"\n]{0,64}"|'[^'\n]{0,64}'|[\w-]{1,64})[ \t]{0,8}\.[ \t]{0,8}"""
_LONG_KEY = re.compile(rb"(?<![\w-])(?:" + _PART + rb"){%d}" % MAX_KEY_PARTS)


def parse_toml(data: bytes) -> dict[str, Any]:
    """Parse a TOML document. ValueError, in one line, for other text, or a key of many parts."""
    if _LONG_KEY.search(data):  # tomllib's time grows with the square of a key's parts
        raise ValueError(f"it has a key of more than {MAX_KEY_PARTS} parts")
    try:
        return tomllib.loads(data.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
