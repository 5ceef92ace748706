"""C into the low level. tree-sitter reads the text; what is here gives it types, and refuses what is outside
the subset.

Only what the asked function reaches is looked at, so that a source may hold anything beside it. Nothing is
guessed: a construct that has no line here is refused with its file, line and name.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import tree_sitter_c
from tree_sitter import Language, Node, Parser

from phasewise.ir import intrinsics
from phasewise.ir.errors import SourceError
from phasewise.ir.nodes import (
    AddressOf,
    Assign,
    BlockStatement,
    Body,
    CallExpression,
    Cast,
    Const,
    Declare,
    Do,
    Expr,
    For,
    FunctionDefinition,
    If,
    Index,
    Leave,
    Member,
    Return,
    Stmt,
    Ternary,
    Var,
    While,
    integer,
)
from phasewise.ir.operations import (
    COMPARISONS,
    LIBRARY,
    LOGICAL,
    OPERATIONS,
    ORDERS,
    Mistyped,
    binary,
    decayed,
    fitting,
    unary,
)
from phasewise.ir.preprocess import Expanded, guess_isa, preprocess, read_source
from phasewise.ir.types import (
    F16,
    F32,
    F64,
    I8,
    I32,
    I64,
    SCALARS,
    U8,
    U64,
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

MAX_NESTING = 150
MAX_NODES = 200_000
"""Most nodes of one function: its tree is walked in Python."""

LANGUAGE = Language(tree_sitter_c.language())

NAMED_TYPES: dict[str, Type] = {
    **{f"int{8 * n}_t": SCALARS[f"i{8 * n}"] for n in (1, 2, 4, 8)},
    **{f"uint{8 * n}_t": SCALARS[f"u{8 * n}"] for n in (1, 2, 4, 8)},
    "size_t": U64, "ssize_t": I64, "ptrdiff_t": I64, "intptr_t": I64, "uintptr_t": U64,
    "float": F32, "double": F64, "void": VOID, "_Bool": U8, "bool": U8, "__fp16": F16, "char": I8, "int": I32,
}  # fmt: skip


@dataclass
class _Names:
    """The top level of a source, by name; definitions are read when they are asked for."""

    functions: dict[str, Node] = field(default_factory=dict)
    types: dict[str, Node] = field(default_factory=dict)
    structs: dict[str, Node] = field(default_factory=dict)
    numbers: dict[str, tuple[Node | None, int]] = field(default_factory=dict)
    tables: dict[str, tuple[Node, Node]] = field(default_factory=dict)


def parse_file(
    path: Path,
    function: str,
    isa: str | None = None,
    include: Sequence[Path] = (),
    define: Sequence[str] = (),
) -> FunctionDefinition:
    """The function of that name and all that it calls, at the low level. SourceError where it is outside the
    subset.
    """
    text = read_source(path)
    return parse(preprocess(path, isa or guess_isa(text), include, define), function, str(path))


def parse_all(expanded: Expanded, path: str) -> dict[str, FunctionDefinition]:
    """Every function that a source defines, by name."""
    source = _Source(expanded, path)
    return {name: source.function(name) for name in source.names.functions}


def parse(expanded: Expanded, function: str, path: str) -> FunctionDefinition:
    """As `parse_file`, of preprocessed text."""
    source = _Source(expanded, path)
    if function not in source.names.functions:
        known = ", ".join(list(source.names.functions)[:8]) or "none"
        broken = source.first_error()
        if broken:
            raise broken
        raise SourceError(path, 0, f"defines no function `{function}` (it has: {known})")
    return source.function(function)


class _Source:
    def __init__(self, expanded: Expanded, path: str) -> None:
        self.expanded = expanded
        self.path = path
        self.bytes = expanded.text.encode()
        self.root = Parser(LANGUAGE).parse(self.bytes).root_node
        self.names = _Names()
        self.registers = intrinsics.register_types(expanded.isa)
        self.intrinsics = intrinsics.table_of(expanded.isa)
        self.read: dict[str, FunctionDefinition] = {}
        self.reading: list[str] = []
        self._types: dict[str, Type] = {}
        self._index(self.root)

    # ---- places and errors ----

    def line(self, node: Node) -> int:
        return self.expanded.places[min(node.start_point[0], len(self.expanded.places) - 1)].line

    def refuse(self, node: Node, reason: str) -> SourceError:
        at = self.expanded.places[min(node.start_point[0], len(self.expanded.places) - 1)]
        return SourceError(at.file, at.line, reason)

    def text(self, node: Node | None) -> str:
        return "" if node is None else self.bytes[node.start_byte : node.end_byte].decode(errors="replace")

    def first_error(self) -> SourceError | None:
        """The place where the text stops being C, if it does."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            if node.type == "ERROR" or node.is_missing:
                at = self.expanded.places[min(node.start_point[0], len(self.expanded.places) - 1)]
                words = " ".join(self.text(node).split())[:40]
                return SourceError(at.file, at.line, f"this is not C as far as can be read: `{words}`")
            if node.has_error:
                waiting += reversed(node.children)
        return None

    # ---- the top level ----

    def _index(self, root: Node) -> None:
        for node in root.named_children:
            match node.type:
                case "function_definition":
                    name = self._declared_name(node.child_by_field_name("declarator"))
                    if name:
                        self.names.functions[name] = node
                    self._index_tag(node.child_by_field_name("type"))
                case "type_definition":
                    for declarator in node.children_by_field_name("declarator"):
                        name = self._declared_name(declarator)
                        if name:
                            self.names.types[name] = node
                    self._index_tag(node.child_by_field_name("type"))
                case "declaration":
                    self._index_tag(node.child_by_field_name("type"))
                    for declarator in node.children_by_field_name("declarator"):
                        name = self._declared_name(declarator)
                        if name and declarator.type == "init_declarator":
                            self.names.tables[name] = (node, declarator)
                case "struct_specifier" | "enum_specifier":
                    self._index_tag(node)
                case "linkage_specification" | "ERROR":
                    self._index(node)

    def _index_tag(self, node: Node | None) -> None:
        if node is None:
            return
        body = node.child_by_field_name("body")
        name = self.text(node.child_by_field_name("name"))
        if node.type == "struct_specifier" and body is not None and name:
            self.names.structs[name] = node
        if node.type == "enum_specifier" and body is not None:
            before: tuple[Node | None, int] = (None, -1)
            for one in body.named_children:
                if one.type != "enumerator":
                    continue
                value = one.child_by_field_name("value")
                before = (value, 0) if value is not None else (before[0], before[1] + 1)
                self.names.numbers[self.text(one.child_by_field_name("name"))] = (
                    before if before[0] is not None else (one, before[1])
                )

    def _declared_name(self, node: Node | None) -> str:
        while node is not None and node.type not in ("identifier", "type_identifier", "primitive_type"):
            node = node.child_by_field_name("declarator") or (
                node.named_children[0] if node.named_children else None
            )
        return self.text(node)

    # ---- types ----

    def type_of(self, node: Node | None, at: Node) -> Type:
        """A type specifier, without its declarator."""
        if node is None:
            raise self.refuse(at, "a declaration without a type")
        match node.type:
            case "primitive_type" | "type_identifier":
                return self._named_type(self.text(node), node)
            case "sized_type_specifier":
                return self._sized_type(self.text(node).split(), node)
            case "struct_specifier":
                return self._struct(node, self.text(node.child_by_field_name("name")))
            case "enum_specifier":
                return I32
            case _:
                raise self.refuse(
                    node, f"`{self.text(node)[:40]}` is not a type of the subset ({_called(node)})"
                )

    def _named_type(self, name: str, node: Node) -> Type:
        known = NAMED_TYPES.get(name) or self.registers.get(name) or self._types.get(name)
        if known is not None:
            return known
        defined = self.names.types.get(name)
        if defined is None:
            raise self.refuse(node, f"unknown type `{name}`")
        if name in self.reading:
            raise self.refuse(node, f"type `{name}` contains itself")
        self.reading.append(name)
        base = self.type_of(defined.child_by_field_name("type"), defined)
        declarator = next(
            one for one in defined.children_by_field_name("declarator") if self._declared_name(one) == name
        )
        found = self.declared(base, declarator, is_const=False)[1]
        self.reading.remove(name)
        if isinstance(found, Struct) and not found.name:
            found = replace(found, name=name)
        self._types[name] = found
        return found

    def _sized_type(self, words: list[str], node: Node) -> Type:
        if "double" in words:
            raise self.refuse(node, "long double is not in the subset")
        size = 1 if "char" in words else 2 if "short" in words else 8 if "long" in words else 4
        return SCALARS[f"{'u' if 'unsigned' in words else 'i'}{8 * size}"]

    def _struct(self, node: Node, name: str) -> Struct:
        body = node.child_by_field_name("body")
        if body is None:
            defined = self.names.structs.get(name)
            if defined is None:
                raise self.refuse(node, f"unknown struct `{name}`")
            if name in self.reading:
                raise self.refuse(node, f"struct `{name}` contains itself")
            self.reading.append(name)
            found = self._struct(defined, name)
            self.reading.remove(name)
            return found
        fields: list[tuple[str, Type]] = []
        for one in body.named_children:
            fields += self._fields(one)
        return Struct(name, tuple(fields))

    def _fields(self, node: Node) -> list[tuple[str, Type]]:
        if node.type != "field_declaration":
            raise self.refuse(node, f"{_called(node)} in a struct is not in the subset")
        if any(child.type == "bitfield_clause" for child in node.children):
            raise self.refuse(node, "bit fields are not in the subset")
        specifier = node.child_by_field_name("type")
        declarators = node.children_by_field_name("declarator")
        if specifier is not None and specifier.type == "union_specifier":
            return self._union_fields(specifier, [self._declared_name(one) for one in declarators])
        base = self.type_of(specifier, node)
        if not declarators:
            if isinstance(base, Struct):
                return list(base.fields)
            raise self.refuse(node, "a field without a name")
        found: list[tuple[str, Type]] = []
        for one in declarators:
            name, of, _ = self.declared(base, one, is_const=False)
            if isinstance(of, Pointer | Vec):
                raise self.refuse(
                    node, f"field `{name}` is a {'pointer' if isinstance(of, Pointer) else 'register'}"
                )
            found.append((name, of))
        return found

    def _union_fields(self, node: Node, names: list[str]) -> list[tuple[str, Type]]:
        """An anonymous union whose first member has the size of the others is taken for that member."""
        body = node.child_by_field_name("body")
        if names or body is None:
            raise self.refuse(node, "unions are not in the subset")
        members = [self._fields(one) for one in body.named_children if one.type == "field_declaration"]
        return members[0] if members else []

    def declared(self, base: Type, node: Node, is_const: bool) -> tuple[str, Type, Node | None]:
        """Name, type and initial value of a declarator."""
        match node.type:
            case "identifier" | "field_identifier" | "type_identifier" | "primitive_type":
                return self.text(node), base, None
            case "init_declarator":
                inner = node.child_by_field_name("declarator")
                assert inner is not None
                name, of, _ = self.declared(base, inner, is_const)
                return name, of, node.child_by_field_name("value")
            case "pointer_declarator":
                inner = node.child_by_field_name("declarator")
                if inner is None:
                    raise self.refuse(node, "a pointer without a name")
                return self.declared(Pointer(base, is_const), inner, is_const=False)
            case "array_declarator":
                inner, size = node.child_by_field_name("declarator"), node.child_by_field_name("size")
                assert inner is not None
                count = 0 if size is None else self.number(size)
                if size is not None and not 0 < count <= 1 << 24:
                    raise self.refuse(node, f"an array of {count} elements")
                return self.declared(Array(base, count), inner, is_const)
            case "parenthesized_declarator" | "attributed_declarator":
                return self.declared(base, node.named_children[0], is_const)
            case "function_declarator":
                raise self.refuse(node, "function pointers are not in the subset")
            case _:
                raise self.refuse(node, f"{_called(node)} is not in the subset")

    def number(self, node: Node) -> int:
        """A constant expression."""
        found = _Body(self, "").expr(node)
        if isinstance(found, Const) and isinstance(found.value, int):
            return found.value
        raise self.refuse(node, f"`{self.text(node)[:40]}` is not a number that is known when compiling")

    # ---- functions and tables ----

    def function(self, name: str) -> FunctionDefinition:
        if name in self.read:
            return self.read[name]
        node = self.names.functions[name]
        if name in self.reading:
            raise self.refuse(node, f"`{name}` calls itself")
        self._check_size(node)
        self.reading.append(name)
        body = _Body(self, name)
        found = body.read(node)
        self.reading.remove(name)
        self.read[name] = found
        return found

    def _check_size(self, node: Node) -> None:
        waiting, seen = [(node, 0)], 0
        while waiting:
            one, depth = waiting.pop()
            seen += 1
            if one.type == "ERROR" or one.is_missing:
                raise self.refuse(
                    one, f"this is not C as far as can be read: `{' '.join(self.text(one).split())[:40]}`"
                )
            if depth > MAX_NESTING:
                raise self.refuse(one, f"nested more than {MAX_NESTING} deep")
            if seen > MAX_NODES:
                raise self.refuse(one, f"a function of more than {MAX_NODES} words")
            waiting += [(child, depth + 1) for child in one.children]


def _called(node: Node) -> str:
    return node.type.replace("_", " ")


_UNSUPPORTED = {
    "goto_statement": "goto",
    "labeled_statement": "a label",
    "switch_statement": "switch",
    "gnu_asm_expression": "inline assembly",
    "asm_statement": "inline assembly",
}


_TAKEN_BY_TEXT = frozenset(keyword.kwlist) | set(OPERATIONS) | set(SCALARS) | set(ORDERS)
"""Names that mean something in the text of the high level."""
_LIKE_A_PARAMETER = re.compile(r"[A-Z][A-Z0-9_]*")


class _Body:
    """One function's statements and expressions."""

    def __init__(self, source: _Source, name: str) -> None:
        self.source = source
        self.name = name
        self.scopes: list[dict[str, Var]] = [{}]
        self.taken: set[str] = set()
        self.helpers: dict[str, FunctionDefinition] = {}
        self.structs: dict[str, Struct] = {}
        self.tables: dict[str, Declare] = {}
        self.result: Type = VOID
        self._after: list[Stmt] | None = None
        """The list that takes `i++` within the statement at hand; None: it may not be there."""

    # ---- the function ----

    def read(self, node: Node) -> FunctionDefinition:
        source = self.source
        declarator = node.child_by_field_name("declarator")
        is_const = _is_const(node)
        self.result = source.type_of(node.child_by_field_name("type"), node)
        while declarator is not None and declarator.type != "function_declarator":
            if declarator.type == "pointer_declarator":
                self.result = Pointer(self.result, is_const)
            declarator = declarator.child_by_field_name("declarator")
        if declarator is None:
            raise source.refuse(node, "no function of the subset")
        args = []
        parameters = declarator.child_by_field_name("parameters")
        for one in parameters.named_children if parameters else ():
            args += self._argument(one)
        body = node.child_by_field_name("body")
        assert body is not None
        statements = self.block(body)
        return FunctionDefinition(
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
            raise self.source.refuse(node, "a variable number of arguments is not in the subset")
        if node.type != "parameter_declaration":
            return []
        base = self.source.type_of(node.child_by_field_name("type"), node)
        declarator = node.child_by_field_name("declarator")
        if declarator is None:
            if base == VOID:
                return []
            raise self.source.refuse(node, "an argument without a name")
        name, of, _ = self.source.declared(base, declarator, _is_const(node))
        if isinstance(of, Array):
            of = Pointer(of.of, _is_const(node))
        if isinstance(of, Struct):
            raise self.source.refuse(node, f"argument `{name}` is a struct, not a pointer to one")
        self._note(of)
        return [(self._new(name, of).name, of)]

    def _note(self, of: Type) -> None:
        """Remember the structs of a type."""
        match of:
            case Pointer(to):
                self._note(to)
            case Array(element, _):
                self._note(element)
            case Struct(name, fields):
                for _, one in fields:
                    self._note(one)
                self.structs[name] = of

    def _new(self, name: str, of: Type) -> Var:
        """A variable; one that hides another gets a name of its own."""
        plain = f"{name.lower()}_" if name in _TAKEN_BY_TEXT or _LIKE_A_PARAMETER.fullmatch(name) else name
        unique, n = plain, 1
        while unique in self.taken:
            n += 1
            unique = f"{plain}_{n}"
        self.taken.add(unique)
        self.scopes[-1][name] = Var(of, unique)
        return self.scopes[-1][name]

    def _look_up(self, name: str) -> Var | None:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)

    # ---- statements ----

    def block(self, node: Node) -> Body:
        self.scopes.append({})
        found = [one for child in node.named_children for one in self.statement(child)]
        self.scopes.pop()
        return tuple(found)

    def _as_body(self, node: Node | None) -> Body:
        if node is None:
            return ()
        if node.type == "compound_statement":
            return self.block(node)
        self.scopes.append({})
        found = tuple(self.statement(node))
        self.scopes.pop()
        return found

    def statement(self, node: Node) -> list[Stmt]:
        if node.type not in ("declaration", "expression_statement"):
            return self._statement(node)
        self._after = []
        found = self._statement(node)
        after, self._after = self._after, None
        return [*found, *after]

    def _statement(self, node: Node) -> list[Stmt]:
        line = self.source.line(node)
        match node.type:
            case "comment" | "type_definition":
                return []
            case "compound_statement":
                return [BlockStatement(self.block(node), line)]
            case "declaration":
                return self._declaration(node)
            case "expression_statement":
                return self._effect(node.named_children[0]) if node.named_children else []
            case "return_statement":
                value = node.named_children[0] if node.named_children else None
                return [Return(None if value is None else self._converted(value, self.result), line)]
            case "if_statement":
                otherwise = node.child_by_field_name("alternative")
                if otherwise is not None and otherwise.type == "else_clause":
                    otherwise = next((one for one in otherwise.named_children if one.type != "comment"), None)
                condition = self.expr(_need(node, "condition"))
                return [
                    If(condition, self._as_body(_need(node, "consequence")), self._as_body(otherwise), line)
                ]
            case "for_statement":
                return self._for(node, line)
            case "while_statement":
                return [While(self.expr(_need(node, "condition")), self._as_body(_need(node, "body")), line)]
            case "do_statement":
                body = self._as_body(_need(node, "body"))
                return [While(self.expr(_need(node, "condition")), body, line, is_after=True)]
            case "break_statement":
                return [Leave("break", line)]
            case "continue_statement":
                return [Leave("continue", line)]
            case "attributed_statement":
                return self.statement(node.named_children[-1])
            case _:
                what = _UNSUPPORTED.get(node.type, _called(node))
                raise self.source.refuse(node, f"{what} is not in the subset")

    def _for(self, node: Node, line: int) -> list[Stmt]:
        self.scopes.append({})
        start = node.child_by_field_name("initializer")
        first: list[Stmt] = []
        if start is not None:
            first = self._declaration(start) if start.type == "declaration" else self._effect(start)
        condition = node.child_by_field_name("condition")
        update = node.child_by_field_name("update")
        found = For(
            tuple(first),
            integer(1) if condition is None else self.expr(condition),
            tuple(self._effect(update) if update is not None else ()),
            self._as_body(_need(node, "body")),
            line,
        )
        self.scopes.pop()
        return [found]

    def _declaration(self, node: Node) -> list[Stmt]:
        line, is_const = self.source.line(node), _is_const(node)
        is_static = any(
            c.type == "storage_class_specifier" and self.source.text(c) == "static" for c in node.children
        )
        if is_static and not is_const:
            raise self.source.refuse(node, "a static variable keeps state between calls")
        base = self.source.type_of(node.child_by_field_name("type"), node)
        found: list[Stmt] = []
        for declarator in node.children_by_field_name("declarator"):
            name, of, value = self.source.declared(base, declarator, is_const)
            if isinstance(of, Array) and isinstance(of.of, Vec) and value is not None:
                found += self._registers_declared(name, of, value, line, declarator)
            else:
                found.append(self._declared(name, of, value, line, is_const, declarator))
        return found

    def _declared(
        self, name: str, of: Type, value: Node | None, line: int, is_const: bool, at: Node
    ) -> Declare:
        if isinstance(of, Array):
            return self._array(name, of, value, line, is_const, at)
        if isinstance(of, Struct):
            raise self.source.refuse(at, f"`{name}`: variables that are structs are not in the subset")
        self._note(of)
        if isinstance(of, Vec) and value is not None and value.type == "initializer_list":
            return Declare(
                self._new(name, of).name, of, self._lanes_listed(value, of), line, is_const=is_const
            )
        init = None if value is None else self._converted(value, of)
        return Declare(self._new(name, of).name, of, init, line, is_const=is_const)

    def _registers_declared(self, name: str, of: Array, value: Node, line: int, at: Node) -> list[Stmt]:
        declared = self._array(name, of, None, line, False, at)
        return [declared, *self._registers(Var(of, declared.name), value, line)]

    def _registers(self, target: Expr, value: Node, line: int) -> list[Stmt]:
        """Values of several registers, one by one: from a list, or from a load of several."""
        of = target.type
        assert isinstance(of, Array)
        if value.type == "initializer_list":
            values = self._listed(value, of)
        else:
            values = self._loaded_together(value, of)
        return [Assign(Index(of.of, target, integer(i)), one, line) for i, one in enumerate(values)]

    def _lanes_listed(self, node: Node, of: Vec) -> Expr:
        """A NEON register of the lanes in a list; lanes that are not there are zero."""
        word = "q" if of.size == 16 else ""
        suffix = of.elem.name.replace("i", "s")
        names = [f"vdup{word}_n_{suffix}", f"vset{word}_lane_{suffix}"]
        values = [self._converted(one, of.elem) for one in node.named_children if one.type != "comment"]
        if any(one not in self.source.intrinsics for one in names) or len(values) > of.lanes:
            raise self.source.refuse(node, "a list of lanes is not in the subset here")
        found: Expr = CallExpression(of, names[0], (Const(of.elem, 0.0 if of.elem.is_float else 0),))
        for lane, value in enumerate(values):
            if not (isinstance(value, Const) and value.value == 0):
                found = CallExpression(of, names[1], (value, found, integer(lane)))
        return found

    def _listed(self, node: Node, of: Array) -> list[Expr]:
        """The elements of a list of registers; `{0}` is zero everywhere."""
        inner = [one for one in node.named_children if one.type != "comment"]
        if len(inner) == 1 and inner[0].type == "initializer_list":
            return self._listed(inner[0], of)
        if len(inner) == 1 and self.source.text(inner[0]) == "0":
            assert isinstance(of.of, Vec)
            suffix = of.of.elem.name.replace("i", "s")
            zero = "_mm256_setzero_si256" if of.of.elem.name == "bits" else f"vdupq_n_{suffix}"
            args = () if of.of.elem.name == "bits" else (integer(0),)
            return [CallExpression(of.of, zero, args)] * of.count
        return [self._converted(one, of.of) for one in inner]

    def _loaded_together(self, node: Node, of: Array) -> list[Expr]:
        name, _, many = self.source.text(node.child_by_field_name("function")).rpartition("_x")
        known = self.source.intrinsics.get(name)
        if known is None or known.result != of.of or many != str(of.count) or not isinstance(of.of, Vec):
            text = self.source.text(node)[:40]
            raise self.source.refuse(node, f"`{text}` where {of.count} registers are needed")
        (place,) = self._arguments(node)
        lanes = of.of.lanes
        return [
            CallExpression(
                of.of, name, (self._typed(lambda i=i: binary("+", place, integer(i * lanes)), node),)
            )
            for i in range(of.count)
        ]

    def _array(
        self, name: str, of: Array, value: Node | None, line: int, is_const: bool, at: Node
    ) -> Declare:
        values: tuple[int | float, ...] = ()
        if value is not None:
            if value.type == "initializer_list":
                values = tuple(self._flat(value, _innermost(of)))
            elif value.type == "string_literal":
                raise self.source.refuse(value, "strings are not in the subset")
        if of.count == 0:
            inner = of.of.size // _innermost(of).size
            of = Array(of.of, len(values) // inner)
        n_all = of.size // _innermost(of).size
        if not isinstance(_innermost(of), Scalar) and not isinstance(of.of, Vec):
            raise self.source.refuse(at, f"`{name}`: arrays of {spelled(of.of)} are not in the subset")
        if len(values) > n_all:
            raise self.source.refuse(at, f"`{name}` has {n_all} elements, not {len(values)}")
        if value is not None:
            values = values + (0,) * (n_all - len(values))
        return Declare(self._new(name, of).name, of, None, line, values, is_const)

    def _flat(self, node: Node, of: Type) -> list[int | float]:
        found: list[int | float] = []
        for one in node.named_children:
            if one.type == "initializer_list":
                found += self._flat(one, of)
                continue
            if one.type == "comment":
                continue
            value = self.expr(one)
            if not isinstance(value, Const) or not isinstance(of, Scalar):
                raise self.source.refuse(
                    one, f"`{self.source.text(one)[:40]}` is not a number that is known when compiling"
                )
            found.append(fitting(value.value, of))
        return found

    def _effect(self, node: Node) -> list[Stmt]:
        """An expression that stands alone."""
        line = self.source.line(node)
        match node.type:
            case "comma_expression":
                return [one for child in node.named_children for one in self._effect(child)]
            case "parenthesized_expression":
                return self._effect(node.named_children[0])
            case "assignment_expression":
                return self._assignment(node, line)
            case "update_expression":
                target = self.expr(_need(node, "argument"))
                op = self.source.text(_need(node, "operator"))[0]
                return [Assign(target, self._typed(lambda: binary(op, target, integer(1)), node), line)]
            case "call_expression":
                return self._called_alone(node, line)
            case "gnu_asm_expression":
                raise self.source.refuse(node, "inline assembly is not in the subset")
            case "cast_expression" if self.source.text(_need(node, "type")) == "void":
                return []
            case _:
                self.expr(node)
                return []

    def _called_alone(self, node: Node, line: int) -> list[Stmt]:
        name = self.source.text(_need(node, "function"))
        if name in ("memcpy", "__builtin_memcpy"):
            return self._memcpy(node, line)
        if name in ("memset", "__builtin_memset"):
            return self._memset(node, line)
        if name in ("_mm256_zeroupper", "_mm256_zeroall", "_mm_sfence", "_mm_empty"):
            return []
        found = self.expr(node)
        return [Do(found, line)]

    def _memcpy(self, node: Node, line: int) -> list[Stmt]:
        """The bits of one variable or element as another one: the only use of it that kernels of the subset
        have.
        """
        to, of, size = self._arguments(node)
        if isinstance(to, Var) and isinstance(to.type, Array) and isinstance(size, Const):
            return self._copied_elements(to, of, int(size.value), node, line)
        target, value = _pointee(to), _pointee(of)
        n_bytes = size.value if isinstance(size, Const) else -1
        if target is None or value is None or target.type.size != n_bytes:
            raise self.source.refuse(node, "memcpy of other than one number")
        if value.type.size != n_bytes:
            value = Index(
                target.type,
                Cast(Pointer(target.type, True), AddressOf(Pointer(value.type), value)),
                integer(0),
            )
        if isinstance(target.type, Vec) or isinstance(value.type, Vec):
            raise self.source.refuse(node, "memcpy of registers is not in the subset")
        if target.type == value.type:
            return [Assign(target, value, line)]
        return [Assign(target, CallExpression(target.type, "__bits", (value,)), line)]

    def _copied_elements(self, to: Var, of: Expr, n_bytes: int, node: Node, line: int) -> list[Stmt]:
        """The beginning of an array, from memory of any type."""
        assert isinstance(to.type, Array)
        element = to.type.of
        is_simple = isinstance(element, Scalar) and n_bytes % element.size == 0 and n_bytes <= to.type.size
        if not is_simple or n_bytes > 64 * element.size or not isinstance(decayed(of.type), Pointer):
            raise self.source.refuse(node, "memcpy to an array of other than a few whole elements")
        source = Cast(Pointer(element, True), of)
        return [
            Assign(Index(element, to, integer(i)), Index(element, source, integer(i)), line)
            for i in range(n_bytes // element.size)
        ]

    def _memset(self, node: Node, line: int) -> list[Stmt]:
        to, value, size = self._arguments(node)
        while isinstance(to, Cast):
            to = to.a
        ok = isinstance(to.type, Array) and isinstance(value, Const) and value.value == 0
        if not ok or not isinstance(size, Const) or size.value != to.type.size:
            raise self.source.refuse(node, "memset of other than a whole array to zero")
        assert isinstance(to, Var)
        assert isinstance(to.type, Array)
        return [Do(CallExpression(VOID, "__clear", (to,)), line)]

    def _arguments(self, node: Node) -> list[Expr]:
        return [self.expr(one) for one in _need(node, "arguments").named_children if one.type != "comment"]

    def _assignment(self, node: Node, line: int) -> list[Stmt]:
        right = _need(node, "right")
        before: list[Stmt] = []
        op = self.source.text(_need(node, "operator"))
        target = self.expr(_need(node, "left"))
        if not isinstance(target, Var | Index | Member):
            raise self.source.refuse(node, f"`{self.source.text(node)[:40]}` assigns to what is no variable")
        if op == "=" and right.type == "assignment_expression":
            before = self._effect(right)
            right = _need(right, "left")
        if op == "=" and isinstance(target.type, Array):
            return self._registers(target, right, line)
        if op == "=":
            return [*before, Assign(target, self._converted(right, target.type), line)]
        value = self.expr(right)
        combined = self._typed(lambda: binary(op[:-1], target, value), node)
        return [Assign(target, self._convert(combined, target.type, node), line)]

    # ---- expressions ----

    def _converted(self, node: Node, to: Type) -> Expr:
        return self._convert(self.expr(node), to, node)

    def _convert(self, value: Expr, to: Type, at: Node) -> Expr:
        """As C converts it without a cast."""
        given = decayed(value.type)
        if given == to:
            return value if value.type == to or isinstance(value.type, Array) else replace(value, type=to)
        if isinstance(given, Scalar) and isinstance(to, Scalar):
            return Const(to, fitting(value.value, to)) if isinstance(value, Const) else Cast(to, value)
        if isinstance(given, Pointer) and isinstance(to, Pointer):
            if given.to == to.to:
                return value if given.is_const == to.is_const else Cast(to, value)
            if VOID in (given.to, to.to):
                return Cast(to, value)
        if to == VOID:
            return value
        raise self.source.refuse(at, f"{spelled(given)} where {spelled(to)} is needed")

    def _typed(self, make: object, node: Node) -> Expr:
        try:
            return make()  # type: ignore[operator, no-any-return]
        except Mistyped as error:
            raise self.source.refuse(node, str(error)) from None

    def expr(self, node: Node) -> Expr:
        match node.type:
            case "parenthesized_expression":
                return self.expr(next(one for one in node.named_children if one.type != "comment"))
            case "number_literal":
                return _literal(self.source, node)
            case "char_literal":
                text = self.source.text(node)
                if len(text) != 3:
                    raise self.source.refuse(node, f"the character {text}")
                return integer(ord(text[1]))
            case "true" | "false":
                return integer(int(node.type == "true"))
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
                base, index = self.expr(_need(node, "argument")), self.expr(_need(node, "index"))
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
                raise self.source.refuse(
                    node, f"`{self.source.text(node)[:40]}` inside an expression is not in the subset"
                )
            case "gnu_asm_expression":
                raise self.source.refuse(node, "inline assembly is not in the subset")
            case _:
                raise self.source.refuse(
                    node, f"{_called(node)} `{self.source.text(node)[:40]}` is not in the subset"
                )

    def _counted_after(self, node: Node, after: list[Stmt]) -> Expr:
        """`i++` in a statement that names i nowhere else: i, which grows behind the statement."""
        argument, operator = _need(node, "argument"), _need(node, "operator")
        whole = node
        while whole.parent is not None and whole.type not in ("declaration", "expression_statement"):
            whole = whole.parent
        target = self.expr(argument)
        names = _identifiers(whole, self.source)
        is_safe = isinstance(target, Var) and names.count(self.source.text(argument)) == 1
        if operator.start_byte < argument.start_byte or not is_safe or _is_lazy(node, whole):
            text = self.source.text(node)[:40]
            raise self.source.refuse(node, f"`{text}` inside an expression is not in the subset")
        op = self.source.text(operator)[0]
        value = self._typed(lambda: binary(op, target, integer(1)), node)
        after.append(Assign(target, value, self.source.line(node)))
        return target

    def _identifier(self, node: Node) -> Expr:
        name = self.source.text(node)
        known = self._look_up(name)
        if known is not None:
            return known
        if name in self.source.names.numbers:
            value, more = self.source.names.numbers[name]
            if value is None or value.type == "enumerator":
                return integer(more)
            found = self.expr(value)
            if isinstance(found, Const):
                return integer(int(found.value) + more)
        if name in self.source.names.tables:
            return self._table(name, node)
        raise self.source.refuse(node, f"unknown name `{name}`")

    def _table(self, name: str, at: Node) -> Expr:
        """A constant of the file."""
        if name not in self.tables:
            node, declarator = self.source.names.tables[name]
            if not _is_const(node):
                raise self.source.refuse(
                    at, f"`{name}` is a variable of the file; only constants are in the subset"
                )
            base = self.source.type_of(node.child_by_field_name("type"), node)
            declared, of, value = self.source.declared(base, declarator, is_const=True)
            if isinstance(of, Scalar) and value is not None:
                found = self._convert(self.expr(value), of, value)
                if isinstance(found, Const):
                    return found
            if not isinstance(of, Array):
                raise self.source.refuse(at, f"`{name}` is no array of numbers")
            outer = _Body(self.source, "")
            self.tables[name] = outer._array(declared, of, value, self.source.line(node), True, declarator)
            self.taken.add(name)
        return Var(self.tables[name].type, name)

    def _binary(self, node: Node) -> Expr:
        op = self.source.text(_need(node, "operator"))
        a, b = self.expr(_need(node, "left")), self.expr(_need(node, "right"))
        if isinstance(a.type, Vec) or isinstance(b.type, Vec):
            raise self.source.refuse(node, f"{op} between registers; write the intrinsic")
        found = self._typed(lambda: binary(op, a, b), node)
        return _folded(op, a, b, found)

    def _unary(self, node: Node) -> Expr:
        op = self.source.text(_need(node, "operator"))
        a = self.expr(_need(node, "argument"))
        if op == "+":
            return a
        if isinstance(a.type, Vec):
            raise self.source.refuse(node, f"{op} of a register; write the intrinsic")
        found = self._typed(lambda: unary(op, a), node)
        if isinstance(a, Const) and isinstance(found.type, Scalar):
            value = {"-": -a.value, "!": int(not a.value)}.get(op)
            if value is None and isinstance(a.value, int):
                value = ~a.value
            if value is not None:
                return Const(found.type, fitting(value, found.type))
        return found

    def _cast(self, node: Node) -> Expr:
        to = self._described(_need(node, "type"))
        value = self.expr(_need(node, "value"))
        given = decayed(value.type)
        if to == VOID:
            return value
        if isinstance(to, Scalar) and isinstance(given, Scalar):
            return Const(to, fitting(value.value, to)) if isinstance(value, Const) else Cast(to, value)
        if isinstance(to, Pointer) and isinstance(given, Pointer):
            self._note(to)
            return Cast(to, value)
        if to == given:
            return value
        raise self.source.refuse(node, f"a cast of {spelled(given)} to {spelled(to)} is not in the subset")

    def _described(self, node: Node) -> Type:
        """A type name: `const float *`."""
        base = self.source.type_of(node.child_by_field_name("type"), node)
        is_const = _is_const(node)
        declarator = node.child_by_field_name("declarator")
        while declarator is not None:
            if declarator.type != "abstract_pointer_declarator":
                raise self.source.refuse(
                    node, f"the type `{self.source.text(node)[:40]}` is not in the subset"
                )
            base, is_const = Pointer(base, is_const), False
            declarator = declarator.child_by_field_name("declarator")
        return base

    def _conditional(self, node: Node) -> Expr:
        condition = self.expr(_need(node, "condition"))
        a, b = self.expr(_need(node, "consequence")), self.expr(_need(node, "alternative"))
        if isinstance(a.type, Scalar) and isinstance(b.type, Scalar):
            of: Type = common(a.type, b.type)
            a, b = self._convert(a, of, node), self._convert(b, of, node)
        elif decayed(a.type) == decayed(b.type):
            of = decayed(a.type)
        else:
            raise self.source.refuse(node, f"{spelled(a.type)} or {spelled(b.type)}")
        if isinstance(condition, Const):
            return a if condition.value else b
        return Ternary(of, condition, a, b)

    def _element(self, base: Expr, index: Expr, node: Node) -> Expr:
        match base.type:
            case Pointer(to):
                element = to
            case Array(to, _):
                element = to
            case _:
                raise self.source.refuse(node, f"an element of {spelled(base.type)}")
        if element == VOID:
            raise self.source.refuse(node, "an element of void")
        if not isinstance(index.type, Scalar) or index.type.is_float:
            raise self.source.refuse(node, f"an index that is {spelled(index.type)}")
        return Index(element, base, index)

    def _pointer(self, node: Node) -> Expr:
        op = self.source.text(_need(node, "operator"))
        a = self.expr(_need(node, "argument"))
        if op == "*":
            return self._element(a, integer(0), node)
        if isinstance(a, Index) and isinstance(a.type, Scalar | Struct):
            return self._typed(lambda: binary("+", _as_pointer(a.base), a.index), node)
        return AddressOf(Pointer(a.type), a)

    def _field(self, node: Node) -> Expr:
        base = self.expr(_need(node, "argument"))
        name = self.source.text(_need(node, "field"))
        if name == "val" and isinstance(base.type, Array) and isinstance(base.type.of, Vec):
            return base
        is_arrow = any(self.source.text(one) == "->" for one in node.children)
        if is_arrow:
            base = self._element(base, integer(0), node)
        of = base.type
        field_type = of.type_of(name) if isinstance(of, Struct) else None
        if field_type is None:
            raise self.source.refuse(node, f"{spelled(of)} has no field `{name}`")
        return Member(field_type, base, name)

    def _sizeof(self, node: Node) -> Expr:
        described = node.child_by_field_name("type")
        if described is not None:
            return Const(U64, self._described(described).size)
        value = _need(node, "value")
        name = self.source.text(value).strip("() ")
        if self._look_up(name) is None and name in self.source.names.types:  # C's grammar alone cannot tell
            return Const(U64, self.source._named_type(name, node).size)
        return Const(U64, self.expr(value).type.size)

    def _call(self, node: Node) -> Expr:
        function = _need(node, "function")
        name = self.source.text(function)
        if function.type != "identifier":
            raise self.source.refuse(
                node, f"a call of `{name[:40]}`: function pointers are not in the subset"
            )
        args = self._arguments(node)
        if name in ("__builtin_inff", "__builtin_nanf"):
            return Const(F32, float("inf" if name.endswith("inff") else "nan"))
        known = self.source.intrinsics.get(name)
        if known is not None:
            return CallExpression(known.result, name, tuple(args))
        if name in _ABS:
            return self._absolute(args[0], node)
        library = name.removeprefix("__builtin_")
        if library in LIBRARY:
            return CallExpression(F32, library, tuple(self._convert(one, F32, node) for one in args))
        if name in self.source.names.functions:
            return self._helper(name, args, node)
        if name.startswith(("_mm", "__builtin_")) or name in _OTHER_INTRINSICS or _looks_like_neon(name):
            raise self.source.refuse(
                node, f"intrinsic `{name}` is not in the table of {self.source.expanded.isa}"
            )
        raise self.source.refuse(node, f"`{name}` is not defined here")

    def _absolute(self, a: Expr, node: Node) -> Expr:
        return Ternary(a.type, self._typed(lambda: binary("<", a, integer(0)), node), unary("-", a), a)

    def _helper(self, name: str, args: list[Expr], node: Node) -> Expr:
        helper = self.source.function(name)
        if len(args) != len(helper.args):
            raise self.source.refuse(node, f"`{name}` takes {len(helper.args)} arguments, not {len(args)}")
        for one in (*helper.helpers, helper):
            self.helpers[one.name] = one
        for struct in helper.structs:
            self.structs[struct.name] = struct
        for table in helper.tables:
            self.tables[table.name] = table
        converted = [self._convert(one, of, node) for one, (_, of) in zip(args, helper.args, strict=True)]
        return CallExpression(helper.result, name, tuple(converted))


def _identifiers(node: Node, source: _Source) -> list[str]:
    found, waiting = [], [node]
    while waiting:
        one = waiting.pop()
        if one.type == "identifier":
            found.append(source.text(one))
        waiting += one.children
    return found


def _is_lazy(node: Node, whole: Node) -> bool:
    """True if a part of a statement may not be evaluated."""
    while node.parent is not None and node != whole:
        node = node.parent
        is_logical = node.type == "binary_expression" and any(
            one.type in ("&&", "||") for one in node.children
        )
        if node.type == "conditional_expression" or is_logical:
            return True
    return False


_ABS = ("abs", "labs")
_OTHER_INTRINSICS = ("_cvtsh_ss",)


def _looks_like_neon(name: str) -> bool:
    return name[:1] == "v" and name.rpartition("_")[2] in {suffix for suffix, _ in intrinsics.NEON_ELEMS} | {
        "f16"
    }


def _need(node: Node, field_name: str) -> Node:
    found = node.child_by_field_name(field_name)
    assert found is not None, f"{node.type} without {field_name}"
    return found


def _is_const(node: Node) -> bool:
    return any(child.type == "type_qualifier" and child.text == b"const" for child in node.children)


def _innermost(of: Type) -> Type:
    while isinstance(of, Array):
        of = of.of
    return of


def _as_pointer(e: Expr) -> Expr:
    return e


def _pointee(e: Expr) -> Index | Var | Member | None:
    """The type of what an address points to."""
    while isinstance(e, Cast):
        e = e.a
    if isinstance(e, AddressOf) and isinstance(e.a, Index | Var | Member):
        return e.a
    if isinstance(e.type, Pointer | Array):
        of = e.type.to if isinstance(e.type, Pointer) else e.type.of
        if isinstance(of, Scalar):
            from phasewise.ir.nodes import Binary

            if isinstance(e, Binary) and e.op == "+":
                return Index(of, e.a, e.b)
            return Index(of, e, integer(0))
    return None


def _literal(source: _Source, node: Node) -> Const:
    text = source.text(node).lower().replace("'", "")
    is_hex = text.startswith("0x")
    try:
        if (not is_hex and (set(text) & set(".ef"))) or "p" in text:
            is_f32 = text.endswith("f")
            number = text.rstrip("fl") if not is_hex else text.rstrip("l").removesuffix("f")
            value = float.fromhex(number) if is_hex else float(number)
            return Const(F32, fitting(value, F32)) if is_f32 else Const(F64, value)
        digits = text.rstrip("ul")
        suffix = text[len(digits) :]
        is_octal = not is_hex and len(digits) > 1 and digits[0] == "0" and digits[1:].isdigit()
        value_i = int(digits, 8) if is_octal else int(digits, 0)
    except (ValueError, OverflowError):
        raise source.refuse(node, f"`{text[:40]}` is no number of the subset") from None
    names = (("i32",), ("u32",), ("i64",), ("u64",))
    wanted = [
        SCALARS[name]
        for (name,) in names
        if ("u" not in suffix or name[0] == "u") and ("l" not in suffix or name.endswith("64"))
        if "u" in suffix or is_hex or is_octal or name[0] == "i"
    ]
    for of in wanted:
        if fitting(value_i, of) == value_i:
            return Const(of, value_i)
    raise source.refuse(node, f"`{text[:40]}` has more than 64 bits")


def _folded(op: str, a: Expr, b: Expr, found: Expr) -> Expr:
    """A number where both sides are numbers: sizes and indices read better."""
    if not (isinstance(a, Const) and isinstance(b, Const) and isinstance(found.type, Scalar)):
        return found
    if found.type.is_float or not isinstance(a.value, int) or not isinstance(b.value, int):
        return found
    from phasewise.ir.arithmetic import integer_result

    of = found.type
    if op in COMPARISONS or op in LOGICAL:
        assert isinstance(a.type, Scalar)
        assert isinstance(b.type, Scalar)
        shared = common(a.type, b.type)
        value = integer_result(op, int(fitting(a.value, shared)), int(fitting(b.value, shared)), I32)
    else:
        value = integer_result(
            op, int(fitting(a.value, of)), b.value if op in ("<<", ">>") else int(fitting(b.value, of)), of
        )
    return found if value is None else Const(of, value)
