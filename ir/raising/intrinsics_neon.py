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
    element,
    half,
    joined,
    lane,
    load,
    neighbours,
    number,
    permuted,
    pointer_to,
    reading,
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
        """With a word before the suffix: `n`, `lane` or `dup`."""
        table.put(f"v{name}{q}_{kind}_{suffix}", of, build)

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
    put("dup", splat(elem, reg.lanes))
    put_as("n", "dup", splat(elem, reg.lanes))
    put_as("n", "mov", splat(elem, reg.lanes))
    put("ld1", load(elem, reg.lanes))
    put("st1", store(elem), VOID)
    put_as("lane", "st1", lambda a: store(elem)((a[0], permuted(a[1], (number(a[2]),)))), VOID)
    put_as("dup", "ld1", lambda a: splat(elem, reg.lanes)([element(pointer_to(a[0], elem))]))
    put_as("lane", "get", lane(elem), elem)
    put_as("lane", "set", lambda a: call("with_lane", (a[1], a[0]), (number(a[2]),)))
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
    for other, to in NEON_ELEMS:
        if other != suffix:
            table.put(f"vreinterpret{q}_{other}_{suffix}", Vec(to, reg.size // to.size), reading(to))
    if q:
        put("addv", lambda a: call("reduce_add", (a[0],), (1,) if elem.is_float else ()), elem)
        if not elem.is_float:
            put("maxv", called("reduce_max", elem), elem)
            put("minv", called("reduce_min", elem), elem)
        put("padd", lambda a: neighbours(a, elem))
        group = 16 // elem.size
        put("zip1", unpacked(elem, 0))
        put("zip2", unpacked(elem, 1))
        put("uzp1", lambda a: shuffled(a[0], a[1], range(0, 2 * group, 2)))
        put("uzp2", lambda a: shuffled(a[0], a[1], range(1, 2 * group, 2)))
        put("ext", lambda a: shuffled(a[0], a[1], [number(a[2]) + i for i in range(group)]))


def _bit_select(a: Sequence[ir.Expr], elem: Scalar, bits: Scalar) -> ir.Expr:
    """(mask & a) | (~mask & b), bit by bit, as the instruction does."""
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
    table.put(f"vaddl_{suffix}", to, lambda a: binary("+", wider(a[0]), wider(a[1])))
    narrow_suffix = f"{suffix[0]}{16 * elem.size}"
    table.put(f"vmovn_{narrow_suffix}", small, lambda a: call("narrow", (a[0],), of=elem))

    def pairs(e: ir.Expr) -> ir.Expr:
        """Neighbours added, wide."""
        low, high = wider(half("lo", e)), wider(half("hi", e))
        if size_of(low) < 16:
            raise Mistyped("pairs of eight bytes are not in the subset")
        return neighbours((low, high), wide)

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
    for q, lanes in (("", 4), ("q", 8)):
        table.put(f"vld1{q}_f16", Vec(U16, lanes), load(U16, lanes))
        table.put(f"vst1{q}_f16", VOID, store(U16))
        table.put(f"vreinterpret{q}_f16_u16 vreinterpret{q}_u16_f16", Vec(U16, lanes), lambda a: a[0])
    table.put("vget_low_f16", Vec(U16, 4), lambda a: half("lo", a[0]))
    table.put("vget_high_f16", Vec(U16, 4), lambda a: half("hi", a[0]))
    table.put("vcvt_f32_f16", Vec(F32, 4), lambda a: call("from_f16", (a[0],)))
    table.put("vcvt_f16_f32", Vec(U16, 4), lambda a: call("to_f16", (a[0],)))


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
    """Places from 16 on give 0 on Arm; `lookup` sees four bits of a place. So they must be below 16."""

    def build(a: Sequence[ir.Expr]) -> ir.Expr:
        if not is_below_16(a[1]):
            raise Mistyped("takes places that are seen to be below 16, as `v & 15` are")
        return as_elem(called("lookup", I8)(a), elem)

    return build


def _created(elem: Scalar) -> Build:
    return lambda a: as_elem(call("splat", (a[0],), (1,)), elem)


def is_below_16(e: ir.Expr) -> bool:
    """True if a mask, or a shift of bytes, keeps every lane below 16."""
    if isinstance(e, ir.Binary) and e.op == "&":
        return any(_is_small_splat(side) for side in (e.a, e.b))
    if isinstance(e, ir.Binary) and e.op == ">>" and isinstance(e.type, Vec):
        return e.type.elem == U8 and isinstance(e.b, ir.Const) and e.b.value >= 4
    return ir.is_call(e, "bits") and is_below_16(e.args[0])


def _is_small_splat(e: ir.Expr) -> bool:
    if not isinstance(e, ir.CallExpression) or e.name != "splat":
        return False
    return isinstance(e.args[0], ir.Const) and 0 <= e.args[0].value < 16
