"""Types of both levels: numbers, vectors, pointers, arrays and structs. All are immutable values.

A vector type has lanes of one number type. On x86 the low level has registers of integers whose lanes only
the instruction determines (`__m256i`): their element is `bits`, and lanes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Scalar:
    """The type of a number of fixed width; `bits` is a byte of a register whose lanes are not known."""

    name: str

    @property
    def is_float(self) -> bool:
        return self.name[0] == "f"

    @property
    def is_signed(self) -> bool:
        return self.name[0] in "if"

    @property
    def size(self) -> int:
        return 1 if self.name == "bits" else int(self.name[1:]) // 8


@dataclass(frozen=True, slots=True)
class Vec:
    """A vector type of `lanes` numbers, which are computed with at once."""

    elem: Scalar
    lanes: int

    @property
    def size(self) -> int:
        return self.elem.size * self.lanes


@dataclass(frozen=True, slots=True)
class Pointer:
    """A pointer type, to elements in the caller's memory. is_const: True if not written through."""

    to: Type
    is_const: bool = False

    @property
    def size(self) -> int:
        return 8


@dataclass(frozen=True, slots=True)
class Array:
    """An array type: `count` elements in a row, in a struct's field, a table, or the kernel's own memory."""

    of: Type
    count: int

    @property
    def size(self) -> int:
        return self.of.size * self.count


@dataclass(frozen=True, slots=True)
class Struct:
    """A struct type: fields in C's layout, without bit fields."""

    name: str
    fields: tuple[tuple[str, Type], ...]

    def offset(self, field: str) -> int:
        offset = 0
        for name, of in self.fields:
            offset = -(-offset // alignment(of)) * alignment(of)
            if name == field:
                return offset
            offset += of.size
        raise KeyError(field)

    def type_of(self, field: str) -> Type | None:
        return dict(self.fields).get(field)

    @property
    def size(self) -> int:
        end = 0
        for _, of in self.fields:
            end = -(-end // alignment(of)) * alignment(of) + of.size
        return -(-end // alignment(self)) * alignment(self)


@dataclass(frozen=True, slots=True)
class Void:
    """The type of a function without a result, and the target of a pointer without a type."""

    @property
    def size(self) -> int:
        return 1


Type: TypeAlias = Scalar | Vec | Pointer | Array | Struct | Void


def alignment(of: Type) -> int:
    """The alignment in bytes that C gives a type in a struct."""
    match of:
        case Array(element, _):
            return alignment(element)
        case Struct(_, fields):
            return max((alignment(field) for _, field in fields), default=1)
        case _:
            return of.size


I8, U8, I16, U16 = Scalar("i8"), Scalar("u8"), Scalar("i16"), Scalar("u16")
I32, U32, I64, U64 = Scalar("i32"), Scalar("u32"), Scalar("i64"), Scalar("u64")
F32, F64, BITS = Scalar("f32"), Scalar("f64"), Scalar("bits")
VOID = Void()
SCALARS = {scalar.name: scalar for scalar in (I8, U8, I16, U16, I32, U32, I64, U64, F32, F64)}


def innermost(of: Type) -> Type:
    """The type of an array's numbers or registers, for any number of dimensions."""
    while isinstance(of, Array):
        of = of.of
    return of


def numbers_of(of: Type) -> Scalar:
    """The type of the numbers of an array."""
    inner = innermost(of)
    assert isinstance(inner, Scalar)
    return inner


def pointee(of: Type) -> Type | None:
    """The element type of a pointer or an array; None for other types."""
    return of.to if isinstance(of, Pointer) else of.of if isinstance(of, Array) else None


def promoted(of: Scalar) -> Scalar:
    """The type after C's integer promotion."""
    return I32 if not of.is_float and of.size < 4 else of


def common(a: Scalar, b: Scalar) -> Scalar:
    """The type that C's usual arithmetic conversions give two numbers."""
    for float_type in (F64, F32):
        if float_type in (a, b):
            return float_type
    a, b = promoted(a), promoted(b)
    if a == b:
        return a
    if a.size != b.size:
        return a if a.size > b.size else b
    return a if not a.is_signed else b


def spelled(of: Type) -> str:
    """The name of a type in the text of the high level."""
    match of:
        case Scalar(name):
            return name
        case Vec(elem, lanes):
            return f"vec[{elem.name}, {lanes}]"
        case Pointer(to, is_const):
            inner = spelled(to)
            return f"ptr[const[{inner}]]" if is_const else f"ptr[{inner}]"
        case Array(element, count):
            return f"array[{spelled(element)}, {count}]"
        case Struct(name):
            return name
        case Void():
            return "None"
