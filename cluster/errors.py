"""Errors in planning a cluster: one clear line each, exit code 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pydantic import ValidationError

MAX_SHOWN = 200
"""Most characters of a part of a message that an error shows."""


class ClusterError(Exception):
    """A cluster, a trace or a goal that cannot be simulated. The message names the thing and what to do."""

    exit_code: ClassVar[int] = 1


def first_line(error: ValidationError) -> str:
    """The first fault of a message or a file, with its place there, as pydantic found it."""
    problems = error.errors(include_url=False, include_input=False)
    first = problems[0] if problems else {"loc": (), "msg": "it is empty"}
    place = ".".join(map(str, first["loc"]))
    return f"{place[:MAX_SHOWN]}: {first['msg'][:MAX_SHOWN]}"
