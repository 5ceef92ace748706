"""Meaning of AVX-512's masks: a mask is raised to a comparison's result, all bits of a lane set or none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from phasewise.ir import nodes as ir
from phasewise.ir.builders import MASK_TYPES, Build, Table, constant, number, zero
from phasewise.ir.operations import Mistyped, as_elem, binary, call, unary
from phasewise.ir.types import BITS, F32, F64, I32, I64, SCALARS, Scalar, Vec

COMPARED = {
    0: "==", 1: "<", 2: "<=", 4: "!=", 13: ">=", 14: ">", 16: "==", 17: "<", 18: "<=", 20: "!=",
    29: ">=", 30: ">",
}  # fmt: skip
_NEGATED = {5: "<", 6: "<=", 9: ">=", 10: ">", 21: "<", 22: "<=", 25: ">=", 26: ">"}
_UNORDERED, _ORDERED = (3, 19), (7, 23)
_BYTES = 64


def compared(elem: Scalar) -> Build:
    """Make a builder of a comparison chosen by an immediate; the result's lanes have all bits or none."""

    def build(a: Sequence[ir.Expr]) -> ir.Expr:
        x, y, which = as_elem(a[0], elem), as_elem(a[1], elem), number(a[2])
        if which in _UNORDERED:
            return binary("|", binary("!=", x, x), binary("!=", y, y))
        if which in _ORDERED:
            return binary("&", binary("==", x, x), binary("==", y, y))
        if which in _NEGATED:
            return unary("~", binary(_NEGATED[which], x, y))
        if which not in COMPARED:
            raise Mistyped(f"comparison {which} has no operation")
        return binary(COMPARED[which], x, y)

    return build


def put_masks(table: Table) -> None:
    """Add the comparisons that give masks, and every operation of 512 bits under a mask."""
    for suffix, elem, bits in (("ps", F32, I32), ("pd", F64, I64), ("epi32", I32, I32), ("epi64", I64, I64)):
        of = Vec(elem if elem.is_float else BITS, _BYTES // (elem.size if elem.is_float else 1))
        names = [name for name in table if name.startswith("_mm512_") and name.endswith(f"_{suffix}")]
        for name in names:
            if table[name].result == of and "load" not in name:  # masked loads touch no memory of other lanes
                _put_masked(table, name.removeprefix("_mm512_"), table[name].build, of, bits)
        table.put(f"_mm512_mask_blend_{suffix}", of, lambda a, bits=bits: _chosen(a[0], a[2], a[1], bits))  # type: ignore[misc]
        _put_comparisons(table, suffix, elem, Vec(bits, _BYTES // bits.size))
    for word, mask in MASK_TYPES.items():
        lanes = word.removeprefix("__m")
        for name, op in (("and", "&"), ("or", "|"), ("xor", "^")):
            table.put(f"_k{name}_{lanes}", mask, lambda a, op=op: binary(op, a[0], a[1]))  # type: ignore[misc]
        table.put(f"_knot_{lanes}", mask, lambda a: unary("~", a[0]))
        table.put(f"_kandn_{lanes}", mask, lambda a: call("andnot", (a[0], a[1])))


def _put_masked(table: Table, name: str, build: Build, of: Vec, bits: Scalar) -> None:
    """Add the masked forms of an intrinsic: lanes that the mask leaves out keep the first argument's value
    (`mask_`), or are zero (`maskz_`)."""

    def kept(a: Sequence[ir.Expr]) -> ir.Expr:
        return _chosen(a[1], build(a[2:]), a[0], bits)

    def cleared(a: Sequence[ir.Expr]) -> ir.Expr:
        return _chosen(a[0], build(a[1:]), zero(bits, _BYTES // bits.size), bits)

    table.put(f"_mm512_mask_{name}", of, kept)
    table.put(f"_mm512_maskz_{name}", of, cleared)


def _put_comparisons(table: Table, suffix: str, elem: Scalar, mask: Vec) -> None:
    if elem.is_float:
        table.put(f"_mm512_cmp_{suffix}_mask", mask, compared(elem))
        table.put(f"_mm512_fpclass_{suffix}_mask", mask, _classified(elem))
        return
    names = {"eq": "==", "neq": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
    for word, of in ((suffix, elem), (suffix.replace("i", "u"), SCALARS[f"u{8 * elem.size}"])):
        for name, op in names.items():
            table.put(
                f"_mm512_cmp{name}_{word}_mask",
                mask,
                lambda a, op=op, of=of: binary(op, as_elem(a[0], of), as_elem(a[1], of)),  # type: ignore[misc]
            )


def _chosen(mask: ir.Expr, if_set: ir.Expr, if_clear: ir.Expr, bits: Scalar) -> ir.Expr:
    """Choose lanes of `if_set` or `if_clear` by a mask, which may be a constant number."""
    elem = ir.vec(if_set).elem
    if elem.size != bits.size:
        if_set, elem = as_elem(if_set, bits), bits
    if isinstance(mask, ir.Const):
        mask = mask_of(int(mask.value), Vec(bits, _BYTES // bits.size))
    return call("select", (mask, if_set, as_elem(if_clear, elem)))


def mask_of(value: int, of: Vec) -> ir.Expr:
    """Make the mask with the bits of a number."""
    return constant(of.elem, [-(value >> lane & 1) for lane in range(of.lanes)])


_INFINITIES = {8: float("inf"), 16: float("-inf")}


def _classified(elem: Scalar) -> Build:
    """Make a builder of the classification of floats into the kinds that authors ask for together: both kinds
    of NaN, both zeros, infinities."""

    def build(a: Sequence[ir.Expr]) -> ir.Expr:
        x, which = as_elem(a[0], elem), number(a[1])
        lanes = ir.vec(x).lanes
        tests = []
        if which & 0x81 == 0x81:
            tests.append(binary("!=", x, x))
        if which & 6 == 6:
            tests.append(binary("==", x, zero(elem, lanes)))
        tests += [
            binary("==", x, constant(elem, [value] * lanes))
            for bit, value in _INFINITIES.items()
            if which & bit
        ]
        is_whole = which & 0x81 in (0, 0x81) and which & 6 in (0, 6) and not which & 0x60
        if not tests or not is_whole:
            raise Mistyped(f"the classes {which:#x} are not in the subset")
        return reduce(lambda test, other: binary("|", test, other), tests)

    return build
