"""By which arithmetic weights are multiplied, where the user says so; light enough for the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from phasewise.workflows.errors import UsageError

ArithmeticChoice = Literal["tuned", "canonical", "groups", "blocks", "tiles"]
"""`canonical`: every weight by the arithmetic that all CPUs share, whatever was tuned. `tiles`: bf16 and
quantised weights by that of the tile unit, in both phases. Else of K-quants:
sub-scales apply in float32 for every 16 or 32 inputs (`groups`), or in integers for 256 (`blocks`);
`tuned`: as `tune-kernels` found faster; where it has not run, `blocks` with a tile unit and `groups` without.
"""
ARITHMETIC_CHOICES: tuple[ArithmeticChoice, ...] = get_args(ArithmeticChoice)

PATHS: Mapping[ArithmeticChoice, str] = {"groups": "int8_dot", "blocks": "int8_block"}


def check_arithmetic(choice: ArithmeticChoice) -> None:
    """UsageError for a choice that this CPU cannot follow."""
    if choice != "tiles":
        return
    from phasewise.cython_kernels import isa
    from phasewise.cython_kernels.schedules import has_tiles_arithmetic

    if not has_tiles_arithmetic():
        raise UsageError(
            f"--arithmetic tiles: {isa.active()} has no tile unit: use a CPU with AMX, or leave that out"
        )
