"""Inlining of helpers into their callers, at the low level, so that a loop holds all that it does."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from phasewise.ir import nodes as ir
from phasewise.ir.errors import SourceError
from phasewise.ir.types import Pointer

MAX_STATEMENTS = 20_000


def inlined(function: ir.FunctionDefinition, path: str = "") -> ir.FunctionDefinition:
    """The function without calls of helpers. SourceError where a helper returns early or is called where it
    cannot be copied (inside a condition, with statements of its own)."""
    inliner = _Inliner(function, path)
    body = inliner.body(function.body)
    return replace(function, body=body, helpers=(), tables=(*function.tables, *inliner.tables))


class _Inliner(ir.Rewriter):
    def __init__(self, function: ir.FunctionDefinition, path: str) -> None:
        self._path = path
        self._helpers = {helper.name: helper for helper in function.helpers}
        self._taken = (
            {name for name, _ in function.args}
            | ir.assigned(function.body)
            | {t.name for t in function.tables}
        )
        self._before: list[list[ir.Stmt]] = []
        self._closed = 0
        self._n_statements = 0
        self._line = function.line
        self.tables: list[ir.Declare] = []
        for helper in function.helpers:
            self._taken |= {table.name for table in helper.tables}

    def _fresh(self, name: str) -> str:
        for n in count(2):
            unique = f"{name}_{n}"
            if unique not in self._taken:
                self._taken.add(unique)
                return unique
        raise AssertionError

    # ---- statements: what helpers compute comes before the statement that calls them ----

    def statement(self, statement: ir.Stmt) -> ir.Body:
        self._n_statements += 1
        if self._n_statements > MAX_STATEMENTS:
            raise SourceError(
                self._path, statement.line, f"more than {MAX_STATEMENTS} statements when inlined"
            )
        self._line = statement.line
        if (
            isinstance(statement, ir.Declare)
            and statement.is_const
            and isinstance(statement.values, tuple)
            and statement.values
        ):
            self.tables.append(statement)
            return ()
        self._before.append([])
        if isinstance(statement, ir.For | ir.While):
            new = self._loop(statement)
        elif isinstance(statement, ir.Do) and ir.is_call(statement.call, *self._helpers):
            return self._called_alone(statement)
        elif isinstance(statement, ir.If):
            condition = self.expr(statement.condition)
            mine = self._before.pop()
            changed = replace(
                statement,
                condition=condition,
                then=self.body(statement.then),
                otherwise=self.body(statement.otherwise),
            )
            return (*mine, changed)
        elif isinstance(statement, ir.BlockStatement):
            self._before.pop()
            return self.body(statement.body)
        else:
            new = self.statement_inside(statement)
        return (*self._before.pop(), new)

    def _loop(self, loop: ir.For | ir.While) -> ir.Stmt:
        self._closed += 1
        condition = self.expr(loop.condition)
        self._closed -= 1
        if isinstance(loop, ir.While):
            return replace(loop, condition=condition, body=self.body(loop.body))
        return replace(
            loop,
            start=self.body(loop.start),
            condition=condition,
            update=self.body(loop.update),
            body=self.body(loop.body),
        )

    def _called_alone(self, statement: ir.Do) -> ir.Body:
        assert isinstance(statement.call, ir.CallExpression)
        call = statement.call
        args = tuple(self.expr(arg) for arg in call.args)
        mine = self._before.pop()
        copied, _ = self._copy(self._helpers[call.name], args)
        return (*mine, *copied)

    # ---- expressions ----

    def expr(self, e: ir.Expr) -> ir.Expr:
        if isinstance(e, ir.Ternary) or (isinstance(e, ir.Binary) and e.op in ("&&", "||")):
            self._closed += 1
            new = self.inside(e)
            self._closed -= 1
            return new
        return super().expr(e)

    def leave(self, e: ir.Expr) -> ir.Expr:
        if not (ir.is_call(e, *self._helpers)):
            return e
        copied, value = self._copy(self._helpers[e.name], e.args)
        if value is None:
            raise SourceError(self._path, self._line, f"`{e.name}` gives no value")
        if copied:
            if self._closed:
                raise SourceError(
                    self._path,
                    self._line,
                    f"`{e.name}` has statements and is called within a condition; call it before",
                )
            self._before[-1] += copied
        return value

    def _copy(
        self, helper: ir.FunctionDefinition, args: tuple[ir.Expr, ...]
    ) -> tuple[ir.Body, ir.Expr | None]:
        """The helper's statements with names of their own, and its value."""
        by: dict[str, ir.Expr] = {}
        before: list[ir.Stmt] = []
        changed = ir.assigned(helper.body)
        for (name, of), given in zip(helper.args, args, strict=True):
            is_kept = isinstance(given, ir.Var | ir.Const) or self._closed or _is_place(given)
            if name not in changed and is_kept:
                by[name] = given
            else:
                own = ir.Var(of, self._fresh(name))
                before.append(ir.Declare(own.name, of, given, self._line))
                by[name] = own
        for node in ir.walk_body(helper.body):
            if isinstance(node, ir.Declare):
                by[node.name] = ir.Var(node.type, self._fresh(node.name))
        returns = [node for node in ir.walk_body(helper.body) if isinstance(node, ir.Return)]
        last = _last(helper.body)
        if len(returns) > 1 or (returns and returns[0] is not last):
            raise SourceError(
                self._path, helper.line, f"helper `{helper.name}` returns before its end; not in the subset"
            )
        copied = ir.Substitute(by).body(helper.body)
        copied = self.body(_without_last(copied) if returns else copied)
        value: ir.Expr | None = None
        if isinstance(last, ir.Return) and last.value is not None:
            self._before.append([])
            value = self.expr(ir.Substitute(by).expr(last.value))
            copied = (*copied, *self._before.pop())
        return (*before, *copied), value


def _is_place(e: ir.Expr) -> bool:
    """True if an expression is an address that is computed without reading memory."""
    if not isinstance(e.type, Pointer):
        return False
    parts = [node for node in ir.walk(e) if node is not e]
    return all(isinstance(node, ir.Var | ir.Const | ir.Binary | ir.Cast) for node in (e, *parts))


def _last(body: ir.Body) -> ir.Stmt | None:
    last = body[-1] if body else None
    return _last(last.body) if isinstance(last, ir.BlockStatement) else last


def _without_last(body: ir.Body) -> ir.Body:
    last = body[-1]
    if isinstance(last, ir.BlockStatement):
        return (*body[:-1], replace(last, body=_without_last(last.body)))
    return body[:-1]
