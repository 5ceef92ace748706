"""Parser of C to the low level. tree-sitter reads the text; this module gives it types, and refuses what is
outside the subset. Only functions that the asked one reaches are looked at, so that a source may hold
anything beside them. Nothing is guessed: a construct that this module does not know is refused with its file,
line and name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tree_sitter import Node

from phasewise._words import counted
from phasewise.ir import nodes as ir
from phasewise.ir.errors import SourceError
from phasewise.ir.operations import binary, decayed, unary
from phasewise.ir.raising.parse_expressions import SourceExpressions
from phasewise.ir.raising.parse_source import Source, described_node, is_const_node, needed
from phasewise.ir.raising.preprocess import Expanded, guess_isa, preprocess, read_source
from phasewise.ir.types import I32, U8, U64, VOID, Array, Pointer, Scalar, Struct, Type, Vec, pointee

MAX_NESTING = 150
MAX_NODES = 200_000
"""Most nodes of one function, since its tree is walked in Python."""


def parse_file(
    path: Path,
    function: str,
    isa: str | None = None,
    include: Sequence[Path] = (),
    define: Sequence[str] = (),
) -> ir.FunctionDefinition:
    """Parse the function of that name, with all that it calls. SourceError for code outside the subset."""
    text = read_source(path)
    return parse(preprocess(path, isa or guess_isa(text), include, define), function, str(path))


def parse_all(expanded: Expanded, path: str) -> dict[str, ir.FunctionDefinition]:
    """Every function that a source defines, by name."""
    source = _Unit(expanded, path)
    return {name: source.function(name) for name in source.names.functions}


def parse(expanded: Expanded, function: str, path: str) -> ir.FunctionDefinition:
    """Parse a function of a preprocessed text, as `parse_file` does."""
    source = _Unit(expanded, path)
    if function not in source.names.functions:
        function_names = ", ".join(list(source.names.functions)[:8]) or "none"
        broken = source.first_error()
        if broken:
            raise broken
        raise SourceError(path, 0, f"defines no function `{function}` (it has: {function_names})")
    return source.function(function)


class _Unit(Source):
    """A source whose functions are parsed when they are asked for."""

    def number(self, node: Node) -> int:
        """The value of a constant expression."""
        value = _Body(self, "").expr(node)
        if isinstance(value, ir.Const) and isinstance(value.value, int):
            return value.value
        raise self.refuse(node, f"`{self.text(node)[:40]}` is not a number that is known when compiling")

    def function(self, name: str) -> ir.FunctionDefinition:
        if name in self.read:
            return self.read[name]
        node = self.names.functions[name]
        if name in self.reading:
            raise self.refuse(node, f"`{name}` calls itself")
        self._check_size(node)
        self.reading.append(name)
        body = _Body(self, name)
        function = body.read(node)
        self.reading.remove(name)
        self.read[name] = function
        return function

    def _check_size(self, node: Node) -> None:
        waiting, seen = [(node, 0)], 0
        while waiting:
            visited, depth = waiting.pop()
            seen += 1
            if visited.type == "ERROR" or visited.is_missing:
                raise self.refuse(
                    visited,
                    f"this is not C as far as can be read: `{' '.join(self.text(visited).split())[:40]}`",
                )
            if depth > MAX_NESTING:
                raise self.refuse(visited, f"nested more than {MAX_NESTING} deep")
            if seen > MAX_NODES:
                raise self.refuse(visited, f"a function of more than {MAX_NODES} words")
            waiting += [(child, depth + 1) for child in visited.children]


_UNSUPPORTED = {
    "goto_statement": "goto",
    "labeled_statement": "a label",
    "switch_statement": "switch",
    "gnu_asm_expression": "inline assembly",
    "asm_statement": "inline assembly",
}


class _Body(SourceExpressions):
    """Reads the statements of one function."""

    def read(self, node: Node) -> ir.FunctionDefinition:
        source = self.source
        declarator = node.child_by_field_name("declarator")
        is_const = is_const_node(node)
        self.result = source.type_of(node.child_by_field_name("type"), node)
        while declarator is not None and declarator.type != "function_declarator":
            if declarator.type == "pointer_declarator":
                self.result = Pointer(self.result, is_const)
            declarator = declarator.child_by_field_name("declarator")
        if declarator is None:
            raise source.refuse(node, "no function of the subset")
        if isinstance(self.result, Struct):
            raise source.refuse(node, "a result that is a struct is not in the subset")
        args = []
        parameters = declarator.child_by_field_name("parameters")
        for child in parameters.named_children if parameters else ():
            args += self._argument(child)
        body = node.child_by_field_name("body")
        assert body is not None
        statements = self.block(body)
        return ir.FunctionDefinition(
            name=self.name,
            args=tuple(args),
            result=self.result,
            body=statements,
            line=source.line(node),
            structs=tuple(self.structs.values()),
            tables=tuple(self.tables.values()),
            helpers=tuple(self.helpers.values()),
            source_isa=source.expanded.isa,
        )

    def _argument(self, node: Node) -> list[tuple[str, Type]]:
        if node.type == "variadic_parameter":
            raise self._refuse(node, "a variable number of arguments is not in the subset")
        if node.type != "parameter_declaration":
            return []
        base = self.source.type_of(node.child_by_field_name("type"), node)
        declarator = node.child_by_field_name("declarator")
        if declarator is None:
            if base == VOID:
                return []
            raise self._refuse(node, "an argument without a name")
        name, of, _ = self.source.declared(base, declarator, is_const_node(node))
        if isinstance(of, Array):
            of = Pointer(of.of, is_const_node(node))
        if isinstance(of, Struct):
            raise self._refuse(node, f"argument `{name}` is a struct, not a pointer to one")
        self._note(of)
        return [(self._new(name, of).name, of)]

    def block(self, node: Node) -> ir.Body:
        self.scopes.append({})
        statements = [statement for child in node.named_children for statement in self.statement(child)]
        self.scopes.pop()
        return tuple(statements)

    def _as_body(self, node: Node | None) -> ir.Body:
        if node is None:
            return ()
        if node.type == "compound_statement":
            return self.block(node)
        self.scopes.append({})
        statements = tuple(self.statement(node))
        self.scopes.pop()
        return statements

    def statement(self, node: Node) -> list[ir.Stmt]:
        if node.type not in ("declaration", "expression_statement"):
            return self._statement(node)
        self._after = []
        statements = self._statement(node)
        after, self._after = self._after, None
        return [*statements, *after]

    def _statement(self, node: Node) -> list[ir.Stmt]:
        line = self._line(node)
        match node.type:
            case "comment" | "type_definition":
                return []
            case "compound_statement":
                return [ir.BlockStatement(self.block(node), line)]
            case "declaration":
                return self._declaration(node)
            case "expression_statement":
                return self._effect(node.named_children[0]) if node.named_children else []
            case "return_statement":
                value = node.named_children[0] if node.named_children else None
                return [ir.Return(None if value is None else self._converted(value, self.result), line)]
            case "if_statement":
                otherwise = node.child_by_field_name("alternative")
                if otherwise is not None and otherwise.type == "else_clause":
                    otherwise = next(
                        (child for child in otherwise.named_children if child.type != "comment"), None
                    )
                before, condition = self._asked_before(needed(node, "condition"), line)
                then = self._as_body(needed(node, "consequence"))
                return [*before, ir.If(condition, then, self._as_body(otherwise), line)]
            case "for_statement":
                return self._for(node, line)
            case "while_statement":
                before, condition = self._asked_before(needed(node, "condition"), line)
                body = self._as_body(needed(node, "body"))
                if not before:
                    return [ir.While(condition, body, line)]
                leave = ir.If(unary("!", condition), (ir.Leave("break", line),), (), line)
                return [ir.While(ir.integer(1), (*before, leave, *body), line)]
            case "do_statement":
                body = self._as_body(needed(node, "body"))
                return [ir.While(self.condition(needed(node, "condition")), body, line, is_after=True)]
            case "break_statement":
                return [ir.Leave("break", line)]
            case "continue_statement":
                return [ir.Leave("continue", line)]
            case "attributed_statement":
                return self.statement(node.named_children[-1])
            case _:
                what = _UNSUPPORTED.get(node.type, described_node(node))
                raise self._refuse(node, f"{what} is not in the subset")

    def _asked_before(self, node: Node, line: int) -> tuple[list[ir.Stmt], ir.Expr]:
        """Statements before a condition, and the condition, which is computed before an `i++` in it."""
        self._after = []
        condition = self.condition(node)
        after, self._after = self._after, None
        if not after:
            return [], condition
        truth = ir.Var(I32, self._unique("is_true"))
        value = ir.Ternary(I32, condition, ir.integer(1), ir.integer(0))
        return [ir.Declare(truth.name, I32, value, line), *after], truth

    def _for(self, node: Node, line: int) -> list[ir.Stmt]:
        self.scopes.append({})
        start = node.child_by_field_name("initializer")
        first: list[ir.Stmt] = []
        if start is not None:
            first = self._declaration(start) if start.type == "declaration" else self._effect(start)
        condition = node.child_by_field_name("condition")
        update = node.child_by_field_name("update")
        loop = ir.For(
            tuple(first),
            ir.integer(1) if condition is None else self.condition(condition),
            tuple(self._effect(update) if update is not None else ()),
            self._as_body(needed(node, "body")),
            line,
        )
        self.scopes.pop()
        return [loop]

    def _declaration(self, node: Node) -> list[ir.Stmt]:
        line, is_const = self._line(node), is_const_node(node)
        is_static = any(
            c.type == "storage_class_specifier" and self._text(c) == "static" for c in node.children
        )
        if is_static and not is_const:
            raise self._refuse(node, "a static variable keeps state between calls")
        base = self.source.type_of(node.child_by_field_name("type"), node)
        statements: list[ir.Stmt] = []
        for declarator in node.children_by_field_name("declarator"):
            name, of, value = self.source.declared(base, declarator, is_const)
            if isinstance(of, Array) and isinstance(of.of, Vec) and value is not None:
                statements += self._registers_declared(name, of, value, line)
            else:
                statements.append(self._declared(name, of, value, line, is_const, declarator))
        return statements

    def _declared(
        self, name: str, of: Type, value: Node | None, line: int, is_const: bool, declarator: Node
    ) -> ir.Declare:
        if isinstance(of, Array):
            return self._array(name, of, value, line, is_const, declarator)
        if isinstance(of, Struct):
            raise self._refuse(declarator, f"`{name}`: variables that are structs are not in the subset")
        self._note(of)
        init = None if value is None else self.expr(value)
        if init is not None and value is not None:
            of = _as_const_as(init, of)
            init = self._convert(init, of, value)
        return ir.Declare(self._new(name, of).name, of, init, line, is_const=is_const)

    def _registers_declared(self, name: str, of: Array, value: Node, line: int) -> list[ir.Stmt]:
        """Declare an array of registers, and assign the registers of its initialiser list."""
        self._note(of)
        declared = self._new(name, of)
        values = [self._converted(item, of.of) for item in value.named_children if item.type != "comment"]
        if len(values) > of.count:
            raise self._refuse(value, f"`{name}` has {counted(of.count, 'register')}, not {len(values)}")
        places = [ir.Index(of.of, declared, ir.integer(i)) for i in range(len(values))]
        assigned = (ir.Assign(place, item, line) for place, item in zip(places, values, strict=True))
        return [ir.Declare(declared.name, of, None, line), *assigned]

    def _effect(self, node: Node) -> list[ir.Stmt]:
        """The statements of an expression that is a statement."""
        line = self._line(node)
        match node.type:
            case "comma_expression":
                return [statement for child in node.named_children for statement in self._effect(child)]
            case "parenthesized_expression":
                return self._effect(node.named_children[0])
            case "assignment_expression":
                return self._assignment(node, line)
            case "update_expression":
                target = self.expr(needed(node, "argument"))
                op = self._text(needed(node, "operator"))[0]
                return [ir.Assign(target, self._typed(lambda: binary(op, target, ir.integer(1)), node), line)]
            case "call_expression":
                return self._called_alone(node, line)
            case "gnu_asm_expression":
                raise self._refuse(node, "inline assembly is not in the subset")
            case "cast_expression" if self._text(needed(node, "type")) == "void":
                return []
            case _:
                self.expr(node)
                return []

    def _called_alone(self, node: Node, line: int) -> list[ir.Stmt]:
        name = self._text(needed(node, "function"))
        if name in ("memcpy", "__builtin_memcpy"):
            return self._memcpy(node, line)
        if name in ("memset", "__builtin_memset"):
            return self._memset(node, line)
        if name == "__builtin_prefetch" and name not in self.source.intrinsics:
            return []  # a hint; instruction sets that have the operation keep it
        if name in ("_mm256_zeroupper", "_mm256_zeroall", "_mm_sfence", "_mm_empty"):
            return []
        call = self.expr(node)
        return [ir.Do(call, line)]

    def _memcpy(self, node: Node, line: int) -> list[ir.Stmt]:
        """Read a memcpy as statements: the bits of a variable or element as another, its only use here."""
        to, of, size = self._arguments(node)
        if isinstance(to, ir.Var) and isinstance(to.type, Array) and isinstance(size, ir.Const):
            return self._copied_elements(to, of, int(size.value), node, line)
        target, value = _pointee(to), _pointee(of)
        n_bytes = size.value if isinstance(size, ir.Const) else -1
        if target is None or value is None or target.type.size != n_bytes:
            return self._copied_bytes(to, of, size, node, line)
        if value.type.size != n_bytes:
            value = ir.Index(
                target.type,
                ir.Cast(Pointer(target.type, True), ir.AddressOf(Pointer(value.type), value)),
                ir.integer(0),
            )
        if isinstance(target.type, Vec) or isinstance(value.type, Vec):
            raise self._refuse(node, "memcpy of registers is not in the subset")
        if target.type == value.type:
            return [ir.Assign(target, value, line)]
        return [ir.Assign(target, ir.CallExpression(target.type, "__bits", (value,)), line)]

    def _copied_elements(self, to: ir.Var, of: ir.Expr, n_bytes: int, node: Node, line: int) -> list[ir.Stmt]:
        """The statements that copy the beginning of an array from memory of any type."""
        assert isinstance(to.type, Array)
        element = to.type.of
        is_simple = isinstance(element, Scalar) and n_bytes % element.size == 0 and n_bytes <= to.type.size
        if not is_simple or n_bytes > 64 * element.size or not isinstance(decayed(of.type), Pointer):
            return self._copied_bytes(to, of, ir.Const(U64, n_bytes), node, line)
        source = ir.Cast(Pointer(element, True), of)
        return [
            ir.Assign(ir.Index(element, to, ir.integer(i)), ir.Index(element, source, ir.integer(i)), line)
            for i in range(n_bytes // element.size)
        ]

    def _copied_bytes(self, to: ir.Expr, of: ir.Expr, size: ir.Expr, node: Node, line: int) -> list[ir.Stmt]:
        if isinstance(pointee(of.type), Vec):
            raise self._refuse(node, "memcpy of registers is not in the subset")
        source = ir.Cast(Pointer(U8, True), of)
        return self._byte_by_byte(to, lambda place: ir.Index(U8, source, place), size, node, line)

    def _byte_by_byte(
        self, to: ir.Expr, value: Callable[[ir.Var], ir.Expr], size: ir.Expr, node: Node, line: int
    ) -> list[ir.Stmt]:
        memory = decayed(to.type)
        if not isinstance(memory, Pointer) or memory.is_const or isinstance(memory.to, Vec):
            raise self._refuse(node, f"{self._quoted(node)} writes to what is no memory of numbers")
        place = ir.Var(U64, self._unique("byte"))
        assign = ir.Assign(ir.Index(U8, ir.Cast(Pointer(U8), to), place), value(place), line)
        step = ir.Assign(place, binary("+", place, ir.Const(U64, 1)), line)
        condition = binary("<", place, self._convert(size, U64, node))
        start = ir.Declare(place.name, U64, ir.Const(U64, 0), line)
        return [ir.For((start,), condition, (step,), (assign,), line)]

    def _memset(self, node: Node, line: int) -> list[ir.Stmt]:
        to, value, size = self._arguments(node)
        array = to
        while isinstance(array, ir.Cast):
            array = array.a
        if not isinstance(value, ir.Const):
            raise self._refuse(node, "memset to what is not known when compiling")
        is_whole = isinstance(array, ir.Var) and isinstance(size, ir.Const) and size.value == array.type.size
        is_of_numbers = isinstance(array.type, Array) and isinstance(array.type.of, Scalar)
        if is_whole and is_of_numbers and value.value == 0:
            return [ir.Do(ir.CallExpression(VOID, "__clear", (array,)), line)]
        byte = ir.Const(U8, int(value.value) & 255)
        return self._byte_by_byte(to, lambda _place: byte, size, node, line)

    def _assignment(self, node: Node, line: int) -> list[ir.Stmt]:
        right = needed(node, "right")
        before: list[ir.Stmt] = []
        op = self._text(needed(node, "operator"))
        target = self.expr(needed(node, "left"))
        if not isinstance(target, ir.Var | ir.Index | ir.Member):
            raise self._refuse(node, f"{self._quoted(node)} assigns to what is no variable")
        if op == "=" and right.type == "assignment_expression":
            before = self._effect(right)
            right = needed(right, "left")
        value = self.expr(right)
        if op != "=":
            value = self._operated(op[:-1], target, value, node)
        value = self._convert(value, target.type, node)
        return [*before, ir.Assign(target, value, line)]


def _as_const_as(value: ir.Expr, of: Type) -> Type:
    """Add const to the pointer type `of` where the value points to const memory: a cast that removed const
    must not allow writing."""
    given = decayed(value.type)
    if isinstance(of, Pointer) and isinstance(given, Pointer) and given.is_const:
        return Pointer(of.to, True)
    return of


def _pointee(e: ir.Expr) -> ir.Index | ir.Var | ir.Member | None:
    """The place that an address points to: a variable, element or member; None for other addresses."""
    while isinstance(e, ir.Cast):
        e = e.a
    if isinstance(e, ir.AddressOf) and isinstance(e.a, ir.Index | ir.Var | ir.Member):
        return e.a
    of = pointee(e.type)
    if not isinstance(of, Scalar):
        return None
    return (
        ir.Index(of, e.a, e.b) if isinstance(e, ir.Binary) and e.op == "+" else ir.Index(of, e, ir.integer(0))
    )
