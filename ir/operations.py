"""The operations of the high level: their names, and the type of a result by the types of the operands.

No operation names an instruction set, and each means the same for any number of lanes. Operations that x86
computes in groups of sixteen bytes (`shuffle`, `pack`, `lookup`) do so here too, because authors wrote their
kernels for that. `integer_result` is C's arithmetic on whole numbers, for constants and for the interpreter.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phasewise.ir import nodes as ir
from phasewise.ir.types import (
    F32,
    F64,
    I32,
    I64,
    SCALARS,
    U16,
    VOID,
    Array,
    Pointer,
    Scalar,
    Type,
    Vec,
    common,
    pointee,
    promoted,
    spelled,
)

LIBRARY = (
    *("sqrtf", "expf", "fabsf", "floorf", "ceilf", "fmaf", "logf", "powf", "cosf", "sinf", "tanhf"),
    *("fmaxf", "fminf", "rintf", "nearbyintf", "truncf", "roundf", "copysignf", "fmodf", "tanf", "asinf"),
    *("acosf", "atanf", "atan2f", "log2f", "log10f", "exp2f", "hypotf", "sinhf", "coshf", "log1pf", "expm1f"),
)
"""Functions of C's math library on float32 that kernels may call."""

LIBRARY_F64 = {f"{name[:-1]}_f64": name[:-1] for name in LIBRARY}
"""C names of the math functions on float64, by their names in kernels."""

REDUCTIONS = ("reduce_add", "reduce_max", "reduce_min")
ORDERS = ("halves", "pairs", "halves_pairs")
"""Orders in which a reduction halves a vector. `halves`: the upper half is combined with the lower; `pairs`:
neighbours; `halves_pairs`: halves down to sixteen bytes, then neighbours."""

DOTS = {
    # name: (types of the factors, type of the sums, products in one sum,
    # whether sums are added to the first argument)
    "dot_i16": ("i16", "i16", "i32", 2, False),
    "dot_u8i8_sat": ("u8", "i8", "i16", 2, False),
    "dot_u8i8": ("u8", "i8", "i32", 4, True),
    "dot_i8i8": ("i8", "i8", "i32", 4, True),
}

MAX_VECTOR_BYTES = 1024


class Mistyped(Exception):
    """An operation does not take its operands. The caller adds file and line."""


def _need(condition: bool, text: str) -> None:
    if not condition:
        raise Mistyped(text)


@dataclass(frozen=True, slots=True)
class Operands:
    """The operands of an operation: types of values, known numbers, and the named element type."""

    name: str
    types: list[Type]
    numbers: tuple[ir.Expr, ...]
    of: Scalar | None

    def number(self, index: int = 0) -> int:
        """A number among the operands, known before the kernel runs."""
        value = self.numbers[index] if index < len(self.numbers) else None
        if not isinstance(value, ir.Const) or not isinstance(value.value, int):
            raise Mistyped("a number that is known before the kernel runs is missing")
        return value.value

    def vector(self, index: int = 0) -> Vec:
        """The type of a value that must be a vector."""
        of = self.types[index]
        if not isinstance(of, Vec):
            raise Mistyped(f"{self.name} takes a vector, not {spelled(of)}")
        return of

    def scalar(self) -> Scalar:
        """The type of the first value, which must be a number."""
        of = self.types[0]
        if not isinstance(of, Scalar):
            raise Mistyped(f"{self.name} takes a number, not {spelled(of)}")
        return of

    def pointed(self) -> Scalar:
        """The type of the numbers that the first value points to."""
        of = self.types[0]
        element = pointee(of)
        if not isinstance(element, Scalar):
            raise Mistyped(f"{self.name} takes a pointer to numbers, not {spelled(of)}")
        return element

    def element(self) -> Scalar:
        """The element type that the text names."""
        assert self.of is not None
        return self.of

    def alike(self, first: int = 0, word: str = "two") -> None:
        """Refuse values of different types, from `first` on."""
        types = self.types[first:]
        told = f", not {', '.join(map(spelled, types))}" if first == 0 else ""
        _need(len(set(types)) == 1, f"{self.name} takes {word} of one type{told}")

    def below(self, most: int, count: int, text: str) -> None:
        """Refuse a number outside 0 .. most - 1."""
        _need(all(0 <= self.number(index) < most for index in range(count)), text)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: the number of values that it takes, and the type of its result."""

    values: int
    result: Callable[[Operands], Type]
    takes_numbers: bool = False
    """True if numbers that are known when compiling follow the values."""
    names_type: bool = False
    """True if the text names the type of the result's lanes, as in `widen(v, i32)`."""
    is_effect: bool = False
    """True if the operation is a statement of its own, for its effect on memory."""
    moves_lanes: bool = False
    """True if the operation moves lanes across groups of sixteen bytes."""
    is_lanewise: bool = False
    """True if each lane of the result depends only on the same lane of the operands."""


# ---- types of results ------------------------------------------------------------------------------------


def _same(given: Operands) -> Type:
    return given.vector()


def _alike(given: Operands) -> Type:
    given.alike()
    return given.vector()


def _element(given: Operands) -> Type:
    return given.vector().elem


def _library(given: Operands) -> Type:
    _need(all(isinstance(arg, Scalar) for arg in given.types), f"{given.name} takes numbers")
    return F64 if given.name in LIBRARY_F64 else F32


def _store(given: Operands) -> Type:
    place, vector = given.types[0], given.vector(1)
    _need(given.pointed() == vector.elem, f"store of {spelled(vector)} to {spelled(place)}")
    _need(not (isinstance(place, Pointer) and place.is_const), "store to memory that is const")
    return VOID


def _prefetch(given: Operands) -> Type:
    _need(isinstance(given.types[0], Pointer | Array), "prefetch takes a pointer")
    return VOID


def _fma(given: Operands) -> Type:
    given.alike(word="three")
    return given.types[0]


def _select(given: Operands) -> Type:
    mask, a = given.vector(), given.vector(1)
    given.alike(1)
    _need((mask.lanes, mask.elem.size) == (a.lanes, a.elem.size), "select takes a mask of as many lanes")
    return a


def _convert(given: Operands) -> Type:
    first = given.types[0]
    return Vec(given.element(), first.lanes) if isinstance(first, Vec) else given.element()


def _to_i32(given: Operands) -> Type:
    _need(given.vector().elem == F32, f"{given.name} takes f32")
    return Vec(I32, given.vector().lanes)


def _resized(given: Operands) -> Type:
    vector, of = given.vector(), given.element()
    is_right = (of.size > vector.elem.size) == (given.name == "widen")
    _need(is_right, f"{given.name} of {spelled(vector)} to {of.name}")
    return Vec(of, vector.lanes)


def _pack(given: Operands) -> Type:
    vector, of = given.vector(), given.element()
    is_right = given.types[0] == given.types[1] and 2 * of.size == vector.elem.size
    _need(is_right, "pack takes two of twice the width")
    return Vec(of, 2 * vector.lanes)


def _bits(given: Operands) -> Type:
    first, of = given.types[0], given.element()
    fits = first.size % of.size == 0 if isinstance(first, Vec) else given.scalar().size == of.size
    _need(fits, f"bits of {spelled(first)} as {of.name}")
    return Vec(of, first.size // of.size) if isinstance(first, Vec) else of


def _half(given: Operands) -> Type:
    vector = given.vector()
    _need(vector.lanes > 1, f"{given.name} of one lane")
    return Vec(vector.elem, vector.lanes // 2)


def _concat(given: Operands) -> Type:
    given.alike(0)
    return Vec(given.vector().elem, 2 * given.vector().lanes)


def _shuffle(given: Operands) -> Type:
    vector = given.vector()
    group = 16 // vector.elem.size
    is_right = given.types[0] == given.types[1] and vector.size >= 16
    _need(is_right, "shuffle takes two of one type, of 16 bytes and more")
    _need(len(given.numbers) == group, f"shuffle of {spelled(vector)} takes {group} places")
    given.below(2 * group, group, "a place of shuffle is outside")
    return vector


def _permute(given: Operands) -> Type:
    vector, count = given.vector(), len(given.numbers)
    _need(count > 0, "permute takes places")
    given.below(vector.lanes, count, "a place is outside")
    return Vec(vector.elem, count)


def _lookup(given: Operands) -> Type:
    first, vector = given.types[0], given.vector(1)
    is_right = first.size == vector.size and vector.elem.size == 1 and vector.size >= 16
    _need(is_right, "lookup takes bytes")
    return first


def _lane(given: Operands) -> Type:
    vector = given.vector()
    given.below(vector.lanes, 1, f"{spelled(vector)} has no lane {given.number()}")
    return vector.elem if given.name == "lane" else vector


def _half_float(given: Operands) -> Type:
    want, result = (U16, F32) if given.name == "from_f16" else (F32, U16)
    first = given.types[0]
    _need((first.elem if isinstance(first, Vec) else first) == want, f"{given.name} takes {want.name}")
    return Vec(result, first.lanes) if isinstance(first, Vec) else result


def _dot(given: Operands) -> Type:
    name = given.name
    first, second, result, products, is_added = DOTS[name]
    a, b = (given.vector(index) for index in (-2, -1))
    _need((a.elem.name, b.elem.name) == (first, second), f"{name} takes {first} and {second}")
    _need(a.lanes == b.lanes and a.lanes % products == 0, f"{name} takes as many lanes of both")
    sums = Vec(SCALARS[result], a.lanes // products)
    _need(not is_added or given.types[0] == sums, f"{name} adds to {spelled(sums)}")
    return sums


_SUFFIXES = ("f", "_f64")
_FUNCTIONS = tuple(name[:-1] for name in LIBRARY)
_OF_TWO = ("pow", "fmax", "fmin", "copysign", "fmod", "atan2", "hypot")

OPERATIONS: dict[str, Operation] = {
    **{f"{name}{suffix}": Operation(1, _library) for name in _FUNCTIONS for suffix in _SUFFIXES},
    **{f"{name}{suffix}": Operation(2, _library) for name in _OF_TWO for suffix in _SUFFIXES},
    **{f"fma{suffix}": Operation(3, _library) for suffix in _SUFFIXES},
    # one vector in, the same type out; `nearest` rounds halves to even
    **dict.fromkeys(
        ("abs", "sqrt", "nearest", "floor", "ceil", "trunc"), Operation(1, _same, is_lanewise=True)
    ),
    # two of one type in, the same out; min and max give the second where either is NaN, avg rounds up
    **dict.fromkeys(
        ("min", "max", "avg", "sign", "mulhi", "add_sat", "sub_sat", "andnot"),
        Operation(2, _alike, is_lanewise=True),
    ),
    **dict.fromkeys(REDUCTIONS, Operation(1, _element)),
    **{name: Operation(3 if is_added else 2, _dot) for name, (*_, is_added) in DOTS.items()},
    "load": Operation(
        1, lambda given: Vec(given.pointed(), given.number()), takes_numbers=True, is_lanewise=True
    ),
    "store": Operation(2, _store, is_effect=True, is_lanewise=True),
    "prefetch": Operation(1, _prefetch, is_effect=True),
    "splat": Operation(
        1, lambda given: Vec(given.scalar(), given.number()), takes_numbers=True, is_lanewise=True
    ),
    "vector": Operation(0, lambda given: Vec(given.element(), len(given.numbers))),
    "fma": Operation(3, _fma, is_lanewise=True),
    "select": Operation(3, _select, is_lanewise=True),
    "convert": Operation(1, _convert, names_type=True, is_lanewise=True),
    "nearest_i32": Operation(1, _to_i32, is_lanewise=True),
    "trunc_i32": Operation(1, _to_i32, is_lanewise=True),
    "widen": Operation(1, _resized, names_type=True, is_lanewise=True),
    "narrow": Operation(1, _resized, names_type=True, is_lanewise=True),
    "pack": Operation(2, _pack, names_type=True),
    "bits": Operation(1, _bits, names_type=True, is_lanewise=True),
    "lo": Operation(1, _half, moves_lanes=True),
    "hi": Operation(1, _half, moves_lanes=True),
    "concat": Operation(2, _concat, moves_lanes=True),
    "shuffle": Operation(2, _shuffle, takes_numbers=True),
    "permute": Operation(1, _permute, takes_numbers=True, moves_lanes=True),
    "lookup": Operation(2, _lookup),
    "lane": Operation(1, _lane, takes_numbers=True),
    "with_lane": Operation(2, _lane, takes_numbers=True, moves_lanes=True),
    "from_f16": Operation(1, _half_float, is_lanewise=True),
    "to_f16": Operation(1, _half_float, is_lanewise=True),
}


def call(
    name: str, args: tuple[ir.Expr, ...], numbers: Sequence[ir.Expr | int] = (), of: Scalar | None = None
) -> ir.CallExpression:
    """Make a call with its type. of: the element type that the text names, e.g. `i32` in `widen(v, i32)`."""
    expressions = tuple(
        ir.integer(constant) if isinstance(constant, int) else constant for constant in numbers
    )
    result = _result(Operands(name, [a.type for a in args], expressions, of))
    return ir.CallExpression(result, name, args, expressions)


def _result(given: Operands) -> Type:
    operation = OPERATIONS.get(given.name)
    if operation is None:
        raise Mistyped(f"there is no operation `{given.name}`")
    count = len(given.types)
    _need(count == operation.values, f"{given.name} takes {operation.values} values, not {count}")
    result = operation.result(given)
    if isinstance(result, Vec):
        _need(
            result.lanes > 0 and result.lanes & (result.lanes - 1) == 0 and result.size <= MAX_VECTOR_BYTES,
            f"vectors have 1, 2, 4, .. lanes and at most {MAX_VECTOR_BYTES} bytes, not {spelled(result)}",
        )
    return result


# ---- C's operators ---------------------------------------------------------------------------------------


COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
LOGICAL = ("&&", "||")
SHIFTS = ("<<", ">>")


def binary(op: str, a: ir.Expr, b: ir.Expr) -> ir.Binary:
    """Make a binary operation with its type: C's type for numbers and pointers. Both vectors must have one
    type; shifts of vectors take a known number."""
    return ir.Binary(binary_type(op, a.type, b.type), op, a, b)


def binary_type(op: str, a: Type, b: Type) -> Type:
    a, b = decayed(a), decayed(b)
    if isinstance(a, Vec) and op in SHIFTS:
        _need(
            isinstance(b, Scalar) and not b.is_float and not a.elem.is_float,
            f"{spelled(a)} {op} {spelled(b)}",
        )
        return a
    if isinstance(a, Vec) or isinstance(b, Vec):
        _need(a == b, f"{spelled(a)} {op} {spelled(b)}: vectors of two types")
        assert isinstance(a, Vec)
        return Vec(mask_of(a.elem), a.lanes) if op in COMPARISONS else a
    if op in LOGICAL:
        return I32
    if isinstance(a, Pointer):
        if op in COMPARISONS:
            return I32
        if op == "-" and isinstance(b, Pointer):
            return I64
        _need(op in "+-" and isinstance(b, Scalar) and not b.is_float, f"{spelled(a)} {op} {spelled(b)}")
        return a
    if isinstance(b, Pointer):
        _need(op == "+" and isinstance(a, Scalar), f"{spelled(a)} {op} {spelled(b)}")
        return b
    _need(isinstance(a, Scalar) and isinstance(b, Scalar), f"{spelled(a)} {op} {spelled(b)}")
    assert isinstance(a, Scalar)
    assert isinstance(b, Scalar)
    if op in COMPARISONS:
        return I32
    if op in SHIFTS:
        return promoted(a)
    _need(op not in "%&|^" or not (a.is_float or b.is_float), f"{spelled(a)} {op} {spelled(b)}")
    return common(a, b)


def mask_of(elem: Scalar) -> Scalar:
    """The type of a comparison's result in each lane: all bits set, or none."""
    return SCALARS[f"i{8 * elem.size}"]


def unary(op: str, a: ir.Expr) -> ir.Unary:
    if isinstance(a.type, Vec):
        return ir.Unary(a.type, op, a)
    if not isinstance(a.type, Scalar):
        raise Mistyped(f"{op} takes a number, not {spelled(a.type)}")
    return ir.Unary(I32 if op == "!" else promoted(a.type), op, a)


def decayed(of: Type) -> Type:
    """The type that C makes of an array: the pointer to its first element; any other type itself."""
    return Pointer(of.of) if isinstance(of, Array) else of


def cast(of: Type, a: ir.Expr) -> ir.Expr:
    """Convert the expression `a` to another type; `a` itself if it has the type already."""
    if a.type == of:
        return a
    if isinstance(a, ir.Const) and isinstance(of, Scalar):
        return ir.Const(of, fitting(a.value, of))
    return ir.Cast(of, a)


def fitting(value: int | float, of: Scalar) -> int | float:
    """Convert a number to a type as C does."""
    if of == F32:
        try:
            return float(struct.unpack("f", struct.pack("f", value))[0])
        except OverflowError:
            return float("inf") if value > 0 else float("-inf")
    if of.is_float:
        return float(value)
    wrapped = int(value) & (1 << 8 * of.size) - 1
    return wrapped - (1 << 8 * of.size) if of.is_signed and wrapped >> (8 * of.size - 1) else wrapped


def as_elem(a: ir.Expr, elem: Scalar) -> ir.Expr:
    """Read the bits of the expression `a` as lanes of `elem`."""
    if ir.vec(a).elem == elem:
        return a
    if ir.is_call(a, "bits"):
        return as_elem(a.args[0], elem)
    if ir.is_call(a, "load") and isinstance(a.args[0], ir.Cast):
        place = a.args[0].a
        of = place.type.to if isinstance(place.type, Pointer) else None
        if isinstance(of, Scalar) and of.size == elem.size:  # read as the numbers that are there
            return as_elem(call("load", (place,), (ir.vec(a).size // elem.size,)), elem)
    match a:
        case ir.CallExpression(name="splat", args=(ir.Const(value=0),)):
            return call("splat", (ir.zero(elem),), (ir.vec(a).size // elem.size,))
    return call("bits", (a,), of=elem)


def integer_result(op: str, a: int, b: int, of: Scalar) -> int | None:
    """The result of `a op b` in both's type; None where C has none: division by 0, a shift by too much."""
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
