"""Parser of the top level of a C source: names and types. Bodies of functions are parsed when asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

import tree_sitter_c
from tree_sitter import Language, Node, Parser

from phasewise.ir import nodes as ir
from phasewise.ir.builders import X86_TYPES
from phasewise.ir.errors import SourceError
from phasewise.ir.raising.intrinsics_x86 import x86
from phasewise.ir.raising.preprocess import Expanded, SourcePlace
from phasewise.ir.types import (
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
    Struct,
    Type,
    Vec,
)

LANGUAGE = Language(tree_sitter_c.language())

NAMED_TYPES: dict[str, Type] = {
    **{f"int{8 * n}_t": SCALARS[f"i{8 * n}"] for n in (1, 2, 4, 8)},
    **{f"uint{8 * n}_t": SCALARS[f"u{8 * n}"] for n in (1, 2, 4, 8)},
    "size_t": U64, "ssize_t": I64, "ptrdiff_t": I64, "intptr_t": I64, "uintptr_t": U64,
    "float": F32, "double": F64, "void": VOID, "_Bool": U8, "bool": U8, "char": I8, "int": I32,
}  # fmt: skip


@dataclass
class _Names:
    """The top-level definitions of a source by name; each is parsed when it is asked for."""

    functions: dict[str, Node] = field(default_factory=dict)
    types: dict[str, Node] = field(default_factory=dict)
    structs: dict[str, Node] = field(default_factory=dict)
    numbers: dict[str, tuple[Node | None, int]] = field(default_factory=dict)
    tables: dict[str, tuple[Node, Node]] = field(default_factory=dict)


class Source(ABC):
    """The top level of a preprocessed text: its types, and the places of its lines."""

    def __init__(self, expanded: Expanded, path: str) -> None:
        self.expanded = expanded
        self.path = path
        self.bytes = expanded.text.encode()
        self.root = Parser(LANGUAGE).parse(self.bytes).root_node
        self.names = _Names()
        self.intrinsics = x86()
        self.read: dict[str, ir.FunctionDefinition] = {}
        self.reading: list[str] = []
        self._types: dict[str, Type] = {}
        self._index(self.root)

    # ---- places and errors ----

    def line(self, node: Node) -> int:
        return self._place(node).line

    def _place(self, node: Node) -> SourcePlace:
        return self.expanded.places[min(node.start_point[0], len(self.expanded.places) - 1)]

    def refuse(self, node: Node, reason: str) -> SourceError:
        place = self._place(node)
        return SourceError(place.file, place.line, reason)

    def text(self, node: Node | None) -> str:
        return "" if node is None else self.bytes[node.start_byte : node.end_byte].decode(errors="replace")

    def first_error(self) -> SourceError | None:
        """The place where the text is no longer valid C, as an error; None for valid text."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            if node.type == "ERROR" or node.is_missing:
                words = " ".join(self.text(node).split())[:40]
                return self.refuse(node, f"this is not C as far as can be read: `{words}`")
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
            for child in body.named_children:
                if child.type != "enumerator":
                    continue
                value = child.child_by_field_name("value")
                before = (value, 0) if value is not None else (before[0], before[1] + 1)
                self.names.numbers[self.text(child.child_by_field_name("name"))] = (
                    before if before[0] is not None else (child, before[1])
                )

    def _declared_name(self, node: Node | None) -> str:
        while node is not None and node.type not in ("identifier", "type_identifier", "primitive_type"):
            node = node.child_by_field_name("declarator") or (
                node.named_children[0] if node.named_children else None
            )
        return self.text(node)

    # ---- types ----

    def type_of(self, node: Node | None, parent: Node) -> Type:
        """The type that a specifier names, before its declarator."""
        if node is None:
            raise self.refuse(parent, "a declaration without a type")
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
                    node, f"`{self.text(node)[:40]}` is not a type of the subset ({described_node(node)})"
                )

    def _named_type(self, name: str, node: Node) -> Type:
        existing = NAMED_TYPES.get(name) or X86_TYPES.get(name) or self._types.get(name)
        if existing is not None:
            return existing
        defined = self.names.types.get(name)
        if defined is None:
            raise self.refuse(node, f"unknown type `{name}`")
        if name in self.reading:
            raise self.refuse(node, f"type `{name}` contains itself")
        self.reading.append(name)
        base = self.type_of(defined.child_by_field_name("type"), defined)
        declarator = next(
            child
            for child in defined.children_by_field_name("declarator")
            if self._declared_name(child) == name
        )
        of = self.declared(base, declarator, is_const=False)[1]
        self.reading.remove(name)
        if isinstance(of, Struct) and not of.name:
            of = replace(of, name=name)
        self._types[name] = of
        return of

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
            struct = self._struct(defined, name)
            self.reading.remove(name)
            return struct
        fields: list[tuple[str, Type]] = []
        for child in body.named_children:
            fields += self._fields(child)
        return Struct(name, tuple(fields))

    def _fields(self, node: Node) -> list[tuple[str, Type]]:
        if node.type != "field_declaration":
            raise self.refuse(node, f"{described_node(node)} in a struct is not in the subset")
        if any(child.type == "bitfield_clause" for child in node.children):
            raise self.refuse(node, "bit fields are not in the subset")
        specifier = node.child_by_field_name("type")
        declarators = node.children_by_field_name("declarator")
        if specifier is not None and specifier.type == "union_specifier":
            return self._union_fields(
                specifier, [self._declared_name(declarator) for declarator in declarators]
            )
        base = self.type_of(specifier, node)
        if not declarators:
            if isinstance(base, Struct):
                return list(base.fields)
            raise self.refuse(node, "a field without a name")
        fields: list[tuple[str, Type]] = []
        for declarator in declarators:
            name, of, _ = self.declared(base, declarator, is_const=False)
            if isinstance(of, Pointer | Vec):
                raise self.refuse(
                    node, f"field `{name}` is a {'pointer' if isinstance(of, Pointer) else 'register'}"
                )
            fields.append((name, of))
        return fields

    def _union_fields(self, node: Node, names: list[str]) -> list[tuple[str, Type]]:
        """The fields of an anonymous union: its first member, which must have the size of the others."""
        body = node.child_by_field_name("body")
        if names or body is None:
            raise self.refuse(node, "unions are not in the subset")
        members = [self._fields(child) for child in body.named_children if child.type == "field_declaration"]
        return members[0] if members else []

    def declared(self, base: Type, node: Node, is_const: bool) -> tuple[str, Type, Node | None]:
        """The name, type and initial value of a declarator."""
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
                raise self.refuse(node, f"{described_node(node)} is not in the subset")

    # ---- what bodies are needed for ----

    @abstractmethod
    def number(self, node: Node) -> int:
        """The value of a constant expression."""

    @abstractmethod
    def function(self, name: str) -> ir.FunctionDefinition:
        """The function of that name, with all that it calls."""


def described_node(node: Node) -> str:
    return node.type.replace("_", " ")


def needed(node: Node, field_name: str) -> Node:
    child = node.child_by_field_name(field_name)
    assert child is not None, f"{node.type} without {field_name}"
    return child


def is_const_node(node: Node) -> bool:
    return any(child.type == "type_qualifier" and child.text == b"const" for child in node.children)
