"""Fusion of byte dot products (VNNI): those whose pairs cannot overflow, as the one instruction for them.

`dot_i16(dot_u8i8_sat(a, b), ones)` adds pairs in 16 bits, which saturates, and these in 32. Where every lane
of `a` is seen to be at most 128, no pair leaves 16 bits (2 * 128 * -128 is the least), and `dot_u8i8` gives
the same bits.
"""

from __future__ import annotations

from dataclasses import replace

from phasewise.ir import nodes as ir
from phasewise.ir.operations import call
from phasewise.ir.raising.reductions import without_unused
from phasewise.ir.types import I32, Vec

MOST = 128
"""Largest value of a lane with which a pair of products fits 16 bits."""


def joined(function: ir.FunctionDefinition) -> ir.FunctionDefinition:
    """The function with four products in one operation, wherever that changes no bit."""
    body = _Joiner(function).body(function.body)
    return function if body == function.body else without_unused(replace(function, body=body))


class _Joiner(ir.Rewriter):
    def __init__(self, function: ir.FunctionDefinition) -> None:
        nodes = ir.walk_body(function.body)
        targets = [node.target for node in nodes if isinstance(node, ir.Assign)]
        self._changing = {target.name for target in targets if isinstance(target, ir.Var)}
        self._values: dict[str, ir.Expr] = {}
        for node in nodes:
            if isinstance(node, ir.Declare):
                if node.name in self._values or node.value is None:
                    self._changing.add(node.name)
                else:
                    self._values[node.name] = node.value

    def leave(self, e: ir.Expr) -> ir.Expr:
        if not (ir.is_call(e, "dot_i16") and _is_one(self._known(e.args[1]))):
            return e
        pairs = self._known(e.args[0])
        if not isinstance(pairs, ir.CallExpression) or pairs.name != "dot_u8i8_sat":
            return e
        a, b = pairs.args
        is_later = isinstance(e.args[0], ir.Var) and (ir.used(pairs) & self._changing or _reads_memory(pairs))
        if is_later or self._most(a) > MOST:
            return e
        zero = call("splat", (ir.Const(I32, 0),), (ir.vec(e).lanes,))
        return call("dot_u8i8", (zero, a, b))

    def _known(self, e: ir.Expr) -> ir.Expr:
        """The expression that a name stands for, if it has only one value."""
        while isinstance(e, ir.Var) and e.name in self._values and e.name not in self._changing:
            e = self._values[e.name]
        return e

    def _most(self, e: ir.Expr) -> int:
        """A bound of the lanes: no lane of bytes, read without a sign, is larger."""
        e = self._known(e)
        match e:
            case ir.CallExpression(name="bits", args=(inner,)) if isinstance(inner.type, Vec):
                return self._most(inner) if inner.type.elem.size == 1 else 255
            case ir.CallExpression(name="splat", args=(ir.Const(value=int(value)),)):
                return value & 255
            case ir.CallExpression(name="abs"):
                return 128
            case ir.CallExpression(name="sign", args=(a, b)) if a == b:
                return 128
            case ir.CallExpression(name="concat", args=(a, b)):
                return max(self._most(a), self._most(b))
            case ir.CallExpression(name="lo" | "hi", args=(a,)):
                return self._most(a)
            case ir.Binary(op="&", a=a, b=b):
                return min(self._most(a), self._most(b))
        return 255


def _reads_memory(e: ir.Expr) -> bool:
    return any(isinstance(node, ir.Index | ir.Member) or (ir.is_call(node, "load")) for node in ir.walk(e))


def _is_one(e: ir.Expr) -> bool:
    match e:
        case ir.CallExpression(name="splat", args=(ir.Const(value=1),)):
            return True
        case ir.CallExpression(name="bits", args=(inner,)) if isinstance(inner.type, Vec):
            return isinstance(e.type, Vec) and inner.type.elem.size == e.type.elem.size and _is_one(inner)
        case ir.CallExpression(name="concat", args=(a, b)):
            return _is_one(a) and _is_one(b)
    return False
