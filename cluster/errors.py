"""Errors in planning a cluster: one clear line each, exit code 1."""

from __future__ import annotations

from typing import ClassVar


class ClusterError(Exception):
    """A cluster, a trace or a goal that cannot be simulated. The message names the thing and what to do."""

    exit_code: ClassVar[int] = 1
