"""Meaning of intrinsics: the type of each result, and the operation of the high level that says the same.

One table for an instruction set, made when it is first asked for. An intrinsic that is not in the table is
refused by name; none is approximated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from phasewise.ir.nodes import Binary, CallExpression, Const, Expr, integer
from phasewise.ir.operations import Mistyped, as_elem, binary, call, unary
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
    U16,
    U32,
    U64,
    VOID,
    Array,
    Pointer,
    Scalar,
    Type,
    Vec,
)

Build: TypeAlias = Callable[[Sequence[Expr]], Expr]


@dataclass(frozen=True, slots=True)
class Intrinsic:
    """`build` makes the operation of raised arguments; vectors that it returns have the result's size."""

    result: Type
    build: Build


Table: TypeAlias = dict[str, Intrinsic]

X86_TYPES: dict[str, Type] = {
    f"__m{bits}{suffix}": Vec(elem, bits // 8 // elem.size)
    for bits in (128, 256, 512)
    for suffix, elem in (("", F32), ("d", F64), ("i", BITS))
}
X86_TYPES["__m64"] = Vec(BITS, 8)
X86_NAMES = {of: name for name, of in X86_TYPES.items()}
NEON_TYPES: dict[str, Type] = {
    f"{word}{8 * elem.size}x{lanes}_t": Vec(elem, lanes)
    for word, elems in (
        ("int", (I8, I16, I32, I64)),
        ("uint", (U8, U16, U32, U64)),
        ("float", (F32, F64)),
    )
    for elem in elems
    for lanes in (8 // elem.size, 16 // elem.size)
}
NEON_TYPES |= {"float16x4_t": Vec(U16, 4), "float16x8_t": Vec(U16, 8), "float16_t": U16}
NEON_TYPES |= {
    f"{name.removesuffix('_t')}x{many}_t": Array(of, many)
    for name, of in list(NEON_TYPES.items())
    if isinstance(of, Vec) and of.size == 16
    for many in (2, 3, 4)
}
NEON_NAMES = {of: name for name, of in reversed(NEON_TYPES.items()) if not name.startswith("float16")}

# ---- helpers of builders ---------------------------------------------------------------------------------


def number(e: Expr) -> int:
    """An argument that must be known when compiling."""
    if not isinstance(e, Const) or not isinstance(e.value, int):
        raise Mistyped("takes a number that is known when compiling")
    return e.value


def zero(elem: Scalar, lanes: int) -> Expr:
    return call("splat", (Const(elem, 0.0 if elem.is_float else 0),), (integer(lanes),))


def constant(elem: Scalar, values: Sequence[int | float]) -> Expr:
    from phasewise.ir.operations import fitting

    fitted = [fitting(value, elem) for value in values]
    if len(set(map(repr, fitted))) == 1:
        return call("splat", (Const(elem, fitted[0]),), (integer(len(fitted)),))
    return call("vector", (), tuple(Const(elem, value) for value in fitted), elem)


def size_of(e: Expr) -> int:
    assert isinstance(e.type, Vec)
    return e.type.size


def lanes_of(e: Expr) -> int:
    assert isinstance(e.type, Vec)
    return e.type.lanes


def pointer_to(e: Expr, elem: Scalar | None) -> Expr:
    """A pointer argument of a load or store, to numbers of the vector's kind."""
    of = e.type
    target = of.to if isinstance(of, Pointer) else of.of if isinstance(of, Array) else None
    if target is None:
        raise Mistyped("takes a pointer")
    if elem is None and isinstance(target, Scalar):
        return e
    if elem is None:
        elem = U8
    if target == elem:
        return e
    from phasewise.ir.operations import cast

    return cast(Pointer(elem, isinstance(of, Pointer) and of.is_const), e)


def first_lanes(e: Expr, elem: Scalar, lanes: int) -> Expr:
    """The first lanes of a register, read as `elem`."""
    found = as_elem(e, elem)
    while lanes_of(found) > lanes:
        found = half("lo", found)
    return found


def half(which: str, e: Expr) -> Expr:
    """A half of a vector; of a concatenation, a part of it."""

    if isinstance(e, CallExpression) and e.name == "concat":
        return e.args[which == "hi"]
    if isinstance(e, CallExpression) and e.name == "splat":
        return call("splat", e.args, (integer(lanes_of(e) // 2),))
    if isinstance(e, CallExpression) and e.name == "bits" and isinstance(e.args[0].type, Vec):
        inner = e.args[0]
        if isinstance(inner, CallExpression) and inner.name in ("concat", "splat") and lanes_of(inner) > 1:
            assert isinstance(e.type, Vec)
            return as_elem(half(which, inner), e.type.elem)
    return call(which, (e,))


def padded(e: Expr, size: int) -> Expr:
    """Zeros behind a vector up to a register's size."""
    while size_of(e) < size:
        assert isinstance(e.type, Vec)
        e = call("concat", (e, zero(e.type.elem, e.type.lanes)))
    return e


def shuffled(a: Expr, b: Expr, places: Sequence[int]) -> Expr:
    return call("shuffle", (a, b), tuple(integer(place) for place in places))


def signs(elem: Scalar, lanes: int, of_even: bool) -> Expr:
    """A mask of sign bits in every second lane."""
    top = 1 << (8 * elem.size - 1)
    bits = SCALARS[f"u{8 * elem.size}"]
    return constant(bits, [top if (i % 2 == 0) == of_even else 0 for i in range(lanes)])


def flipped(e: Expr, of_even: bool) -> Expr:
    """Every second lane negated."""
    assert isinstance(e.type, Vec)
    elem = e.type.elem
    mask = signs(elem, e.type.lanes, of_even)
    assert isinstance(mask.type, Vec)
    return as_elem(binary("^", as_elem(e, mask.type.elem), mask), elem)


def _dup(places: Sequence[int], elem: Scalar) -> Build:
    return lambda a: shuffled(as_elem(a[0], elem), as_elem(a[0], elem), places)


def _imm4(value: int) -> list[int]:
    return [value >> 2 * i & 3 for i in range(4)]


# ---- x86 -------------------------------------------------------------------------------------------------


@cache
def x86() -> Table:
    table: Table = {}
    for prefix, size in (("_mm_", 16), ("_mm256_", 32), ("_mm512_", 64)):
        _x86_floats(table, prefix, size)
        _x86_integers(table, prefix, size)
        _x86_moves(table, prefix, size)
        _x86_shuffles(table, prefix, size)
    _x86_halves(table)
    _x86_scalars(table)
    return table


def _alike(elem: Scalar, op: str) -> Build:
    return lambda a: binary(op, as_elem(a[0], elem), as_elem(a[1], elem))


def _called(name: str, elem: Scalar) -> Build:
    return lambda a: call(name, tuple(as_elem(one, elem) for one in a))


COMPARED = {
    0: "==", 1: "<", 2: "<=", 4: "!=", 13: ">=", 14: ">", 16: "==", 17: "<", 18: "<=", 20: "!=",
    29: ">=", 30: ">",
}  # fmt: skip


def _compared(elem: Scalar) -> Build:
    def build(a: Sequence[Expr]) -> Expr:
        op = COMPARED.get(number(a[2]))
        if op is None:
            raise Mistyped(f"comparison {number(a[2])} has no operation")
        return binary(op, as_elem(a[0], elem), as_elem(a[1], elem))

    return build


def _x86_floats(table: Table, prefix: str, size: int) -> None:
    def negative(e: Expr) -> Expr:
        return unary("-", e)

    for suffix, elem in (("ps", F32), ("pd", F64)):
        reg, bits = Vec(elem, size // elem.size), SCALARS[f"u{8 * elem.size}"]
        for name, op in (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/")):
            table[f"{prefix}{name}_{suffix}"] = Intrinsic(reg, _alike(elem, op))
        for name, op in (("and", "&"), ("or", "|"), ("xor", "^")):
            table[f"{prefix}{name}_{suffix}"] = Intrinsic(
                reg,
                lambda a, op=op, bits=bits, elem=elem: as_elem(_alike(bits, op)(a), elem),  # type: ignore[misc]
            )
        table[f"{prefix}andnot_{suffix}"] = Intrinsic(
            reg,
            lambda a, bits=bits, elem=elem: as_elem(_called("andnot", bits)(a), elem),  # type: ignore[misc]
        )
        for name in ("min", "max"):
            table[f"{prefix}{name}_{suffix}"] = Intrinsic(reg, _called(name, elem))
        table[f"{prefix}sqrt_{suffix}"] = Intrinsic(reg, _called("sqrt", elem))
        table[f"{prefix}fmadd_{suffix}"] = Intrinsic(reg, lambda a: call("fma", tuple(a)))
        table[f"{prefix}fmsub_{suffix}"] = Intrinsic(reg, lambda a: call("fma", (a[0], a[1], negative(a[2]))))
        table[f"{prefix}fnmadd_{suffix}"] = Intrinsic(
            reg, lambda a: call("fma", (negative(a[0]), a[1], a[2]))
        )
        table[f"{prefix}fnmsub_{suffix}"] = Intrinsic(
            reg, lambda a: call("fma", (negative(a[0]), a[1], negative(a[2])))
        )
        table[f"{prefix}fmaddsub_{suffix}"] = Intrinsic(
            reg, lambda a: call("fma", (a[0], a[1], flipped(a[2], True)))
        )
        table[f"{prefix}addsub_{suffix}"] = Intrinsic(reg, lambda a: binary("+", a[0], flipped(a[1], True)))
        table[f"{prefix}cmp_{suffix}"] = Intrinsic(
            reg,
            lambda a, elem=elem: as_elem(_compared(elem)(a), elem),  # type: ignore[misc]
        )
        for name, op in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("neq", "!=")):
            table[f"{prefix}cmp{name}_{suffix}"] = Intrinsic(
                reg,
                lambda a, op=op, elem=elem: as_elem(_alike(elem, op)(a), elem),  # type: ignore[misc]
            )
        table[f"{prefix}blendv_{suffix}"] = Intrinsic(
            reg,
            lambda a, elem=elem: call("select", (as_elem(a[2], SCALARS[f"i{8 * elem.size}"]), a[1], a[0])),  # type: ignore[misc]
        )
        table[f"{prefix}set1_{suffix}"] = Intrinsic(reg, _splat(elem, reg.lanes))
        table[f"{prefix}setzero_{suffix}"] = Intrinsic(reg, lambda a, reg=reg: zero(reg.elem, reg.lanes))  # type: ignore[misc]
        table[f"{prefix}set_{suffix}"] = Intrinsic(reg, _set(elem, reg.lanes, is_reversed=True))
        table[f"{prefix}setr_{suffix}"] = Intrinsic(reg, _set(elem, reg.lanes))
        for name in ("loadu", "load"):
            table[f"{prefix}{name}_{suffix}"] = Intrinsic(reg, _load(elem, reg.lanes))
        for name in ("storeu", "store", "stream"):
            table[f"{prefix}{name}_{suffix}"] = Intrinsic(VOID, _store(elem))
    ps = Vec(F32, size // 4)
    for name, op_name in (("floor", "floor"), ("ceil", "ceil")):
        table[f"{prefix}{name}_ps"] = Intrinsic(ps, _called(op_name, F32))
    for name in ("round_ps", "roundscale_ps"):
        table[f"{prefix}{name}"] = Intrinsic(ps, _rounded)
    table[f"{prefix}cvtps_epi32"] = Intrinsic(Vec(BITS, size), _called("nearest_i32", F32))
    table[f"{prefix}cvttps_epi32"] = Intrinsic(Vec(BITS, size), _called("trunc_i32", F32))
    table[f"{prefix}cvtepi32_ps"] = Intrinsic(ps, lambda a: call("convert", (as_elem(a[0], I32),), of=F32))
    table[f"{prefix}cvtph_ps"] = Intrinsic(
        ps,
        lambda a, ps=ps: call("from_f16", (first_lanes(a[0], U16, ps.lanes),)),  # type: ignore[misc]
    )
    table[f"{prefix}cvtps_ph"] = Intrinsic(
        Vec(BITS, max(16, size // 2)), lambda a: padded(call("to_f16", (a[0],)), 16)
    )


def _rounded(a: Sequence[Expr]) -> Expr:
    name = {0: "nearest", 1: "floor", 2: "ceil", 3: "trunc"}.get(number(a[1]) & 7)
    if name is None:
        raise Mistyped("rounds as the processor is set, which is not known")
    return call(name, (a[0],))


def _splat(elem: Scalar, lanes: int) -> Build:
    from phasewise.ir.operations import cast

    return lambda a: call("splat", (cast(elem, a[0]),), (integer(lanes),))


def _set(elem: Scalar, lanes: int, is_reversed: bool = False) -> Build:
    from phasewise.ir.operations import cast

    def build(given: Sequence[Expr]) -> Expr:
        values = [cast(elem, one) for one in (reversed(given) if is_reversed else given)]
        if len(values) != lanes:
            raise Mistyped(f"takes {lanes} numbers, not {len(values)}")
        known = [one.value for one in values if isinstance(one, Const)]
        if len(known) == lanes:
            return constant(elem, known)
        if all(one == values[0] for one in values):
            return call("splat", (values[0],), (integer(lanes),))
        return _gathered(values, elem)

    return build


def _gathered(values: list[Expr], elem: Scalar) -> Expr:
    """A vector of values that are known when the kernel runs: halves of equal ones are splats."""
    if all(one == values[0] for one in values):
        return call("splat", (values[0],), (integer(len(values)),))
    middle = len(values) // 2
    return call("concat", (_gathered(values[:middle], elem), _gathered(values[middle:], elem)))


def _load(elem: Scalar | None, lanes: int) -> Build:
    def build(a: Sequence[Expr]) -> Expr:
        p = pointer_to(a[0], elem)
        size = _target(p).size
        return call("load", (p,), (integer(lanes if elem else lanes // size),))

    return build


def _target(p: Expr) -> Scalar:
    of = p.type.to if isinstance(p.type, Pointer) else p.type.of if isinstance(p.type, Array) else None
    assert isinstance(of, Scalar)
    return of


def _store(elem: Scalar | None) -> Build:
    def build(a: Sequence[Expr]) -> Expr:
        p = pointer_to(a[0], elem)
        return call("store", (p, as_elem(a[1], _target(p))))

    return build


WIDTHS = (("8", I8, U8), ("16", I16, U16), ("32", I32, U32), ("64", I64, U64))


def _x86_integers(table: Table, prefix: str, size: int) -> None:
    reg = Vec(BITS, size)

    def put(name: str, build: Build) -> None:
        table[prefix + name] = Intrinsic(reg, build)

    for width, signed, unsigned in WIDTHS:
        put(f"add_epi{width}", _alike(signed, "+"))
        put(f"sub_epi{width}", _alike(signed, "-"))
        put(f"cmpeq_epi{width}", _alike(signed, "=="))
        put(f"cmpgt_epi{width}", _alike(signed, ">"))
        put(f"cmplt_epi{width}", _alike(signed, "<"))
        for name in ("min", "max"):
            put(f"{name}_epi{width}", _called(name, signed))
            put(f"{name}_epu{width}", _called(name, unsigned))
        put(f"abs_epi{width}", _called("abs", signed))
        put(f"sign_epi{width}", _called("sign", signed))
        if width != "8":
            put(f"mullo_epi{width}", _alike(signed, "*"))
            put(f"slli_epi{width}", _shift("<<", unsigned))
            put(f"srli_epi{width}", _shift(">>", unsigned))
            put(f"srai_epi{width}", _shift(">>", signed))
        if width in ("8", "16"):
            for word, elem in (("i", signed), ("u", unsigned)):
                put(f"adds_ep{word}{width}", _called("add_sat", elem))
                put(f"subs_ep{word}{width}", _called("sub_sat", elem))
    put("mulhi_epi16", _called("mulhi", I16))
    put("avg_epu8", _called("avg", U8))
    put("avg_epu16", _called("avg", U16))
    put("maddubs_epi16", lambda a: call("dot_u8i8_sat", (as_elem(a[0], U8), as_elem(a[1], I8))))
    put("madd_epi16", _called("dot_i16", I16))
    for name in ("dpbusd_epi32", "dpbusd_avx_epi32"):
        put(name, lambda a: call("dot_u8i8", (as_elem(a[0], I32), as_elem(a[1], U8), as_elem(a[2], I8))))
    for suffix in (f"si{8 * size}", "epi32", "epi64"):
        elem = I64 if suffix == "epi64" else I32
        for name, op in (("and", "&"), ("or", "|"), ("xor", "^")):
            put(f"{name}_{suffix}", _bitwise(op, elem))
        put(f"andnot_{suffix}", _called("andnot", elem))
    put("blendv_epi8", lambda a: call("select", (as_elem(a[2], I8), as_elem(a[1], I8), as_elem(a[0], I8))))
    for name, elem in (("epi8", I8), ("epi16", I16), ("epi32", I32), ("epi64x", I64), ("epi64", I64)):
        put(f"set1_{name}", _splat(elem, size // elem.size))
        put(f"set_{name}", _set(elem, size // elem.size, is_reversed=True))
        put(f"setr_{name}", _set(elem, size // elem.size))
    put(f"setzero_si{8 * size}", lambda a: zero(I32, size // 4))
    put("packs_epi32", lambda a: call("pack", (as_elem(a[0], I32), as_elem(a[1], I32)), of=I16))
    put("packus_epi32", lambda a: call("pack", (as_elem(a[0], I32), as_elem(a[1], I32)), of=U16))
    put("packs_epi16", lambda a: call("pack", (as_elem(a[0], I16), as_elem(a[1], I16)), of=I8))
    put("packus_epi16", lambda a: call("pack", (as_elem(a[0], I16), as_elem(a[1], I16)), of=U8))
    for narrow, i_narrow, u_narrow in WIDTHS[:3]:
        for wide, i_wide, _u_wide in WIDTHS[1:]:
            if i_wide.size > i_narrow.size:
                lanes = size // i_wide.size
                put(f"cvtepi{narrow}_epi{wide}", _widened(i_narrow, i_wide, lanes))
                put(f"cvtepu{narrow}_epi{wide}", _widened(u_narrow, i_wide, lanes))


def _bitwise(op: str, elem: Scalar) -> Build:
    """In the lanes that both sides have, so that no reinterpretation stands between them."""

    def build(a: Sequence[Expr]) -> Expr:
        own = [one.type.elem for one in a if isinstance(one.type, Vec)]
        shared = own[0] if own[0] == own[1] and not own[0].is_float else elem

        for one, other in ((0, 1), (1, 0)):
            constant_side = isinstance(a[one], CallExpression) and a[one].name in ("splat", "vector")  # type: ignore[union-attr]
            if constant_side and not own[one].is_float and own[one] != own[other]:
                shared = own[one]
        return binary(op, as_elem(a[0], shared), as_elem(a[1], shared))

    return build


def _shift(op: str, elem: Scalar) -> Build:
    def build(a: Sequence[Expr]) -> Expr:
        if not isinstance(a[1], Const):
            return binary(op, as_elem(a[0], elem), a[1])
        bits = number(a[1])
        if bits >= 8 * elem.size:
            if op == ">>" and elem.is_signed:
                bits = 8 * elem.size - 1
            else:
                return zero(elem, size_of(a[0]) // elem.size)
        return binary(op, as_elem(a[0], elem), integer(bits))

    return build


def _widened(narrow: Scalar, wide: Scalar, lanes: int) -> Build:
    return lambda a: call("widen", (first_lanes(a[0], narrow, lanes),), of=wide)


def _x86_moves(table: Table, prefix: str, size: int) -> None:
    reg = Vec(BITS, size)
    si = f"si{8 * size}"
    for name in ("loadu", "load", "lddqu"):
        table[f"{prefix}{name}_{si}"] = Intrinsic(reg, _load(None, size))
    for name in ("storeu", "store", "stream"):
        table[f"{prefix}{name}_{si}"] = Intrinsic(VOID, _store(None))
    kinds = {"ps": F32, "pd": F64, "si": BITS}
    for one, elem in kinds.items():
        for other, to in kinds.items():
            if one != other:
                right = f"{other}{8 * size}" if other == "si" else other
                left = f"{one}{8 * size}" if one == "si" else one
                table[f"{prefix}cast{left}_{right}"] = Intrinsic(
                    Vec(to, size // to.size),
                    lambda a, to=to: a[0] if to == BITS else as_elem(a[0], to),  # type: ignore[misc]
                )
        for bigger in (32, 64):
            if bigger > size:
                wide = {32: "_mm256_", 64: "_mm512_"}[bigger]
                big_name, small_name = f"{one}{8 * bigger}", f"{one}{8 * size}"
                table[f"{wide}cast{big_name}_{small_name}"] = Intrinsic(
                    Vec(elem, size // elem.size),
                    lambda a, size=size: _low(a[0], size),  # type: ignore[misc]
                )
                for word in ("cast", "zext"):
                    table[f"{wide}{word}{small_name}_{big_name}"] = Intrinsic(
                        Vec(elem, bigger // elem.size),
                        lambda a, bigger=bigger: padded(a[0], bigger),  # type: ignore[misc]
                    )


def _low(e: Expr, size: int) -> Expr:
    while size_of(e) > size:
        e = half("lo", e)
    return e


def _part(e: Expr, at: int, size: int) -> Expr:
    """The part number `at` of `size` bytes."""
    parts = size_of(e) // size
    while parts > 1:
        parts //= 2
        e = half("hi" if at >= parts else "lo", e)
        at %= parts
    return e


def _x86_shuffles(table: Table, prefix: str, size: int) -> None:
    ps, reg = Vec(F32, size // 4), Vec(BITS, size)

    def put(name: str, build: Build, of: Type = reg) -> None:
        table[prefix + name] = Intrinsic(of, build)

    put("movehdup_ps", _dup((1, 1, 3, 3), F32), ps)
    put("moveldup_ps", _dup((0, 0, 2, 2), F32), ps)
    put("permute_ps", lambda a: _dup(_imm4(number(a[1])), F32)(a), ps)
    put("shuffle_epi32", lambda a: _dup(_imm4(number(a[1])), I32)(a))
    put("shuffle_ps", _shuffle_ps, ps)
    put("shufflelo_epi16", lambda a: _dup((*_imm4(number(a[1])), 4, 5, 6, 7), I16)(a))
    put("shufflehi_epi16", lambda a: _dup((0, 1, 2, 3, *(4 + i for i in _imm4(number(a[1])))), I16)(a))
    put("shuffle_epi8", lambda a: call("lookup", (as_elem(a[0], I8), as_elem(a[1], I8))))
    put("alignr_epi8", lambda a: _aligned(a[0], a[1], number(a[2])))
    for name in ("srli_si128", "bsrli_epi128", "bsrli_si128"):
        put(name, lambda a: _aligned(zero(I8, size_of(a[0])), a[0], number(a[1])))
    for name in ("slli_si128", "bslli_epi128", "bslli_si128"):
        put(name, lambda a: _aligned(a[0], zero(I8, size_of(a[0])), 16 - number(a[1])))
    for suffix, elem, of in (
        ("ps", F32, ps),
        ("pd", F64, Vec(F64, size // 8)),
        ("epi8", I8, reg),
        ("epi16", I16, reg),
        ("epi32", I32, reg),
        ("epi64", I64, reg),
    ):
        put(f"unpacklo_{suffix}", _unpacked(elem, 0), of)
        put(f"unpackhi_{suffix}", _unpacked(elem, 1), of)
    put("hadd_ps", lambda a: _neighbours(a, F32), ps)
    put("hadd_pd", lambda a: _neighbours(a, F64), Vec(F64, size // 8))
    put("hadd_epi32", lambda a: _neighbours(a, I32))
    put("hadd_epi16", lambda a: _neighbours(a, I16))


def _shuffle_ps(a: Sequence[Expr]) -> Expr:
    imm = _imm4(number(a[2]))
    return shuffled(a[0], a[1], (imm[0], imm[1], 4 + imm[2], 4 + imm[3]))


def _aligned(high: Expr, low: Expr, by: int) -> Expr:
    if by > 16:
        raise Mistyped("shifts by more than 16 bytes are not in the subset")
    return (
        shuffled(as_elem(low, I8), as_elem(high, I8), [by + i for i in range(16)])
        if by < 16
        else as_elem(high, I8)
    )


def _unpacked(elem: Scalar, which: int) -> Build:
    group = 16 // elem.size
    places = [which * group // 2 + i // 2 + (group if i % 2 else 0) for i in range(group)]
    return lambda a: shuffled(as_elem(a[0], elem), as_elem(a[1], elem), places)


def _neighbours(a: Sequence[Expr], elem: Scalar) -> Expr:
    one, other = as_elem(a[0], elem), as_elem(a[1], elem)
    group = 2 * (16 // elem.size)
    even = shuffled(one, other, range(0, group, 2))
    return binary("+", even, shuffled(one, other, range(1, group, 2)))


def _x86_halves(table: Table) -> None:
    """Intrinsics that take a register apart, or join two into one."""
    for suffix, elem in (("ps", F32), ("pd", F64), ("si256", BITS)):
        small, big = Vec(elem, 16 // elem.size), Vec(elem, 32 // elem.size)
        table[f"_mm256_extractf128_{suffix}"] = Intrinsic(small, lambda a: _part(a[0], number(a[1]), 16))
        table[f"_mm256_insertf128_{suffix}"] = Intrinsic(big, _inserted)
        table[f"_mm256_permute2f128_{suffix}"] = Intrinsic(big, _chosen_halves)
    table["_mm256_extracti128_si256"] = table["_mm256_extractf128_si256"]
    table["_mm256_inserti128_si256"] = table["_mm256_insertf128_si256"]
    table["_mm256_permute2x128_si256"] = table["_mm256_permute2f128_si256"]
    for suffix, elem in (("", F32), ("i", BITS), ("d", F64)):
        of = Vec(elem, 32 // elem.size)
        table[f"_mm256_set_m128{suffix}"] = Intrinsic(of, lambda a: _joined(a[1], a[0]))
        table[f"_mm256_setr_m128{suffix}"] = Intrinsic(of, lambda a: _joined(a[0], a[1]))
    for name, elem, size in (
        ("extractf32x8_ps", F32, 32),
        ("extractf64x4_pd", F64, 32),
        ("extracti64x4_epi64", BITS, 32),
        ("extracti32x8_epi32", BITS, 32),
        ("extractf32x4_ps", F32, 16),
        ("extracti32x4_epi32", BITS, 16),
    ):
        table[f"_mm512_{name}"] = Intrinsic(
            Vec(elem, size // elem.size),
            lambda a, size=size: _part(a[0], number(a[1]), size),  # type: ignore[misc]
        )
    for name, elem in (
        ("inserti64x4", BITS),
        ("insertf32x8", F32),
        ("insertf64x4", F64),
        ("inserti32x8", BITS),
    ):
        table[f"_mm512_{name}"] = Intrinsic(Vec(elem, 64 // elem.size), _inserted)
    bits32 = Vec(BITS, 32)
    for name in ("_mm256_broadcastsi128_si256", "_mm_broadcastsi128_si256"):
        table[name] = Intrinsic(bits32, lambda a: _joined(a[0], a[0]))
    table["_mm256_permute4x64_epi64"] = Intrinsic(
        bits32, lambda a: _permuted(as_elem(a[0], I64), _imm4(number(a[1])))
    )
    table["_mm256_permute4x64_pd"] = Intrinsic(Vec(F64, 4), lambda a: _permuted(a[0], _imm4(number(a[1]))))
    table["_mm256_permutevar8x32_epi32"] = Intrinsic(
        bits32, lambda a: _permuted(as_elem(a[0], I32), _places(a[1]))
    )
    table["_mm256_permutevar8x32_ps"] = Intrinsic(Vec(F32, 8), lambda a: _permuted(a[0], _places(a[1])))
    for size, prefix in ((16, "_mm_"), (32, "_mm256_"), (64, "_mm512_")):
        table[f"{prefix}broadcastss_ps"] = Intrinsic(
            Vec(F32, size // 4),
            lambda a, size=size: call(  # type: ignore[misc]
                "splat", (call("lane", (a[0],), (integer(0),)),), (integer(size // 4),)
            ),
        )
        table[f"{prefix}broadcast_ss"] = Intrinsic(
            Vec(F32, size // 4),
            lambda a, size=size: call("splat", (element(a[0]),), (integer(size // 4),)),  # type: ignore[misc]
        )
    table["_mm256_broadcast_ps"] = Intrinsic(
        Vec(F32, 8), lambda a: _joined(_load(F32, 4)(a), _load(F32, 4)(a))
    )
    for name, how in (
        ("reduce_add", "reduce_add"),
        ("reduce_max", "reduce_max"),
        ("reduce_min", "reduce_min"),
    ):
        table[f"_mm512_{name}_ps"] = Intrinsic(F32, _called(how, F32))
        table[f"_mm512_{name}_epi32"] = Intrinsic(I32, _called(how, I32))


def element(p: Expr) -> Expr:
    """The type that a pointer points to."""
    from phasewise.ir.nodes import Index

    of = _target(p)
    if isinstance(p, Binary) and p.op == "+" and isinstance(p.a.type, Pointer | Array):
        return Index(of, p.a, p.b)
    return Index(of, p, integer(0))


def _joined(low: Expr, high: Expr) -> Expr:
    assert isinstance(low.type, Vec)
    return call("concat", (low, as_elem(high, low.type.elem)))


def _inserted(a: Sequence[Expr]) -> Expr:
    assert isinstance(a[1].type, Vec)
    whole = as_elem(a[0], a[1].type.elem)
    if size_of(whole) != 2 * size_of(a[1]):
        raise Mistyped("only halves are inserted in this subset")
    return _joined(half("lo", whole), a[1]) if number(a[2]) & 1 else _joined(a[1], half("hi", whole))


def _chosen_halves(a: Sequence[Expr]) -> Expr:
    imm = number(a[2])

    def chosen(bits: int) -> Expr:
        if bits & 8:
            assert isinstance(a[0].type, Vec)
            return zero(a[0].type.elem, a[0].type.lanes // 2)
        return half("hi" if bits & 1 else "lo", a[bits >> 1 & 1])

    return _joined(chosen(imm & 15), chosen(imm >> 4 & 15))


def _permuted(e: Expr, places: Sequence[int]) -> Expr:
    return call("permute", (e,), tuple(integer(place) for place in places))


def _places(e: Expr) -> list[int]:

    found = as_elem(e, I32)
    if not isinstance(found, CallExpression) or found.name != "vector":
        raise Mistyped("takes places that are known when compiling")
    return [number(one) & 7 for one in found.numbers]


def _x86_scalars(table: Table) -> None:
    """Intrinsics between vectors and numbers, and those of the lowest lane alone."""

    def lane(elem: Scalar, at: int = 0) -> Build:
        return lambda a: call("lane", (as_elem(a[0], elem),), (integer(at),))

    for bits, size in ((128, 16), (256, 32), (512, 64)):
        prefix = "_mm_" if size == 16 else f"_mm{bits}_"
        table[f"{prefix}cvtss_f32"] = Intrinsic(F32, lane(F32))
        table[f"{prefix}cvtsd_f64"] = Intrinsic(F64, lane(F64))
        for name in (f"cvtsi{bits}_si32",):
            table[prefix + name] = Intrinsic(I32, lane(I32))
        table[f"{prefix}cvtsi{bits}_si64"] = Intrinsic(I64, lane(I64))
        for width, signed, unsigned in WIDTHS:
            of = {"8": I32, "16": I32, "32": I32, "64": I64}[width]
            elem = unsigned if width in ("8", "16") and size == 16 else signed
            table[f"{prefix}extract_epi{width}"] = Intrinsic(of, _extracted(elem, of))
            table[f"{prefix}insert_epi{width}"] = Intrinsic(Vec(BITS, size), _with(signed))
    m128i, m128 = Vec(BITS, 16), Vec(F32, 4)
    for name, elem in (("cvtsi32_si128", I32), ("cvtsi64_si128", I64)):
        table[f"_mm_{name}"] = Intrinsic(m128i, _alone(elem))
    table["_mm_set_ss"] = Intrinsic(m128, _alone(F32))
    table["_mm_load_ss"] = Intrinsic(m128, lambda a: _alone(F32)([element(pointer_to(a[0], F32))]))
    table["_mm_store_ss"] = Intrinsic(
        VOID, lambda a: call("store", (pointer_to(a[0], F32), _permuted(a[1], (0,))))
    )
    for name in ("loadl_epi64", "loadu_si64"):
        table[f"_mm_{name}"] = Intrinsic(m128i, lambda a: padded(_load(None, 8)(a), 16))
    table["_mm_storel_epi64"] = Intrinsic(
        VOID, lambda a: _store(None)([a[0], half("lo", as_elem(a[1], I64))])
    )
    for name in ("loadu_si32",):
        table[f"_mm_{name}"] = Intrinsic(m128i, lambda a: padded(_load(None, 4)(a), 16))
    for name, op in (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/")):
        table[f"_mm_{name}_ss"] = Intrinsic(m128, _lowest(lambda x, y, op=op: binary(op, x, y)))  # type: ignore[misc]
    for name in ("min", "max"):
        table[f"_mm_{name}_ss"] = Intrinsic(m128, _lowest_by_vector(name))
    table["_mm_movehl_ps"] = Intrinsic(m128, lambda a: shuffled(a[1], a[0], (2, 3, 6, 7)))
    table["_mm_movelh_ps"] = Intrinsic(m128, lambda a: shuffled(a[0], a[1], (0, 1, 4, 5)))
    table["_cvtsh_ss"] = Intrinsic(F32, lambda a: call("from_f16", (_u16(a[0]),)))
    table["_cvtss_sh"] = Intrinsic(U16, lambda a: call("to_f16", (a[0],)))
    table["_mm_storel_pi"] = Intrinsic(
        VOID, lambda a: call("store", (pointer_to(a[0], F32), half("lo", a[1])))
    )
    table["_mm_prefetch"] = Intrinsic(VOID, lambda a: call("prefetch", (a[0],)))
    table["__builtin_prefetch"] = Intrinsic(VOID, lambda a: call("prefetch", (a[0],)))


def _u16(e: Expr) -> Expr:
    from phasewise.ir.operations import cast

    return cast(U16, e)


def _extracted(elem: Scalar, of: Scalar) -> Build:
    from phasewise.ir.operations import cast

    return lambda a: cast(of, call("lane", (as_elem(a[0], elem),), (integer(number(a[1])),)))


def _with(elem: Scalar) -> Build:
    from phasewise.ir.operations import cast

    return lambda a: call("with_lane", (as_elem(a[0], elem), cast(elem, a[1])), (integer(number(a[2])),))


def _alone(elem: Scalar) -> Build:
    from phasewise.ir.operations import cast

    lanes = 16 // elem.size
    return lambda a: call("with_lane", (zero(elem, lanes), cast(elem, a[0])), (integer(0),))


def _lowest(op: Callable[[Expr, Expr], Expr]) -> Build:
    """An operation on lane 0; the other lanes are the first argument's."""

    def build(a: Sequence[Expr]) -> Expr:
        x, y = (call("lane", (one,), (integer(0),)) for one in a)
        return call("with_lane", (a[0], op(x, y)), (integer(0),))

    return build


def _lowest_by_vector(name: str) -> Build:
    def build(a: Sequence[Expr]) -> Expr:
        found = call("lane", (call(name, tuple(a)),), (integer(0),))
        return call("with_lane", (a[0], found), (integer(0),))

    return build


# ---- NEON ------------------------------------------------------------------------------------------------

NEON_ELEMS = (
    ("s8", I8), ("s16", I16), ("s32", I32), ("s64", I64), ("u8", U8), ("u16", U16), ("u32", U32),
    ("u64", U64),
    ("f32", F32), ("f64", F64),
)  # fmt: skip


@cache
def neon() -> Table:
    table: Table = {}
    for suffix, elem in NEON_ELEMS:
        for q, size in (("", 8), ("q", 16)):
            _neon_plain(table, q, suffix, Vec(elem, size // elem.size))
        _neon_halves(table, suffix, elem)
    _neon_floats(table)
    _neon_dots(table)
    return table


def _neon_plain(table: Table, q: str, suffix: str, reg: Vec) -> None:
    elem = reg.elem
    bits = elem if not elem.is_float else SCALARS[f"i{8 * elem.size}"]
    unsigned = SCALARS[f"u{8 * elem.size}"]

    def put(name: str, build: Build, of: Type = reg) -> None:
        table[f"v{name}{q}_{suffix}"] = Intrinsic(of, build)

    for name, op in (("add", "+"), ("sub", "-"), ("mul", "*"), ("and", "&"), ("orr", "|"), ("eor", "^")):
        put(name, _alike(elem, op))
    if elem.is_float:
        put("div", _alike(elem, "/"))
    for name in ("min", "max"):
        if not elem.is_float:  # of floats these give NaN where one is; none of the operations does
            put(name, _called(name, elem))
    put("abs", _called("abs", elem))
    put("neg", lambda a: unary("-", a[0]))
    mask = Vec(unsigned, reg.lanes)
    for name, op in (("ceq", "=="), ("cgt", ">"), ("cge", ">="), ("clt", "<"), ("cle", "<=")):
        put(name, lambda a, op=op: as_elem(binary(op, a[0], a[1]), unsigned), mask)  # type: ignore[misc]
    put("bsl", lambda a: _bit_select(a, elem, bits))
    put("bic", lambda a: call("andnot", (a[1], a[0])))
    put("dup", lambda a: _splat(elem, reg.lanes)(a))
    table[f"vdup{q}_n_{suffix}"] = table[f"vmov{q}_n_{suffix}"] = Intrinsic(reg, _splat(elem, reg.lanes))
    put("ld1", _load(elem, reg.lanes))
    put("st1", _store(elem), VOID)
    table[f"vst1{q}_lane_{suffix}"] = Intrinsic(
        VOID, lambda a: call("store", (pointer_to(a[0], elem), _permuted(a[1], (number(a[2]),))))
    )
    table[f"vld1{q}_dup_{suffix}"] = Intrinsic(
        reg, lambda a: call("splat", (element(pointer_to(a[0], elem)),), (integer(reg.lanes),))
    )
    table[f"vget{q}_lane_{suffix}"] = Intrinsic(
        elem, lambda a: call("lane", (a[0],), (integer(number(a[1])),))
    )
    table[f"vset{q}_lane_{suffix}"] = Intrinsic(
        reg, lambda a: call("with_lane", (a[1], a[0]), (integer(number(a[2])),))
    )
    table[f"vmul{q}_n_{suffix}"] = Intrinsic(reg, lambda a: binary("*", a[0], _splat(elem, reg.lanes)(a[1:])))
    put("mla", lambda a: binary("+", a[0], binary("*", a[1], a[2])))
    put("mls", lambda a: binary("-", a[0], binary("*", a[1], a[2])))
    table[f"vmla{q}_n_{suffix}"] = Intrinsic(
        reg, lambda a: binary("+", a[0], binary("*", a[1], _splat(elem, reg.lanes)(a[2:])))
    )
    if not elem.is_float:
        table[f"vshr{q}_n_{suffix}"] = Intrinsic(reg, _shift(">>", elem))
        table[f"vshl{q}_n_{suffix}"] = Intrinsic(reg, _shift("<<", elem))
        put("qadd", _called("add_sat", elem))
        if elem in (U8, U16):
            put("rhadd", _called("avg", elem))
        put("qsub", _called("sub_sat", elem))
        put("mvn", lambda a: unary("~", a[0]))
    for other, to in NEON_ELEMS:
        if other != suffix:
            table[f"vreinterpret{q}_{other}_{suffix}"] = Intrinsic(
                Vec(to, reg.size // to.size),
                lambda a, to=to: as_elem(a[0], to),  # type: ignore[misc]
            )
    if q:
        put("addv", lambda a: call("reduce_add", (a[0],), (integer(1),) if elem.is_float else ()), elem)
        if not elem.is_float:
            put("maxv", _called("reduce_max", elem), elem)
            put("minv", _called("reduce_min", elem), elem)
        put("padd", lambda a: _neighbours(a, elem))
    group = 16 // elem.size
    if q:
        put("zip1", _unpacked(elem, 0))
        put("zip2", _unpacked(elem, 1))
        put("uzp1", lambda a: shuffled(a[0], a[1], range(0, 2 * group, 2)))
        put("uzp2", lambda a: shuffled(a[0], a[1], range(1, 2 * group, 2)))
        put("ext", lambda a: shuffled(a[0], a[1], [number(a[2]) + i for i in range(group)]))


def _bit_select(a: Sequence[Expr], elem: Scalar, bits: Scalar) -> Expr:
    """(mask & a) | (~mask & b), bit by bit, as the instruction does."""
    mask, one, other = (as_elem(e, bits) for e in a)
    return as_elem(binary("|", binary("&", mask, one), call("andnot", (mask, other))), elem)


def _neon_halves(table: Table, suffix: str, elem: Scalar) -> None:
    small, big = Vec(elem, 8 // elem.size), Vec(elem, 16 // elem.size)
    table[f"vget_low_{suffix}"] = Intrinsic(small, lambda a: half("lo", a[0]))
    table[f"vget_high_{suffix}"] = Intrinsic(small, lambda a: half("hi", a[0]))
    table[f"vcombine_{suffix}"] = Intrinsic(big, lambda a: _joined(a[0], a[1]))
    if elem.is_float or elem.size == 8:
        return
    wide = SCALARS[f"{elem.name[0]}{16 * elem.size}"]
    to = Vec(wide, small.lanes)

    def wider(e: Expr) -> Expr:
        return call("widen", (e,), of=wide)

    table[f"vmovl_{suffix}"] = Intrinsic(to, lambda a: wider(a[0]))
    table[f"vmovl_high_{suffix}"] = Intrinsic(to, lambda a: wider(half("hi", a[0])))
    table[f"vmull_{suffix}"] = Intrinsic(to, lambda a: binary("*", wider(a[0]), wider(a[1])))
    table[f"vmull_high_{suffix}"] = Intrinsic(
        to, lambda a: binary("*", wider(half("hi", a[0])), wider(half("hi", a[1])))
    )
    table[f"vmlal_{suffix}"] = Intrinsic(
        to, lambda a: binary("+", a[0], binary("*", wider(a[1]), wider(a[2])))
    )
    table[f"vaddl_{suffix}"] = Intrinsic(to, lambda a: binary("+", wider(a[0]), wider(a[1])))
    narrow_suffix = f"{suffix[0]}{16 * elem.size}"
    table[f"vmovn_{narrow_suffix}"] = Intrinsic(small, lambda a: call("narrow", (a[0],), of=elem))

    def pairs(e: Expr) -> Expr:
        """Neighbours added, wide."""
        low, high = wider(half("lo", e)), wider(half("hi", e))
        if size_of(low) < 16:
            raise Mistyped("pairs of eight bytes are not in the subset")
        return _neighbours((low, high), wide)

    table[f"vpaddlq_{suffix}"] = Intrinsic(Vec(wide, 16 // wide.size), lambda a: pairs(a[0]))
    table[f"vpadalq_{suffix}"] = Intrinsic(
        Vec(wide, 16 // wide.size), lambda a: binary("+", a[0], pairs(a[1]))
    )


def _neon_floats(table: Table) -> None:
    for q, lanes in (("", 2), ("q", 4)):
        reg = Vec(F32, lanes)
        table[f"vfma{q}_f32"] = Intrinsic(reg, lambda a: call("fma", (a[1], a[2], a[0])))
        table[f"vfms{q}_f32"] = Intrinsic(reg, lambda a: call("fma", (unary("-", a[1]), a[2], a[0])))
        table[f"vfma{q}_n_f32"] = Intrinsic(
            reg,
            lambda a, lanes=lanes: call("fma", (a[1], _splat(F32, lanes)(a[2:]), a[0])),  # type: ignore[misc]
        )
        table[f"vsqrt{q}_f32"] = Intrinsic(reg, _called("sqrt", F32))
        for name, op in (("rndn", "nearest"), ("rndm", "floor"), ("rndp", "ceil"), ("rnd", "trunc")):
            table[f"v{name}{q}_f32"] = Intrinsic(reg, _called(op, F32))
        table[f"vcvt{q}_f32_s32"] = Intrinsic(reg, lambda a: call("convert", (a[0],), of=F32))
        table[f"vcvtn{q}_s32_f32"] = Intrinsic(Vec(I32, lanes), _called("nearest_i32", F32))
        table[f"vcvt{q}_s32_f32"] = Intrinsic(Vec(I32, lanes), _called("trunc_i32", F32))
    for q, lanes in (("", 4), ("q", 8)):
        table[f"vld1{q}_f16"] = Intrinsic(Vec(U16, lanes), _load(U16, lanes))
        table[f"vst1{q}_f16"] = Intrinsic(VOID, _store(U16))
        table[f"vreinterpret{q}_f16_u16"] = Intrinsic(Vec(U16, lanes), lambda a: a[0])
        table[f"vreinterpret{q}_u16_f16"] = Intrinsic(Vec(U16, lanes), lambda a: a[0])
    table["vget_low_f16"] = Intrinsic(Vec(U16, 4), lambda a: half("lo", a[0]))
    table["vget_high_f16"] = Intrinsic(Vec(U16, 4), lambda a: half("hi", a[0]))
    table["vcvt_f32_f16"] = Intrinsic(Vec(F32, 4), lambda a: call("from_f16", (a[0],)))
    table["vcvt_f16_f32"] = Intrinsic(Vec(U16, 4), lambda a: call("to_f16", (a[0],)))


def _neon_dots(table: Table) -> None:
    for suffix, elem in NEON_ELEMS:
        if not elem.is_float and elem.size < 8:
            small = Vec(elem, 8 // elem.size)
            table[f"vcreate_{suffix}"] = Intrinsic(small, _created(elem))
    table["vdotq_s32"] = Intrinsic(Vec(I32, 4), lambda a: call("dot_i8i8", tuple(a)))
    table["vusdotq_s32"] = Intrinsic(Vec(I32, 4), lambda a: call("dot_u8i8", tuple(a)))
    for suffix, elem in (("s8", I8), ("u8", U8)):
        table[f"vqtbl1q_{suffix}"] = Intrinsic(
            Vec(elem, 16),
            lambda a, elem=elem: as_elem(_looked_up(a[0], a[1]), elem),  # type: ignore[misc]
        )


def _looked_up(table: Expr, places: Expr) -> Expr:
    """Places from 16 on give 0 on Arm; `lookup` sees four bits of a place. So they must be below 16."""
    if not is_below_16(places):
        raise Mistyped("takes places that are seen to be below 16, as `v & 15` are")
    return call("lookup", (as_elem(table, I8), as_elem(places, I8)))


def _created(elem: Scalar) -> Build:
    return lambda a: as_elem(call("splat", (a[0],), (integer(1),)), elem)


def is_below_16(e: Expr) -> bool:
    """True if a mask, or a shift of bytes, keeps every lane below 16."""
    if isinstance(e, Binary) and e.op == "&":
        return any(_is_small_splat(one) for one in (e.a, e.b))
    if isinstance(e, Binary) and e.op == ">>" and isinstance(e.type, Vec):
        return e.type.elem == U8 and isinstance(e.b, Const) and e.b.value >= 4
    return isinstance(e, CallExpression) and e.name == "bits" and is_below_16(e.args[0])


def _is_small_splat(e: Expr) -> bool:
    if not isinstance(e, CallExpression) or e.name != "splat":
        return False
    return isinstance(e.args[0], Const) and 0 <= e.args[0].value < 16


def table_of(isa: str) -> Table:
    """The intrinsics of a source's instruction set."""
    return neon() if isa.startswith("neon") else x86()


def register_types(isa: str) -> dict[str, Type]:
    return NEON_TYPES if isa.startswith("neon") else X86_TYPES


def register_name(isa: str, of: Vec) -> str | None:
    return (NEON_NAMES if isa.startswith("neon") else X86_NAMES).get(of)
