"""Errors of a kernel that a user brings: one line each, with file and line where they are known."""

from __future__ import annotations


class UserKernelError(Exception):
    """An expected failure: the command prints its line and exits with 1."""

    exit_code = 1


class SourceError(UserKernelError):
    """A construct outside the subset, or text that does not parse."""

    def __init__(self, where: str, line: int, reason: str) -> None:
        super().__init__(f"{where}:{line}: {reason}" if line else f"{where}: {reason}")
        self.line = line
        self.reason = reason


class CheckError(UserKernelError):
    """A kernel and its original differ, or a kernel touches memory that its description does not give it."""


class ToolError(UserKernelError):
    """A compiler or an emulator is missing, failed, or exceeded its limits."""
