"""Arm's estimates of 1 / x and 1 / sqrt(x), in whole numbers of nine bits: the architecture defines every
bit. Those of x86 are not here: processors differ in their bits."""

from __future__ import annotations

from collections.abc import Sequence

from phasewise.ir import nodes as ir
from phasewise.ir.builders import Table, constant, lanes_of
from phasewise.ir.operations import as_elem, binary, call
from phasewise.ir.types import F32, I32, Scalar, Vec

_SIGN, _INFINITY, _QUIET, _FRACTION = -(2**31), 0x7F800000, 0x400000, 0x7FFFFF
_LIFT = 24
"""Binary places by which subnormal numbers are made normal."""


def put_estimates(table: Table) -> None:
    for q, lanes in (("", 2), ("q", 4)):
        table.put(f"vrecpe{q}_f32", Vec(F32, lanes), _reciprocal)
        table.put(f"vrsqrte{q}_f32", Vec(F32, lanes), _reciprocal_root)


def _same(value: float, like: ir.Expr, elem: Scalar = I32) -> ir.Expr:
    return constant(elem, [value] * lanes_of(like))


def _with(op: str, e: ir.Expr, value: float) -> ir.Expr:
    """An operation with the same number in every lane."""
    if op in ("<<", ">>"):
        return binary(op, e, ir.integer(int(value)))
    return binary(op, e, _same(value, e, ir.vec(e).elem))


def _if(mask: ir.Expr, if_set: ir.Expr, if_clear: ir.Expr) -> ir.Expr:
    return call("select", (mask, if_set, if_clear))


def _taken_apart(x: ir.Expr) -> tuple[ir.Expr, ir.Expr, ir.Expr]:
    """The bits of x without their sign, with its exponent and fraction, also of subnormal numbers as if they
    were normal."""
    size = _with("&", as_elem(x, I32), ~_SIGN)
    is_subnormal = _with("<", size, 1 << 23)
    lifted = as_elem(_if(is_subnormal, _with("*", x, 2.0**_LIFT), x), I32)
    lifted = _with("&", lifted, ~_SIGN)
    exponent = _with(">>", lifted, 23)
    exponent = _if(is_subnormal, _with("-", exponent, _LIFT), exponent)
    return size, exponent, _with("&", lifted, _FRACTION)


def _finished(x: ir.Expr, size: ir.Expr, bits: ir.Expr) -> ir.Expr:
    """The estimate for every x: what is not a number stays none, infinity becomes a zero of its sign."""
    own = as_elem(x, I32)
    bits = _if(_with("==", size, _INFINITY), _with("&", own, _SIGN), bits)
    return as_elem(_if(_with(">", size, _INFINITY), _with("|", own, _QUIET), bits), F32)


def _reciprocal(a: Sequence[ir.Expr]) -> ir.Expr:
    """The estimate of 1 / x: 2^19 over nine bits of x, rounded to eight."""
    x = as_elem(a[0], F32)
    size, exponent, fraction = _taken_apart(x)
    nine_bits = _with("+", _with("<<", _with(">>", fraction, 15), 1), 513)
    quotient = binary("/", _same(2.0**19, x, F32), call("convert", (nine_bits,), of=F32))
    estimate = _eight_bits(call("trunc_i32", (quotient,)))
    less = binary("-", _same(253, x), exponent)
    once, twice = _with("|", _with(">>", estimate, 1), 1 << 22), _with("|", _with(">>", estimate, 2), 1 << 21)
    estimate = _if(_with("==", less, 0), once, _if(_with("<", less, 0), twice, estimate))
    bits: ir.Expr = binary("|", _with("<<", call("max", (less, _same(0, x))), 23), estimate)
    bits = _if(_with("<", size, 1 << 21), _same(_INFINITY, x), bits)
    return _finished(x, size, binary("|", bits, _with("&", as_elem(x, I32), _SIGN)))


def _reciprocal_root(a: Sequence[ir.Expr]) -> ir.Expr:
    """The estimate of 1 / sqrt(x): the largest b with a b^2 < 2^28 for nine bits a of x or 2 x, whose
    exponent is then even."""
    x = as_elem(a[0], F32)
    size, exponent, fraction = _taken_apart(x)
    of_even = _with("<<", _with("+", _with("&", _with(">>", fraction, 15), ~1), 257), 1)
    of_odd = _with("+", _with("<<", _with(">>", fraction, 16), 1), 257)
    nine_bits = _if(_with("==", _with("&", exponent, 1), 0), of_even, of_odd)
    ratio = binary("/", _same(2.0**28, x, F32), call("convert", (nine_bits,), of=F32))
    root: ir.Expr = call("trunc_i32", (call("sqrt", (ratio,)),))
    next_root = _with("+", root, 1)
    is_too_large = _with(">=", binary("*", nine_bits, binary("*", root, root)), 1 << 28)
    is_too_small = _with("<", binary("*", nine_bits, binary("*", next_root, next_root)), 1 << 28)
    root = binary("-", binary("+", root, is_too_large), is_too_small)
    half = _with(">>", binary("-", _same(380, x), exponent), 1)
    bits = binary("|", _with("<<", half, 23), _eight_bits(root))
    of_zero = _with("|", _with("&", as_elem(x, I32), _SIGN), _INFINITY)
    done = _finished(x, size, _if(_with("==", size, 0), of_zero, bits))
    return _if(_with("<", x, 0.0), as_elem(_same(_INFINITY | _QUIET, x), F32), done)


def _eight_bits(nine: ir.Expr) -> ir.Expr:
    """Half of a number, rounded, as a fraction without its leading bit."""
    return _with("<<", _with("&", _with(">>", _with("+", nine, 1), 1), 255), 15)
