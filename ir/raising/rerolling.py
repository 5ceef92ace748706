"""Loop rerolling: loops that an author unrolled by hand become one turn, and `unroll` or `apart` behind it.

    for (; i + 16 <= n; i += 16) {                      for i in steps("loop1", i, (i + 8) <= n, 8, apart(2)):
        s0 = fma(load(x + i), load(y + i), s0);    ->       s0 = fma(load(x + i, 8), load(y + i, 8), s0)
        s1 = fma(load(x + i + 8), .., s1);
    }
    s0 = s0 + s1;

The transformation gives back the statements that the author wrote, so that every bit stays: a loop is
rolled up only where each copy is the first one at a later index, with names of its own; where its sums
begin with zero; and where they are added in an order that `apart` has. Copies whose statements were
written side by side come one after another, which changes nothing because they write nothing. A loop of
single turns behind the unrolled one that does the same is what the transformation leaves behind its main
loop, and is not written twice.

Two pieces of a kernel are compared up to a step of an index and the names of variables. Addresses are
compared as sums: what they begin with, how far each variable moves them, and a number. Whole numbers are
summed so only where C's arithmetic cannot wrap around (signed, where that has no meaning, and 64 bits, which
pointers have).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from phasewise.ir import nodes as ir
from phasewise.ir.loops import SUM_ORDERS, WHOLE, Accumulator, accumulators, continued, leaves_early
from phasewise.ir.operations import binary
from phasewise.ir.transforms import MAX_COPIES
from phasewise.ir.types import I32, I64, U64, Array, Pointer, Scalar, Struct, Type

Key: TypeAlias = Hashable
SUMMED = (I32, I64, U64)


@dataclass(frozen=True)
class View:
    """One of two sides of a comparison: names that stand for others, and a variable that is ahead."""

    names: Mapping[str, str] = field(default_factory=dict)
    variable: str = ""
    ahead: int = 0

    def key(self, e: ir.Expr) -> Key:
        """A key that is equal for two expressions of one value, as far as can be seen."""
        if _is_summed(e.type):
            return ("sum", e.type, *self._frozen(e))
        return self._whole(e)

    def statement(self, statement: ir.Stmt) -> Key:
        """A key of a statement; None where it is of a kind that is not compared."""
        match statement:
            case ir.Declare(name=name, type=of, value=value, values=()) if not isinstance(of, Array):
                given = None if value is None else self.key(value)
                return ("declare", of, self.names.get(name, name), given)
            case ir.Assign(target=target, value=value):
                return ("assign", self.key(target), self.key(value))
            case ir.Do(call=call):
                return ("do", self.key(call))
        return None

    def sum_of(self, e: ir.Expr) -> tuple[dict[Key, int], int]:
        """A sum as its terms with their factors, and the number that is left; of a pointer in bytes."""
        match e:
            case ir.Const(value=int(value)):
                return {}, value
            case ir.Var(name=name) if name == self.variable:
                return {("variable", e.type, name): 1}, self.ahead
            case ir.Binary(op="+" | "-" as op, a=a, b=b) if _is_summed(e.type):
                return self._added(e, op, a, b)
            case (
                ir.Binary(op="*", a=a, b=ir.Const(value=int(by)))
                | ir.Binary(op="*", a=ir.Const(value=int(by)), b=a)
            ) if _is_summed(a.type):
                return _scaled(self.sum_of(a), by)
            case ir.Unary(op="-", a=a) if _is_summed(a.type):
                return _scaled(self.sum_of(a), -1)
            case ir.Cast(a=a) if isinstance(e.type, Pointer) and isinstance(a.type, Pointer | Array):
                return self.sum_of(a)
            case ir.Cast(a=a) if a.type == I32 and e.type in SUMMED:
                return self.sum_of(a)
            case ir.Index() | ir.Member() if isinstance(e.type, Array | Struct):
                return self._place(e)
        return {self._whole(e): 1}, 0

    def _whole(self, e: ir.Expr) -> Key:
        """A key of a term that is no sum of others."""
        match e:
            case ir.Const(of, value):
                return ("number", of, repr(value))
            case ir.Var(of, name):
                return ("variable", of, self.names.get(name, name))
            case ir.Binary(of, op, a, b):
                return ("binary", of, op, self.key(a), self.key(b))
            case ir.Unary(of, op, a):
                return ("unary", of, op, self.key(a))
            case ir.Cast(of, a):
                return ("cast", of, self.key(a))
            case ir.Index() | ir.Member():
                return ("element", e.type, *self._frozen_place(e))
            case ir.Ternary(of, condition, a, b):
                return ("choice", of, self.key(condition), self.key(a), self.key(b))
            case ir.CallExpression(of, name, args, numbers):
                return ("call", of, name, *map(self.key, args), "numbers", *map(self.key, numbers))
        return ("other", repr(e))

    def _added(self, e: ir.Expr, op: str, a: ir.Expr, b: ir.Expr) -> tuple[dict[Key, int], int]:
        left, right = self.sum_of(a), self.sum_of(b)
        if isinstance(a.type, Pointer | Array) and isinstance(b.type, Pointer | Array):
            return {("binary", op, self.key(a), self.key(b)): 1}, 0
        if isinstance(e.type, Pointer):
            size = e.type.to.size
            left = left if isinstance(a.type, Pointer | Array) else _scaled(left, size)
            right = right if isinstance(b.type, Pointer | Array) else _scaled(right, size)
        return _plus(left, _scaled(right, 1 if op == "+" else -1))

    def _place(self, e: ir.Expr) -> tuple[dict[Key, int], int]:
        """A key of the address of an element or a field."""
        match e:
            case ir.Index(of, base, index):
                inner = self._place(base) if isinstance(base, ir.Index | ir.Member) else self.sum_of(base)
                offset = self.sum_of(index) if _is_summed(index.type) else ({self.key(index): 1}, 0)
                return _plus(inner, _scaled(offset, of.size))
            case ir.Member(_, base, name):
                assert isinstance(base.type, Struct)
                inner = (
                    self._place(base) if isinstance(base, ir.Index | ir.Member) else ({self.key(base): 1}, 0)
                )
                return _plus(inner, ({}, base.type.offset(name)))
        raise AssertionError(e)

    def _frozen(self, e: ir.Expr) -> tuple[Key, Key]:
        terms, number = self.sum_of(e)
        return frozenset(item for item in terms.items() if item[1]), number

    def _frozen_place(self, e: ir.Expr) -> tuple[Key, Key]:
        terms, number = self._place(e)
        return frozenset(item for item in terms.items() if item[1]), number


def _is_summed(of: Type) -> bool:
    return isinstance(of, Pointer | Array) or (isinstance(of, Scalar) and of in SUMMED)


def _scaled(linear: tuple[dict[Key, int], int], by: int) -> tuple[dict[Key, int], int]:
    return {term: factor * by for term, factor in linear[0].items()}, linear[1] * by


def _plus(a: tuple[dict[Key, int], int], b: tuple[dict[Key, int], int]) -> tuple[dict[Key, int], int]:
    terms = dict(a[0])
    for term, factor in b[0].items():
        terms[term] = terms.get(term, 0) + factor
    return terms, a[1] + b[1]


def rolled(function: ir.FunctionDefinition) -> ir.FunctionDefinition:
    """The function with a loop of one turn for each loop that holds several alike turns."""
    return replace(function, body=_Roller(function.body).body(function.body))


def without_whole(function: ir.FunctionDefinition) -> ir.FunctionDefinition:
    """The function with loops that take every turn they can, where the loop of the rest goes on at whatever
    index they leave; for texts whose sums may change their order."""
    return replace(function, body=_Loosener().body(function.body))


class _Roller(ir.StatementRewriter):
    def __init__(self, whole: ir.Body) -> None:
        self._whole = whole

    def body(self, body: ir.Body) -> ir.Body:
        statements = tuple(new for statement in body for new in self.statement(statement))
        index = 0
        while index < len(statements):
            statement = statements[index]
            if isinstance(statement, ir.Steps) and not statement.how:
                statements = _rolled_at(statements, index, statement, self._whole) or statements
            index += 1
        return statements


class _Loosener(ir.StatementRewriter):
    def body(self, body: ir.Body) -> ir.Body:
        statements = list(super().body(body))
        for index, statement in enumerate(statements):
            if isinstance(statement, ir.Steps) and continued(tuple(statements), index) is not None:
                how = tuple(replace(h, args=tuple(a for a in h.args if a != WHOLE)) for h in statement.how)
                statements[index] = replace(statement, how=how)
        return tuple(statements)


def _rolled_at(body: ir.Body, index: int, loop: ir.Steps, whole: ir.Body) -> ir.Body | None:
    """The body with a loop in it rolled up; None: it is not several turns alike."""
    if not isinstance(loop.step, ir.Const) or loop.type not in SUMMED or leaves_early(loop.body):
        return None
    if not all(isinstance(statement, ir.Declare | ir.Assign | ir.Do) for statement in loop.body):
        return None
    step, n_statements = int(loop.step.value), len(loop.body)
    most = min(math.gcd(step, n_statements), MAX_COPIES) if step > 0 else 0
    for n in range(most, 1, -1):
        if n_statements % n or step % n:
            continue
        condition = _condition_of_one(loop, (n - 1) * (step // n))
        for copies in (_one_after_another(loop.body, n), _side_by_side(loop.body, n)):
            turns = _turns(loop, copies, step // n) if condition and copies else None
            if condition and turns:
                one_turn = replace(
                    loop, condition=condition, step=ir.integer(step // n, loop.step.type), body=copies[0]
                )
                rolled_up = _in_one(body, index, one_turn, turns, n, whole)
                if rolled_up:
                    return rolled_up
    return None


def _one_after_another(body: ir.Body, n: int) -> list[ir.Body]:
    size = len(body) // n
    return [body[i * size : (i + 1) * size] for i in range(n)]


def _side_by_side(body: ir.Body, n: int) -> list[ir.Body]:
    """The n copies in a body where their statements stand side by side.

    Empty for a body that writes, since copies would write in another order.
    """
    return [] if any(isinstance(statement, ir.Do) for statement in body) else [body[i::n] for i in range(n)]


@dataclass(frozen=True)
class _Turns:
    """The first turn's names for the variables of each copy of an unrolled loop."""

    carried: dict[str, tuple[str, ...]]

    @property
    def is_apart(self) -> bool:
        return any(len(set(names)) > 1 for names in self.carried.values())


def _turns(loop: ir.Steps, copies: Sequence[ir.Body], step: int) -> _Turns | None:
    """The correspondence of the copies of a turn; None where a copy is not the first one at a later index."""
    first = copies[0]
    names = [_targets(copy) for copy in copies]
    maps: list[dict[str, str]] = []
    for number, copy in enumerate(copies):
        if len(names[number]) != len(names[0]):
            return None
        by = dict(zip(names[0], names[number], strict=True))
        is_map = all(by[a] == b for a, b in zip(names[0], names[number], strict=True))
        if not is_map or len(set(by.values())) != len(by):
            return None
        there, here = View(by, loop.variable, number * step), View({}, loop.variable)
        for a, b in zip(first, copy, strict=True):
            key = there.statement(a)
            if key is None or key != here.statement(b):
                return None
        maps.append(by)
    own = {statement.name for statement in first if isinstance(statement, ir.Declare)}
    carried = {name: tuple(by[name] for by in maps) for name in names[0] if name not in own}
    if any(1 < len(set(many)) < len(many) for many in carried.values()):
        return None
    turns = _Turns(carried)
    if turns.is_apart and any(len(set(many)) == 1 for many in carried.values()):
        return None
    stays_in_order = turns.is_apart or not carried or list(copies[0]) == list(loop.body[: len(copies[0])])
    return turns if stays_in_order else None


def _targets(body: ir.Body) -> list[str]:
    """The variables that get a value, in the order of the statements."""
    names = []
    for statement in body:
        if isinstance(statement, ir.Declare):
            names.append(statement.name)
        elif isinstance(statement, ir.Assign) and isinstance(statement.target, ir.Var):
            names.append(statement.target.name)
    return names


def _condition_of_one(loop: ir.Steps, ahead: int) -> ir.Expr | None:
    """A condition that tests for one turn where the loop's tests for all: the same one `ahead` later."""
    match loop.condition:
        case ir.Binary(op="<" | "<=", a=a, b=b) if isinstance(a.type, Scalar) and isinstance(b.type, Scalar):
            terms, number = View({}, loop.variable).sum_of(a)
            moving = [(key, by) for key, by in terms.items() if by]
            is_plain = len(moving) == 1 and moving[0] == (("variable", loop.type, loop.variable), 1)
            if not is_plain or ir.used(b) & (ir.assigned(loop.body) | {loop.variable}):
                return None
            variable = ir.Var(loop.type, loop.variable)
            if number >= ahead:
                left: ir.Expr = (
                    variable if number == ahead else binary("+", variable, ir.integer(number - ahead))
                )
                return replace(loop.condition, a=left)
            match b:
                case ir.Binary(op="-", a=end, b=ir.Const(value=int(less))) if (
                    loop.type.is_signed and b.type == loop.type and number == 0 and less >= ahead  # type: ignore[union-attr]
                ):
                    right = end if less == ahead else binary("-", end, ir.integer(less - ahead))
                    return replace(loop.condition, b=right)
    return None


def _in_one(
    body: ir.Body, index: int, loop: ir.Steps, turns: _Turns, n: int, whole: ir.Body
) -> ir.Body | None:
    """The body with a loop of one turn in place of a loop of n turns."""
    before, after = body[:index], body[index + 1 :]
    words: tuple[str, ...] = ()
    if turns.is_apart:
        combined = _sums_apart(before, loop, after, turns)
        if combined is None:
            return None
        before, after, order = combined
        words = () if order == SUM_ORDERS[0] else (order,)
    if after and _is_rest(loop, after[0]):
        after = after[1:]
    else:
        words = (WHOLE, *words)
    how = ir.How("apart" if turns.is_apart else "unroll", (ir.integer(n), *words))
    rolled_up = (*before, replace(loop, how=(how,)), *after)
    removed = {name for names in turns.carried.values() for name in names[1:]} - set(turns.carried)
    is_all_here = _mentions(whole, removed) == _mentions(body, removed)
    return rolled_up if is_all_here and not _mentions(rolled_up, removed) else None


def _mentions(body: ir.Body, names: set[str]) -> int:
    return sum(isinstance(node, ir.Var | ir.Declare) and node.name in names for node in ir.walk_body(body))


def _sums_apart(
    before: ir.Body, loop: ir.Steps, after: ir.Body, turns: _Turns
) -> tuple[ir.Body, ir.Body, str] | None:
    """The statements before and behind the loop without the copies of its sums, and the order in which these
    are added up."""
    sums, others = accumulators(loop)
    if others or {each.name for each in sums} != set(turns.carried):
        return None
    orders = set()
    for each in sums:
        copies = turns.carried[each.name]
        begun, ended = _without_beginnings(before, each, copies), _without_ending(after, each, copies)
        if begun is None or ended is None:
            return None
        before, (after, order) = begun, ended
        orders.add(order)
    return (before, after, orders.pop()) if len(orders) == 1 else None


def _without_beginnings(before: ir.Body, each: Accumulator, copies: Sequence[str]) -> ir.Body | None:
    """The statements before a loop without the first values of a sum's copies; None where a copy does not
    begin with what `apart` lets it begin with."""
    values = {statement.name: statement.value for statement in before if isinstance(statement, ir.Declare)}
    first = values.get(each.name)
    own = each.identity(ir.Var(each.type, each.name))
    if own == ir.Var(each.type, each.name):  # of min and max: with what the first one begins with
        is_plain = first is not None and not ir.used(first) and _mentions(before, {each.name}) == 1
        if first is None or not is_plain:
            return None
        own = first
    if any(repr(values.get(name)) != repr(own) for name in copies[1:]):
        return None
    removed = set(copies[1:])
    left = tuple(
        statement
        for statement in before
        if not (isinstance(statement, ir.Declare) and statement.name in removed)
    )
    return left if not _mentions(left, removed) else None


def _without_ending(after: ir.Body, each: Accumulator, copies: Sequence[str]) -> tuple[ir.Body, str] | None:
    """The statements behind the loop, with the first sum in place of the total of all, and the order of that
    total."""
    names = set(copies)
    index = next((i for i, statement in enumerate(after) if _mentions((statement,), names)), None)
    if index is None:
        return None
    parts: list[ir.Expr] = [ir.Var(each.type, name) for name in copies]
    totals = {order: each.total(parts, order) for order in reversed(SUM_ORDERS)}
    by_tree = {repr(tree): order for order, tree in totals.items()}
    first = ir.Var(each.type, each.name)
    total, end = _added_up(after, index, each, names)
    order = by_tree.get(repr(total))
    if order is not None:
        return (*after[:index], *after[end:]), order
    for order in SUM_ORDERS:
        if isinstance(after[index], ir.Steps | ir.While | ir.If):
            return None
        (new,) = ir.Replace(totals[order], first).body((after[index],))
        if new == after[index]:
            continue
        rest = after[index + 1 :]
        is_copy = isinstance(new, ir.Declare) and new.value == first and new.type == first.type
        if isinstance(new, ir.Declare) and is_copy and not _mentions(rest, {first.name}):
            return (*after[:index], *ir.Substitute({new.name: first}).body(rest)), order
        return (*after[:index], new, *rest), order
    return None


def _added_up(after: ir.Body, index: int, each: Accumulator, names: set[str]) -> tuple[ir.Expr | None, int]:
    """The value of the first sum after statements that add sums to sums, and where these end."""
    sums: dict[str, ir.Expr] = {name: ir.Var(each.type, name) for name in names}
    while index < len(after):
        match after[index]:
            case ir.Assign(target=ir.Var(name=name), value=value) if name in names and _is_total(
                value, each, names
            ):
                sums[name] = ir.Substitute(sums).expr(value)
            case _:
                break
        index += 1
    return sums[each.name], index


def _is_total(e: ir.Expr, each: Accumulator, names: set[str]) -> bool:
    match e:
        case ir.Var(name=name):
            return name in names
        case ir.Binary(op="+", a=a, b=b) if each.op == "+":
            return _is_total(a, each, names) and _is_total(b, each, names)
        case ir.CallExpression(name=name, args=(a, b)) if name == each.op:
            return _is_total(a, each, names) and _is_total(b, each, names)
    return False


def _is_rest(loop: ir.Steps, other: ir.Stmt) -> bool:
    """True if a loop takes the turns that another one leaves."""
    if not isinstance(other, ir.Steps) or other.how or len(other.body) != len(loop.body):
        return False
    mine, theirs = _targets(loop.body), _targets(other.body)
    if len(mine) != len(theirs) or (loop.variable, loop.type) != (other.variable, other.type):
        return False
    own = {each.name for each in loop.body if isinstance(each, ir.Declare)}
    there = View({a: b for a, b in zip(mine, theirs, strict=True) if a in own}, loop.variable)
    here = View({}, loop.variable)
    return (
        other.start == ir.Var(loop.type, loop.variable)
        and other.step == loop.step
        and there.key(loop.condition) == here.key(other.condition)
        and all(
            there.statement(a) is not None and there.statement(a) == here.statement(b)
            for a, b in zip(loop.body, other.body, strict=True)
        )
    )
