"""Reader of the high level's types and expressions."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace

from phasewise.ir import nodes as ir
from phasewise.ir.errors import SourceError
from phasewise.ir.operations import (
    OPERATIONS,
    ORDERS,
    REDUCTIONS,
    Mistyped,
    binary,
    call,
    cast,
    decayed,
    fitting,
    integer_result,
    unary,
)
from phasewise.ir.types import (
    F32,
    I32,
    SCALARS,
    VOID,
    Array,
    Pointer,
    Scalar,
    Struct,
    Type,
    Vec,
    common,
    spelled,
)

MAX_ELEMENTS = 1 << 20


class TextExpressions:
    """Reader of expressions, with the names and types that are known so far."""

    def __init__(self, where: str, choice: Mapping[str, int] | None) -> None:
        self._where = where
        self._choice = choice
        self._structs: dict[str, Struct] = {}
        self._types: dict[str, Type] = {}
        self._parameters: dict[str, ir.Parameter] = {}

    def _refuse(self, node: ast.AST | int, reason: str) -> SourceError:
        line = node if isinstance(node, int) else getattr(node, "lineno", 0)
        return SourceError(self._where, line, reason)

    def _plain_number(self, node: ast.expr, of: Scalar) -> int | float:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            if isinstance(node.operand, ast.Constant) and isinstance(node.operand.value, int | float):
                return self._plain_number(ast.copy_location(ast.Constant(-node.operand.value), node), of)
            return fitting(-self._plain_number(node.operand, of), of)
        if isinstance(node, ast.Name) and node.id in ("inf", "nan"):
            return float(node.id)
        if not isinstance(node, ast.Constant) or type(node.value) not in (int, float):
            raise self._refuse(node, "a number is needed")
        value = node.value
        assert isinstance(value, int | float)
        if not of.is_float and fitting(value, of) != value:
            raise self._refuse(node, f"{value} is no {of.name}")
        return fitting(value, of)

    def _type(self, node: ast.expr | None) -> Type:
        match node:
            case None | ast.Constant(value=None):
                return VOID
            case ast.Name(id=name) if name in SCALARS:
                return SCALARS[name]
            case ast.Name(id=name) if name in self._structs:
                return self._structs[name]
            case ast.Subscript(value=ast.Name(id="ptr"), slice=inner):
                if (
                    isinstance(inner, ast.Subscript)
                    and isinstance(inner.value, ast.Name)
                    and inner.value.id == "const"
                ):
                    return Pointer(self._type(inner.slice), True)
                return Pointer(self._type(inner))
            case ast.Subscript(
                value=ast.Name(id="vec" | "array" as word), slice=ast.Tuple(elts=[first, second])
            ):
                of, count = self._type(first), self._count(second)
                if word == "array":
                    if not 0 < count * of.size <= MAX_ELEMENTS:
                        raise self._refuse(node, f"an array of {count} elements")
                    return Array(of, count)
                if not isinstance(of, Scalar) or not 0 < count <= 256 or count & (count - 1):
                    raise self._refuse(node, "a vector has 1, 2, 4, .. lanes of numbers")
                return Vec(of, count)
        raise self._refuse(node or 0, f"`{ast.unparse(node)[:40] if node else ''}` is no type")

    def _count(self, node: ast.expr) -> int:
        number = self._expr(node)
        if isinstance(number, ir.Var) and number.name in self._parameters:
            return self._parameters[number.name].values[0]
        if not isinstance(number, ir.Const) or not isinstance(number.value, int):
            raise self._refuse(node, "a number that is known before the kernel runs is needed")
        return number.value

    # ---- expressions ----

    def _number(self, node: ast.expr) -> ir.Expr:
        value = self._expr(node)
        if not isinstance(value.type, Scalar | Pointer):
            raise self._refuse(node, f"{spelled(value.type)} as a condition")
        return value

    def _expr(self, node: ast.expr) -> ir.Expr:
        try:
            return self._typed_expr(node)
        except Mistyped as error:
            raise self._refuse(node, str(error)) from None

    def _typed_expr(self, node: ast.expr) -> ir.Expr:
        match node:
            case ast.Constant(value=bool() as flag):
                return ir.integer(int(flag))
            case ast.Constant(value=int() as value):
                if fitting(value, I32) != value:
                    raise self._refuse(node, f"{value} is no i32; write i64(..) or u32(..)")
                return ir.integer(value)
            case ast.Constant(value=float() as value):
                return ir.Const(F32, fitting(value, F32))
            case ast.Name(id=name):
                return self._name(name, node)
            case ast.UnaryOp(op=op, operand=operand):
                return self._unary(op, operand)
            case ast.BinOp(left=left, op=op, right=right):
                return self._binary(self._operator(op, node), left, right, node)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._binary(_COMPARED.get(type(op), ""), left, right, node)
            case ast.BoolOp(op=op, values=values):
                word = "&&" if isinstance(op, ast.And) else "||"
                condition = self._number(values[0])
                for item in values[1:]:
                    condition = binary(word, condition, self._number(item))
                return condition
            case ast.IfExp(test=test, body=a, orelse=b):
                return self._choice_of(self._number(test), self._expr(a), self._expr(b), node)
            case ast.Call(func=func, args=args, keywords=[]):
                return self._call(func, args, node)
            case ast.Subscript(value=base, slice=index):
                return self._index(self._expr(base), self._expr(index), node)
            case ast.Attribute(value=base, attr=field):
                inner = self._expr(base)
                of = inner.type.type_of(field) if isinstance(inner.type, Struct) else None
                if of is None:
                    raise self._refuse(node, f"{spelled(inner.type)} has no field `{field}`")
                return ir.Member(of, inner, field)
        raise self._refuse(node, f"`{ast.unparse(node)[:40]}` is no expression of a kernel")

    def _name(self, name: str, node: ast.expr) -> ir.Expr:
        if name in ("inf", "nan"):
            return ir.Const(F32, float(name))
        if name in self._parameters:
            if self._choice is not None:
                return ir.integer(self._parameters[name].values[0])
            return ir.Var(I32, name)
        if name not in self._types:
            raise self._refuse(node, f"`{name}` has no value here")
        return ir.Var(self._types[name], name)

    def _unary(self, op: ast.unaryop, operand: ast.expr) -> ir.Expr:
        if isinstance(op, ast.USub) and isinstance(operand, ast.Constant) and operand.value == 1 << 31:
            return ir.integer(-(1 << 31))
        a = self._expr(operand)
        if isinstance(op, ast.USub) and isinstance(a, ir.Const):
            return ir.Const(a.type, -a.value)
        word = {ast.USub: "-", ast.Invert: "~", ast.Not: "!"}.get(type(op))
        if word is None:
            raise self._refuse(operand, "+ before a value")
        return unary(word, a)

    def _operator(self, op: ast.operator, node: ast.AST) -> str:
        word = _OPERATORS.get(type(op))
        if word is None:
            raise self._refuse(node, "an operator that kernels do not have")
        return word

    def _binary(self, op: str, left: ast.expr, right: ast.expr, node: ast.expr) -> ir.Expr:
        a, b = self._expr(left), self._expr(right)
        if not op:
            raise self._refuse(node, "a comparison that kernels do not have")
        is_whole = (
            isinstance(a.type, Scalar) and isinstance(b.type, Scalar) and not common(a.type, b.type).is_float
        )
        if op == "//" and not is_whole:
            raise self._refuse(node, "// divides whole numbers; write /")
        if op == "/" and is_whole:
            raise self._refuse(node, "/ divides floats; write // for whole numbers")
        return binary("/" if op == "//" else op, a, b)

    def _choice_of(self, condition: ir.Expr, a: ir.Expr, b: ir.Expr, node: ast.expr) -> ir.Expr:
        of_a, of_b = decayed(a.type), decayed(b.type)
        if of_a == of_b:
            return ir.Ternary(of_a, condition, a, b)
        if isinstance(of_a, Scalar) and isinstance(of_b, Scalar):
            of = common(of_a, of_b)
            return ir.Ternary(of, condition, cast(of, a), cast(of, b))
        raise self._refuse(node, f"{spelled(of_a)} or {spelled(of_b)}")

    def _index(self, base: ir.Expr, index: ir.Expr, node: ast.expr) -> ir.Expr:
        element = (
            base.type.to
            if isinstance(base.type, Pointer)
            else base.type.of
            if isinstance(base.type, Array)
            else None
        )
        if element is None or element == VOID:
            raise self._refuse(node, f"an element of {spelled(base.type)}")
        if not isinstance(index.type, Scalar) or index.type.is_float:
            raise self._refuse(node, f"an index that is {spelled(index.type)}")
        return ir.Index(element, base, index)

    def _call(self, func: ast.expr, args: list[ast.expr], node: ast.expr) -> ir.Expr:
        if isinstance(func, ast.Subscript) or (isinstance(func, ast.Name) and func.id in SCALARS):
            return self._cast(self._type(func), args, node)
        if not isinstance(func, ast.Name) or func.id not in OPERATIONS:
            raise self._refuse(node, f"there is no operation `{ast.unparse(func)[:40]}`")
        name, of = func.id, None
        if OPERATIONS[name].names_type:
            if not args or not isinstance(args[-1], ast.Name) or args[-1].id not in SCALARS:
                raise self._refuse(node, f"{name} ends with a type, e.g. i32")
            of, args = SCALARS[args[-1].id], args[:-1]
        if name == "vector":
            if not args or not isinstance(args[0], ast.Name) or args[0].id not in SCALARS:
                raise self._refuse(node, "vector begins with a type, e.g. i32")
            elem = SCALARS[args[0].id]
            lanes = tuple(ir.Const(elem, self._plain_number(arg, elem)) for arg in args[1:])
            return call(name, (), lanes, elem)
        if name in REDUCTIONS and len(args) == 2 and isinstance(args[1], ast.Name) and args[1].id in ORDERS:
            number = ORDERS.index(args[1].id)
            return call(name, (self._expr(args[0]),), (number,) if number else ())
        values = tuple(self._expr(arg) for arg in args)
        n_values = OPERATIONS[name].values if OPERATIONS[name].takes_numbers else len(values)
        return self._with_lanes(name, values[:n_values], values[n_values:], of)

    def _with_lanes(
        self, name: str, values: tuple[ir.Expr, ...], numbers: tuple[ir.Expr, ...], of: Scalar | None
    ) -> ir.Expr:
        """Make a call of an operation whose numbers may be parameters: its type is that of their defaults."""
        defaults = tuple(self._known(constant) for constant in numbers)
        operation = call(name, values, defaults, of)
        return operation if defaults == numbers else replace(operation, numbers=numbers)

    def _known(self, e: ir.Expr) -> ir.Expr:
        by_default = {name: ir.integer(parameter.values[0]) for name, parameter in self._parameters.items()}
        return Folder(by_default).expr(e)

    def _cast(self, of: Type, args: list[ast.expr], node: ast.expr) -> ir.Expr:
        if len(args) != 1:
            raise self._refuse(node, "a conversion takes one value")
        plain = args[0].operand if isinstance(args[0], ast.UnaryOp) else args[0]
        is_plain = isinstance(plain, ast.Constant) and type(plain.value) in (int, float)
        if (
            isinstance(of, Scalar)
            and is_plain
            and not isinstance(getattr(args[0], "op", None), ast.Invert | ast.Not)
        ):
            return ir.Const(of, self._plain_number(args[0], of))
        value = self._expr(args[0])
        is_number = isinstance(of, Scalar) and isinstance(value.type, Scalar)
        if is_number or (isinstance(of, Pointer) and isinstance(decayed(value.type), Pointer)):
            if isinstance(of, Pointer) and not of.is_const:
                given = decayed(value.type)
                assert isinstance(given, Pointer)
                if given.is_const:
                    raise self._refuse(node, "a pointer to const memory stays one")
            return cast(of, value)
        raise self._refuse(node, f"{spelled(value.type)} as {spelled(of)}")


_COMPARED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.LShift: "<<",    ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^",
}  # fmt: skip


class Folder(ir.Rewriter):
    """Rewriter that computes arithmetic on known whole numbers."""

    def __init__(self, by: Mapping[str, ir.Const] | None = None) -> None:
        self._by: Mapping[str, ir.Const] = by or {}

    def leave(self, e: ir.Expr) -> ir.Expr:
        match e:
            case ir.Var(name=name) if name in self._by:
                return self._by[name]
            case ir.Binary(
                type=Scalar() as of, op=op, a=ir.Const(value=int(a)), b=ir.Const(value=int(b))
            ) if not of.is_float:
                value = integer_result(op, a, b, of)
                if value is not None and isinstance(e.a.type, Scalar) and e.a.type == e.b.type:
                    return ir.Const(of, value)
            case ir.Ternary(condition=ir.Const(value=value), a=a, b=b):
                return a if value else b
        return e
