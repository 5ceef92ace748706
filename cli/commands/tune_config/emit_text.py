"""Plans as another tool's flags: these alone on stdout, so that a shell can use them; remarks on stderr."""

from __future__ import annotations

from collections.abc import Mapping

from phasewise.cli.present import note, write_text
from phasewise.topology import Machine
from phasewise.tuner.emit import emit
from phasewise.tuner.plans import Phase, ServicePlan


def print_emitted(tool: str, plans: Mapping[Phase, ServicePlan], machine: Machine) -> None:
    """Print what `tuner.emit` makes of the plans."""
    emitted = emit(tool, plans, machine)
    for line in emitted.notes:
        note(f"# {line}")
    write_text(emitted.text + "\n")
