"""The tree of a kernel at both levels: expressions that carry their type, statements that carry their line.

At the low level calls name intrinsics and helpers and loops are C's; at the high level calls name operations
on vectors (ir/operations.py), loops are `Steps`, and parameters stand for numbers that a search chooses.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TypeAlias, TypeGuard, TypeVar

from phasewise.ir.types import I32, Array, Pointer, Scalar, Struct, Type, Vec

# ---- expressions -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Const:
    """A constant number: a Python int or float; one of type f32 is a value of float32."""

    type: Type
    value: int | float


@dataclass(frozen=True, slots=True)
class Var:
    type: Type
    name: str


@dataclass(frozen=True, slots=True)
class Unary:
    type: Type
    op: str  # - ~ !
    a: Expr


@dataclass(frozen=True, slots=True)
class Binary:
    """C's arithmetic or comparison, on vectors lane by lane. The left side of + and - may be a pointer."""

    type: Type
    op: str
    a: Expr
    b: Expr


@dataclass(frozen=True, slots=True)
class Ternary:
    type: Type
    condition: Expr
    a: Expr
    b: Expr


@dataclass(frozen=True, slots=True)
class Cast:
    type: Type
    a: Expr


@dataclass(frozen=True, slots=True)
class CallExpression:
    """A call of an intrinsic, a helper or an operation. numbers: arguments that must be known when compiling,
    e.g. lanes, a shift, a pattern."""

    type: Type
    name: str
    args: tuple[Expr, ...]
    numbers: tuple[Expr, ...] = ()

    @property
    def places(self) -> list[int]:
        """The call's known numbers as indices of lanes."""
        return [int(number.value) for number in self.numbers if isinstance(number, Const)]


@dataclass(frozen=True, slots=True)
class Index:
    """An element of a pointer or an array; at the high level also of an array of registers."""

    type: Type
    base: Expr
    index: Expr


@dataclass(frozen=True, slots=True)
class Member:
    type: Type
    base: Expr
    field: str


@dataclass(frozen=True, slots=True)
class AddressOf:
    type: Type
    a: Expr


Expr: TypeAlias = Const | Var | Unary | Binary | Ternary | Cast | CallExpression | Index | Member | AddressOf

# ---- statements ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Declare:
    """Declaration of a variable of the function. Without a value its content is undefined; an array is zero
    or `values`."""

    name: str
    type: Type
    value: Expr | None
    line: int
    values: tuple[int | float, ...] = ()
    is_const: bool = False


@dataclass(frozen=True, slots=True)
class Assign:
    target: Expr
    value: Expr
    line: int


@dataclass(frozen=True, slots=True)
class Do:
    """A call as a statement, for its effect alone."""

    call: Expr
    line: int


@dataclass(frozen=True, slots=True)
class For:
    """C's `for` loop, at the low level only."""

    start: tuple[Stmt, ...]
    condition: Expr
    update: tuple[Stmt, ...]
    body: tuple[Stmt, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Steps:
    """A named loop: `variable` goes from `start` by `step` while the condition holds, and keeps its last
    value. how: transformations, applied in this order; `unroll` among them expands a loop of known length
    completely."""

    name: str
    variable: str
    type: Type
    start: Expr
    condition: Expr
    step: Expr
    body: tuple[Stmt, ...]
    line: int
    how: tuple[How, ...] = ()


@dataclass(frozen=True, slots=True)
class How:
    """One transformation of a loop, with its number."""

    name: str
    number: Expr


@dataclass(frozen=True, slots=True)
class While:
    condition: Expr
    body: tuple[Stmt, ...]
    line: int
    is_after: bool = False
    """True if the condition is tested after the body."""


@dataclass(frozen=True, slots=True)
class If:
    condition: Expr
    then: tuple[Stmt, ...]
    otherwise: tuple[Stmt, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Return:
    value: Expr | None
    line: int


@dataclass(frozen=True, slots=True)
class Leave:
    """A statement `break` or `continue`."""

    word: str
    line: int


@dataclass(frozen=True, slots=True)
class BlockStatement:
    body: tuple[Stmt, ...]
    line: int


Stmt: TypeAlias = Declare | Assign | Do | For | Steps | While | If | Return | Leave | BlockStatement
Body: TypeAlias = tuple[Stmt, ...]

# ---- functions -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number that a search may choose among values: the first one is the default."""

    name: str
    values: tuple[int, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Argument:
    """The description of one argument: the number and kind of elements that callers pass. Counts are
    expressions over other arguments."""

    name: str
    line: int
    count: Expr | None = None
    numbers: tuple[tuple[str, float], ...] = ()
    """Numbers of the description by name: low and high of values; least, most and multiple of a number."""
    halves: tuple[str, ...] = ()
    """Names of fields that hold float16 bits."""
    is_out: bool = False
    alias: str = ""
    """Name of another buffer that callers may also pass, as a whole, as this argument; empty: none."""


@dataclass(frozen=True, slots=True)
class FunctionDefinition:
    """A kernel; `structs` and `tables` are the ones that it uses."""

    name: str
    args: tuple[tuple[str, Type], ...]
    result: Type
    body: Body
    line: int = 0
    structs: tuple[Struct, ...] = ()
    tables: tuple[Declare, ...] = ()
    helpers: tuple[FunctionDefinition, ...] = ()
    """At the low level: the functions that the kernel calls, callees before callers."""
    parameters: tuple[Parameter, ...] = ()
    described: tuple[Argument, ...] = ()
    reassociate: bool = False
    source_isa: str = ""


def children(node: object) -> list[object]:
    """The expressions, statements and transformations directly in a node, in the order of their fields."""
    parts: list[object] = []
    for field in fields(node):  # type: ignore[arg-type]
        value = getattr(node, field.name)
        if isinstance(value, tuple):
            parts += [item for item in value if isinstance(item, NODES)]
        elif isinstance(value, NODES):
            parts.append(value)
    return parts


EXPRESSIONS = (Const, Var, Unary, Binary, Ternary, Cast, CallExpression, Index, Member, AddressOf)
STATEMENTS = (Declare, Assign, Do, For, Steps, While, If, Return, Leave, BlockStatement)
NODES = (*EXPRESSIONS, *STATEMENTS, How)


def walk(node: object) -> list[object]:
    """A node and everything in it, parents first."""
    nodes, waiting = [], [node]
    while waiting:
        visited = waiting.pop()
        nodes.append(visited)
        waiting += reversed(children(visited))
    return nodes


def walk_body(body: Body) -> list[object]:
    return [node for statement in body for node in walk(statement)]


Node = TypeVar("Node", Expr, Stmt)


class Rewriter:
    """Rebuilds a tree bottom up; a subclass overrides what changes."""

    def expr(self, e: Expr) -> Expr:
        return self.leave(self.inside(e))

    def leave(self, e: Expr) -> Expr:
        """Replace the expression `e`, whose parts have been rewritten before."""
        return e

    def inside(self, e: Expr) -> Expr:
        return self._rebuilt(e)

    def _rebuilt(self, node: Node) -> Node:
        """Rewrite a node's parts; the node itself if none changes."""
        values = {field.name: getattr(node, field.name) for field in fields(node)}
        new = {name: self._value(value) for name, value in values.items()}
        changed = {name: value for name, value in new.items() if value is not values[name]}
        return replace(node, **changed) if changed else node  # type: ignore[arg-type]

    def _value(self, value: object) -> object:
        if isinstance(value, EXPRESSIONS):
            return self.expr(value)
        if isinstance(value, How):
            return replace(value, number=self.expr(value.number))
        if isinstance(value, tuple) and value and isinstance(value[0], STATEMENTS):
            return self.body(value)
        if isinstance(value, tuple) and any(isinstance(item, (*EXPRESSIONS, How)) for item in value):
            new = tuple(self._value(item) for item in value)
            return value if all(a is b for a, b in zip(value, new, strict=True)) else new
        return value

    def body(self, body: Body) -> Body:
        return tuple(new for statement in body for new in self.statement(statement))

    def statement(self, statement: Stmt) -> Body:
        """Replace a statement by none, one or several statements."""
        return (self.statement_inside(statement),)

    def statement_inside(self, statement: Stmt) -> Stmt:
        return self._rebuilt(statement)


class Substitute(Rewriter):
    """Replaces variables by expressions, and renames targets where the replacement is a variable."""

    def __init__(self, by: dict[str, Expr]) -> None:
        self._by = by

    def leave(self, e: Expr) -> Expr:
        return self._by.get(e.name, e) if isinstance(e, Var) else e

    def statement(self, statement: Stmt) -> Body:
        new = self.statement_inside(statement)
        if isinstance(new, Declare | Steps):
            other = self._by.get(new.name if isinstance(new, Declare) else new.variable)
            if isinstance(other, Var) and isinstance(new, Declare):
                new = replace(new, name=other.name)
            elif isinstance(other, Var) and isinstance(new, Steps):
                new = replace(new, variable=other.name)
        return (new,)


class Replace(Rewriter):
    """Replaces one expression by another, wherever it stands."""

    def __init__(self, old: Expr, new: Expr) -> None:
        self._old = old
        self._new = new

    def leave(self, e: Expr) -> Expr:
        return self._new if e == self._old else e


class StatementRewriter(Rewriter):
    """Rebuilds statements, and leaves expressions as they are."""

    def expr(self, e: Expr) -> Expr:
        return e


def assigned(body: Body) -> set[str]:
    """The names of the variables to which a body gives values."""
    names: set[str] = set()
    for node in walk_body(body):
        match node:
            case Declare(name=name):
                names.add(name)
            case Steps(variable=name):
                names.add(name)
            case Assign(target=target):
                while isinstance(target, Index | Member) and not isinstance(target.base.type, PointerLike):
                    target = target.base
                if isinstance(target, Var):
                    names.add(target.name)
    return names


PointerLike = (Pointer, Array)


def is_call(node: object, *names: str) -> TypeGuard[CallExpression]:
    """True if the node is a call of one of these names."""
    return isinstance(node, CallExpression) and node.name in names


def used(part: object) -> set[str]:
    """The names of the variables in a node, or in a body."""
    nodes = walk_body(part) if isinstance(part, tuple) else walk(part)
    return {node.name for node in nodes if isinstance(node, Var)}


def vec(e: Expr) -> Vec:
    """The type of a vector expression."""
    assert isinstance(e.type, Vec)
    return e.type


def integer(value: int, of: Type = I32) -> Const:
    return Const(of, value)


def zero(of: Scalar) -> Const:
    return Const(of, 0.0 if of.is_float else 0)
