"""Reductions: trees of additions over a vector's lanes become one operation; unused code is removed.

A tree is recognised only if it adds in one of the orders of `operations.ORDERS`, so that no bit changes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

from phasewise.ir import nodes as ir
from phasewise.ir.operations import ORDERS, as_elem, call
from phasewise.ir.types import Pointer, Scalar, Vec

Tree: TypeAlias = Any
"""A tree of additions: a leaf (name, version, lane), or (operation, tree, tree)."""

OPERATIONS = {"+": "reduce_add", "max": "reduce_max", "min": "reduce_min"}


def recognised(function: ir.FunctionDefinition) -> ir.FunctionDefinition:
    """Replace trees of additions by reductions, and remove values that nothing uses."""
    return without_unused(replace(function, body=_Recogniser().body(function.body)))


def halved(values: list[Tree], order: str, op: str, elem: Scalar) -> Tree:
    """Make the tree by which a reduction of this order combines the lanes."""
    while len(values) > 1:
        half = len(values) // 2
        is_pairs = order == "pairs" or (order == "halves_pairs" and len(values) * elem.size <= 16)
        if is_pairs:
            values = [_node(op, values[2 * i], values[2 * i + 1], elem) for i in range(half)]
        else:
            values = [_node(op, values[i], values[i + half], elem) for i in range(half)]
    return values[0]


def _node(op: str, a: Tree, b: Tree, elem: Scalar) -> Tree:
    """Make a node of a tree. Its sides are ordered for min and max of floats (NaN, zeros), not for sums."""
    if (op == "+" or not elem.is_float) and repr(b) < repr(a):
        a, b = b, a
    return op, a, b


class _Recogniser(ir.Rewriter):
    def __init__(self) -> None:
        self._known: dict[str, list[Tree]] = {}
        self._versions: dict[str, int] = {}

    def statement(self, statement: ir.Stmt) -> ir.Body:
        if isinstance(statement, ir.Steps | ir.While | ir.If):
            for name in ir.assigned((statement,)):
                self._forget(name)
            new = self.statement_inside(statement)
            for name in ir.assigned((statement,)):
                self._forget(name)
            return (new,)
        new = self.statement_inside(statement)
        match new:
            case ir.Declare(name=name, value=value) | ir.Assign(target=ir.Var(name=name), value=value):
                lanes = self._lanes(value) if value is not None and isinstance(value.type, Vec) else None
                self._forget(name)
                if lanes is not None and not _is_lane_by_lane(lanes):
                    self._known[name] = lanes
        return (new,)

    def _forget(self, name: str) -> None:
        self._versions[name] = self._versions.get(name, 0) + 1
        self._known.pop(name, None)

    def leave(self, e: ir.Expr) -> ir.Expr:
        match e:
            case ir.CallExpression(
                name="lane",
                args=(ir.CallExpression(name="with_lane", args=(_, value), numbers=given),),
                numbers=asked,
            ) if asked == given:
                return self._reduction(e) or value
            case ir.CallExpression(name="lane"):
                return self._reduction(e) or e
            case ir.CallExpression(name="store", args=(place, ir.CallExpression(name="bits", args=(value,)))):
                return _plain_store(place, value) or e
        return e

    def _reduction(self, e: ir.CallExpression) -> ir.Expr | None:
        lanes = self._lanes(e.args[0])
        index = e.numbers[0]
        if lanes is None or not isinstance(index, ir.Const) or not isinstance(e.type, Scalar):
            return None
        tree = lanes[int(index.value)]
        leaves = _leaves(tree)
        if len(leaves) < 2 or tree[0] not in OPERATIONS:
            return None
        name, version, _, of = leaves[0]
        if self._versions.get(name, 0) != version or len(leaves) != of.lanes or of.elem != e.type:
            return None
        own = [(name, version, lane, of) for lane in range(of.lanes)]
        for number, order in enumerate(ORDERS):
            if tree == halved(list(own), order, tree[0], of.elem):
                numbers = (ir.integer(number),) if number else ()
                return call(OPERATIONS[tree[0]], (ir.Var(of, name),), numbers)
        return None

    def _lanes(self, e: ir.Expr) -> list[Tree] | None:
        """Find the source of each lane of an expression; None if no reduction has such lanes."""
        match e:
            case ir.Var(type=Vec() as of, name=name):
                own = [(name, self._versions.get(name, 0), lane, of) for lane in range(of.lanes)]
                return self._known.get(name, own)
            case ir.Binary(type=Vec() as of, op="+", a=a, b=b):
                return self._paired("+", a, b, of)
            case ir.CallExpression(type=Vec() as of, name="max" | "min" as name, args=(a, b)):
                return self._paired(name, a, b, of)
            case ir.CallExpression(name="lo" | "hi" as which, args=(a,)):
                lanes = self._lanes(a)
                half = 0 if lanes is None else len(lanes) // 2
                return None if lanes is None else lanes[:half] if which == "lo" else lanes[half:]
            case ir.CallExpression(type=Vec() as of, name="shuffle", args=(a, b)):
                return self._shuffled(a, b, e.places, of)
            case ir.CallExpression(name="permute", args=(a,)):
                lanes = self._lanes(a)
                return lanes and [lanes[place] for place in e.places]
            case ir.CallExpression(
                type=Vec() as of,
                name="with_lane",
                args=(a, ir.Binary(op="+", a=x, b=y)),
                numbers=(ir.Const(value=0),),
            ):
                return self._with_lowest(a, x, y, of)
            case ir.CallExpression(name="bits", args=(inner,)):
                return self._same_width(e, inner)
        return None

    def _same_width(self, e: ir.Expr, inner: ir.Expr) -> list[Tree] | None:
        """Turn sources of 64-bit lanes that were moved whole into sources of lanes of half the width."""
        if (
            not isinstance(e.type, Vec)
            or not isinstance(inner.type, Vec)
            or not isinstance(inner, ir.CallExpression)
        ):
            return None
        if inner.name != "shuffle" or inner.type.elem.size <= e.type.elem.size:
            return None
        ratio = inner.type.elem.size // e.type.elem.size
        sides = [_unwrapped(side, e.type) for side in inner.args]
        if None in sides:
            return None
        places = [place * ratio + i for place in inner.places for i in range(ratio)]
        return self._shuffled(sides[0], sides[1], places, e.type)  # type: ignore[arg-type]

    def _paired(self, op: str, a: ir.Expr, b: ir.Expr, of: Vec) -> list[Tree] | None:
        lanes_a, lanes_b = self._lanes(a), self._lanes(b)
        if lanes_a is None or lanes_b is None:
            return None
        return [_node(op, x, y, of.elem) for x, y in zip(lanes_a, lanes_b, strict=True)]

    def _shuffled(self, a: ir.Expr, b: ir.Expr, places: list[int], of: Vec) -> list[Tree] | None:
        lanes_a, lanes_b = self._lanes(a), self._lanes(b)
        if lanes_a is None or lanes_b is None:
            return None
        group = 16 // of.elem.size
        return [
            (lanes_a if place < group else lanes_b)[start + place % group]
            for start in range(0, of.lanes, group)
            for place in places
        ]

    def _with_lowest(self, a: ir.Expr, x: ir.Expr, y: ir.Expr, of: Vec) -> list[Tree] | None:
        rest = self._lanes(a)
        sides = []
        for side in (x, y):
            if not ir.is_call(side, "lane") or (lanes := self._lanes(side.args[0])) is None:
                return None
            sides.append(lanes[side.places[0]])
        return rest and [_node("+", sides[0], sides[1], of.elem), *rest[1:]]


def _is_lane_by_lane(lanes: list[Tree]) -> bool:
    """True if each lane is made of the same lane of other vectors: trees then start at this vector."""
    return all(
        leaf[2] == lane and leaf[3].lanes == len(lanes)
        for lane, tree in enumerate(lanes)
        for leaf in _leaves(tree)
    )


def _plain_store(place: ir.Expr, value: ir.Expr) -> ir.Expr | None:
    """Make a store of bytes a store of numbers, if the pointer was cast from one to numbers; else None."""
    if not (isinstance(place, ir.Cast) and isinstance(place.a.type, Pointer) and isinstance(value.type, Vec)):
        return None
    of = place.a.type.to
    if not isinstance(of, Scalar) or of.size != value.type.elem.size or place.a.type.is_const:
        return None
    return call("store", (place.a, as_elem(value, of)))


def _unwrapped(e: ir.Expr, of: Vec) -> ir.Expr | None:
    """Remove the reinterpretation around `e`, if its inner expression has the type; else None."""
    if e.type == of:
        return e
    return e.args[0] if ir.is_call(e, "bits") and e.args[0].type == of else None


def _leaves(tree: Tree) -> list[Tree]:
    leaves, waiting = [], [tree]
    while waiting:
        subtree = waiting.pop()
        if len(subtree) == 3:
            waiting += [subtree[1], subtree[2]]
        else:
            leaves.append(subtree)
    return leaves


def without_unused(function: ir.FunctionDefinition) -> ir.FunctionDefinition:
    """Remove variables that nothing else reads; evaluation of expressions has no effects here."""
    body = function.body
    while True:
        reads: set[str] = set()
        for node in ir.walk_body(body):
            match node:
                case ir.Assign(target=ir.Var(name=name), value=value):
                    reads |= ir.used(value) - {name}
                case ir.Assign(target=target, value=value):
                    reads |= ir.used(target) | ir.used(value)
                case ir.Declare(value=value) if value is not None:
                    reads |= ir.used(value)
                case ir.Steps():
                    for part in (node.start, node.condition, node.step, *node.how):
                        reads |= ir.used(part)
                case ir.If(condition=condition) | ir.While(condition=condition):
                    reads |= ir.used(condition)
                case _ if type(node).__name__ in ("Do", "Return"):
                    reads |= ir.used(node)
        new = _Without(reads).body(body)
        if new == body:
            tables = tuple(table for table in function.tables if table.name in reads)
            return replace(function, body=body, tables=tables)
        body = new


class _Without(ir.StatementRewriter):
    def __init__(self, reads: set[str]) -> None:
        self._reads = reads

    def statement(self, statement: ir.Stmt) -> ir.Body:
        match statement:
            case ir.Declare(name=name) | ir.Assign(target=ir.Var(name=name)) if name not in self._reads:
                return ()
        return (self.statement_inside(statement),)
