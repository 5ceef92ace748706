"""Complex numbers of C as pairs of numbers, by the rules that C's compilers follow.

A pair lives while a source is read: a complex variable is two variables, a complex argument two arguments, an
assignment two assignments. Products and quotients are operations of their own, because C gives infinities and
what is no number their own rules there.
"""

from __future__ import annotations

from collections.abc import Callable

from phasewise._words import counted
from phasewise.ir import nodes as ir
from phasewise.ir.operations import Mistyped, binary, call, cast, decayed, unary
from phasewise.ir.types import F32, F64, I8, I16, I32, I64, Scalar, Struct, Type, common, promoted

_PAIR = "__pair"
_WORDS = {F32: "float", F64: "double", I8: "char", I16: "short", I32: "int", I64: "long"}
_TYPES = {elem: Struct(f"complex_{word}", (("re", elem), ("im", elem))) for elem, word in _WORDS.items()}
IMAGINARY_UNIT = "__imaginary_unit"


def is_complex(of: Type) -> bool:
    return isinstance(of, Struct) and of in _TYPES.values()


def element_of(of: Type) -> Scalar:
    """The type of both parts of a complex type; of a type of numbers, that type."""
    part = of.fields[0][1] if isinstance(of, Struct) else of
    if not isinstance(part, Scalar):
        raise Mistyped("a complex number meets what is no number")
    return part


def complex_of(e: ir.Expr) -> Struct:
    return _TYPES[element_of(e.type)]


def pair(re: ir.Expr, im: ir.Expr) -> ir.Expr:
    return ir.CallExpression(complex_of(re), _PAIR, (re, im))


def imaginary_unit() -> ir.Expr:
    return pair(ir.Const(F32, 0.0), ir.Const(F32, 1.0))


def parts(e: ir.Expr) -> tuple[ir.Expr, ir.Expr]:
    """The real and the imaginary part of a complex value, or of a place that holds one."""
    if ir.is_call(e, _PAIR):
        return e.args[0], e.args[1]
    elem = element_of(e.type)
    if isinstance(e, ir.Ternary):
        (a_re, a_im), (b_re, b_im) = parts(e.a), parts(e.b)
        return ir.Ternary(elem, e.condition, a_re, b_re), ir.Ternary(elem, e.condition, a_im, b_im)
    return ir.Member(elem, e, "re"), ir.Member(elem, e, "im")


def flat(values: list[ir.Expr]) -> list[ir.Expr]:
    """The arguments, each complex one as two."""
    return [part for e in values for part in (parts(e) if is_complex(e.type) else (e,))]


def converted(e: ir.Expr, to: Type) -> ir.Expr:
    """A value converted as C does: a number gets the imaginary part zero, a complex number loses its own."""
    if e.type == to:
        return e
    if not is_complex(e.type):
        elem = element_of(to)
        element_of(e.type)
        return pair(cast(elem, e), ir.zero(elem))
    re, im = parts(e)
    elem = element_of(to)
    return pair(cast(elem, re), cast(elem, im)) if is_complex(to) else cast(elem, re)


def operated(op: str, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    """The result of an operator with a complex number on one side or both."""
    elems = [
        element_of(e.type) if is_complex(e.type) else promoted(element_of(decayed(e.type))) for e in (a, b)
    ]
    elem = elems[0] if elems[0] == elems[1] else common(*elems)
    build = _BY_OPERATOR.get(op)
    if build is None:
        raise Mistyped(f"{op} of complex numbers is not in the subset")
    return build(_side(a, elem), _side(b, elem), elem)


_Side = tuple[ir.Expr, ir.Expr | None]


def _side(e: ir.Expr, elem: Scalar) -> _Side:
    """Both parts of a side; a number has no imaginary one, and C keeps it so."""
    if not is_complex(e.type):
        return cast(elem, e), None
    re, im = parts(e)
    return cast(elem, re), cast(elem, im)


def _plain(op: str, a: ir.Expr, b: ir.Expr, elem: Scalar) -> ir.Expr:
    if op == "*" and elem.is_float:
        for factor, other in ((a, b), (b, a)):
            if isinstance(factor, ir.Const) and factor.value == 1:
                return other
            if isinstance(factor, ir.Const) and isinstance(other, ir.Const):
                return ir.Const(elem, factor.value * other.value)
    return cast(elem, binary(op, a, b))


def _sum(op: str) -> Callable[[_Side, _Side, Scalar], ir.Expr]:
    def build(a: _Side, b: _Side, elem: Scalar) -> ir.Expr:
        (a_re, a_im), (b_re, b_im) = a, b
        re = _plain(op, a_re, b_re, elem)
        if a_im is not None and b_im is not None:
            return pair(re, _plain(op, a_im, b_im, elem))
        if a_im is not None:
            return pair(re, a_im)
        assert b_im is not None
        return pair(re, b_im if op == "+" else cast(elem, unary("-", b_im)))

    return build


def _product(a: _Side, b: _Side, elem: Scalar) -> ir.Expr:
    (a_re, a_im), (b_re, b_im) = a, b
    if a_im is None and b_im is not None:
        return pair(_plain("*", a_re, b_re, elem), _plain("*", a_re, b_im, elem))
    assert a_im is not None
    if b_im is None:
        return pair(_plain("*", a_re, b_re, elem), _plain("*", a_im, b_re, elem))
    if elem.is_float:
        return pair(*(call(name, (a_re, a_im, b_re, b_im)) for name in ("times_real", "times_imag")))
    crossed = [_plain("*", x, y, elem) for x, y in ((a_re, b_re), (a_im, b_im), (a_re, b_im), (a_im, b_re))]
    return pair(_plain("-", crossed[0], crossed[1], elem), _plain("+", crossed[2], crossed[3], elem))


def _quotient(a: _Side, b: _Side, elem: Scalar) -> ir.Expr:
    (a_re, a_im), (b_re, b_im) = a, b
    if a_im is not None and b_im is None:
        return pair(_plain("/", a_re, b_re, elem), _plain("/", a_im, b_re, elem))
    assert b_im is not None
    values = (a_re, ir.zero(elem) if a_im is None else a_im, b_re, b_im)
    return pair(*(call(name, values) for name in ("over_real", "over_imag")))


_BY_OPERATOR = {"+": _sum("+"), "-": _sum("-"), "*": _product, "/": _quotient}


def negated(op: str, a: ir.Expr) -> ir.Expr:
    """The negated (`-`) or conjugated (`~`) complex number."""
    re, im = parts(a)
    elem = element_of(a.type)
    if op not in "-~":
        raise Mistyped(f"{op} of complex numbers is not in the subset")
    return pair(cast(elem, unary("-", re)), cast(elem, unary("-", im))) if op == "-" else _conjugate(re, im)


def function_of(name: str, args: list[ir.Expr]) -> ir.Expr:
    """The result of a function on complex numbers, or on a number."""
    n_arguments, build = FUNCTIONS[name]
    if len(args) != n_arguments:
        raise Mistyped(f"takes {counted(n_arguments, 'argument')}, not {len(args)}")
    if n_arguments == 2:
        return build(args[0], args[1])
    return build(*parts(converted(args[0], complex_of(args[0]))))


def _conjugate(re: ir.Expr, im: ir.Expr) -> ir.Expr:
    return pair(re, cast(element_of(im.type), unary("-", im)))


FUNCTIONS: dict[str, tuple[int, Callable[[ir.Expr, ir.Expr], ir.Expr]]] = {
    "__real__": (1, lambda re, im: re),
    "__imag__": (1, lambda re, im: im),
    "crealf": (1, lambda re, im: re),
    "cimagf": (1, lambda re, im: im),
    "conjf": (1, _conjugate),
    "cabsf": (1, lambda re, im: call("hypotf", (re, im))),
    "cargf": (1, lambda re, im: call("atan2f", (im, re))),
    "complex": (2, pair),
}
"""Functions on complex numbers by name: how many arguments, and what is made of their parts.

`complex` is __builtin_complex.
"""
