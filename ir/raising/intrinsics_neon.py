"""Meaning of the intrinsics of NEON."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from phasewise.ir import nodes as ir
from phasewise.ir.builders import (
    Build,
    Intrinsic,
    Table,
    alike,
    called,
    element,
    half,
    joined,
    load,
    neighbours,
    number,
    permuted,
    pointer_to,
    shift,
    shuffled,
    size_of,
    splat,
    store,
    unpacked,
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
        put(name, alike(elem, op))
    if elem.is_float:
        put("div", alike(elem, "/"))
    for name in ("min", "max"):
        if not elem.is_float:  # of floats these give NaN where one is; none of the operations does
            put(name, called(name, elem))
    put("abs", called("abs", elem))
    put("neg", lambda a: unary("-", a[0]))
    mask = Vec(unsigned, reg.lanes)
    for name, op in (("ceq", "=="), ("cgt", ">"), ("cge", ">="), ("clt", "<"), ("cle", "<=")):
        put(name, lambda a, op=op: as_elem(binary(op, a[0], a[1]), unsigned), mask)  # type: ignore[misc]
    put("bsl", lambda a: _bit_select(a, elem, bits))
    put("bic", lambda a: call("andnot", (a[1], a[0])))
    put("dup", lambda a: splat(elem, reg.lanes)(a))
    table[f"vdup{q}_n_{suffix}"] = table[f"vmov{q}_n_{suffix}"] = Intrinsic(reg, splat(elem, reg.lanes))
    put("ld1", load(elem, reg.lanes))
    put("st1", store(elem), VOID)
    table[f"vst1{q}_lane_{suffix}"] = Intrinsic(
        VOID, lambda a: call("store", (pointer_to(a[0], elem), permuted(a[1], (number(a[2]),))))
    )
    table[f"vld1{q}_dup_{suffix}"] = Intrinsic(
        reg, lambda a: call("splat", (element(pointer_to(a[0], elem)),), (ir.integer(reg.lanes),))
    )
    table[f"vget{q}_lane_{suffix}"] = Intrinsic(
        elem, lambda a: call("lane", (a[0],), (ir.integer(number(a[1])),))
    )
    table[f"vset{q}_lane_{suffix}"] = Intrinsic(
        reg, lambda a: call("with_lane", (a[1], a[0]), (ir.integer(number(a[2])),))
    )
    table[f"vmul{q}_n_{suffix}"] = Intrinsic(reg, lambda a: binary("*", a[0], splat(elem, reg.lanes)(a[1:])))
    put("mla", lambda a: binary("+", a[0], binary("*", a[1], a[2])))
    put("mls", lambda a: binary("-", a[0], binary("*", a[1], a[2])))
    table[f"vmla{q}_n_{suffix}"] = Intrinsic(
        reg, lambda a: binary("+", a[0], binary("*", a[1], splat(elem, reg.lanes)(a[2:])))
    )
    if not elem.is_float:
        table[f"vshr{q}_n_{suffix}"] = Intrinsic(reg, shift(">>", elem))
        table[f"vshl{q}_n_{suffix}"] = Intrinsic(reg, shift("<<", elem))
        put("qadd", called("add_sat", elem))
        if elem in (U8, U16):
            put("rhadd", called("avg", elem))
        put("qsub", called("sub_sat", elem))
        put("mvn", lambda a: unary("~", a[0]))
    for other, to in NEON_ELEMS:
        if other != suffix:
            table[f"vreinterpret{q}_{other}_{suffix}"] = Intrinsic(
                Vec(to, reg.size // to.size),
                lambda a, to=to: as_elem(a[0], to),  # type: ignore[misc]
            )
    if q:
        put("addv", lambda a: call("reduce_add", (a[0],), (ir.integer(1),) if elem.is_float else ()), elem)
        if not elem.is_float:
            put("maxv", called("reduce_max", elem), elem)
            put("minv", called("reduce_min", elem), elem)
        put("padd", lambda a: neighbours(a, elem))
    group = 16 // elem.size
    if q:
        put("zip1", unpacked(elem, 0))
        put("zip2", unpacked(elem, 1))
        put("uzp1", lambda a: shuffled(a[0], a[1], range(0, 2 * group, 2)))
        put("uzp2", lambda a: shuffled(a[0], a[1], range(1, 2 * group, 2)))
        put("ext", lambda a: shuffled(a[0], a[1], [number(a[2]) + i for i in range(group)]))


def _bit_select(a: Sequence[ir.Expr], elem: Scalar, bits: Scalar) -> ir.Expr:
    """(mask & a) | (~mask & b), bit by bit, as the instruction does."""
    mask, one, other = (as_elem(e, bits) for e in a)
    return as_elem(binary("|", binary("&", mask, one), call("andnot", (mask, other))), elem)


def _neon_halves(table: Table, suffix: str, elem: Scalar) -> None:
    small, big = Vec(elem, 8 // elem.size), Vec(elem, 16 // elem.size)
    table[f"vget_low_{suffix}"] = Intrinsic(small, lambda a: half("lo", a[0]))
    table[f"vget_high_{suffix}"] = Intrinsic(small, lambda a: half("hi", a[0]))
    table[f"vcombine_{suffix}"] = Intrinsic(big, lambda a: joined(a[0], a[1]))
    if elem.is_float or elem.size == 8:
        return
    wide = SCALARS[f"{elem.name[0]}{16 * elem.size}"]
    to = Vec(wide, small.lanes)

    def wider(e: ir.Expr) -> ir.Expr:
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

    def pairs(e: ir.Expr) -> ir.Expr:
        """Neighbours added, wide."""
        low, high = wider(half("lo", e)), wider(half("hi", e))
        if size_of(low) < 16:
            raise Mistyped("pairs of eight bytes are not in the subset")
        return neighbours((low, high), wide)

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
            lambda a, lanes=lanes: call("fma", (a[1], splat(F32, lanes)(a[2:]), a[0])),  # type: ignore[misc]
        )
        table[f"vsqrt{q}_f32"] = Intrinsic(reg, called("sqrt", F32))
        for name, op in (("rndn", "nearest"), ("rndm", "floor"), ("rndp", "ceil"), ("rnd", "trunc")):
            table[f"v{name}{q}_f32"] = Intrinsic(reg, called(op, F32))
        table[f"vcvt{q}_f32_s32"] = Intrinsic(reg, lambda a: call("convert", (a[0],), of=F32))
        table[f"vcvtn{q}_s32_f32"] = Intrinsic(Vec(I32, lanes), called("nearest_i32", F32))
        table[f"vcvt{q}_s32_f32"] = Intrinsic(Vec(I32, lanes), called("trunc_i32", F32))
    for q, lanes in (("", 4), ("q", 8)):
        table[f"vld1{q}_f16"] = Intrinsic(Vec(U16, lanes), load(U16, lanes))
        table[f"vst1{q}_f16"] = Intrinsic(VOID, store(U16))
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


def _looked_up(table: ir.Expr, places: ir.Expr) -> ir.Expr:
    """Places from 16 on give 0 on Arm; `lookup` sees four bits of a place. So they must be below 16."""
    if not is_below_16(places):
        raise Mistyped("takes places that are seen to be below 16, as `v & 15` are")
    return call("lookup", (as_elem(table, I8), as_elem(places, I8)))


def _created(elem: Scalar) -> Build:
    return lambda a: as_elem(call("splat", (a[0],), (ir.integer(1),)), elem)


def is_below_16(e: ir.Expr) -> bool:
    """True if a mask, or a shift of bytes, keeps every lane below 16."""
    if isinstance(e, ir.Binary) and e.op == "&":
        return any(_is_small_splat(one) for one in (e.a, e.b))
    if isinstance(e, ir.Binary) and e.op == ">>" and isinstance(e.type, Vec):
        return e.type.elem == U8 and isinstance(e.b, ir.Const) and e.b.value >= 4
    return isinstance(e, ir.CallExpression) and e.name == "bits" and is_below_16(e.args[0])


def _is_small_splat(e: ir.Expr) -> bool:
    if not isinstance(e, ir.CallExpression) or e.name != "splat":
        return False
    return isinstance(e.args[0], ir.Const) and 0 <= e.args[0].value < 16
