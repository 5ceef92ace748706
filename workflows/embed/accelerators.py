"""The accelerators that a command may embed on: GPUs here, and devices behind workers of the user's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phasewise.serving.embedding.devices import Command, accelerators, command_of
from phasewise.workflows.errors import UsageError


@dataclass(frozen=True)
class Accelerators:
    """`names`: e.g. cuda:0, exec:0. `commands`: the workers' commands of exec devices, by name.

    A command comes from the command line or the configuration file of this host, and never from a database,
    which others may have filled.
    """

    names: tuple[str, ...] = ()
    commands: Mapping[str, Command] = field(default_factory=dict)


def accelerators_here(*, with_gpus: bool, devices: Sequence[str] | None) -> Accelerators:
    """List GPUs, then `exec:COMMAND` devices in their order. Raises UsageError for any other device."""
    try:
        commands = {f"exec:{index}": command_of(text) for index, text in enumerate(devices or ())}
    except ValueError as error:
        raise UsageError(f"--embed-device {error}") from error
    gpus = accelerators() if with_gpus else []
    return Accelerators((*gpus, *commands), commands)
