"""Meaning of the intrinsics of NEON."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from phasewise.ir import nodes as ir
from phasewise.ir.builders import (
    Build,
    Table,
    alike,
    called,
    constant,
    element,
    half,
    joined,
    lane,
    lanes_of,
    load,
    neighbours,
    number,
    permuted,
    pointer_to,
    reading,
    saturated,
    shift,
    shuffled,
    splat,
    store,
    unpacked,
    zero,
)
from phasewise.ir.operations import Mistyped, as_elem, binary, call, unary
from phasewise.ir.types import (
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
    Scalar,
    Type,
    Vec,
)

# ---- NEON ------------------------------------------------------------------------------------------------

NEON_ELEMS = (
    ("s8", I8), ("s16", I16), ("s32", I32), ("s64", I64), ("u8", U8), ("u16", U16), ("u32", U32),
    ("u64", U64),
    ("f32", F32), ("f64", F64),
)  # fmt: skip


@cache
def neon() -> Table:
    table = Table()
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
        table.put(f"v{name}{q}_{suffix}", of, build)

    def put_as(kind: str, name: str, build: Build, of: Type = reg) -> None:
        """Add an intrinsic with a word before the suffix: `n`, `lane` or `dup`."""
        table.put(f"v{name}{q}_{kind}_{suffix}", of, build)

    for name, op in (("add", "+"), ("sub", "-"), ("mul", "*"), ("and", "&"), ("orr", "|"), ("eor", "^")):
        put(name, alike(elem, op))
    if elem.is_float:
        put("div", alike(elem, "/"))
    for name in ("min", "max"):
        put(name, _extreme(name, elem) if elem.is_float else called(name, elem))
    put("abs", called("abs", elem))
    put("neg", lambda a: unary("-", a[0]))
    mask = Vec(unsigned, reg.lanes)
    for name, op in (("ceq", "=="), ("cgt", ">"), ("cge", ">="), ("clt", "<"), ("cle", "<=")):
        put(name, lambda a, op=op: as_elem(binary(op, a[0], a[1]), unsigned), mask)  # type: ignore[misc]
    put("bsl", lambda a: _bit_select(a, elem, bits))
    put("bic", lambda a: call("andnot", (a[1], a[0])))
    put("dup", splat(elem, reg.lanes))
    put_as("n", "dup", splat(elem, reg.lanes))
    put_as("n", "mov", splat(elem, reg.lanes))
    put("ld1", load(elem, reg.lanes))
    put("st1", store(elem), VOID)
    put_as("lane", "st1", lambda a: store(elem)((a[0], permuted(a[1], (number(a[2]),)))), VOID)
    put_as("dup", "ld1", lambda a: splat(elem, reg.lanes)([element(pointer_to(a[0], elem))]))
    put_as("lane", "get", lane(elem), elem)
    put_as("lane", "set", _with_lane)
    put_as("n", "mul", lambda a: binary("*", a[0], splat(elem, reg.lanes)(a[1:])))
    put("mla", lambda a: binary("+", a[0], binary("*", a[1], a[2])))
    put("mls", lambda a: binary("-", a[0], binary("*", a[1], a[2])))
    put_as("n", "mla", lambda a: binary("+", a[0], binary("*", a[1], splat(elem, reg.lanes)(a[2:]))))
    if not elem.is_float:
        put_as("n", "shr", shift(">>", elem))
        put_as("n", "shl", shift("<<", elem))
        put("qadd", called("add_sat", elem))
        if elem in (U8, U16):
            put("rhadd", called("avg", elem))
        put("qsub", called("sub_sat", elem))
        put("mvn", lambda a: unary("~", a[0]))
        put("tst", lambda a: as_elem(binary("!=", binary("&", a[0], a[1]), _zeros(reg)), unsigned), mask)
        put_as("n", "sra", lambda a: binary("+", a[0], shift(">>", elem)(a[1:])))
    for other, to in NEON_ELEMS:
        if other != suffix:
            table.put(f"vreinterpret{q}_{other}_{suffix}", Vec(to, reg.size // to.size), reading(to))
    if not q and reg.lanes > 1:
        put("padd", lambda a: neighbours(a, elem))
        for name, of_group in (("rev16", 2), ("rev32", 4), ("rev64", 8)):
            if elem.size < of_group:
                put(name, _reversed_in(of_group // elem.size))
    if q:
        for name, of_group in (("rev16", 2), ("rev32", 4), ("rev64", 8)):
            if elem.size < of_group:
                put(name, _reversed_in(of_group // elem.size))
        put("addv", lambda a: call("reduce_add", (a[0],), (1,) if elem.is_float else ()), elem)
        for name in ("max", "min"):
            put(f"{name}v", _extreme_of_all(name) if elem.is_float else called(f"reduce_{name}", elem), elem)
        put("padd", lambda a: neighbours(a, elem))
        group = 16 // elem.size
        put("zip1", unpacked(elem, 0))
        put("zip2", unpacked(elem, 1))
        put("uzp1", lambda a: shuffled(a[0], a[1], range(0, 2 * group, 2)))
        put("uzp2", lambda a: shuffled(a[0], a[1], range(1, 2 * group, 2)))
        put("ext", lambda a: shuffled(a[0], a[1], [number(a[2]) + i for i in range(group)]))


def _zeros(of: Vec) -> ir.Expr:
    return zero(of.elem, of.lanes)


def _reversed_in(lanes: int) -> Build:
    """Builds a vector whose lanes are reversed within each group."""
    return lambda a: permuted(
        a[0], [i // lanes * lanes + lanes - 1 - i % lanes for i in range(lanes_of(a[0]))]
    )


def _extreme(name: str, elem: Scalar) -> Build:
    """Builds Arm's minimum or maximum: what is no number stays, and of two zeros the positive one is the
    larger."""
    bits = SCALARS[f"i{8 * elem.size}"]

    def build(given: Sequence[ir.Expr]) -> ir.Expr:
        a, b = given
        first, second = (a, b) if name == "max" else (b, a)
        both = as_elem(binary("&" if name == "max" else "|", as_elem(a, bits), as_elem(b, bits)), elem)
        unequal = call("select", (binary(">", second, first), b, binary("+", a, b)))
        unequal = call("select", (binary(">", first, second), a, unequal))
        return call("select", (binary("==", a, b), both, unequal))

    return build


def _extreme_of_all(name: str) -> Build:
    def build(a: Sequence[ir.Expr]) -> ir.Expr:
        rest = a[0]
        while lanes_of(rest) > 1:
            rest = _extreme(name, ir.vec(rest).elem)((half("lo", rest), half("hi", rest)))
        return call("lane", (rest,), (0,))

    return build


def _with_lane(a: Sequence[ir.Expr]) -> ir.Expr:
    """A vector with one lane replaced; of numbers that are known, numbers again."""
    value, register, lane = a[0], a[1], number(a[2])
    numbers = _numbers(register)
    if numbers is None or not isinstance(value, ir.Const):
        return call("with_lane", (register, value), (lane,))
    return constant(ir.vec(register).elem, [*numbers[:lane], value.value, *numbers[lane + 1 :]])


def _numbers(e: ir.Expr) -> list[int | float] | None:
    """The lanes of a register of known numbers."""
    if ir.is_call(e, "vector"):
        return [each.value for each in e.numbers if isinstance(each, ir.Const)]
    match e:
        case ir.CallExpression(name="splat", args=(ir.Const(value=value),)):
            return [value] * lanes_of(e)
    return None


def _bit_select(a: Sequence[ir.Expr], elem: Scalar, bits: Scalar) -> ir.Expr:
    """Bits of `a` where the mask's are set, else of `b`: (mask & a) | (~mask & b), as the instruction
    does."""
    mask, if_set, if_clear = (as_elem(e, bits) for e in a)
    return as_elem(binary("|", binary("&", mask, if_set), call("andnot", (mask, if_clear))), elem)


def _neon_halves(table: Table, suffix: str, elem: Scalar) -> None:
    small, big = Vec(elem, 8 // elem.size), Vec(elem, 16 // elem.size)
    table.put(f"vget_low_{suffix}", small, lambda a: half("lo", a[0]))
    table.put(f"vget_high_{suffix}", small, lambda a: half("hi", a[0]))
    table.put(f"vcombine_{suffix}", big, lambda a: joined(a[0], a[1]))
    if elem.is_float or elem.size == 8:
        return
    wide = SCALARS[f"{elem.name[0]}{16 * elem.size}"]
    to = Vec(wide, small.lanes)

    def wider(e: ir.Expr) -> ir.Expr:
        return call("widen", (e,), of=wide)

    table.put(f"vmovl_{suffix}", to, lambda a: wider(a[0]))
    table.put(f"vmovl_high_{suffix}", to, lambda a: wider(half("hi", a[0])))
    table.put(f"vmull_{suffix}", to, lambda a: binary("*", wider(a[0]), wider(a[1])))
    table.put(
        f"vmull_high_{suffix}", to, lambda a: binary("*", wider(half("hi", a[0])), wider(half("hi", a[1])))
    )
    table.put(f"vmlal_{suffix}", to, lambda a: binary("+", a[0], binary("*", wider(a[1]), wider(a[2]))))
    table.put(f"vmlsl_{suffix}", to, lambda a: binary("-", a[0], binary("*", wider(a[1]), wider(a[2]))))
    table.put(f"vsubl_{suffix}", to, lambda a: binary("-", wider(a[0]), wider(a[1])))
    table.put(f"vshll_n_{suffix}", to, lambda a: shift("<<", wide)((wider(a[0]), a[1])))
    table.put(f"vaddl_{suffix}", to, lambda a: binary("+", wider(a[0]), wider(a[1])))
    narrow_suffix = f"{suffix[0]}{16 * elem.size}"
    table.put(f"vmovn_{narrow_suffix}", small, lambda a: call("narrow", (a[0],), of=elem))
    table.put(f"vqmovn_{narrow_suffix}", small, lambda a: saturated(a[0], elem))
    table.put(f"vshrn_n_{narrow_suffix}", small, lambda a: call("narrow", (shift(">>", wide)(a),), of=elem))
    if elem.is_signed:
        unsigned = SCALARS[f"u{8 * elem.size}"]
        name = f"vqmovun_{narrow_suffix}"
        table.put(name, Vec(unsigned, small.lanes), lambda a: saturated(a[0], unsigned))

    def pairs(e: ir.Expr) -> ir.Expr:
        """Sums of neighbours, in lanes of twice the width."""
        return neighbours((wider(half("lo", e)), wider(half("hi", e))), wide)

    if small.lanes > 1:
        table.put(f"vpaddl_{suffix}", Vec(wide, 8 // wide.size), lambda a: pairs(a[0]))
    table.put(f"vpaddlq_{suffix}", Vec(wide, 16 // wide.size), lambda a: pairs(a[0]))
    table.put(f"vpadalq_{suffix}", Vec(wide, 16 // wide.size), lambda a: binary("+", a[0], pairs(a[1])))


def _neon_floats(table: Table) -> None:
    for q, lanes in (("", 2), ("q", 4)):
        reg = Vec(F32, lanes)
        table.put(f"vfma{q}_f32", reg, lambda a: call("fma", (a[1], a[2], a[0])))
        table.put(f"vfms{q}_f32", reg, lambda a: call("fma", (unary("-", a[1]), a[2], a[0])))
        table.put(f"vfma{q}_n_f32", reg, _fused_with_number(lanes))
        table.put(f"vsqrt{q}_f32", reg, called("sqrt", F32))
        for name, op in (("rndn", "nearest"), ("rndm", "floor"), ("rndp", "ceil"), ("rnd", "trunc")):
            table.put(f"v{name}{q}_f32", reg, called(op, F32))
        table.put(f"vcvt{q}_f32_s32", reg, lambda a: call("convert", (a[0],), of=F32))
        table.put(f"vcvtn{q}_s32_f32", Vec(I32, lanes), called("nearest_i32", F32))
        table.put(f"vcvt{q}_s32_f32", Vec(I32, lanes), called("trunc_i32", F32))
        table.put(f"vcvt{q}_f32_u32", reg, lambda a: call("convert", (a[0],), of=F32))
        table.put(f"vcvt{q}_u32_f32", Vec(U32, lanes), lambda a: _to_u32(a[0]))
        table.put(f"vcvtn{q}_u32_f32", Vec(U32, lanes), lambda a: _to_u32(call("nearest", (a[0],))))
        table.put(f"vrndi{q}_f32", reg, called("nearest", F32))
    for q, lanes in (("", 8), ("q", 16)):
        table.put(f"vcnt{q}_u8", Vec(U8, lanes), _bits_set)
        table.put(f"vrbit{q}_u8", Vec(U8, lanes), _bits_reversed)
    table.put("vaddv_u8", U8, called("reduce_add", U8))
    table.put("vfmaq_f64", Vec(F64, 2), lambda a: call("fma", (a[1], a[2], a[0])))
    table.put("vcvt_f64_f32", Vec(F64, 2), lambda a: call("convert", (a[0],), of=F64))
    table.put("vcvt_high_f64_f32", Vec(F64, 2), lambda a: call("convert", (half("hi", a[0]),), of=F64))
    table.put("vcvt_f32_f64", Vec(F32, 2), lambda a: call("convert", (a[0],), of=F32))
    for q, lanes in (("", 4), ("q", 8)):
        table.put(f"vld1{q}_f16", Vec(U16, lanes), load(U16, lanes))
        table.put(f"vst1{q}_f16", VOID, store(U16))
        table.put(f"vreinterpret{q}_f16_u16 vreinterpret{q}_u16_f16", Vec(U16, lanes), lambda a: a[0])
    table.put("vget_low_f16", Vec(U16, 4), lambda a: half("lo", a[0]))
    table.put("vget_high_f16", Vec(U16, 4), lambda a: half("hi", a[0]))
    table.put("vcvt_f32_f16", Vec(F32, 4), lambda a: call("from_f16", (a[0],)))
    table.put("vcvt_f16_f32", Vec(U16, 4), lambda a: call("to_f16", (a[0],)))


_NIBBLES = ((1, 0x55), (2, 0x33), (4, 0x0F))
"""Shifts and masks that separate neighbours of one bit, of two and of four."""


def _bits_set(a: Sequence[ir.Expr]) -> ir.Expr:
    e = a[0]
    for by, kept in _NIBBLES:
        mask = constant(U8, [kept] * lanes_of(e))
        e = binary("+", binary("&", e, mask), binary("&", binary(">>", e, ir.integer(by)), mask))
    return e


def _bits_reversed(a: Sequence[ir.Expr]) -> ir.Expr:
    e = a[0]
    for by, kept in _NIBBLES:
        mask = constant(U8, [kept] * lanes_of(e))
        low = binary("<<", binary("&", e, mask), ir.integer(by))
        e = binary("|", low, binary("&", binary(">>", e, ir.integer(by)), mask))
    return e


def _to_u32(e: ir.Expr) -> ir.Expr:
    """Floats rounded toward zero to u32; what is below zero or no number becomes 0, what is too large the
    largest."""
    lanes = lanes_of(e)
    top = constant(F32, [2.0**32] * lanes)
    inside = binary("&", binary(">=", e, zero(F32, lanes)), binary("<", e, top))
    number_inside = as_elem(call("select", (inside, e, zero(F32, lanes))), F32)
    whole = call("convert", (number_inside,), of=U32)
    return call("select", (binary(">=", e, top), constant(U32, [2**32 - 1] * lanes), whole))


def _fused_with_number(lanes: int) -> Build:
    return lambda a: call("fma", (a[1], splat(F32, lanes)(a[2:]), a[0]))


def _neon_dots(table: Table) -> None:
    for suffix, elem in NEON_ELEMS:
        if not elem.is_float and elem.size < 8:
            table.put(f"vcreate_{suffix}", Vec(elem, 8 // elem.size), _created(elem))
    table.put("vdotq_s32", Vec(I32, 4), lambda a: call("dot_i8i8", tuple(a)))
    table.put("vusdotq_s32", Vec(I32, 4), lambda a: call("dot_u8i8", tuple(a)))
    for suffix, elem in (("s8", I8), ("u8", U8)):
        table.put(f"vqtbl1q_{suffix}", Vec(elem, 16), _looked_up(elem))


def _looked_up(elem: Scalar) -> Build:
    """Builds a look-up in a table.

    Places from 16 on give 0 on Arm, while `lookup` sees four bits of a place: so places must be known to be
    below 16.
    """

    def build(a: Sequence[ir.Expr]) -> ir.Expr:
        if not is_below_16(a[1]):
            raise Mistyped("takes places that are seen to be below 16, as `v & 15` are")
        return as_elem(called("lookup", I8)(a), elem)

    return build


def _created(elem: Scalar) -> Build:
    return lambda a: as_elem(call("splat", (a[0],), (1,)), elem)


def is_below_16(e: ir.Expr) -> bool:
    """True if a mask, or a shift of bytes, keeps every lane of an expression below 16."""
    if isinstance(e, ir.Binary) and e.op == "&":
        return any(_is_small(side) for side in (e.a, e.b))
    if _is_small(e):
        return True
    if isinstance(e, ir.Binary) and e.op == ">>" and isinstance(e.type, Vec):
        return e.type.elem == U8 and isinstance(e.b, ir.Const) and e.b.value >= 4
    return ir.is_call(e, "bits") and is_below_16(e.args[0])


def _is_small(e: ir.Expr) -> bool:
    numbers = _numbers(e)
    return numbers is not None and all(0 <= value < 16 for value in numbers)
