"""How results reach a person or a script: data on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from typing import Any, NoReturn

SCHEMA_VERSION = 1


def print_json(fields: dict[str, Any]) -> None:
    """One JSON object on stdout, led by the version of its schema."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **fields}, indent=2, ensure_ascii=False))


def note(message: str) -> None:
    """One line of progress or remark on stderr."""
    print(message, file=sys.stderr, flush=True)


def fail(message: str, exit_code: int) -> NoReturn:
    """One line on stderr, then the end."""
    note("phasewise: " + " ".join(message.split()))
    sys.exit(exit_code)
