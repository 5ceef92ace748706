"""Loop transformations (unroll, jam, interchange, ..), by the names that the text gives them. Each keeps what
the loop computes.

A loop becomes a main loop of several turns at once and, behind it, a remainder loop: the original one, for
the turns that are left. Sums of floats change their order only under `reassociate()`: else an unrolled loop
adds in turn, and one that cannot is refused.

- unroll(n): n turns in a row. Under `reassociate` each has sums of its own.
- apart(n): n turns in a row, each with sums of its own that are added behind the loop: the order of an author
  who wrote n sums. Of a parameter, only under `reassociate`.
- widen(n): n turns side by side in vectors n times as long.
- split(n): blocks of n turns, as a loop in a loop.
- jam(n): n turns of an outer loop within one turn of its inner loop.
- interchange(): the inner loop outside.
- prefetch(p, bytes): asks for what a turn reads through p, that far ahead.
- pipeline(): the first load of the next turn before the work of this one.

`unroll` and `apart` take words behind the number: "whole" leaves turns that are no whole n to what follows
the loop; "halves" and "in_turn" say how `apart` adds its sums, which otherwise are added in neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from phasewise.ir import nodes as ir
from phasewise.ir.errors import SourceError
from phasewise.ir.loops import (
    SUM_ORDERS,
    WHOLE,
    Accumulator,
    accumulators,
    base_of,
    coefficient,
    later,
    leaves_early,
    loaded,
    moved,
    renamed,
    stored,
    times,
    trip_count,
)
from phasewise.ir.operations import binary, call, cast
from phasewise.ir.types import U8, Pointer, Scalar
from phasewise.ir.widening import widened

MAX_COPIES = 64
_COPYING = ("unroll", "apart", "widen", "jam")


def transformed(function: ir.FunctionDefinition, where: str = "kernel") -> ir.FunctionDefinition:
    """The function with every loop transformed as it says. SourceError where one cannot be, naming its
    line.
    """
    worker = _Transformer(function, where)
    return replace(function, body=worker.body(function.body))


class _Transformer(ir.StatementRewriter):
    def __init__(self, function: ir.FunctionDefinition, where: str) -> None:
        self._where = where
        self._reassociate = function.reassociate
        self._n = 0

    def statement(self, statement: ir.Stmt) -> ir.Body:
        """Transform a statement's outer loop first: what its transformations copy has the inner ones still to
        be transformed."""
        if not isinstance(statement, ir.Steps) or not statement.how:
            return (self.statement_inside(statement),)
        how, loop = statement.how[0], replace(statement, how=statement.how[1:])
        self._n += 1
        before, main, after = _BY_NAME[how.name](self, loop, how)
        return self.body((*before, *(() if main is None else (main,)), *after))

    def refuse(self, loop: ir.Steps, reason: str) -> SourceError:
        return SourceError(self._where, loop.line, f"loop `{loop.name}`: {reason}")

    def count(self, loop: ir.Steps, how: ir.How, index: int = 0) -> int:
        """The number that is an argument of a transformation, 1 or more."""
        value = how.args[index]
        if not isinstance(value, ir.Const) or not isinstance(value.value, int):
            raise self.refuse(loop, f"{how.name} takes a number that is known before the kernel runs")
        if not 0 <= value.value <= (MAX_COPIES if how.name in _COPYING else 1 << 20):
            raise self.refuse(loop, f"{how.name} by {value.value}")
        return value.value

    def split_sums(self, loop: ir.Steps, how: str) -> list[Accumulator]:
        """The sums that may have a second accumulator."""
        sums, _ = accumulators(loop)
        return [accumulator for accumulator in sums if accumulator.is_exact or self._reassociate]

    def suffix(self, copy: int) -> str:
        return f"_{self._n}_{copy}"


Result = tuple[ir.Body, ir.Steps | None, ir.Body]


def _unroll(worker: _Transformer, loop: ir.Steps, how: ir.How) -> Result:
    trips = trip_count(loop)
    n = worker.count(loop, how)
    if n > 1 and trips is not None and trips <= n and WHOLE not in how.args and not leaves_early(loop.body):
        return _expanded(worker, loop, trips), None, ()
    return _in_a_row(worker, loop, how, worker.split_sums(loop, "unroll"))


def _apart(worker: _Transformer, loop: ir.Steps, how: ir.How) -> Result:
    sums, _ = accumulators(loop)
    return _in_a_row(worker, loop, how, sums)


def _in_a_row(worker: _Transformer, loop: ir.Steps, how: ir.How, sums: list[Accumulator]) -> Result:
    """Unroll a loop: one turn does several, each with sums of its own (`sums`)."""
    n = worker.count(loop, how)
    if n <= 1:
        return (), loop, ()
    if leaves_early(loop.body):
        raise worker.refuse(loop, f"{how.name} of a loop that may end within a turn")
    order = next((word for word in SUM_ORDERS if word in how.args), SUM_ORDERS[0])
    before: list[ir.Stmt] = []
    after: list[ir.Stmt] = []
    copies: list[ir.Stmt] = list(loop.body)
    own: dict[int, dict[str, ir.Expr]] = {}
    for copy in range(1, n):
        own[copy] = {
            accumulator.name: ir.Var(accumulator.type, f"{accumulator.name}{worker.suffix(copy)}")
            for accumulator in sums
        }
        for accumulator in sums:
            second = own[copy][accumulator.name]
            assert isinstance(second, ir.Var)
            before.append(
                ir.Declare(
                    second.name,
                    accumulator.type,
                    accumulator.identity(ir.Var(accumulator.type, accumulator.name)),
                    loop.line,
                )
            )
        copied = renamed(loop.body, worker.suffix(copy))
        copied = ir.Substitute({loop.variable: later(loop, copy), **own[copy]}).body(copied)
        copies += copied
    for accumulator in sums:
        parts: list[ir.Expr] = [
            ir.Var(accumulator.type, accumulator.name),
            *(own[copy][accumulator.name] for copy in range(1, n)),
        ]
        after.append(ir.Assign(parts[0], accumulator.total(parts, order), loop.line))
    main = replace(
        loop,
        name=f"{loop.name}_by_{n}",
        condition=moved(loop.condition, loop, n - 1),
        step=times(loop.step, n),
        body=tuple(copies),
    )
    if WHOLE in how.args:
        return tuple(before), main, tuple(after)
    rest = replace(loop, start=ir.Var(loop.type, loop.variable), how=())
    return tuple(before), main, (*after, rest)


def _expanded(worker: _Transformer, loop: ir.Steps, trips: int) -> ir.Body:
    """All turns of a loop of known length as statements, one after another."""
    assert isinstance(loop.start, ir.Const)
    assert isinstance(loop.step, ir.Const)
    statements: list[ir.Stmt] = []
    for turn in range(trips):
        counter = ir.Const(loop.type, int(loop.start.value) + turn * int(loop.step.value))
        body = renamed(loop.body, worker.suffix(turn)) if turn else loop.body
        statements += ir.Substitute({loop.variable: counter}).body(body)
    end = ir.Const(loop.type, int(loop.start.value) + trips * int(loop.step.value))
    return (*statements, ir.Declare(loop.variable, loop.type, end, loop.line))


def _widen(worker: _Transformer, loop: ir.Steps, how: ir.How) -> Result:
    n = worker.count(loop, how)
    if n <= 1:
        return (), loop, ()
    if any(WHOLE in later_one.args for later_one in loop.how):
        raise worker.refuse(loop, 'widen before "whole": it would take turns that are not this loop\'s')
    if n & (n - 1):
        raise worker.refuse(loop, f"widen by {n}: by 2, 4, 8 or 16")
    sums, others = accumulators(loop)
    inexact = [
        accumulator.name for accumulator in sums if not accumulator.is_exact and not worker._reassociate
    ]
    if inexact:
        raise worker.refuse(
            loop, f"widen changes the order of the sum `{inexact[0]}`; add reassociate() to allow it"
        )
    if others:
        raise worker.refuse(loop, f"widen: `{others[0]}` is carried from turn to turn and is no sum")
    try:
        before, main, after = widened(loop, sums, n, worker.suffix(0))
    except ValueError as error:
        raise worker.refuse(loop, f"widen: {error}") from None
    rest = replace(loop, start=ir.Var(loop.type, loop.variable), how=())
    return before, main, (*after, rest)


def _split(worker: _Transformer, loop: ir.Steps, how: ir.How) -> Result:
    n = worker.count(loop, how)
    if n <= 1:
        return (), loop, ()
    outer = f"{loop.variable}{worker.suffix(0)}"
    blocks = ir.Var(loop.type, outer)
    end = binary("+", blocks, times(loop.step, n))
    inside = binary("&&", loop.condition, binary("<", ir.Var(loop.type, loop.variable), end))
    if isinstance(loop.step, ir.Const) and int(loop.step.value) < 0:
        raise worker.refuse(loop, "split of a loop that counts down")
    inner = replace(loop, name=f"{loop.name}_in", start=blocks, condition=inside)
    whole = replace(
        loop,
        name=f"{loop.name}_blocks",
        variable=outer,
        condition=ir.Substitute({loop.variable: blocks}).expr(loop.condition),
        step=times(loop.step, n),
        body=(inner,),
        how=(),
    )
    return (), whole, ()


def _only_loop(worker: _Transformer, loop: ir.Steps, how: str) -> tuple[ir.Body, ir.Steps, ir.Body]:
    """The one loop that a loop holds, with the statements before and after it."""
    places = [i for i, statement in enumerate(loop.body) if isinstance(statement, ir.Steps | ir.While)]
    inner = loop.body[places[0]] if len(places) == 1 else None
    if not isinstance(inner, ir.Steps):
        raise worker.refuse(loop, f"{how} of a loop that does not hold one loop")
    return loop.body[: places[0]], inner, loop.body[places[0] + 1 :]


def _check_independent(worker: _Transformer, loop: ir.Steps, how: str) -> None:
    """Refuse a loop whose turns may not change their order: they carry something, or read what another turn
    writes."""
    own = {node.name for node in ir.walk_body(loop.body) if isinstance(node, ir.Declare)}
    own |= {node.variable for node in ir.walk_body(loop.body) if isinstance(node, ir.Steps)}
    carried = ir.assigned(loop.body) - own - {loop.variable}
    if carried:
        raise worker.refuse(loop, f"{how}: `{min(carried)}` is carried from turn to turn")
    reads = loaded(loop.body)
    changing = ir.assigned(loop.body)
    for base, address in stored(loop.body):
        if not isinstance(address.type, Pointer):
            raise worker.refuse(
                loop, f"{how}: writes to `{base}` where it cannot be seen that turns write apart"
            )
        if not coefficient(address, loop.variable, changing - own):
            raise worker.refuse(loop, f"{how}: turns write to the same place of `{base}`")
        if any(other == base and place != address for other, place in reads):
            raise worker.refuse(loop, f"{how}: a turn may read what another writes to `{base}`")


def _jam(worker: _Transformer, loop: ir.Steps, how: ir.How) -> Result:
    n = worker.count(loop, how)
    if n <= 1:
        return (), loop, ()
    head, inner, tail = _only_loop(worker, loop, "jam")
    _check_independent(worker, loop, "jam")
    if (
        leaves_early(loop.body)
        or ir.used(inner.condition) & {loop.variable}
        or ir.used(inner.start) & {loop.variable}
    ):
        raise worker.refuse(loop, "jam: the inner loop depends on the outer one")
    parts: tuple[list[ir.Stmt], list[ir.Stmt], list[ir.Stmt]] = ([], [], [])
    for copy in range(n):
        by: dict[str, ir.Expr] = {loop.variable: later(loop, copy)}
        for node in ir.walk_body(loop.body):
            if isinstance(node, ir.Declare) and copy:
                by[node.name] = ir.Var(node.type, f"{node.name}{worker.suffix(copy)}")
        for statements, body in zip(parts, (head, inner.body, tail), strict=True):
            statements += ir.Substitute(by).body(body)
    jammed = replace(inner, body=tuple(parts[1]))
    main = replace(
        loop,
        name=f"{loop.name}_jam_{n}",
        condition=moved(loop.condition, loop, n - 1),
        step=times(loop.step, n),
        body=(*parts[0], jammed, *parts[2]),
    )
    return (), main, (replace(loop, start=ir.Var(loop.type, loop.variable), how=()),)


def _interchange(worker: _Transformer, loop: ir.Steps, how: ir.How) -> Result:
    head, inner, tail = _only_loop(worker, loop, "interchange")
    if head or tail:
        raise worker.refuse(loop, "interchange of loops with statements between them")
    _check_independent(worker, loop, "interchange")
    parts = (inner.start, inner.condition, inner.step)
    if any(loop.variable in ir.used(part) for part in parts) or inner.variable in ir.used(loop.condition):
        raise worker.refuse(loop, "interchange: the inner loop depends on the outer one")
    return (), replace(inner, body=(replace(loop, body=inner.body),)), ()


def _prefetch(worker: _Transformer, loop: ir.Steps, how: ir.How) -> Result:
    n_bytes = worker.count(loop, how, 1)
    pointer = how.args[0]
    if n_bytes == 0:
        return (), loop, ()
    name = base_of(pointer) if not isinstance(pointer, str) else pointer
    changing = ir.assigned(loop.body)
    for base, address in loaded(loop.body):
        if base == name and not (ir.used(address) & changing) and isinstance(address.type, Pointer):
            ahead = binary("+", cast(Pointer(U8, True), address), ir.integer(n_bytes))
            return (), replace(loop, body=(ir.Do(call("prefetch", (ahead,)), loop.line), *loop.body)), ()
    raise worker.refuse(
        loop, f"prefetch: nothing is read through `{name}` at a place that the loop's variable gives"
    )


def _pipeline(worker: _Transformer, loop: ir.Steps, how: ir.How) -> Result:
    changing = ir.assigned(loop.body)
    writes = {base for base, _ in stored(loop.body)}
    if leaves_early(loop.body):
        raise worker.refuse(loop, "pipeline of a loop that may end within a turn")
    load = next(
        (
            node
            for node in ir.walk_body(loop.body)
            if ir.is_call(node, "load")
            and loop.variable in ir.used(node)
            and not ir.used(node) & changing
            and base_of(node.args[0]) not in writes
        ),
        None,
    )
    if load is None:
        raise worker.refuse(loop, "pipeline: no load whose place the loop's variable alone gives")
    name = f"next{worker.suffix(0)}"
    current = ir.Var(load.type, f"this{worker.suffix(0)}")
    following = ir.Var(load.type, name)
    first = ir.Substitute({loop.variable: loop.start}).expr(load)
    can_begin = ir.Substitute({loop.variable: loop.start}).expr(loop.condition)
    before: ir.Body = (
        ir.Declare(name, load.type, None, loop.line),
        ir.If(can_begin, (ir.Assign(following, first, loop.line),), (), loop.line),
    )
    body = ir.Replace(load, current).body(loop.body)
    main = replace(
        loop,
        name=f"{loop.name}_ahead",
        condition=moved(loop.condition, loop, 1),
        body=(
            ir.Declare(current.name, load.type, following, loop.line),
            ir.Assign(following, moved(load, loop, 1), loop.line),
            *body,
        ),
    )
    variable = ir.Var(loop.type, loop.variable)
    last = renamed(ir.Replace(load, following).body(loop.body), worker.suffix(1))
    assert isinstance(loop.type, Scalar | Pointer)
    step = ir.Assign(variable, _stepped(variable, loop.step), loop.line)
    return before, main, (ir.If(loop.condition, (*last, step), (), loop.line),)


def _stepped(variable: ir.Var, step: ir.Expr) -> ir.Expr:
    moved_on = binary("+", variable, step)
    return cast(variable.type, moved_on)


_BY_NAME: dict[str, Callable[[_Transformer, ir.Steps, ir.How], Result]] = {
    "unroll": _unroll,
    "apart": _apart,
    "widen": _widen,
    "split": _split,
    "jam": _jam,
    "interchange": _interchange,
    "prefetch": _prefetch,
    "pipeline": _pipeline,
}
