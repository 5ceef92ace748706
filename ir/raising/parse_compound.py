"""Values of several parts: NEON's sets of registers, lists of lanes."""

from __future__ import annotations

import re
from functools import partial

from tree_sitter import Node

from phasewise.ir import nodes as ir
from phasewise.ir.operations import binary
from phasewise.ir.raising.parse_expressions import SourceExpressions
from phasewise.ir.types import Array, Vec

APART = re.compile(r"v(ld|st)([24])(q?)_([suf](?:8|16|32|64))")
_MIXED = re.compile(r"v(zip|uzp|trn)q_([suf](?:8|16|32|64))")


class CompoundValues(SourceExpressions):
    """Declares, loads and stores them part by part."""

    def _registers_declared(
        self, name: str, of: Array, value: Node, line: int, declarator: Node
    ) -> list[ir.Stmt]:
        declared = self._array(name, of, None, line, False, declarator)
        return [declared, *self._registers(ir.Var(of, declared.name), value, line)]

    def _registers(self, target: ir.Expr, value: Node, line: int) -> list[ir.Stmt]:
        """Assign several registers one by one: from a list, or from a load of several."""
        of = target.type
        assert isinstance(of, Array)
        if value.type == "initializer_list":
            values = self._listed(value, of)
        else:
            values = self._loaded_together(value, of)
        return [
            ir.Assign(ir.Index(of.of, target, ir.integer(i)), item, line) for i, item in enumerate(values)
        ]

    def _lanes_listed(self, node: Node, of: Vec) -> ir.Expr:
        """A NEON register of the lanes in a list; lanes that are not there are zero."""
        word = "q" if of.size == 16 else ""
        suffix = of.elem.name.replace("i", "s")
        names = [f"vdup{word}_n_{suffix}", f"vset{word}_lane_{suffix}"]
        values = [self._converted(child, of.elem) for child in node.named_children if child.type != "comment"]
        if any(name not in self.source.intrinsics for name in names) or len(values) > of.lanes:
            raise self._refuse(node, "a list of lanes is not in the subset here")
        register: ir.Expr = ir.CallExpression(of, names[0], (ir.zero(of.elem),))
        for lane, value in enumerate(values):
            if not (isinstance(value, ir.Const) and value.value == 0):
                register = ir.CallExpression(of, names[1], (value, register, ir.integer(lane)))
        return register

    def _listed(self, node: Node, of: Array) -> list[ir.Expr]:
        """The elements of a list of registers; `{0}` is zero everywhere."""
        inner = [child for child in node.named_children if child.type != "comment"]
        if len(inner) == 1 and inner[0].type == "initializer_list":
            return self._listed(inner[0], of)
        if len(inner) == 1 and self._text(inner[0]) == "0":
            assert isinstance(of.of, Vec)
            suffix = of.of.elem.name.replace("i", "s")
            zero = "_mm256_setzero_si256" if of.of.elem.name == "bits" else f"vdupq_n_{suffix}"
            args = () if of.of.elem.name == "bits" else (ir.integer(0),)
            return [ir.CallExpression(of.of, zero, args)] * of.count
        return [self._converted(item, of.of) for item in inner]

    def _loaded_together(self, node: Node, of: Array) -> list[ir.Expr]:
        if node.type != "call_expression":
            registers = self.expr(node)
            if registers.type != of:
                raise self._refuse(node, f"{self._quoted(node)} where {of.count} registers are needed")
            return [ir.Index(of.of, registers, ir.integer(i)) for i in range(of.count)]
        called = self._text(node.child_by_field_name("function"))
        if (apart := APART.fullmatch(called)) and apart[1] == "ld":
            return self._loaded_apart(int(apart[2]), apart[3], apart[4], node, of)
        if mixed := _MIXED.fullmatch(called):
            args = tuple(self._arguments(node))
            return [self._intrinsic(f"v{mixed[1]}{half}q_{mixed[2]}", args, node) for half in (1, 2)]
        name, _, many = called.rpartition("_x")
        intrinsic = self.source.intrinsics.get(name)
        if (
            intrinsic is None
            or intrinsic.result != of.of
            or many != str(of.count)
            or not isinstance(of.of, Vec)
        ):
            raise self._refuse(node, f"{self._quoted(node)} where {of.count} registers are needed")
        return self._loaded_in_a_row(name, node, of)

    def _loaded_in_a_row(self, name: str, node: Node, of: Array) -> list[ir.Expr]:
        assert isinstance(of.of, Vec)
        (place,) = self._arguments(node)
        starts = [ir.integer(i * of.of.lanes) for i in range(of.count)]
        places = [self._typed(partial(binary, "+", place, start), node) for start in starts]
        return [ir.CallExpression(of.of, name, (each,)) for each in places]

    def _intrinsic(self, name: str, args: tuple[ir.Expr, ...], node: Node) -> ir.Expr:
        intrinsic = self.source.intrinsics.get(name)
        if intrinsic is None:
            raise self._refuse(node, f"intrinsic `{name}` is not in the table of {self.source.expanded.isa}")
        return ir.CallExpression(intrinsic.result, name, args)

    def _loaded_apart(self, n: int, q: str, suffix: str, node: Node, of: Array) -> list[ir.Expr]:
        """The NEON registers that a load takes apart: every second, or every fourth, element, each with a
        first element of its own."""
        if of.count != n:
            raise self._refuse(node, f"{self._quoted(node)} where {of.count} registers are needed")
        whole = self._intrinsic(f"vld1q_{suffix}", (), node).type
        assert isinstance(whole, Vec)
        rows = self._loaded_in_a_row(f"vld1q_{suffix}", node, Array(whole, n if q else n // 2))

        def every_second(a: ir.Expr, b: ir.Expr) -> tuple[ir.Expr, ir.Expr]:
            first, second = (self._intrinsic(f"vuzp{half}q_{suffix}", (a, b), node) for half in (1, 2))
            return first, second

        if n == 2 and q:
            return [*every_second(*rows)]
        if n == 2:
            return [self._intrinsic(f"vget_low_{suffix}", (e,), node) for e in every_second(rows[0], rows[0])]
        if not q:
            rows = [row for half in every_second(*rows) for row in every_second(half, half)]
            low = [self._intrinsic(f"vget_low_{suffix}", (row,), node) for row in rows]
            return [low[0], low[2], low[1], low[3]]
        (a_even, a_odd), (b_even, b_odd) = every_second(*rows[:2]), every_second(*rows[2:])
        (first, third), (second, fourth) = every_second(a_even, b_even), every_second(a_odd, b_odd)
        return [first, second, third, fourth]

    def _stored_together(self, n: int, q: str, suffix: str, node: Node, line: int) -> list[ir.Stmt]:
        """Store NEON registers element by element in turn."""
        place, registers = self._arguments(node)
        of = registers.type
        if not isinstance(of, Array) or not isinstance(of.of, Vec) or of.count != n or (n == 4 and not q):
            raise self._refuse(node, f"{self._quoted(node)} is not in the subset")
        values: list[ir.Expr] = [ir.Index(of.of, registers, ir.integer(i)) for i in range(n)]

        def in_turn(a: ir.Expr, b: ir.Expr) -> list[ir.Expr]:
            if not q:
                a, b = (self._intrinsic(f"vcombine_{suffix}", (e, e), node) for e in (a, b))
            halves = (1, 2) if q else (1,)
            return [self._intrinsic(f"vzip{half}q_{suffix}", (a, b), node) for half in halves]

        rows = in_turn(*values) if n == 2 else [
            row
            for pair in zip(in_turn(values[0], values[2]), in_turn(values[1], values[3]), strict=True)
            for row in in_turn(*pair)
        ]  # fmt: skip
        lanes = 16 // of.of.elem.size
        stores = []
        for i, row in enumerate(rows):
            target = self._typed(partial(binary, "+", place, ir.integer(i * lanes)), node)
            stores.append(ir.Do(self._intrinsic(f"vst1q_{suffix}", (target, row), node), line))
        return [*stores]
