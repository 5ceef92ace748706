"""By which arithmetic weights are multiplied, where the user says so; light enough for the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

ArithmeticChoice = Literal["tuned", "canonical", "groups", "blocks"]
"""`canonical`: every weight by the arithmetic that all CPUs share, whatever was tuned. Else of K-quants:
sub-scales apply in float32 for every 16 or 32 inputs (`groups`), or in integers for 256 (`blocks`);
`tuned`: as `tune-kernels` found faster, and `groups` where it has not run."""
ARITHMETIC_CHOICES: tuple[ArithmeticChoice, ...] = get_args(ArithmeticChoice)

PATHS: Mapping[ArithmeticChoice, str] = {"groups": "int8_dot", "blocks": "int8_block"}
