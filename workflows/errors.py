"""Errors of workflows, where no room below has a name for them."""

from __future__ import annotations

from typing import ClassVar


class WorkflowError(Exception):
    """A workflow cannot do what was asked. The message names the thing, what is wrong and what to do."""

    exit_code: ClassVar[int] = 1


class UsageError(WorkflowError):
    """Settings that exclude each other, or one that is out of its range: wrong usage on a command line."""

    exit_code: ClassVar[int] = 2
