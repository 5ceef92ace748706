"""Errors below Python: a kernel that this machine cannot run, a weight that no kernel reads."""

from __future__ import annotations

from typing import ClassVar


class KernelError(Exception):
    """Base of the errors of this package."""

    exit_code: ClassVar[int] = 1


class IsaError(KernelError):
    """PHASEWISE_ISA or PHASEWISE_CORE, or a caller, named what does not exist or does not run here."""


class WeightError(KernelError):
    """A packed weight whose arrays do not have the dtype, shape or layout that its fields promise."""


class TeamError(KernelError):
    """A thread team cannot be opened, pinned or used."""


class ProgramError(KernelError):
    """A program whose ops, offsets or sizes do not fit together, or for which there is no memory."""


class GroupError(KernelError):
    """A process group that cannot be had, has failed, or whose other ranks did not come in time."""


class GroupFailed(GroupError):
    """Ranks that ran a program together no longer do: one has failed, ended or not come in time."""
