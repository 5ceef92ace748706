"""Types, numbers and operands as text of C."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from phasewise.ir import nodes as ir
from phasewise.ir.operations import COMPARISONS, decayed
from phasewise.ir.types import F32, Array, Pointer, Scalar, Struct, Type, Vec, Void, common, promoted
from phasewise.ir.words import C_NAMES


def c_type(of: Type, name: str = "", special: Callable[[Type], str | None] = lambda _: None) -> str:
    """C's declaration of `name` with a type. special: gives the words for types that C lacks, or None."""
    own = special(of)
    if own is not None:
        return f"{own} {name}".rstrip()
    match of:
        case Scalar(word):
            return f"{C_NAMES[word]} {name}".rstrip()
        case Pointer(to, is_const):
            const = "const " if is_const else ""
            return f"{const}{c_type(to, '', special)} *{name}"
        case Array(element, count):
            return c_type(element, f"{name}[{count}]", special)
        case Struct(word):
            return f"{word} {name}".rstrip()
        case Void():
            return f"void {name}".rstrip()
        case Vec():
            raise AssertionError("a register in a declaration of memory")


def struct_text(of: Struct, typed: Callable[[Type, str], str] = c_type) -> str:
    fields = " ".join(f"{typed(field, name)};" for name, field in of.fields)
    return f"typedef struct {{ {fields} }} {of.name};"


def signature(name: str, args: Sequence[tuple[str, Type]], result: Type) -> str:
    """The head of a C function."""
    given = ", ".join(c_type(of, arg) for arg, of in args) or "void"
    return f"{c_type(result)} {name}({given})".replace("* ", "*")


def number(value: int | float, of: Scalar) -> str:
    """The constant's text in C."""
    if of.is_float:
        suffix = "f" if of == F32 else ""
        if math.isnan(value):
            return f'__builtin_nan{suffix}("")'
        if math.isinf(value):
            return f"{'-' if value < 0 else ''}__builtin_inf{suffix}()"
        value = float(value)
        text = value.hex() if value != int(value) or abs(value) > 1e9 else f"{value:.1f}"
        return f"({text}{suffix})" if value < 0 or text.startswith("-") else f"{text}{suffix}"
    value = int(value)
    if of.name == "i32":
        return f"({value})" if value < 0 and value != -(2**31) else "INT32_MIN" if value < 0 else str(value)
    if of.name == "u32":
        return f"{value}u"
    if of.size == 8:
        return (
            f"UINT64_C({value})"
            if not of.is_signed
            else "INT64_MIN"
            if value == -(2**63)
            else f"INT64_C({value})"
        )
    return f"({C_NAMES[of.name]}){value}"


def compared(e: ir.Binary, a: str, b: str, typed: Callable[[Type], str]) -> str:
    """C of an operation on two numbers; the sides of a comparison are first converted as C converts them."""
    left, right = decayed(e.a.type), decayed(e.b.type)
    if e.op in COMPARISONS and isinstance(left, Scalar) and isinstance(right, Scalar) and left != right:
        shared = common(left, right)
        a = a if promoted(left) == shared else f"({typed(shared)}){wrapped(a)}"
        b = b if promoted(right) == shared else f"({typed(shared)}){wrapped(b)}"
    return f"{wrapped(a)} {e.op} {wrapped(b)}"


def is_simple(text: str) -> bool:
    return text.isidentifier()


def wrapped(text: str) -> str:
    """Put an operand of C in parentheses unless it is a name, a number or closed already."""
    if text.isidentifier() or text.replace(".", "").isalnum():
        return text
    if text[0] == "(" and text[-1] == ")":
        depth = 0
        for i, mark in enumerate(text):
            depth += (mark == "(") - (mark == ")")
            if depth == 0:
                return text if i == len(text) - 1 else f"({text})"
    head = text.partition("(")[0].partition("[")[0]
    if head.isidentifier() and _closes_at_end(text, len(head)):
        return text
    return f"({text})"


def _closes_at_end(text: str, start: int) -> bool:
    depth = 0
    for i, mark in enumerate(text[start:], start):
        depth += (mark in "([") - (mark in ")]")
        if depth == 0:
            return i == len(text) - 1
    return False
