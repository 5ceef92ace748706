"""Inlining of helpers into their callers, at the low level, so that a loop contains all of its work."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from phasewise.ir import nodes as ir
from phasewise.ir.errors import SourceError
from phasewise.ir.types import VOID, Array, Pointer, pointee

MAX_STATEMENTS = 20_000


def inlined(function: ir.FunctionDefinition, path: str = "") -> ir.FunctionDefinition:
    """Inline all calls of helpers. SourceError for a helper whose early return cannot be rewritten, or whose
    call is where statements cannot be copied to, such as inside a condition."""
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
        """Copy the helper's statements, with new names for its variables, and the expression of its value."""
        helper = self._with_one_return(helper)
        by: dict[str, ir.Expr] = {}
        before: list[ir.Stmt] = []
        changed = ir.assigned(helper.body)
        addressed = {variable.name for given in args if (variable := _address_of(given))}
        for (name, of), given in zip(helper.args, args, strict=True):
            is_kept = isinstance(given, ir.Var | ir.Const) or self._closed or _is_place(given)
            is_kept = _address_of(given) is not None or (is_kept and not ir.used(given) & addressed)
            if name not in changed and is_kept:
                by[name] = given
            else:
                own = ir.Var(of, self._fresh(name))
                before.append(ir.Declare(own.name, of, given, self._line))
                by[name] = own
        for node in ir.walk_body(helper.body):
            if isinstance(node, ir.Declare):
                by[node.name] = ir.Var(node.type, self._fresh(node.name))
        last = _last(helper.body)
        copied = _Dereferenced().body(ir.Substitute(by).body(helper.body))
        copied = self.body(_without_last(copied) if isinstance(last, ir.Return) else copied)
        value: ir.Expr | None = None
        if isinstance(last, ir.Return) and last.value is not None:
            self._before.append([])
            value = self.expr(_Dereferenced().expr(ir.Substitute(by).expr(last.value)))
            copied = (*copied, *self._before.pop())
        return (*before, *copied), value

    def _with_one_return(self, helper: ir.FunctionDefinition) -> ir.FunctionDefinition:
        """Rewrite a helper to return once: early returns assign the value to a variable instead."""
        if all(node is _last(helper.body) for node in _returns(helper.body)):
            return helper
        result = ir.Var(helper.result, f"{helper.name}_result")
        body = _assigned_at_end(helper.body, result)
        if body is None:
            raise SourceError(
                self._path, helper.line, f"helper `{helper.name}` returns before its end; not in the subset"
            )
        if helper.result == VOID:
            return replace(helper, body=body)
        declared = ir.Declare(result.name, result.type, None, helper.line)
        return replace(helper, body=(declared, *body, ir.Return(result, helper.line)))


def _address_of(e: ir.Expr) -> ir.Var | None:
    """The variable whose address the pointer is, also with const added; None for other pointers."""
    while isinstance(e, ir.Cast) and isinstance(e.type, Pointer) and pointee(e.a.type) == e.type.to:
        e = e.a
    is_variable = isinstance(e, ir.AddressOf) and isinstance(e.a, ir.Var) and not isinstance(e.a.type, Array)
    return e.a if is_variable else None  # type: ignore[union-attr, return-value]


class _Dereferenced(ir.Rewriter):
    """Replaces accesses through a pointer by the variable whose address it is."""

    def leave(self, e: ir.Expr) -> ir.Expr:
        variable = _address_of(e.base) if isinstance(e, ir.Index) and _is_zero(e.index) else None
        return e if variable is None else variable


def _is_zero(e: ir.Expr) -> bool:
    return isinstance(e, ir.Const) and e.value == 0


def _returns(part: object) -> list[ir.Return]:
    nodes = ir.walk_body(part) if isinstance(part, tuple) else ir.walk(part)
    return [node for node in nodes if isinstance(node, ir.Return)]


def _assigned_at_end(body: ir.Body, result: ir.Var) -> ir.Body | None:
    """Rewrite a body's returns as assignments to `result`: statements after an `if` that returns move into
    its other branch. None where a loop returns, or where both branches may go on."""
    for index, statement in enumerate(body):
        rest = body[index + 1 :]
        match statement:
            case ir.Return(value, line):
                return (*body[:index], *((ir.Assign(result, value, line),) if value is not None else ()))
            case ir.BlockStatement(inner) if _returns(inner):
                return _assigned_at_end((*body[:index], *inner, *rest), result)
            case ir.If(_, then, otherwise) if _returns((*then, *otherwise)):
                if rest and not _ends(then) and not _ends(otherwise):
                    return None
                branches = [_assigned_at_end((*branch, *rest), result) for branch in (then, otherwise)]
                if branches[0] is None or branches[1] is None:
                    return None
                return (*body[:index], replace(statement, then=branches[0], otherwise=branches[1]))
            case _ if _returns(statement):
                return None
    return body


def _ends(body: ir.Body) -> bool:
    """True if a body always returns."""
    match body[-1] if body else None:
        case ir.Return():
            return True
        case ir.BlockStatement(inner):
            return _ends(inner)
        case ir.If(_, then, otherwise):
            return _ends(then) and _ends(otherwise)
    return False


def _is_place(e: ir.Expr) -> bool:
    """True if an expression is an address computed without reading memory."""
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
