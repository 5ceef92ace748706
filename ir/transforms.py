"""Loop transformations (unroll, widen), by the names that the text gives them.

Each keeps what the loop computes.

A loop becomes a main loop of several turns at once and, behind it, a remainder loop: the original one, for
the turns that are left. Sums of floats change their order only under `reassociate()`: else an unrolled loop
adds in turn, and one that cannot is refused.

- unroll(n): n turns in a row. Under `reassociate` each has sums of its own.
- widen(n): n turns side by side in vectors n times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from phasewise.ir import nodes as ir
from phasewise.ir.errors import SourceError
from phasewise.ir.loops import accumulators, later, leaves_early, moved, renamed, times, trip_count
from phasewise.ir.widening import widened

MAX_COPIES = 64


def transformed(function: ir.FunctionDefinition, where: str = "kernel") -> ir.FunctionDefinition:
    """Transform every loop as its text says. SourceError, with the line, for a loop that cannot be."""
    worker = _Transformer(function, where)
    return replace(function, body=worker.body(function.body))


class _Transformer(ir.StatementRewriter):
    def __init__(self, function: ir.FunctionDefinition, where: str) -> None:
        self._where = where
        self.reassociate = function.reassociate
        self._n = 0

    def statement(self, statement: ir.Stmt) -> ir.Body:
        """Transform a statement's outer loop before its inner ones, since its transformations copy the
        untransformed inner loops."""
        if not isinstance(statement, ir.Steps) or not statement.how:
            return (self.statement_inside(statement),)
        how, loop = statement.how[0], replace(statement, how=statement.how[1:])
        self._n += 1
        before, main, after = _BY_NAME[how.name](self, loop, how)
        return self.body((*before, *(() if main is None else (main,)), *after))

    def refuse(self, loop: ir.Steps, reason: str) -> SourceError:
        return SourceError(self._where, loop.line, f"loop `{loop.name}`: {reason}")

    def count(self, loop: ir.Steps, how: ir.How) -> int:
        """The known number of a transformation."""
        value = how.number
        if not isinstance(value, ir.Const) or not isinstance(value.value, int):
            raise self.refuse(loop, f"{how.name} takes a number that is known before the kernel runs")
        if not 0 <= value.value <= MAX_COPIES:
            raise self.refuse(loop, f"{how.name} by {value.value}")
        return value.value

    def suffix(self, copy: int) -> str:
        return f"_{self._n}_{copy}"


Result = tuple[ir.Body, ir.Steps | None, ir.Body]


def _unroll(worker: _Transformer, loop: ir.Steps, how: ir.How) -> Result:
    trips = trip_count(loop)
    n = worker.count(loop, how)
    if n > 1 and trips is not None and trips <= n and not leaves_early(loop.body):
        return _expanded(worker, loop, trips), None, ()
    if n <= 1:
        return (), loop, ()
    if leaves_early(loop.body):
        raise worker.refuse(loop, "unroll of a loop that may end within a turn")
    sums = [each for each in accumulators(loop)[0] if each.is_exact or worker.reassociate]
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
        after.append(ir.Assign(parts[0], accumulator.total(parts), loop.line))
    main = replace(
        loop,
        name=f"{loop.name}_by_{n}",
        condition=moved(loop.condition, loop, n - 1),
        step=times(loop.step, n),
        body=tuple(copies),
    )
    rest = replace(loop, start=ir.Var(loop.type, loop.variable), how=())
    return tuple(before), main, (*after, rest)


def _expanded(worker: _Transformer, loop: ir.Steps, trips: int) -> ir.Body:
    """Write all turns of a loop of known length as statements, one after another."""
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
    if n & (n - 1):
        raise worker.refuse(loop, f"widen by {n}: by 2, 4, 8 or 16")
    sums, others = accumulators(loop)
    inexact = [
        accumulator.name for accumulator in sums if not accumulator.is_exact and not worker.reassociate
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


_BY_NAME: dict[str, Callable[[_Transformer, ir.Steps, ir.How], Result]] = {"unroll": _unroll, "widen": _widen}
