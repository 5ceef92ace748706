"""C's arithmetic on whole numbers, for constants and for the interpreter."""

from __future__ import annotations

from phasewise.ir.operations import fitting
from phasewise.ir.types import Scalar


def integer_result(op: str, a: int, b: int, of: Scalar) -> int | None:
    """The result of `a op b` in a type that both have; None where C defines none: a division by 0, a shift by
    too much."""
    value = _exact(op, a, b, 8 * of.size)
    return None if value is None else int(fitting(value, of))


def _exact(op: str, a: int, b: int, bits: int) -> int | None:
    match op:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
        case "/" | "%":
            if b == 0:
                return None
            quotient = abs(a) // abs(b)
            quotient = -quotient if (a < 0) != (b < 0) else quotient
            return quotient if op == "/" else a - b * quotient
        case "<<" | ">>":
            if not 0 <= b < bits:
                return None
            return a << b if op == "<<" else a >> b
        case "&":
            return a & b
        case "|":
            return a | b
        case "^":
            return a ^ b
        case "<":
            return int(a < b)
        case "<=":
            return int(a <= b)
        case ">":
            return int(a > b)
        case ">=":
            return int(a >= b)
        case "==":
            return int(a == b)
        case "!=":
            return int(a != b)
        case "&&":
            return int(bool(a) and bool(b))
        case "||":
            return int(bool(a) or bool(b))
        case _:
            raise ValueError(op)
