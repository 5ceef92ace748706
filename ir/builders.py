"""Functions that build operations from the arguments of intrinsics, and the types of registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from phasewise.ir import nodes as ir
from phasewise.ir.operations import Mistyped, as_elem, binary, call, cast, fitting
from phasewise.ir.types import (
    BITS,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    SCALARS,
    U8,
    Array,
    Pointer,
    Scalar,
    Type,
    Vec,
    pointee,
)

Build: TypeAlias = Callable[[Sequence[ir.Expr]], ir.Expr]


@dataclass(frozen=True, slots=True)
class Intrinsic:
    """An intrinsic's result type, and `build`, which makes the operation from raised arguments; a vector that
    `build` returns has the result's size."""

    result: Type
    build: Build


class Table(dict[str, Intrinsic]):
    def put(self, names: str, result: Type, build: Build) -> None:
        """Add one row: intrinsics of the same meaning, their names separated by blanks."""
        self.update(dict.fromkeys(names.split(), Intrinsic(result, build)))


X86_TYPES: dict[str, Type] = {
    f"__m{bits}{suffix}": Vec(elem, bits // 8 // elem.size)
    for bits in (128, 256, 512)
    for suffix, elem in (("", F32), ("d", F64), ("i", BITS))
}
X86_TYPES["__m64"] = Vec(BITS, 8)
MASK_TYPES: dict[str, Vec] = {
    f"__mmask{64 // elem.size}": Vec(elem, 64 // elem.size) for elem in (I8, I16, I32, I64)
}
"""Types of AVX-512 masks, by the comparisons that make them: all bits of a lane set, or none."""
X86_TYPES |= MASK_TYPES
X86_NAMES = {of: name for name, of in X86_TYPES.items()}
# ---- helpers of builders ---------------------------------------------------------------------------------


def number(e: ir.Expr) -> int:
    """The value of an argument that must be known when compiling; an error if it is not."""
    if not isinstance(e, ir.Const) or not isinstance(e.value, int):
        raise Mistyped("takes a number that is known when compiling")
    return e.value


def zero(elem: Scalar, lanes: int) -> ir.Expr:
    return call("splat", (ir.zero(elem),), (lanes,))


def constant(elem: Scalar, values: Sequence[int | float]) -> ir.Expr:
    fitted = [fitting(value, elem) for value in values]
    if len(set(map(repr, fitted))) == 1:
        return call("splat", (ir.Const(elem, fitted[0]),), (len(fitted),))
    return call("vector", (), tuple(ir.Const(elem, value) for value in fitted), elem)


def size_of(e: ir.Expr) -> int:
    return ir.vec(e).size


def lanes_of(e: ir.Expr) -> int:
    return ir.vec(e).lanes


def pointer_to(e: ir.Expr, elem: Scalar | None) -> ir.Expr:
    """Make the pointer argument of a load or store point to numbers of the vector's kind."""
    of = e.type
    target = pointee(of)
    if target is None:
        raise Mistyped("takes a pointer")
    if elem is None and isinstance(target, Scalar):
        return e
    if elem is None:
        elem = U8
    if target == elem:
        return e
    return cast(Pointer(elem, isinstance(of, Pointer) and of.is_const), e)


def first_lanes(e: ir.Expr, elem: Scalar, lanes: int) -> ir.Expr:
    """Take the first lanes of a register whose bits are read as `elem`."""
    register = as_elem(e, elem)
    while lanes_of(register) > lanes:
        register = half("lo", register)
    return register


def half(which: str, e: ir.Expr) -> ir.Expr:
    """Take one half of a vector; of a concatenation, the part that is this half."""

    if ir.is_call(e, "concat"):
        return e.args[which == "hi"]
    if ir.is_call(e, "splat"):
        return call("splat", e.args, (lanes_of(e) // 2,))
    if ir.is_call(e, "bits") and isinstance(e.args[0].type, Vec):
        inner = e.args[0]
        if ir.is_call(inner, "concat", "splat") and lanes_of(inner) > 1:
            return as_elem(half(which, inner), ir.vec(e).elem)
    return call(which, (e,))


def padded(e: ir.Expr, size: int) -> ir.Expr:
    """Append zeros to a vector, up to a register's size."""
    while size_of(e) < size:
        assert isinstance(e.type, Vec)
        e = call("concat", (e, zero(e.type.elem, e.type.lanes)))
    return e


def shuffled(a: ir.Expr, b: ir.Expr, places: Sequence[int]) -> ir.Expr:
    return call("shuffle", (a, b), places)


def signs(elem: Scalar, lanes: int, of_even: bool) -> ir.Expr:
    """Make a mask of the sign bits of every second lane."""
    top = 1 << (8 * elem.size - 1)
    bits = SCALARS[f"u{8 * elem.size}"]
    return constant(bits, [top if (i % 2 == 0) == of_even else 0 for i in range(lanes)])


def flipped(e: ir.Expr, of_even: bool) -> ir.Expr:
    """Negate every second lane of a vector."""
    elem = ir.vec(e).elem
    mask = signs(elem, ir.vec(e).lanes, of_even)
    return as_elem(binary("^", as_elem(e, ir.vec(mask).elem), mask), elem)


def reading(elem: Scalar) -> Build:
    """Make a builder that reads the same bits as numbers of another type."""
    return lambda a: a[0] if elem == BITS else as_elem(a[0], elem)


def dup(places: Sequence[int], elem: Scalar) -> Build:
    return lambda a: shuffled(as_elem(a[0], elem), as_elem(a[0], elem), places)


def imm4(value: int) -> list[int]:
    return [value >> 2 * i & 3 for i in range(4)]


def alike(elem: Scalar, op: str) -> Build:
    return lambda a: binary(op, as_elem(a[0], elem), as_elem(a[1], elem))


def called(name: str, elem: Scalar) -> Build:
    return lambda a: call(name, tuple(as_elem(arg, elem) for arg in a))


def splat(elem: Scalar, lanes: int) -> Build:
    return lambda a: call("splat", (cast(elem, a[0]),), (lanes,))


def load(elem: Scalar | None, lanes: int) -> Build:
    def build(a: Sequence[ir.Expr]) -> ir.Expr:
        p = pointer_to(a[0], elem)
        size = target(p).size
        return call("load", (p,), (lanes if elem else lanes // size,))

    return build


def target(p: ir.Expr) -> Scalar:
    of = pointee(p.type)
    assert isinstance(of, Scalar)
    return of


def store(elem: Scalar | None) -> Build:
    def build(a: Sequence[ir.Expr]) -> ir.Expr:
        p = pointer_to(a[0], elem)
        return call("store", (p, as_elem(a[1], target(p))))

    return build


def shift(op: str, elem: Scalar) -> Build:
    def build(a: Sequence[ir.Expr]) -> ir.Expr:
        if not isinstance(a[1], ir.Const):
            return binary(op, as_elem(a[0], elem), a[1])
        bits = number(a[1])
        if bits >= 8 * elem.size:
            if op == ">>" and elem.is_signed:
                bits = 8 * elem.size - 1
            else:
                return zero(elem, size_of(a[0]) // elem.size)
        return binary(op, as_elem(a[0], elem), ir.integer(bits))

    return build


def unpacked(elem: Scalar, which: int) -> Build:
    group = 16 // elem.size
    places = [which * group // 2 + i // 2 + (group if i % 2 else 0) for i in range(group)]
    return lambda a: shuffled(as_elem(a[0], elem), as_elem(a[1], elem), places)


def neighbours(a: Sequence[ir.Expr], elem: Scalar, op: str = "+") -> ir.Expr:
    """Add each lane to the next one, or combine the two by `op`."""
    first, second = as_elem(a[0], elem), as_elem(a[1], elem)
    group = 2 * (16 // elem.size)
    even = shuffled(first, second, range(0, group, 2))
    return binary(op, even, shuffled(first, second, range(1, group, 2)))


def saturated(e: ir.Expr, to: Scalar) -> ir.Expr:
    """Convert lanes to half their width or less; a number that does not fit becomes the nearest that does."""
    wide, bits = ir.vec(e).elem, 8 * to.size
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if to.is_signed else (0, (1 << bits) - 1)
    bounded = call("min", (e, constant(wide, [high] * lanes_of(e))))
    if wide.is_signed:
        bounded = call("max", (bounded, constant(wide, [low] * lanes_of(e))))
    return call("narrow", (bounded,), of=to)


def element(p: ir.Expr) -> ir.Expr:
    """The element that a pointer expression points to, as an `Index`."""
    of = target(p)
    if isinstance(p, ir.Binary) and p.op == "+" and isinstance(p.a.type, Pointer | Array):
        return ir.Index(of, p.a, p.b)
    return ir.Index(of, p, ir.integer(0))


def joined(low: ir.Expr, high: ir.Expr) -> ir.Expr:
    return call("concat", (low, as_elem(high, ir.vec(low).elem)))


def permuted(e: ir.Expr, places: Sequence[int]) -> ir.Expr:
    return call("permute", (e,), places)
