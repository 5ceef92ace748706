"""Structural equality of two pieces of a kernel, up to a step of an index and the names of variables.

Addresses are compared as sums: what they begin with, how far each variable moves them, and a number. Whole
numbers are summed so only where C's arithmetic cannot wrap around (signed, where that has no meaning, and 64
bits, which pointers have).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from phasewise.ir import nodes as ir
from phasewise.ir.types import I32, I64, U64, Array, Pointer, Scalar, Struct, Type

Key: TypeAlias = Hashable
SUMMED = (I32, I64, U64)


@dataclass(frozen=True)
class View:
    """One of two sides of a comparison: names that stand for others, and a variable that is ahead."""

    names: Mapping[str, str] = field(default_factory=dict)
    variable: str = ""
    ahead: int = 0

    def key(self, e: ir.Expr) -> Key:
        """A key that is equal for two expressions of one value, as far as can be seen."""
        if _is_summed(e.type):
            return ("sum", e.type, *self._frozen(e))
        return self._whole(e)

    def statement(self, statement: ir.Stmt) -> Key:
        """A key of a statement; None where it is of a kind that is not compared."""
        match statement:
            case ir.Declare(name=name, type=of, value=value, values=()) if not isinstance(of, Array):
                given = None if value is None else self.key(value)
                return ("declare", of, self.names.get(name, name), given)
            case ir.Assign(target=target, value=value):
                return ("assign", self.key(target), self.key(value))
            case ir.Do(call=call):
                return ("do", self.key(call))
        return None

    def sum_of(self, e: ir.Expr) -> tuple[dict[Key, int], int]:
        """A sum as its terms with their factors, and the number that is left; of a pointer in bytes."""
        match e:
            case ir.Const(value=int(value)):
                return {}, value
            case ir.Var(name=name) if name == self.variable:
                return {("variable", e.type, name): 1}, self.ahead
            case ir.Binary(op="+" | "-" as op, a=a, b=b) if _is_summed(e.type):
                return self._added(e, op, a, b)
            case (
                ir.Binary(op="*", a=a, b=ir.Const(value=int(by)))
                | ir.Binary(op="*", a=ir.Const(value=int(by)), b=a)
            ) if _is_summed(a.type):
                return _scaled(self.sum_of(a), by)
            case ir.Unary(op="-", a=a) if _is_summed(a.type):
                return _scaled(self.sum_of(a), -1)
            case ir.Cast(a=a) if isinstance(e.type, Pointer) and isinstance(a.type, Pointer | Array):
                return self.sum_of(a)
            case ir.Cast(a=a) if a.type == I32 and e.type in SUMMED:
                return self.sum_of(a)
            case ir.Index() | ir.Member() if isinstance(e.type, Array | Struct):
                return self._place(e)
        return {self._whole(e): 1}, 0

    def _whole(self, e: ir.Expr) -> Key:
        """A key of a term that is no sum of others."""
        match e:
            case ir.Const(of, value):
                return ("number", of, repr(value))
            case ir.Var(of, name):
                return ("variable", of, self.names.get(name, name))
            case ir.Binary(of, op, a, b):
                return ("binary", of, op, self.key(a), self.key(b))
            case ir.Unary(of, op, a):
                return ("unary", of, op, self.key(a))
            case ir.Cast(of, a):
                return ("cast", of, self.key(a))
            case ir.Index() | ir.Member():
                return ("element", e.type, *self._frozen_place(e))
            case ir.Ternary(of, condition, a, b):
                return ("choice", of, self.key(condition), self.key(a), self.key(b))
            case ir.CallExpression(of, name, args, numbers):
                return ("call", of, name, *map(self.key, args), "numbers", *map(self.key, numbers))
        return ("other", repr(e))

    def _added(self, e: ir.Expr, op: str, a: ir.Expr, b: ir.Expr) -> tuple[dict[Key, int], int]:
        left, right = self.sum_of(a), self.sum_of(b)
        if isinstance(a.type, Pointer | Array) and isinstance(b.type, Pointer | Array):
            return {("binary", op, self.key(a), self.key(b)): 1}, 0
        if isinstance(e.type, Pointer):
            size = e.type.to.size
            left = left if isinstance(a.type, Pointer | Array) else _scaled(left, size)
            right = right if isinstance(b.type, Pointer | Array) else _scaled(right, size)
        return _plus(left, _scaled(right, 1 if op == "+" else -1))

    def _place(self, e: ir.Expr) -> tuple[dict[Key, int], int]:
        """A key of the address of an element or a field."""
        match e:
            case ir.Index(of, base, index):
                inner = self._place(base) if isinstance(base, ir.Index | ir.Member) else self.sum_of(base)
                offset = self.sum_of(index) if _is_summed(index.type) else ({self.key(index): 1}, 0)
                return _plus(inner, _scaled(offset, of.size))
            case ir.Member(_, base, name):
                assert isinstance(base.type, Struct)
                inner = (
                    self._place(base) if isinstance(base, ir.Index | ir.Member) else ({self.key(base): 1}, 0)
                )
                return _plus(inner, ({}, base.type.offset(name)))
        raise AssertionError(e)

    def _frozen(self, e: ir.Expr) -> tuple[Key, Key]:
        terms, number = self.sum_of(e)
        return frozenset(item for item in terms.items() if item[1]), number

    def _frozen_place(self, e: ir.Expr) -> tuple[Key, Key]:
        terms, number = self._place(e)
        return frozenset(item for item in terms.items() if item[1]), number


def _is_summed(of: Type) -> bool:
    return isinstance(of, Pointer | Array) or (isinstance(of, Scalar) and of in SUMMED)


def _scaled(linear: tuple[dict[Key, int], int], by: int) -> tuple[dict[Key, int], int]:
    return {term: factor * by for term, factor in linear[0].items()}, linear[1] * by


def _plus(a: tuple[dict[Key, int], int], b: tuple[dict[Key, int], int]) -> tuple[dict[Key, int], int]:
    terms = dict(a[0])
    for term, factor in b[0].items():
        terms[term] = terms.get(term, 0) + factor
    return terms, a[1] + b[1]
