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

from phasewise.ir import nodes as ir
from phasewise.ir.loops import Accumulator, accumulators, coefficient, continued
from phasewise.ir.operations import OPERATIONS, REDUCTIONS, binary
from phasewise.ir.types import I32, Array, Vec

NAME = "LANES"
REDUCED = {"+": "reduce_add", "max": "reduce_max", "min": "reduce_min"}


def lanes_named(function: ir.FunctionDefinition) -> ir.FunctionDefinition:
    """The function with LANES for its number of lanes, where that is only its author's choice."""
    lanes = _one_number(function)
    taken = ir.used(function.body) | ir.assigned(function.body) | {name for name, _ in function.args}
    if lanes is None or NAME in taken or not _is_free(function.body, lanes):
        return function
    return replace(
        function,
        body=_Namer(lanes).body(function.body),
        parameters=(*function.parameters, ir.Parameter(NAME, (lanes,), function.line)),
    )


def _one_number(function: ir.FunctionDefinition) -> int | None:
    """The number of lanes of all vectors; None: they have several numbers, or operations that move lanes."""
    numbers: set[int] = set()
    for node in ir.walk_body(function.body):
        of = getattr(node, "type", None)
        if isinstance(of, Vec):
            numbers.add(of.lanes)
        if isinstance(of, Array) and isinstance(of.of, Vec):
            return None
        if isinstance(node, ir.CallExpression) and any(isinstance(a.type, Vec) for a in (node, *node.args)):
            lanes_stay = OPERATIONS[node.name].is_lanewise or node.name in REDUCTIONS
            if not lanes_stay:
                return None
    return numbers.pop() if len(numbers) == 1 and max(numbers) > 1 else None


def _is_free(body: ir.Body, lanes: int) -> bool:
    """True if every use of vectors in a body holds for any number of lanes."""
    sums: set[str] = set()
    for index, statement in enumerate(body):
        if not _has_vectors(statement):
            continue
        if isinstance(statement, ir.Steps) and any(isinstance(inner, ir.Steps) for inner in statement.body):
            own = {node.name for node in ir.walk_body(statement.body) if isinstance(node, ir.Declare)}
            if _vectors_given(statement.body) - own or not _is_free(statement.body, lanes):
                return False
        elif isinstance(statement, ir.Steps):
            loop_sums = _sums_of(body, index, statement, lanes)
            if loop_sums is None:
                return False
            sums |= loop_sums
        elif isinstance(statement, ir.If | ir.While) or not _is_uniform_or_reduced(statement, sums):
            return False
    return True


def _has_vectors(statement: ir.Stmt) -> bool:
    return any(isinstance(getattr(node, "type", None), Vec) for node in ir.walk(statement))


def _vectors_given(body: ir.Body) -> set[str]:
    """The names of the vectors that a body assigns to."""
    targets = [node.target for node in ir.walk_body(body) if isinstance(node, ir.Assign)]
    return {target.name for target in targets if isinstance(target, ir.Var) and isinstance(target.type, Vec)}


def _is_uniform_or_reduced(statement: ir.Stmt, sums: set[str]) -> bool:
    """True if vectors in a statement outside of loops are the same in all lanes, or are reduced."""
    nodes = ir.walk(statement)
    if isinstance(statement, ir.Declare) and isinstance(statement.type, Vec):
        return statement.value is not None and _is_uniform(statement.value)
    reduced = [node.args[0] for node in nodes if ir.is_call(node, *REDUCTIONS)]
    vectors = [node for node in nodes if isinstance(getattr(node, "type", None), Vec)]
    return len(vectors) == len(reduced) and all(isinstance(v, ir.Var) and v.name in sums for v in reduced)


def _is_uniform(e: ir.Expr) -> bool:
    """True if all lanes hold one value, whatever their number."""
    leaves = [node for node in ir.walk(e) if isinstance(getattr(node, "type", None), Vec)]
    return not any(isinstance(node, ir.Var) or getattr(node, "name", "") == "load" for node in leaves)


def _sums_of(body: ir.Body, index: int, loop: ir.Steps, lanes: int) -> set[str] | None:
    """The vectors that a loop adds up, if it does the same with any number of lanes; None: it does not."""
    sums, others = accumulators(loop)
    holds = (
        not others
        and loop.step == ir.integer(lanes)
        and _condition(loop, lanes) is not None
        and continued(body, index) is not None
        and all(_is_vector_statement(statement) for statement in loop.body)
        and _Places(loop).are_all_neighbours()
        and all(_is_sum(body[:index], body[index + 1 :], accumulator) for accumulator in sums)
    )
    return {accumulator.name for accumulator in sums} if holds else None


def _is_vector_statement(statement: ir.Stmt) -> bool:
    match statement:
        case ir.Declare(type=Vec()) | ir.Assign(target=ir.Var(type=Vec())):
            return not any(ir.is_call(n, *REDUCTIONS) for n in ir.walk(statement))
        case ir.Do(call=ir.CallExpression(name="store")):
            return True
    return False


class _Places(ir.Rewriter):
    """Removes addresses from a loop, so that the remaining uses of its variable can be seen."""

    def __init__(self, loop: ir.Steps) -> None:
        self._loop = loop
        self._places: list[ir.Expr] = []

    def are_all_neighbours(self) -> bool:
        """True if the variable gives addresses alone, each of which moves on by one when it does."""
        left = self.body(self._loop.body)
        changing, variable = ir.assigned(self._loop.body), self._loop.variable
        return variable not in ir.used(left) and all(
            coefficient(place, variable, changing) == 1 for place in self._places
        )

    def leave(self, e: ir.Expr) -> ir.Expr:
        if ir.is_call(e, "load", "store"):
            self._places.append(e.args[0])
            return replace(e, args=(ir.integer(0), *e.args[1:]))
        return e


def _is_sum(before: ir.Body, after: ir.Body, accumulator: Accumulator) -> bool:
    """True if more lanes of a sum change nothing: it begins neutral, and only its reduction is used."""
    uses = [
        node
        for node in ir.walk_body(before)
        if isinstance(node, ir.Var | ir.Declare) and node.name == accumulator.name
    ]
    if len(uses) != 1 or not isinstance(uses[0], ir.Declare) or uses[0].value is None:
        return False
    begins = uses[0].value
    is_zero = repr(begins) == repr(accumulator.identity(begins))
    reduced = sum(
        ir.is_call(node, REDUCED[accumulator.op])
        and node.args[0] == ir.Var(accumulator.type, accumulator.name)
        for node in ir.walk_body(after)
    )  # fmt: skip
    mentioned = sum(
        isinstance(node, ir.Var) and node.name == accumulator.name for node in ir.walk_body(after)
    )
    return (
        is_zero
        and _is_uniform(begins)
        and reduced == mentioned
        and accumulator.name not in ir.assigned(after)
    )


def _condition(loop: ir.Steps, lanes: int) -> ir.Expr | None:
    """The loop's condition with the name of the number of lanes, where it keeps a turn within the end."""
    name = ir.Var(I32, NAME)
    match loop.condition:
        case ir.Binary(
            op="<=", a=ir.Binary(op="+", a=ir.Var(name=variable) as i, b=ir.Const(value=number))
        ) if variable == loop.variable and number == lanes:
            return replace(loop.condition, a=binary("+", i, name))
        case ir.Binary(
            op="<", a=ir.Binary(op="+", a=ir.Var(name=variable) as i, b=ir.Const(value=number))
        ) if variable == loop.variable and number == lanes - 1:
            return replace(loop.condition, a=binary("+", i, binary("-", name, ir.integer(1))))
        case ir.Binary(
            op="<=", a=ir.Var(name=variable), b=ir.Binary(op="-", a=end, b=ir.Const(value=number))
        ) if variable == loop.variable and number == lanes:
            return replace(loop.condition, b=binary("-", end, name))
    return None


class _Namer(ir.Rewriter):
    def __init__(self, lanes: int) -> None:
        self._lanes = lanes

    def leave(self, e: ir.Expr) -> ir.Expr:
        if ir.is_call(e, "load", "splat") and isinstance(e.type, Vec):
            return replace(e, numbers=(ir.Var(I32, NAME),))
        return e

    def statement_inside(self, statement: ir.Stmt) -> ir.Stmt:
        new = super().statement_inside(statement)
        if (
            isinstance(statement, ir.Steps)
            and isinstance(new, ir.Steps)
            and statement.step == ir.integer(self._lanes)
        ):
            condition = _condition(statement, self._lanes)
            if condition is not None and any(
                _has_vectors(inner_statement) for inner_statement in statement.body
            ):
                return replace(new, condition=condition, step=ir.Var(I32, NAME))
        return new
