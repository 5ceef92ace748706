"""Parser of C's expressions with their types, and of the scopes in which they are read."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable
from dataclasses import replace

from tree_sitter import Node

from phasewise._words import counted
from phasewise.ir import nodes as ir
from phasewise.ir.builders import MASK_TYPES
from phasewise.ir.errors import SourceError
from phasewise.ir.operations import (
    COMPARISONS,
    LIBRARY,
    LIBRARY_F64,
    LOGICAL,
    OPERATIONS,
    ORDERS,
    Mistyped,
    binary,
    decayed,
    fitting,
    integer_result,
    unary,
)
from phasewise.ir.raising.parse_source import Source, described_node, is_const_node, needed
from phasewise.ir.types import (
    F32,
    F64,
    I32,
    I64,
    SCALARS,
    U64,
    VOID,
    Array,
    Pointer,
    Scalar,
    Struct,
    Type,
    Vec,
    common,
    innermost,
    pointee,
    spelled,
)

_TAKEN_BY_TEXT = frozenset(keyword.kwlist) | {*OPERATIONS, *SCALARS, *ORDERS, "inf", "nan", "zeros"}
"""Names that have a meaning in the text of the high level, and so cannot be variables there."""
_LIKE_A_PARAMETER = re.compile(r"[A-Z][A-Z0-9_]*")


class SourceExpressions:
    """Parser of the expressions of one function, or of constants outside any function."""

    def __init__(self, source: Source, name: str) -> None:
        self.source = source
        self.name = name
        self.scopes: list[dict[str, ir.Expr]] = [{}]
        self.taken: set[str] = set()
        self.helpers: dict[str, ir.FunctionDefinition] = {}
        self.structs: dict[str, Struct] = {}
        self.tables: dict[str, ir.Declare] = {}
        self.result: Type = VOID
        self._after: list[ir.Stmt] | None = None
        """Statements for each `i++`, to follow the current statement; None where `i++` is not allowed."""

    # ---- the source ----

    def _line(self, node: Node) -> int:
        return self.source.line(node)

    def _text(self, node: Node | None) -> str:
        return self.source.text(node)

    def _quoted(self, node: Node) -> str:
        return f"`{self._text(node)[:40]}`"

    def _refuse(self, node: Node, reason: str) -> SourceError:
        return self.source.refuse(node, reason)

    # ---- names ----

    def _note(self, of: Type) -> None:
        """Remember the structs in a type."""
        match of:
            case Pointer(to):
                self._note(to)
            case Array(element, _):
                self._note(element)
            case Struct(name, fields):
                for _, field in fields:
                    self._note(field)
                self.structs[name] = of

    def _new(self, name: str, of: Type) -> ir.Var:
        """Make a variable; if its name hides another variable, it gets a new name."""
        variable = ir.Var(of, self._unique(name))
        self.scopes[-1][name] = variable
        return variable

    def _unique(self, name: str) -> str:
        plain = f"{name.lower()}_" if name in _TAKEN_BY_TEXT or _LIKE_A_PARAMETER.fullmatch(name) else name
        unique, n = plain, 1
        while unique in self.taken:
            n += 1
            unique = f"{plain}_{n}"
        self.taken.add(unique)
        return unique

    def _look_up(self, name: str) -> ir.Expr | None:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)

    def _array(
        self, name: str, of: Array, value: Node | None, line: int, is_const: bool, declarator: Node
    ) -> ir.Declare:
        values: tuple[int | float, ...] = ()
        if value is not None:
            if value.type == "initializer_list":
                values = tuple(self._flat(value, innermost(of)))
            elif value.type == "string_literal":
                raise self._refuse(value, "strings are not in the subset")
        if of.count == 0:
            inner = of.of.size // innermost(of).size
            of = Array(of.of, len(values) // inner)
        n_all = of.size // innermost(of).size
        self._note(of)
        if not isinstance(innermost(of), Scalar) and not isinstance(of.of, Vec):
            raise self._refuse(declarator, f"`{name}`: arrays of {spelled(of.of)} are not in the subset")
        if len(values) > n_all:
            raise self._refuse(declarator, f"`{name}` has {counted(n_all, 'element')}, not {len(values)}")
        if value is not None:
            values = values + (0,) * (n_all - len(values))
        return ir.Declare(self._new(name, of).name, of, None, line, values, is_const)

    def _flat(self, node: Node, of: Type) -> list[int | float]:
        numbers: list[int | float] = []
        for child in node.named_children:
            if child.type == "initializer_list":
                numbers += self._flat(child, of)
                continue
            if child.type == "comment":
                continue
            value = self.expr(child)
            if not isinstance(value, ir.Const) or not isinstance(of, Scalar):
                raise self._refuse(
                    child, f"{self._quoted(child)} is not a number that is known when compiling"
                )
            numbers.append(fitting(value.value, of))
        return numbers

    def _arguments(self, node: Node) -> list[ir.Expr]:
        return [self.expr(arg) for arg in needed(node, "arguments").named_children if arg.type != "comment"]

    # ---- expressions ----

    def _converted(self, node: Node, to: Type) -> ir.Expr:
        return self._convert(self.expr(node), to, node)

    def _convert(self, value: ir.Expr, to: Type, node: Node) -> ir.Expr:
        """Convert a value to a type as C does without a cast."""
        if value.type == to:
            return value
        if _is_mask(to) and isinstance(value, ir.Const):
            return ir.CallExpression(to, "__mask", (value,))
        given = decayed(value.type)
        if given == to:
            return value if value.type == to or isinstance(value.type, Array) else replace(value, type=to)
        if isinstance(given, Scalar) and isinstance(to, Scalar):
            return (
                ir.Const(to, fitting(value.value, to)) if isinstance(value, ir.Const) else ir.Cast(to, value)
            )
        if isinstance(given, Pointer) and isinstance(to, Pointer):
            if given.to == to.to:
                return value if given.is_const == to.is_const else ir.Cast(to, value)
            if VOID in (given.to, to.to):
                return ir.Cast(to, value)
        if to == VOID:
            return value
        raise self._refuse(node, f"{spelled(given)} where {spelled(to)} is needed")

    def _typed(self, make: Callable[[], ir.Expr], node: Node) -> ir.Expr:
        try:
            return make()
        except Mistyped as error:
            raise self._refuse(node, str(error)) from None

    def condition(self, node: Node) -> ir.Expr:
        value = self.expr(node)
        if not isinstance(decayed(value.type), Scalar | Pointer):
            raise self._refuse(node, f"{spelled(value.type)} as a condition")
        return value

    def expr(self, node: Node) -> ir.Expr:
        match node.type:
            case "parenthesized_expression":
                return self.expr(next(child for child in node.named_children if child.type != "comment"))
            case "number_literal":
                return _literal(self.source, node)
            case "char_literal":
                text = self._text(node)
                if len(text) != 3:
                    raise self._refuse(node, f"the character {text}")
                return ir.integer(ord(text[1]))
            case "true" | "false":
                return ir.integer(int(node.type == "true"))
            case "identifier":
                return self._identifier(node)
            case "binary_expression":
                return self._binary(node)
            case "unary_expression":
                return self._unary(node)
            case "cast_expression":
                return self._cast(node)
            case "conditional_expression":
                return self._conditional(node)
            case "subscript_expression":
                base, index = self.expr(needed(node, "argument")), self.expr(needed(node, "index"))
                return self._element(base, index, node)
            case "pointer_expression":
                return self._pointer(node)
            case "field_expression":
                return self._field(node)
            case "call_expression":
                return self._call(node)
            case "sizeof_expression":
                return self._sizeof(node)
            case "update_expression" if self._after is not None:
                return self._counted_after(node, self._after)
            case "assignment_expression" | "update_expression":
                raise self._refuse(node, f"{self._quoted(node)} inside an expression is not in the subset")
            case "gnu_asm_expression":
                raise self._refuse(node, "inline assembly is not in the subset")
            case _:
                raise self._refuse(node, f"{described_node(node)} {self._quoted(node)} is not in the subset")

    def _counted_after(self, node: Node, after: list[ir.Stmt]) -> ir.Expr:
        """The variable of an `i++` in a statement that names it nowhere else; `after` gets the increment."""
        argument, operator = needed(node, "argument"), needed(node, "operator")
        whole = node
        while whole.parent is not None and whole.type not in ("declaration", "expression_statement"):
            if whole.parent.type in ("if_statement", "while_statement"):
                break
            whole = whole.parent
        target = self.expr(argument)
        names = _identifiers(whole, self.source)
        is_safe = isinstance(target, ir.Var) and names.count(self._text(argument)) == 1
        if operator.start_byte < argument.start_byte or not is_safe or _is_lazy(node, whole):
            raise self._refuse(node, f"{self._quoted(node)} inside an expression is not in the subset")
        op = self._text(operator)[0]
        value = self._typed(lambda: binary(op, target, ir.integer(1)), node)
        after.append(ir.Assign(target, value, self._line(node)))
        return target

    def _identifier(self, node: Node) -> ir.Expr:
        name = self._text(node)
        variable = self._look_up(name)
        if variable is not None:
            return variable
        if name in self.source.names.numbers:
            value, more = self.source.names.numbers[name]
            if value is None or value.type == "enumerator":
                return ir.integer(more)
            number = self.expr(value)
            if isinstance(number, ir.Const):
                return ir.integer(int(number.value) + more)
        if name in self.source.names.tables:
            return self._table(name, node)
        raise self._refuse(node, f"unknown name `{name}`")

    def _table(self, name: str, identifier: Node) -> ir.Expr:
        """Read a constant table of the file."""
        if name not in self.tables:
            node, declarator = self.source.names.tables[name]
            if not is_const_node(node):
                raise self._refuse(
                    identifier, f"`{name}` is a variable of the file; only constants are in the subset"
                )
            base = self.source.type_of(node.child_by_field_name("type"), node)
            declared, of, value = self.source.declared(base, declarator, is_const=True)
            if isinstance(of, Scalar) and value is not None:
                number = self._convert(self.expr(value), of, value)
                if isinstance(number, ir.Const):
                    return number
            if not isinstance(of, Array):
                raise self._refuse(identifier, f"`{name}` is no array of numbers")
            outer = SourceExpressions(self.source, "")
            self.tables[name] = outer._array(declared, of, value, self._line(node), True, declarator)
            self.taken.add(name)
        return ir.Var(self.tables[name].type, name)

    def _binary(self, node: Node) -> ir.Expr:
        op = self._text(needed(node, "operator"))
        a, b = self.expr(needed(node, "left")), self.expr(needed(node, "right"))
        return _folded(op, a, b, self._operated(op, a, b, node))

    def _operated(self, op: str, a: ir.Expr, b: ir.Expr, node: Node) -> ir.Expr:
        is_of_masks = a.type == b.type and _is_mask(a.type) and op in "&|^"
        if not is_of_masks and (isinstance(a.type, Vec) or isinstance(b.type, Vec)):
            raise self._refuse(node, f"{op} between registers; write the intrinsic")
        return self._typed(lambda: binary(op, a, b), node)

    def _unary(self, node: Node) -> ir.Expr:
        op = self._text(needed(node, "operator"))
        a = self.expr(needed(node, "argument"))
        if op == "+":
            return a
        if isinstance(a.type, Vec) and not (_is_mask(a.type) and op == "~"):
            raise self._refuse(node, f"{op} of a register; write the intrinsic")
        operation = self._typed(lambda: unary(op, a), node)
        if isinstance(a, ir.Const) and isinstance(operation.type, Scalar):
            value = {"-": -a.value, "!": int(not a.value)}.get(op)
            if value is None and isinstance(a.value, int):
                value = ~a.value
            if value is not None:
                return ir.Const(operation.type, fitting(value, operation.type))
        return operation

    def _cast(self, node: Node) -> ir.Expr:
        to = self._described(needed(node, "type"))
        value = self.expr(needed(node, "value"))
        given = decayed(value.type)
        if to == VOID:
            return value
        if _is_mask(to):
            return self._convert(value, to, node)
        if isinstance(to, Scalar) and isinstance(given, Scalar):
            return (
                ir.Const(to, fitting(value.value, to)) if isinstance(value, ir.Const) else ir.Cast(to, value)
            )
        if isinstance(to, Pointer) and isinstance(given, Pointer):
            self._note(to)
            return ir.Cast(Pointer(to.to, to.is_const or given.is_const), value)
        if to == given:
            return value
        raise self._refuse(node, f"a cast of {spelled(given)} to {spelled(to)} is not in the subset")

    def _described(self, node: Node) -> Type:
        """The type that a type name such as `const float *` states."""
        base = self.source.type_of(node.child_by_field_name("type"), node)
        is_const = is_const_node(node)
        declarator = node.child_by_field_name("declarator")
        while declarator is not None:
            if declarator.type != "abstract_pointer_declarator":
                raise self._refuse(node, f"the type {self._quoted(node)} is not in the subset")
            base, is_const = Pointer(base, is_const), False
            declarator = declarator.child_by_field_name("declarator")
        return base

    def _conditional(self, node: Node) -> ir.Expr:
        condition = self.condition(needed(node, "condition"))
        a, b = self.expr(needed(node, "consequence")), self.expr(needed(node, "alternative"))
        if isinstance(a.type, Scalar) and isinstance(b.type, Scalar):
            of: Type = common(a.type, b.type)
            a, b = self._convert(a, of, node), self._convert(b, of, node)
        elif decayed(a.type) == decayed(b.type):
            of = decayed(a.type)
        else:
            raise self._refuse(node, f"{spelled(a.type)} or {spelled(b.type)}")
        if isinstance(condition, ir.Const):
            return a if condition.value else b
        return ir.Ternary(of, condition, a, b)

    def _element(self, base: ir.Expr, index: ir.Expr, node: Node) -> ir.Expr:
        element = pointee(base.type)
        if element is None:
            raise self._refuse(node, f"an element of {spelled(base.type)}")
        if element == VOID:
            raise self._refuse(node, "an element of void")
        if not isinstance(index.type, Scalar) or index.type.is_float:
            raise self._refuse(node, f"an index that is {spelled(index.type)}")
        return ir.Index(element, base, index)

    def _pointer(self, node: Node) -> ir.Expr:
        op = self._text(needed(node, "operator"))
        a = self.expr(needed(node, "argument"))
        if op == "*":
            return self._element(a, ir.integer(0), node)
        if isinstance(a, ir.Index) and isinstance(a.type, Scalar | Struct):
            return self._typed(lambda: binary("+", a.base, a.index), node)
        return ir.AddressOf(Pointer(a.type), a)

    def _field(self, node: Node) -> ir.Expr:
        base = self.expr(needed(node, "argument"))
        name = self._text(needed(node, "field"))
        is_arrow = any(self._text(child) == "->" for child in node.children)
        if is_arrow:
            base = self._element(base, ir.integer(0), node)
        of = base.type
        field_type = of.type_of(name) if isinstance(of, Struct) else None
        if field_type is None:
            raise self._refuse(node, f"{spelled(of)} has no field `{name}`")
        return ir.Member(field_type, base, name)

    def _sizeof(self, node: Node) -> ir.Expr:
        described = node.child_by_field_name("type")
        if described is not None:
            return ir.Const(U64, self._described(described).size)
        value = needed(node, "value")
        name = self._text(value).strip("() ")
        if self._look_up(name) is None and name in self.source.names.types:  # C's grammar alone cannot tell
            return ir.Const(U64, self.source._named_type(name, node).size)
        return ir.Const(U64, self.expr(value).type.size)

    def _call(self, node: Node) -> ir.Expr:
        function = needed(node, "function")
        name = self._text(function)
        if function.type != "identifier":
            raise self._refuse(node, f"a call of `{name[:40]}`: function pointers are not in the subset")
        args = self._arguments(node)
        if name in ("__builtin_inff", "__builtin_huge_valf", "__builtin_nanf"):
            return ir.Const(F32, float("nan" if name.endswith("nanf") else "inf"))
        intrinsic = self.source.intrinsics.get(name)
        if intrinsic is not None:
            return ir.CallExpression(intrinsic.result, name, tuple(args))
        if name in _ABS:
            return self._absolute(args[0], node)
        library = name.removeprefix("__builtin_")
        if library in _CLASSES and len(args) == 1:
            return self._typed(lambda: _CLASSES[library](args[0]), node)
        if library in LIBRARY:
            return ir.CallExpression(F32, library, tuple(self._convert(arg, F32, node) for arg in args))
        if name in self.source.names.functions:
            return self._helper(name, args, node)
        of_double = f"{library}_f64"
        if of_double in LIBRARY_F64:
            return ir.CallExpression(F64, of_double, tuple(self._convert(arg, F64, node) for arg in args))
        if library in ("lrintf", "llrintf"):
            (whole,) = (self._convert(arg, F32, node) for arg in args)
            return ir.Cast(I64, ir.CallExpression(F32, "rintf", (whole,)))
        if name.startswith(("_mm", "__builtin_")) or name in _OTHER_INTRINSICS:
            raise self._refuse(node, f"intrinsic `{name}` is not in the table of {self.source.expanded.isa}")
        raise self._refuse(node, f"`{name}` is not defined here")

    def _absolute(self, a: ir.Expr, node: Node) -> ir.Expr:
        return ir.Ternary(a.type, self._typed(lambda: binary("<", a, ir.integer(0)), node), unary("-", a), a)

    def _helper(self, name: str, args: list[ir.Expr], node: Node) -> ir.Expr:
        helper = self.source.function(name)
        if len(args) != len(helper.args):
            raise self._refuse(
                node, f"`{name}` takes {counted(len(helper.args), 'argument')}, not {len(args)}"
            )
        for function in (*helper.helpers, helper):
            self.helpers[function.name] = function
        for struct in helper.structs:
            self.structs[struct.name] = struct
        for table in helper.tables:
            self.tables[table.name] = table
        converted = [self._convert(arg, of, node) for arg, (_, of) in zip(args, helper.args, strict=True)]
        return ir.CallExpression(helper.result, name, tuple(converted))


def _is_mask(of: Type) -> bool:
    return of in MASK_TYPES.values()


def _identifiers(node: Node, source: Source) -> list[str]:
    names, waiting = [], [node]
    while waiting:
        visited = waiting.pop()
        if visited.type == "identifier":
            names.append(source.text(visited))
        waiting += visited.children
    return names


def _is_lazy(node: Node, whole: Node) -> bool:
    """True if a part of a statement may not be evaluated, such as the right side of `&&`."""
    while node.parent is not None and node != whole:
        node = node.parent
        is_logical = node.type == "binary_expression" and any(
            child.type in ("&&", "||") for child in node.children
        )
        if node.type == "conditional_expression" or is_logical:
            return True
    return False


_ABS = ("abs", "labs")
_INFINITY = ir.Const(F32, float("inf"))


def _is_infinite(a: ir.Expr) -> ir.Expr:
    return binary("||", binary("==", a, _INFINITY), binary("==", a, ir.Const(F32, float("-inf"))))


_CLASSES: dict[str, Callable[[ir.Expr], ir.Expr]] = {
    "isnan": lambda a: binary("!=", a, a),
    "isinf": _is_infinite,
    "isfinite": lambda a: binary("==", binary("-", a, a), ir.Const(F32, 0.0)),
}
"""C's macros that classify a float, each as a builder of a truth value."""
_OTHER_INTRINSICS = ("_cvtsh_ss",)


def _literal(source: Source, node: Node) -> ir.Const:
    written = source.text(node).lower().replace("'", "")
    text = written.lstrip("+-")  # the grammar leaves a sign before a hexadecimal float to the number
    sign = -1 if written.startswith("-") else 1
    is_hex = text.startswith("0x")
    try:
        if (not is_hex and (set(text) & set(".ef"))) or "p" in text:
            is_f32 = text.endswith("f")
            number = text.rstrip("fl") if not is_hex else text.rstrip("l").removesuffix("f")
            value = sign * (float.fromhex(number) if is_hex else float(number))
            return ir.Const(F32, fitting(value, F32)) if is_f32 else ir.Const(F64, value)
        digits = text.rstrip("ul")
        suffix = text[len(digits) :]
        is_octal = not is_hex and len(digits) > 1 and digits[0] == "0" and digits[1:].isdigit()
        value_i = sign * (int(digits, 8) if is_octal else int(digits, 0))
    except (ValueError, OverflowError):
        raise source.refuse(node, f"`{text[:40]}` is no number of the subset") from None
    wanted = [
        SCALARS[name]
        for name in ("i32", "u32", "i64", "u64")
        if ("u" not in suffix or name[0] == "u") and ("l" not in suffix or name.endswith("64"))
        if "u" in suffix or is_hex or is_octal or name[0] == "i"
    ]
    for of in wanted:
        if fitting(value_i, of) == value_i:
            return ir.Const(of, value_i)
    raise source.refuse(node, f"`{text[:40]}` has more than 64 bits")


def _folded(op: str, a: ir.Expr, b: ir.Expr, operation: ir.Expr) -> ir.Expr:
    """Compute an operation on two constants, since sizes read better so; else return the operation."""
    if not (isinstance(a, ir.Const) and isinstance(b, ir.Const) and isinstance(operation.type, Scalar)):
        return operation
    if operation.type.is_float or not isinstance(a.value, int) or not isinstance(b.value, int):
        return operation
    of = operation.type
    if op in COMPARISONS or op in LOGICAL:
        assert isinstance(a.type, Scalar)
        assert isinstance(b.type, Scalar)
        shared = common(a.type, b.type)
        value = integer_result(op, int(fitting(a.value, shared)), int(fitting(b.value, shared)), I32)
    else:
        value = integer_result(
            op, int(fitting(a.value, of)), b.value if op in ("<<", ">>") else int(fitting(b.value, of)), of
        )
    return operation if value is None else ir.Const(of, value)
