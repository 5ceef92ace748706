"""Meaning of the intrinsics of x86 as operations: AVX2, AVX-512, F16C, VNNI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from phasewise.ir import nodes as ir
from phasewise.ir.builders import (
    Build,
    Table,
    alike,
    called,
    constant,
    dup,
    element,
    first_lanes,
    flipped,
    half,
    imm4,
    joined,
    lanes_of,
    load,
    neighbours,
    number,
    padded,
    permuted,
    pointer_to,
    reading,
    saturated,
    shift,
    shuffled,
    size_of,
    splat,
    store,
    unpacked,
    zero,
)
from phasewise.ir.operations import REDUCTIONS, Mistyped, as_elem, binary, call, cast, unary
from phasewise.ir.raising.intrinsics_masks import compared, put_masks
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
    Scalar,
    Type,
    Vec,
)

# ---- x86 -------------------------------------------------------------------------------------------------


@cache
def x86() -> Table:
    table = Table()
    for prefix, size in (("_mm_", 16), ("_mm256_", 32), ("_mm512_", 64)):
        _x86_floats(table, prefix, size)
        _x86_integers(table, prefix, size)
        _x86_moves(table, prefix, size)
        _x86_shuffles(table, prefix, size)
    _x86_halves(table)
    _x86_scalars(table)
    _x86_doubles(table)
    _x86_estimates(table)
    put_masks(table)
    return table


def _as(elem: Scalar, build: Build) -> Build:
    """Make a builder that reads the bits of `build`'s result as `elem`."""
    return lambda a: as_elem(build(a), elem)


def _fused(is_product_negative: bool, is_sum_negative: bool) -> Build:
    def build(a: Sequence[ir.Expr]) -> ir.Expr:
        product = unary("-", a[0]) if is_product_negative else a[0]
        return call("fma", (product, a[1], unary("-", a[2]) if is_sum_negative else a[2]))

    return build


def _x86_floats(table: Table, prefix: str, size: int) -> None:
    for suffix, elem in (("ps", F32), ("pd", F64)):
        lanes = size // elem.size
        for name, build in _x86_float_builders(elem, lanes).items():
            table.put(f"{prefix}{name}_{suffix}", Vec(elem, lanes), build)
        names = (f"{prefix}{name}_{suffix}" for name in ("storeu", "store", "stream"))
        table.put(" ".join(names), VOID, store(elem))
    ps, reg, lanes = _register(F32, size), Vec(BITS, size), size // 4
    for name, of, build in (
        ("floor_ps", ps, called("floor", F32)),
        ("ceil_ps", ps, called("ceil", F32)),
        ("round_ps", ps, _rounded),
        ("roundscale_ps", ps, _rounded),
        ("cvtps_epi32", reg, called("nearest_i32", F32)),
        ("cvttps_epi32", reg, called("trunc_i32", F32)),
        ("cvtepi32_ps", ps, lambda a: call("convert", (as_elem(a[0], I32),), of=F32)),
        ("cvtph_ps", ps, lambda a: call("from_f16", (first_lanes(a[0], U16, lanes),))),
        ("cvtps_ph", Vec(BITS, max(16, size // 2)), lambda a: padded(call("to_f16", (a[0],)), 16)),
    ):
        table.put(f"{prefix}{name}", of, build)


def _x86_float_builders(elem: Scalar, lanes: int) -> dict[str, Build]:
    """Builders of intrinsics whose result is a register of floats, by name without prefix and suffix."""
    bits, mask = SCALARS[f"u{8 * elem.size}"], SCALARS[f"i{8 * elem.size}"]
    comparisons = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "neq": "!="}
    return {
        **{name: alike(elem, op) for name, op in (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/"))},
        **{name: _as(elem, alike(bits, op)) for name, op in (("and", "&"), ("or", "|"), ("xor", "^"))},
        **{name: called(name, elem) for name in ("min", "max", "sqrt")},
        **{f"cmp{name}": _as(elem, alike(elem, op)) for name, op in comparisons.items()},
        "andnot": _as(elem, called("andnot", bits)),
        "fmadd": lambda a: call("fma", tuple(a)),
        "fmsub": _fused(False, True),
        "fnmadd": _fused(True, False),
        "fnmsub": _fused(True, True),
        "fmaddsub": lambda a: call("fma", (a[0], a[1], flipped(a[2], True))),
        "addsub": lambda a: binary("+", a[0], flipped(a[1], True)),
        "cmp": _as(elem, compared(elem)),
        "cmpord": _as(elem, lambda a: compared(elem)((*a, ir.integer(7)))),
        "cmpunord": _as(elem, lambda a: compared(elem)((*a, ir.integer(3)))),
        "blendv": lambda a: call("select", (as_elem(a[2], mask), a[1], a[0])),
        "set1": splat(elem, lanes),
        "setzero": lambda a: zero(elem, lanes),
        "set": _set(elem, lanes, is_reversed=True),
        "setr": _set(elem, lanes),
        "loadu": load(elem, lanes),
        "load": load(elem, lanes),
    }


def _rounded(a: Sequence[ir.Expr]) -> ir.Expr:
    name = {0: "nearest", 1: "floor", 2: "ceil", 3: "trunc"}.get(number(a[1]) & 7)
    if name is None:
        raise Mistyped("rounds as the processor is set, which is not known")
    return call(name, (a[0],))


def _set(elem: Scalar, lanes: int, is_reversed: bool = False) -> Build:
    def build(given: Sequence[ir.Expr]) -> ir.Expr:
        values = [cast(elem, arg) for arg in (reversed(given) if is_reversed else given)]
        if len(values) != lanes:
            raise Mistyped(f"takes {lanes} numbers, not {len(values)}")
        numbers = [value.value for value in values if isinstance(value, ir.Const)]
        if len(numbers) == lanes:
            return constant(elem, numbers)
        if all(value == values[0] for value in values):
            return call("splat", (values[0],), (lanes,))
        return _gathered(values, elem)

    return build


def _gathered(values: list[ir.Expr], elem: Scalar) -> ir.Expr:
    """Make a vector of values that are known only when the kernel runs: halves of equal values are splats."""
    if all(value == values[0] for value in values):
        return call("splat", (values[0],), (len(values),))
    middle = len(values) // 2
    return call("concat", (_gathered(values[:middle], elem), _gathered(values[middle:], elem)))


WIDTHS = (("8", I8, U8), ("16", I16, U16), ("32", I32, U32), ("64", I64, U64))


def _x86_integers(table: Table, prefix: str, size: int) -> None:
    reg = Vec(BITS, size)

    def put(name: str, build: Build) -> None:
        table.put(prefix + name, reg, build)

    for width, signed, unsigned in WIDTHS:
        put(f"add_epi{width}", alike(signed, "+"))
        put(f"sub_epi{width}", alike(signed, "-"))
        put(f"cmpeq_epi{width}", alike(signed, "=="))
        put(f"cmpgt_epi{width}", alike(signed, ">"))
        put(f"cmplt_epi{width}", alike(signed, "<"))
        for name in ("min", "max"):
            put(f"{name}_epi{width}", called(name, signed))
            put(f"{name}_epu{width}", called(name, unsigned))
        put(f"abs_epi{width}", called("abs", signed))
        put(f"sign_epi{width}", called("sign", signed))
        if width != "8":
            put(f"mullo_epi{width}", alike(signed, "*"))
            put(f"slli_epi{width}", shift("<<", unsigned))
            put(f"srli_epi{width}", shift(">>", unsigned))
            put(f"srai_epi{width}", shift(">>", signed))
        if width in ("8", "16"):
            for word, elem in (("i", signed), ("u", unsigned)):
                put(f"adds_ep{word}{width}", called("add_sat", elem))
                put(f"subs_ep{word}{width}", called("sub_sat", elem))
    put("mulhi_epi16", called("mulhi", I16))
    put("avg_epu8", called("avg", U8))
    put("avg_epu16", called("avg", U16))
    put("maddubs_epi16", lambda a: call("dot_u8i8_sat", (as_elem(a[0], U8), as_elem(a[1], I8))))
    put("madd_epi16", called("dot_i16", I16))
    for name in ("dpbusd_epi32", "dpbusd_avx_epi32"):
        put(name, lambda a: call("dot_u8i8", (as_elem(a[0], I32), as_elem(a[1], U8), as_elem(a[2], I8))))
    for suffix in (f"si{8 * size}", "epi32", "epi64"):
        elem = I64 if suffix == "epi64" else I32
        for name, op in (("and", "&"), ("or", "|"), ("xor", "^")):
            put(f"{name}_{suffix}", _bitwise(op, elem))
        put(f"andnot_{suffix}", called("andnot", elem))
    put("blendv_epi8", lambda a: call("select", (as_elem(a[2], I8), as_elem(a[1], I8), as_elem(a[0], I8))))
    for name, elem in (("epi8", I8), ("epi16", I16), ("epi32", I32), ("epi64x", I64), ("epi64", I64)):
        put(f"set1_{name}", splat(elem, size // elem.size))
        put(f"set_{name}", _set(elem, size // elem.size, is_reversed=True))
        put(f"setr_{name}", _set(elem, size // elem.size))
    put(f"setzero_si{8 * size}", lambda a: zero(I32, size // 4))
    for name, of, signed, unsigned in (("epi32", I32, I16, U16), ("epi16", I16, I8, U8)):
        put(f"packs_{name}", _narrowed(of, signed))
        put(f"packus_{name}", _narrowed(of, unsigned))
    for narrow, i_narrow, u_narrow in WIDTHS[:3]:
        for wide, i_wide, _u_wide in WIDTHS[1:]:
            if i_wide.size > i_narrow.size:
                lanes = size // i_wide.size
                put(f"cvtepi{narrow}_epi{wide}", _widened(i_narrow, i_wide, lanes))
                put(f"cvtepu{narrow}_epi{wide}", _widened(u_narrow, i_wide, lanes))


def _bitwise(op: str, elem: Scalar) -> Build:
    """Make a builder of a bitwise operation in the lanes of both sides, without a reinterpretation."""

    def build(a: Sequence[ir.Expr]) -> ir.Expr:
        own = [arg.type.elem for arg in a if isinstance(arg.type, Vec)]
        shared = own[0] if own[0] == own[1] and not own[0].is_float else elem

        for side, other in ((0, 1), (1, 0)):
            constant_side = ir.is_call(a[side], "splat", "vector")
            if constant_side and not own[side].is_float and own[side] != own[other]:
                shared = own[side]
        return binary(op, as_elem(a[0], shared), as_elem(a[1], shared))

    return build


def _narrowed(wide: Scalar, narrow: Scalar) -> Build:
    return lambda a: call("pack", (as_elem(a[0], wide), as_elem(a[1], wide)), of=narrow)


def _widened(narrow: Scalar, wide: Scalar, lanes: int) -> Build:
    return lambda a: call("widen", (first_lanes(a[0], narrow, lanes),), of=wide)


def _x86_moves(table: Table, prefix: str, size: int) -> None:
    reg = Vec(BITS, size)
    si = f"si{8 * size}"
    for name in ("loadu", "load", "lddqu"):
        table.put(f"{prefix}{name}_{si}", reg, load(None, size))
    for name in ("storeu", "store", "stream"):
        table.put(f"{prefix}{name}_{si}", VOID, store(None))
    kinds = {"ps": F32, "pd": F64, "si": BITS}
    for kind, elem in kinds.items():
        for other, to in kinds.items():
            if kind != other:
                right = f"{other}{8 * size}" if other == "si" else other
                left = f"{kind}{8 * size}" if kind == "si" else kind
                table.put(f"{prefix}cast{left}_{right}", _register(to, size), reading(to))
        for bigger in (32, 64):
            if bigger > size:
                wide = {32: "_mm256_", 64: "_mm512_"}[bigger]
                big_name, small_name = f"{kind}{8 * bigger}", f"{kind}{8 * size}"
                table.put(f"{wide}cast{big_name}_{small_name}", _register(elem, size), _first_part(size))
                names = f"{wide}cast{small_name}_{big_name} {wide}zext{small_name}_{big_name}"
                table.put(names, _register(elem, bigger), _padded(bigger))


def _register(elem: Scalar, size: int) -> Vec:
    return Vec(elem, size // elem.size)


def _part(e: ir.Expr, index: int, size: int) -> ir.Expr:
    """Take part `index` of a register that is divided into parts of `size` bytes."""
    parts = size_of(e) // size
    while parts > 1:
        parts //= 2
        e = half("hi" if index >= parts else "lo", e)
        index %= parts
    return e


def _first_part(size: int) -> Build:
    return lambda a: _part(a[0], 0, size)


def _chosen_part(size: int) -> Build:
    return lambda a: _part(a[0], number(a[1]), size)


def _padded(size: int) -> Build:
    return lambda a: padded(a[0], size)


def _x86_shuffles(table: Table, prefix: str, size: int) -> None:
    ps, reg = _register(F32, size), Vec(BITS, size)

    def put(name: str, build: Build, of: Type = reg) -> None:
        table.put(prefix + name, of, build)

    put("movehdup_ps", dup((1, 1, 3, 3), F32), ps)
    put("moveldup_ps", dup((0, 0, 2, 2), F32), ps)
    put("permute_ps", lambda a: dup(imm4(number(a[1])), F32)(a), ps)
    put("shuffle_epi32", lambda a: dup(imm4(number(a[1])), I32)(a))
    put("shuffle_ps", _shuffle_ps, ps)
    put("shufflelo_epi16", lambda a: dup((*imm4(number(a[1])), 4, 5, 6, 7), I16)(a))
    put("shufflehi_epi16", lambda a: dup((0, 1, 2, 3, *(4 + i for i in imm4(number(a[1])))), I16)(a))
    put("shuffle_epi8", lambda a: call("lookup", (as_elem(a[0], I8), as_elem(a[1], I8))))
    put("alignr_epi8", lambda a: _aligned(a[0], a[1], number(a[2])))
    for name in (f"srli_si{8 * size}", "bsrli_epi128", f"bsrli_si{8 * size}"):
        put(name, lambda a: _aligned(zero(I8, size_of(a[0])), a[0], number(a[1])))
    for name in (f"slli_si{8 * size}", "bslli_epi128", f"bslli_si{8 * size}"):
        put(name, lambda a: _aligned(a[0], zero(I8, size_of(a[0])), 16 - number(a[1])))
    for suffix, elem, of in (
        ("ps", F32, ps),
        ("pd", F64, _register(F64, size)),
        ("epi8", I8, reg),
        ("epi16", I16, reg),
        ("epi32", I32, reg),
        ("epi64", I64, reg),
    ):
        put(f"unpacklo_{suffix}", unpacked(elem, 0), of)
        put(f"unpackhi_{suffix}", unpacked(elem, 1), of)
    put("hadd_ps", lambda a: neighbours(a, F32), ps)
    put("hadd_pd", lambda a: neighbours(a, F64), _register(F64, size))
    put("hadd_epi32", lambda a: neighbours(a, I32))
    put("hadd_epi16", lambda a: neighbours(a, I16))
    put("hsub_ps", lambda a: neighbours(a, F32, "-"), ps)
    put("hsub_epi32", lambda a: neighbours(a, I32, "-"))
    put("hsub_epi16", lambda a: neighbours(a, I16, "-"))
    put("dp_ps", _dot_of_four, ps)
    put("permutevar_ps", lambda a: permuted(a[0], [i & ~3 | j & 3 for i, j in enumerate(_places(a[1]))]), ps)


def _dot_of_four(a: Sequence[ir.Expr]) -> ir.Expr:
    """Build the dot product of four floats: the number's upper bits choose the products, which are summed by
    pairs; its lower bits choose the lanes of the result."""
    imm = number(a[2])

    def chosen(e: ir.Expr, bits: int) -> ir.Expr:
        mask = [-(bits >> lane % 4 & 1) for lane in range(lanes_of(e))]
        return as_elem(binary("&", as_elem(e, I32), constant(I32, mask)), F32)

    products = chosen(binary("*", a[0], a[1]), imm >> 4)
    pairs = binary("+", products, dup((1, 0, 3, 2), F32)([products]))
    return chosen(binary("+", pairs, dup((2, 3, 0, 1), F32)([pairs])), imm)


def _shuffle_ps(a: Sequence[ir.Expr]) -> ir.Expr:
    imm = imm4(number(a[2]))
    return shuffled(a[0], a[1], (imm[0], imm[1], 4 + imm[2], 4 + imm[3]))


def _aligned(high: ir.Expr, low: ir.Expr, by: int) -> ir.Expr:
    if by > 16:
        raise Mistyped("shifts by more than 16 bytes are not in the subset")
    return (
        shuffled(as_elem(low, I8), as_elem(high, I8), [by + i for i in range(16)])
        if by < 16
        else as_elem(high, I8)
    )


def _x86_halves(table: Table) -> None:
    """Add the intrinsics that take a register apart, or join two into one."""
    for suffix, elem in (("ps", F32), ("pd", F64), ("si256", BITS)):
        small, big = _register(elem, 16), _register(elem, 32)
        table.put(f"_mm256_extractf128_{suffix}", small, _chosen_part(16))
        table.put(f"_mm256_insertf128_{suffix}", big, _inserted)
        table.put(f"_mm256_permute2f128_{suffix}", big, _chosen_halves)
    table.put("_mm256_extracti128_si256", _register(BITS, 16), _chosen_part(16))
    table.put("_mm256_inserti128_si256", _register(BITS, 32), _inserted)
    table.put("_mm256_permute2x128_si256", _register(BITS, 32), _chosen_halves)
    for suffix, elem in (("", F32), ("i", BITS), ("d", F64)):
        of = _register(elem, 32)
        table.put(f"_mm256_set_m128{suffix}", of, lambda a: joined(a[1], a[0]))
        table.put(f"_mm256_setr_m128{suffix}", of, lambda a: joined(a[0], a[1]))
    table.put("_mm512_extractf32x8_ps", _register(F32, 32), _chosen_part(32))
    table.put("_mm512_extractf64x4_pd", _register(F64, 32), _chosen_part(32))
    table.put("_mm512_extracti64x4_epi64 _mm512_extracti32x8_epi32", _register(BITS, 32), _chosen_part(32))
    table.put("_mm512_extractf32x4_ps", _register(F32, 16), _chosen_part(16))
    table.put("_mm512_extracti32x4_epi32", _register(BITS, 16), _chosen_part(16))
    table.put("_mm512_insertf32x8", _register(F32, 64), _inserted)
    table.put("_mm512_insertf64x4", _register(F64, 64), _inserted)
    table.put("_mm512_inserti64x4 _mm512_inserti32x8", _register(BITS, 64), _inserted)
    bits32 = _register(BITS, 32)
    table.put("_mm256_broadcastsi128_si256 _mm_broadcastsi128_si256", bits32, lambda a: joined(a[0], a[0]))
    table.put("_mm256_permute4x64_epi64", bits32, lambda a: permuted(as_elem(a[0], I64), imm4(number(a[1]))))
    table.put("_mm256_permute4x64_pd", Vec(F64, 4), lambda a: permuted(a[0], imm4(number(a[1]))))
    table.put("_mm256_permutevar8x32_epi32", bits32, lambda a: permuted(as_elem(a[0], I32), _places(a[1], 7)))
    table.put("_mm256_permutevar8x32_ps", Vec(F32, 8), lambda a: permuted(a[0], _places(a[1], 7)))
    for suffix, elem in (("ps", F32), ("epi32", I32)):
        of = _register(F32 if elem == F32 else BITS, 64)
        table.put(f"_mm512_permutexvar_{suffix}", of, _permuted_by_first(elem))
        table.put(f"_mm512_permutex2var_{suffix}", of, _permuted_of_two(elem))
    for wide, narrow in ((I32, I8), (I32, I16), (I16, I8), (I64, I32), (I64, I16)):
        small = _register(BITS, max(16, 64 * narrow.size // wide.size))
        name = f"_mm512_cvtsepi{8 * wide.size}_epi{8 * narrow.size}"
        table.put(name, small, _saturating(wide, narrow, small.size))
    for size, prefix in ((16, "_mm_"), (32, "_mm256_"), (64, "_mm512_")):
        table.put(f"{prefix}broadcastss_ps", _register(F32, size), _splat_of(_lane_0, size // 4))
        table.put(f"{prefix}broadcast_ss", _register(F32, size), _splat_of(element, size // 4))
    table.put("_mm256_broadcast_ps", Vec(F32, 8), lambda a: joined(load(F32, 4)(a), load(F32, 4)(a)))
    for name in REDUCTIONS:
        table.put(f"_mm512_{name}_ps", F32, called(name, F32))
        table.put(f"_mm512_{name}_epi32", I32, called(name, I32))


def _permuted_by_first(elem: Scalar) -> Build:
    return lambda a: permuted(as_elem(a[1], elem), _places(a[0], 15))


def _permuted_of_two(elem: Scalar) -> Build:
    return lambda a: permuted(joined(as_elem(a[0], elem), as_elem(a[2], elem)), _places(a[1], 31))


def _saturating(wide: Scalar, narrow: Scalar, size: int) -> Build:
    return lambda a: padded(saturated(as_elem(a[0], wide), narrow), size)


def _x86_doubles(table: Table) -> None:
    """Add the conversions between floats of the two sizes."""
    for prefix, size in (("_mm_", 16), ("_mm256_", 32), ("_mm512_", 64)):
        lanes = size // 8
        table.put(f"{prefix}cvtps_pd", Vec(F64, lanes), _as_double(F32, lanes))
        table.put(f"{prefix}cvtepi32_pd", Vec(F64, lanes), _as_double(I32, lanes))
        to_f32 = Vec(F32, max(4, lanes))
        table.put(f"{prefix}cvtpd_ps", to_f32, lambda a: padded(call("convert", (a[0],), of=F32), 16))
        table.put(f"{prefix}set_pd1", Vec(F64, lanes), splat(F64, lanes))
    for name, lanes in (("_mm_load1_pd", 2), ("_mm_load_pd1", 2), ("_mm256_broadcast_sd", 4)):
        table.put(name, Vec(F64, lanes), _splat_at(F64, lanes))
    table.put("_mm_load1_ps _mm_load_ps1", Vec(F32, 4), _splat_at(F32, 4))
    table.put("_mm_storel_pd", VOID, lambda a: call("store", (pointer_to(a[0], F64), half("lo", a[1]))))
    table.put("_mm_storeh_pd", VOID, lambda a: call("store", (pointer_to(a[0], F64), half("hi", a[1]))))
    for name in REDUCTIONS:
        table.put(f"_mm512_{name}_pd", F64, called(name, F64))


def _as_double(elem: Scalar, lanes: int) -> Build:
    return lambda a: call("convert", (first_lanes(a[0], elem, lanes),), of=F64)


def _splat_at(elem: Scalar, lanes: int) -> Build:
    return lambda a: call("splat", (element(pointer_to(a[0], elem)),), (lanes,))


def _x86_estimates(table: Table) -> None:
    def refused(a: Sequence[ir.Expr]) -> ir.Expr:
        raise Mistyped("is an estimate: processors differ in its bits")

    for prefix, size in (("_mm_", 16), ("_mm256_", 32), ("_mm512_", 64)):
        for name in ("rcp", "rsqrt", "rcp14", "rsqrt14"):
            table.put(f"{prefix}{name}_ps", _register(F32, size), refused)


def _splat_of(number_of: Callable[[ir.Expr], ir.Expr], lanes: int) -> Build:
    return lambda a: call("splat", (number_of(a[0]),), (lanes,))


def _lane_0(e: ir.Expr) -> ir.Expr:
    return call("lane", (e,), (0,))


def _inserted(a: Sequence[ir.Expr]) -> ir.Expr:
    whole = as_elem(a[0], ir.vec(a[1]).elem)
    if size_of(whole) != 2 * size_of(a[1]):
        raise Mistyped("only halves are inserted in this subset")
    return joined(half("lo", whole), a[1]) if number(a[2]) & 1 else joined(a[1], half("hi", whole))


def _chosen_halves(a: Sequence[ir.Expr]) -> ir.Expr:
    imm = number(a[2])

    def chosen(bits: int) -> ir.Expr:
        if bits & 8:
            return zero(ir.vec(a[0]).elem, ir.vec(a[0]).lanes // 2)
        return half("hi" if bits & 1 else "lo", a[bits >> 1 & 1])

    return joined(chosen(imm & 15), chosen(imm >> 4 & 15))


def _places(e: ir.Expr, most: int = -1) -> list[int]:
    vector = as_elem(e, I32)
    if not isinstance(vector, ir.CallExpression) or vector.name != "vector":
        raise Mistyped("takes places that are known when compiling")
    return [number(known_number) & most for known_number in vector.numbers]


def _x86_scalars(table: Table) -> None:
    """Add the intrinsics between vectors and numbers, and the intrinsics on the lowest lane alone."""

    def lowest(elem: Scalar) -> Build:
        return lambda a: _lane_0(as_elem(a[0], elem))

    for bits, size in ((128, 16), (256, 32), (512, 64)):
        prefix = "_mm_" if size == 16 else f"_mm{bits}_"
        table.put(f"{prefix}cvtss_f32", F32, lowest(F32))
        table.put(f"{prefix}cvtsd_f64", F64, lowest(F64))
        table.put(f"{prefix}cvtsi{bits}_si32", I32, lowest(I32))
        table.put(f"{prefix}cvtsi{bits}_si64", I64, lowest(I64))
        for width, signed, unsigned in WIDTHS:
            of = I64 if width == "64" else I32
            elem = unsigned if width in ("8", "16") and size == 16 else signed
            table.put(f"{prefix}extract_epi{width}", of, _extracted(elem, of))
            table.put(f"{prefix}insert_epi{width}", Vec(BITS, size), _with(signed))
    m128i, m128 = Vec(BITS, 16), Vec(F32, 4)
    table.put("_mm_cvtsi32_si128", m128i, _alone(I32))
    table.put("_mm_cvtsi64_si128", m128i, _alone(I64))
    table.put("_mm_set_ps1", m128, splat(F32, 4))
    table.put("_mm_set_ss", m128, _alone(F32))
    table.put("_mm_load_ss", m128, lambda a: _alone(F32)([element(pointer_to(a[0], F32))]))
    table.put("_mm_store_ss", VOID, lambda a: call("store", (pointer_to(a[0], F32), permuted(a[1], (0,)))))
    table.put("_mm_loadl_epi64 _mm_loadu_si64", m128i, lambda a: padded(load(None, 8)(a), 16))
    table.put("_mm_storel_epi64", VOID, lambda a: store(None)([a[0], half("lo", as_elem(a[1], I64))]))
    table.put("_mm_loadu_si32", m128i, lambda a: padded(load(None, 4)(a), 16))
    for name, op in (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/")):
        table.put(f"_mm_{name}_ss", m128, _lowest(op))
    for name in ("min", "max"):
        table.put(f"_mm_{name}_ss", m128, _lowest_by_vector(name))
    table.put("_mm_movehl_ps", m128, lambda a: shuffled(a[1], a[0], (2, 3, 6, 7)))
    table.put("_mm_movelh_ps", m128, lambda a: shuffled(a[0], a[1], (0, 1, 4, 5)))
    table.put("_cvtsh_ss", F32, lambda a: call("from_f16", (cast(U16, a[0]),)))
    table.put("_cvtss_sh", U16, lambda a: call("to_f16", (a[0],)))
    table.put("_mm_storeh_pi", VOID, lambda a: call("store", (pointer_to(a[0], F32), half("hi", a[1]))))
    table.put("_mm_loadl_pi", m128, lambda a: joined(load(F32, 2)(a[1:]), half("hi", a[0])))
    table.put("_mm_loadh_pi", m128, lambda a: joined(half("lo", a[0]), load(F32, 2)(a[1:])))
    table.put("_mm_set_pi16", Vec(BITS, 8), _set(I16, 4, is_reversed=True))
    table.put(
        "_mm_cvtpi16_ps",
        m128,
        lambda a: call("convert", (call("widen", (as_elem(a[0], I16),), of=I32),), of=F32),
    )
    table.put("_mm_storel_pi", VOID, lambda a: call("store", (pointer_to(a[0], F32), half("lo", a[1]))))
    for word, of in (("32", U32), ("64", U64)):
        table.put(f"_mm_popcnt_u{word}", I64 if word == "64" else I32, _bits_set(of))
    table.put("_mm_prefetch __builtin_prefetch", VOID, lambda a: call("prefetch", (a[0],)))


def _bits_set(of: Scalar) -> Build:
    """Build the count of set bits in each lane, by sums of neighbours of one bit, two and four."""
    ones = (1 << 8 * of.size) // 255

    def build(a: Sequence[ir.Expr]) -> ir.Expr:
        e = cast(of, a[0])
        for by, kept in ((1, 0x55), (2, 0x33), (4, 0x0F)):
            mask = ir.Const(of, ones * kept)
            e = binary("+", binary("&", e, mask), binary("&", binary(">>", e, ir.integer(by)), mask))
        count = binary(">>", binary("*", e, ir.Const(of, ones)), ir.integer(8 * of.size - 8))
        return cast(I64 if of == U64 else I32, count)

    return build


def _extracted(elem: Scalar, of: Scalar) -> Build:
    return lambda a: cast(of, call("lane", (as_elem(a[0], elem),), (number(a[1]),)))


def _with(elem: Scalar) -> Build:
    return lambda a: call("with_lane", (as_elem(a[0], elem), cast(elem, a[1])), (number(a[2]),))


def _alone(elem: Scalar) -> Build:
    lanes = 16 // elem.size
    return lambda a: call("with_lane", (zero(elem, lanes), cast(elem, a[0])), (0,))


def _lowest(op: str) -> Build:
    """Make a builder of an operation on lane 0; the other lanes are the first argument's."""
    return lambda a: call("with_lane", (a[0], binary(op, _lane_0(a[0]), _lane_0(a[1]))), (0,))


def _lowest_by_vector(name: str) -> Build:
    return lambda a: call("with_lane", (a[0], _lane_0(call(name, tuple(a)))), (0,))
