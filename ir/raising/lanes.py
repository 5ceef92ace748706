"""Kernels whose number of lanes is no part of what they compute: the number gets a name.

    for i in steps("loop1", i, (i + LANES) <= n, LANES):
        sum = fma(load(x + i, LANES), load(y + i, LANES), sum)

It is named where any other number computes the same but for the order of sums: all vectors have one
number of lanes; every operation is lane by lane; each load and store moves on with a loop's variable
that steps by that number, stops before it would pass the end, and is continued by a loop of single
turns; what vectors carry from turn to turn are sums that begin with zero, or extremes, and nothing but
their reduction is used behind the loop. Elsewhere numbers stay as they are written.
"""

from __future__ import annotations

from dataclasses import replace

from phasewise.ir.loops import Accumulator, accumulators, coefficient, continued
from phasewise.ir.nodes import (
    Assign,
    Binary,
    Body,
    CallExpression,
    Const,
    Declare,
    Do,
    Expr,
    FunctionDefinition,
    If,
    Parameter,
    Rewriter,
    Steps,
    Stmt,
    Var,
    While,
    assigned,
    integer,
    used_in,
    walk,
    walk_body,
)
from phasewise.ir.operations import OPERATIONS, REDUCTIONS, binary
from phasewise.ir.types import I32, Array, Vec

NAME = "LANES"
REDUCED = {"+": "reduce_add", "max": "reduce_max", "min": "reduce_min"}


def lanes_named(function: FunctionDefinition) -> FunctionDefinition:
    """The function with LANES for its number of lanes, where that is only its author's choice."""
    lanes = _one_number(function)
    taken = used_in(function.body) | assigned(function.body) | {name for name, _ in function.args}
    if lanes is None or NAME in taken or not _is_free(function.body, lanes):
        return function
    return replace(
        function,
        body=_Namer(lanes).body(function.body),
        parameters=(*function.parameters, Parameter(NAME, (lanes,), function.line)),
    )


def _one_number(function: FunctionDefinition) -> int | None:
    """The lanes of all vectors; None: they have several numbers, or operations that move lanes."""
    found: set[int] = set()
    for node in walk_body(function.body):
        of = getattr(node, "type", None)
        if isinstance(of, Vec):
            found.add(of.lanes)
        if isinstance(of, Array) and isinstance(of.of, Vec):
            return None
        if isinstance(node, CallExpression) and any(isinstance(a.type, Vec) for a in (node, *node.args)):
            lanes_stay = OPERATIONS[node.name].is_lanewise or node.name in REDUCTIONS
            if not lanes_stay:
                return None
    return found.pop() if len(found) == 1 and max(found) > 1 else None


def _is_free(body: Body, lanes: int) -> bool:
    """True if every use of vectors in a body holds for any number of lanes."""
    sums: set[str] = set()
    for at, one in enumerate(body):
        if not _has_vectors(one):
            continue
        if isinstance(one, Steps) and any(isinstance(inner, Steps) for inner in one.body):
            own = {node.name for node in walk_body(one.body) if isinstance(node, Declare)}
            if _vectors_given(one.body) - own or not _is_free(one.body, lanes):
                return False
        elif isinstance(one, Steps):
            found = _sums_of(body, at, one, lanes)
            if found is None:
                return False
            sums |= found
        elif isinstance(one, If | While) or not _is_uniform_or_reduced(one, sums):
            return False
    return True


def _has_vectors(one: Stmt) -> bool:
    return any(isinstance(getattr(node, "type", None), Vec) for node in walk(one))


def _vectors_given(body: Body) -> set[str]:
    """Names of vectors that are assigned to."""
    targets = [node.target for node in walk_body(body) if isinstance(node, Assign)]
    return {one.name for one in targets if isinstance(one, Var) and isinstance(one.type, Vec)}


def _is_uniform_or_reduced(one: Stmt, sums: set[str]) -> bool:
    """Outside of loops vectors are the same in all lanes, or are reduced."""
    nodes = walk(one)
    if isinstance(one, Declare) and isinstance(one.type, Vec):
        return one.value is not None and _is_uniform(one.value)
    reduced = [node.args[0] for node in nodes if isinstance(node, CallExpression) and node.name in REDUCTIONS]
    vectors = [node for node in nodes if isinstance(getattr(node, "type", None), Vec)]
    return len(vectors) == len(reduced) and all(isinstance(v, Var) and v.name in sums for v in reduced)


def _is_uniform(e: Expr) -> bool:
    """True if all lanes hold one value, whatever their number."""
    leaves = [node for node in walk(e) if isinstance(getattr(node, "type", None), Vec)]
    return not any(isinstance(node, Var) or getattr(node, "name", "") == "load" for node in leaves)


def _sums_of(body: Body, at: int, loop: Steps, lanes: int) -> set[str] | None:
    """The vectors that a loop adds up, if it does the same with any number of lanes; None: it does not."""
    sums, others = accumulators(loop)
    holds = (
        not others
        and loop.step == integer(lanes)
        and _condition(loop, lanes) is not None
        and continued(body, at) is not None
        and all(_is_vector_statement(one) for one in loop.body)
        and _Places(loop).are_all_neighbours()
        and all(_is_sum(body[:at], body[at + 1 :], one) for one in sums)
    )
    return {one.name for one in sums} if holds else None


def _is_vector_statement(one: Stmt) -> bool:
    match one:
        case Declare(type=Vec()) | Assign(target=Var(type=Vec())):
            return not any(isinstance(n, CallExpression) and n.name in REDUCTIONS for n in walk(one))
        case Do(call=CallExpression(name="store")):
            return True
    return False


class _Places(Rewriter):
    """Takes addresses out of a loop, so that what is left of its variable can be seen."""

    def __init__(self, loop: Steps) -> None:
        self._loop = loop
        self._places: list[Expr] = []

    def are_all_neighbours(self) -> bool:
        """True if the variable gives addresses alone, each of which moves on by one when it does."""
        left = self.body(self._loop.body)
        changing, variable = assigned(self._loop.body), self._loop.variable
        return variable not in used_in(left) and all(
            coefficient(place, variable, changing) == 1 for place in self._places
        )

    def leave(self, e: Expr) -> Expr:
        if isinstance(e, CallExpression) and e.name in ("load", "store"):
            self._places.append(e.args[0])
            return replace(e, args=(integer(0), *e.args[1:]))
        return e


def _is_sum(before: Body, after: Body, one: Accumulator) -> bool:
    """True if more lanes of a sum change nothing: it begins neutral, and only its reduction is used."""
    uses = [node for node in walk_body(before) if isinstance(node, Var | Declare) and node.name == one.name]
    if len(uses) != 1 or not isinstance(uses[0], Declare) or uses[0].value is None:
        return False
    begins = uses[0].value
    is_zero = repr(begins) == repr(one.identity(begins))
    reduced = sum(
        isinstance(node, CallExpression) and node.name == REDUCED[one.op]
        and node.args[0] == Var(one.type, one.name)
        for node in walk_body(after)
    )  # fmt: skip
    mentioned = sum(isinstance(node, Var) and node.name == one.name for node in walk_body(after))
    return is_zero and _is_uniform(begins) and reduced == mentioned and one.name not in assigned(after)


def _condition(loop: Steps, lanes: int) -> Expr | None:
    """The condition with the name of the number of lanes, where it keeps a turn within the end."""
    name = Var(I32, NAME)
    match loop.condition:
        case Binary(op="<=", a=Binary(op="+", a=Var(name=variable) as i, b=Const(value=number))) if (
            variable == loop.variable and number == lanes
        ):
            return replace(loop.condition, a=binary("+", i, name))
        case Binary(op="<", a=Binary(op="+", a=Var(name=variable) as i, b=Const(value=number))) if (
            variable == loop.variable and number == lanes - 1
        ):
            return replace(loop.condition, a=binary("+", i, binary("-", name, integer(1))))
        case Binary(op="<=", a=Var(name=variable), b=Binary(op="-", a=end, b=Const(value=number))) if (
            variable == loop.variable and number == lanes
        ):
            return replace(loop.condition, b=binary("-", end, name))
    return None


class _Namer(Rewriter):
    def __init__(self, lanes: int) -> None:
        self._lanes = lanes

    def leave(self, e: Expr) -> Expr:
        if isinstance(e, CallExpression) and e.name in ("load", "splat") and isinstance(e.type, Vec):
            return replace(e, numbers=(Var(I32, NAME),))
        return e

    def statement_inside(self, statement: Stmt) -> Stmt:
        new = super().statement_inside(statement)
        if isinstance(statement, Steps) and isinstance(new, Steps) and statement.step == integer(self._lanes):
            condition = _condition(statement, self._lanes)
            if condition is not None and any(_has_vectors(one) for one in statement.body):
                return replace(new, condition=condition, step=Var(I32, NAME))
        return new
