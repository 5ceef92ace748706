"""The operations of the high level: names, and the type of a result, given the types of what goes in.

None names an instruction set, and each says the same for any number of lanes. Those that x86 computes in
groups of sixteen bytes (`shuffle`, `pack`, `lookup`) do so here too, because that is what authors wrote.
"""

from __future__ import annotations

from phasewise.ir.nodes import Binary, CallExpression, Cast, Const, Expr, Unary, integer
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
    promoted,
    spelled,
)

LIBRARY = (
    "sqrtf",
    "expf",
    "fabsf",
    "floorf",
    "ceilf",
    "fmaf",
    "logf",
    "powf",
    "cosf",
    "sinf",
    "tanhf",
    "fmaxf",
    "fminf",
)
"""Functions of C's library on float32 that kernels may call."""

SAME = ("abs", "sqrt", "nearest", "floor", "ceil", "trunc")
"""One vector in, the same type out. `nearest` rounds halves to even."""
ALIKE = ("min", "max", "avg", "sign", "mulhi", "add_sat", "sub_sat", "andnot")
"""Two vectors of one type in, the same type out. min and max give the second where either is NaN; avg
rounds up."""
REDUCTIONS = ("reduce_add", "reduce_max", "reduce_min")
ORDERS = ("halves", "pairs", "halves_pairs")
"""The halving of a reduction: the upper half upon the lower, or neighbours; `halves_pairs`: halves down to
sixteen bytes, then neighbours."""

DOTS = {
    # name: (types of the factors, type of the sums, products in one sum,
    # whether sums are added to the first argument)
    "dot_i16": ("i16", "i16", "i32", 2, False),
    "dot_u8i8_sat": ("u8", "i8", "i16", 2, False),
    "dot_u8i8": ("u8", "i8", "i32", 4, True),
    "dot_i8i8": ("i8", "i8", "i32", 4, True),
}

EFFECTS = ("store", "prefetch")

NAMES = {
    *LIBRARY, *SAME, *ALIKE, *REDUCTIONS, *DOTS, *EFFECTS,
    "load", "splat", "vector", "fma", "convert", "nearest_i32", "trunc_i32", "widen", "narrow", "pack",
    "bits", "lo", "hi", "concat", "shuffle", "permute", "lookup", "select", "lane", "with_lane", "from_f16",
    "to_f16",
}  # fmt: skip


class Mistyped(Exception):
    """An operation does not take what it was given. The caller adds file and line."""


def call(
    name: str, args: tuple[Expr, ...], numbers: tuple[Expr, ...] = (), of: Scalar | None = None
) -> CallExpression:
    """A call with its type. `of` is the element type that the text names, e.g. in `widen(v, i32)`."""
    return CallExpression(_result(name, [a.type for a in args], numbers, of), name, args, numbers)


def _number(numbers: tuple[Expr, ...], at: int = 0) -> int:
    one = numbers[at] if at < len(numbers) else None
    if not isinstance(one, Const) or not isinstance(one.value, int):
        raise Mistyped("a number that is known before the kernel runs is missing")
    return one.value


def _vec(name: str, of: Type) -> Vec:
    if not isinstance(of, Vec):
        raise Mistyped(f"{name} takes a vector, not {spelled(of)}")
    return of


def _scalar(name: str, of: Type) -> Scalar:
    if not isinstance(of, Scalar):
        raise Mistyped(f"{name} takes a number, not {spelled(of)}")
    return of


def _need(condition: bool, text: str) -> None:
    if not condition:
        raise Mistyped(text)


ARITY = {
    **dict.fromkeys(SAME, 1), **dict.fromkeys(ALIKE, 2), **dict.fromkeys(REDUCTIONS, 1),
    **dict.fromkeys(LIBRARY, 1),
    "fmaf": 3, "powf": 2, "fmaxf": 2, "fminf": 2, "load": 1, "store": 2, "prefetch": 1, "splat": 1,
    "vector": 0,
    "fma": 3, "convert": 1, "nearest_i32": 1, "trunc_i32": 1, "widen": 1, "narrow": 1, "pack": 2, "bits": 1,
    "lo": 1, "hi": 1, "concat": 2, "shuffle": 2, "permute": 1, "lookup": 2, "select": 3, "lane": 1,
    "with_lane": 2,
    "from_f16": 1, "to_f16": 1, "dot_i16": 2, "dot_u8i8_sat": 2, "dot_u8i8": 3, "dot_i8i8": 3,
}  # fmt: skip

MAX_VECTOR_BYTES = 1024


def _result(name: str, types: list[Type], numbers: tuple[Expr, ...], of: Scalar | None) -> Type:
    _need(name in NAMES, f"there is no operation `{name}`")
    _need(len(types) == ARITY[name], f"{name} takes {ARITY[name]} values, not {len(types)}")
    result = _untested_result(name, types, numbers, of)
    if isinstance(result, Vec):
        _need(
            result.lanes > 0 and result.lanes & (result.lanes - 1) == 0 and result.size <= MAX_VECTOR_BYTES,
            f"vectors have 1, 2, 4, .. lanes and at most {MAX_VECTOR_BYTES} bytes, not {spelled(result)}",
        )
    return result


def _untested_result(name: str, types: list[Type], numbers: tuple[Expr, ...], of: Scalar | None) -> Type:
    match name:
        case "load":
            return Vec(_pointed(name, types[0]), _number(numbers))
        case "store":
            vector = _vec(name, types[1])
            _need(
                _pointed(name, types[0]) == vector.elem, f"store of {spelled(vector)} to {spelled(types[0])}"
            )
            _need(not (isinstance(types[0], Pointer) and types[0].is_const), "store to memory that is const")
            return VOID
        case "prefetch":
            _need(isinstance(types[0], Pointer | Array), "prefetch takes a pointer")
            return VOID
        case "splat":
            return Vec(_scalar(name, types[0]), _number(numbers))
        case "vector":
            assert of is not None
            return Vec(of, len(numbers))
        case "fma":
            _need(len(set(types)) == 1, f"fma takes three of one type, not {', '.join(map(spelled, types))}")
            return types[0]
        case "select":
            mask, a = _vec(name, types[0]), _vec(name, types[1])
            _need(types[1] == types[2], "select takes two of one type")
            _need(
                (mask.lanes, mask.elem.size) == (a.lanes, a.elem.size), "select takes a mask of as many lanes"
            )
            return a
        case "convert":
            assert of is not None
            given = types[0]
            return Vec(of, given.lanes) if isinstance(given, Vec) else of
        case "nearest_i32" | "trunc_i32":
            _need(_vec(name, types[0]).elem == F32, f"{name} takes f32")
            return Vec(I32, _vec(name, types[0]).lanes)
        case "widen" | "narrow":
            assert of is not None
            vector = _vec(name, types[0])
            _need(
                (of.size > vector.elem.size) == (name == "widen"), f"{name} of {spelled(vector)} to {of.name}"
            )
            return Vec(of, vector.lanes)
        case "pack":
            assert of is not None
            vector = _vec(name, types[0])
            _need(
                types[0] == types[1] and 2 * of.size == vector.elem.size, "pack takes two of twice the width"
            )
            return Vec(of, 2 * vector.lanes)
        case "bits":
            assert of is not None
            if isinstance(types[0], Vec):
                _need(types[0].size % of.size == 0, f"bits of {spelled(types[0])} as {of.name}")
                return Vec(of, types[0].size // of.size)
            _need(_scalar(name, types[0]).size == of.size, f"bits of {spelled(types[0])} as {of.name}")
            return of
        case "lo" | "hi":
            vector = _vec(name, types[0])
            _need(vector.lanes > 1, f"{name} of one lane")
            return Vec(vector.elem, vector.lanes // 2)
        case "concat":
            _need(types[0] == types[1], "concat takes two of one type")
            return Vec(_vec(name, types[0]).elem, 2 * _vec(name, types[0]).lanes)
        case "shuffle":
            vector = _vec(name, types[0])
            group = 16 // vector.elem.size
            _need(
                types[0] == types[1] and vector.size >= 16,
                "shuffle takes two of one type, of 16 bytes and more",
            )
            _need(len(numbers) == group, f"shuffle of {spelled(vector)} takes {group} places")
            _need(
                all(0 <= _number(numbers, i) < 2 * group for i in range(group)),
                "a place of shuffle is outside",
            )
            return vector
        case "permute":
            vector = _vec(name, types[0])
            _need(bool(numbers), "permute takes places")
            _need(
                all(0 <= _number(numbers, i) < vector.lanes for i in range(len(numbers))),
                "a place is outside",
            )
            return Vec(vector.elem, len(numbers))
        case "lookup":
            vector = _vec(name, types[1])
            _need(
                types[0].size == vector.size and vector.elem.size == 1 and vector.size >= 16,
                "lookup takes bytes",
            )
            return types[0]
        case "lane":
            vector = _vec(name, types[0])
            _need(0 <= _number(numbers) < vector.lanes, f"{spelled(vector)} has no lane {_number(numbers)}")
            return vector.elem
        case "with_lane":
            vector = _vec(name, types[0])
            _need(0 <= _number(numbers) < vector.lanes, f"{spelled(vector)} has no lane {_number(numbers)}")
            return vector
        case "from_f16" | "to_f16":
            want, got = (U16, F32) if name == "from_f16" else (F32, U16)
            given = types[0]
            _need((given.elem if isinstance(given, Vec) else given) == want, f"{name} takes {want.name}")
            return Vec(got, given.lanes) if isinstance(given, Vec) else got
        case _ if name in DOTS:
            return _dot(name, types)
        case _ if name in REDUCTIONS:
            return _vec(name, types[0]).elem
        case _ if name in SAME:
            return _vec(name, types[0])
        case _ if name in ALIKE:
            _need(types[0] == types[1], f"{name} takes two of one type, not {', '.join(map(spelled, types))}")
            return _vec(name, types[0])
        case _:
            _need(all(one in (F32, F64) or isinstance(one, Scalar) for one in types), f"{name} takes numbers")
            return F32


def _dot(name: str, types: list[Type]) -> Type:
    first, second, result, products, is_added = DOTS[name]
    a, b = (_vec(name, one) for one in types[-2:])
    _need((a.elem.name, b.elem.name) == (first, second), f"{name} takes {first} and {second}")
    _need(a.lanes == b.lanes and a.lanes % products == 0, f"{name} takes as many lanes of both")
    found = Vec(SCALARS[result], a.lanes // products)
    _need(not is_added or types[0] == found, f"{name} adds to {spelled(found)}")
    return found


def _pointed(name: str, of: Type) -> Scalar:
    element = of.to if isinstance(of, Pointer) else of.of if isinstance(of, Array) else None
    if not isinstance(element, Scalar):
        raise Mistyped(f"{name} takes a pointer to numbers, not {spelled(of)}")
    return element


COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
LOGICAL = ("&&", "||")
SHIFTS = ("<<", ">>")


def binary(op: str, a: Expr, b: Expr) -> Binary:
    """C's types for numbers and pointers; vectors meet vectors of their own type, shifts a known number."""
    return Binary(binary_type(op, a.type, b.type, b), op, a, b)


def binary_type(op: str, a: Type, b: Type, right: Expr | None = None) -> Type:
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
    """The result of a comparison in each lane: all bits set, or none."""
    return SCALARS[f"i{8 * elem.size}"]


def unary(op: str, a: Expr) -> Unary:
    if isinstance(a.type, Vec):
        return Unary(a.type, op, a)
    if not isinstance(a.type, Scalar):
        raise Mistyped(f"{op} takes a number, not {spelled(a.type)}")
    return Unary(I32 if op == "!" else promoted(a.type), op, a)


def decayed(of: Type) -> Type:
    """An array as the pointer to its first element that C makes of it."""
    return Pointer(of.of) if isinstance(of, Array) else of


def cast(of: Type, a: Expr) -> Expr:
    """`a` as another type, itself where it has the type."""
    if a.type == of:
        return a
    if isinstance(a, Const) and isinstance(of, Scalar):
        return Const(of, fitting(a.value, of))
    return Cast(of, a)


def fitting(value: int | float, of: Scalar) -> int | float:
    """A number as C converts it."""
    import struct

    if of == F32:
        try:
            return float(struct.unpack("f", struct.pack("f", value))[0])
        except OverflowError:
            return float("inf") if value > 0 else float("-inf")
    if of.is_float:
        return float(value)
    wrapped = int(value) & (1 << 8 * of.size) - 1
    return wrapped - (1 << 8 * of.size) if of.is_signed and wrapped >> (8 * of.size - 1) else wrapped


def as_elem(a: Expr, elem: Scalar) -> Expr:
    """The same bits with other lanes."""
    assert isinstance(a.type, Vec)
    if a.type.elem == elem:
        return a
    if isinstance(a, CallExpression) and a.name == "bits":
        return as_elem(a.args[0], elem)
    if isinstance(a, CallExpression) and a.name == "load" and isinstance(a.args[0], Cast):
        place = a.args[0].a
        of = place.type.to if isinstance(place.type, Pointer) else None
        if isinstance(of, Scalar) and of.size == elem.size:  # read as the numbers that are there
            return as_elem(call("load", (place,), (integer(a.type.size // elem.size),)), elem)
    if (
        isinstance(a, CallExpression)
        and a.name == "splat"
        and isinstance(a.args[0], Const)
        and a.args[0].value == 0
    ):
        return call(
            "splat", (Const(elem, 0.0 if elem.is_float else 0),), (integer(a.type.size // elem.size),)
        )
    return call("bits", (a,), of=elem)
