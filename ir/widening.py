"""Loop vectorisation (`widen`): several turns side by side, every vector n times as long.

A vector is held as one long vector, or as the n vectors of the turns where it must be taken apart: half
vectors, and short vectors that were read from distant places. Loads and stores of neighbouring places become
one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phasewise.ir import nodes as ir
from phasewise.ir.loops import Accumulator, coefficient, later, leaves_early, moved, times
from phasewise.ir.operations import OPERATIONS, call
from phasewise.ir.types import Scalar, Vec

SMALL_BYTES = 32
"""Bytes below which a vector is kept as one for each turn, as long as all that it meets are."""


@dataclass(frozen=True, slots=True)
class _Turns:
    """The values of one expression in each turn; `is_same`: all turns have the same value."""

    values: tuple[ir.Expr, ...]

    @property
    def is_same(self) -> bool:
        return all(value == self.values[0] for value in self.values)


@dataclass(frozen=True, slots=True)
class _Long:
    value: ir.Expr


def widened(
    loop: ir.Steps, sums: list[Accumulator], n: int, suffix: str
) -> tuple[ir.Body, ir.Steps, ir.Body]:
    """Widen a loop; returns the statements before it, the loop of n turns at once, and the statements after
    it. ValueError with the reason for a loop that cannot be widened."""
    if leaves_early(loop.body):
        raise ValueError("the loop may end within a turn")
    worker = _Widener(loop, sums, n, suffix)
    body = worker.body()
    main = replace(
        loop,
        name=f"{loop.name}_wide_{n}",
        condition=moved(loop.condition, loop, n - 1),
        step=times(loop.step, n),
        body=body,
    )
    return tuple(worker.before), main, tuple(worker.after)


class _Widener:
    def __init__(self, loop: ir.Steps, sums: list[Accumulator], n: int, suffix: str) -> None:
        self._loop = loop
        self._n = n
        self._suffix = suffix
        self._changing = ir.assigned(loop.body)
        self._known: dict[str, _Turns | _Long] = {}
        self._out: list[ir.Stmt] = []
        self.before: list[ir.Stmt] = []
        self.after: list[ir.Stmt] = []
        for accumulator in sums:
            self._sum(accumulator)

    def _sum(self, accumulator: Accumulator) -> None:
        """Widen an accumulator: a vector becomes a longer one, a number becomes one for each turn."""
        own, line = ir.Var(accumulator.type, accumulator.name), self._loop.line
        if isinstance(accumulator.type, Scalar):
            copies = [
                own,
                *(
                    ir.Var(accumulator.type, f"{accumulator.name}{self._suffix}_{i}")
                    for i in range(1, self._n)
                ),
            ]
            for copy in copies[1:]:
                self.before.append(ir.Declare(copy.name, accumulator.type, accumulator.identity(own), line))
            self._known[accumulator.name] = _Turns(tuple(copies))
            total: ir.Expr = own
            for copy in copies[1:]:
                total = accumulator.combined(total, copy)
            self.after.append(ir.Assign(own, total, line))
            return
        begun = [own, *([accumulator.identity(own)] * (self._n - 1))]
        long = _joined(begun)
        name = f"{accumulator.name}{self._suffix}"
        self.before.append(ir.Declare(name, long.type, long, line))
        self._known[accumulator.name] = _Long(ir.Var(long.type, name))
        value: ir.Expr = ir.Var(long.type, name)
        rest = self._n
        while rest > 1:
            value = accumulator.combined(call("lo", (value,)), call("hi", (value,)))
            rest //= 2
        self.after.append(ir.Assign(own, value, line))

    # ---- statements ----

    def body(self) -> ir.Body:
        for statement in self._loop.body:
            self._statement(statement)
        return tuple(self._out)

    def _statement(self, statement: ir.Stmt) -> None:
        match statement:
            case ir.Declare(name=name, type=of, value=value) if value is not None:
                self._new(name, self._value(value), statement.line)
            case ir.Assign(target=ir.Var(name=name), value=value):
                if name not in self._known:
                    raise ValueError(f"`{name}` is assigned to before it has a value")
                self._set(name, self._value(value), statement.line)
            case ir.Assign(target=ir.Index(type=of, base=base, index=index), value=value):
                places = self._turns(self._value(index)).values
                bases = self._turns(self._value(base)).values
                values = self._turns(self._value(value)).values
                for place, from_base, each in zip(places, bases, values, strict=True):
                    self._out.append(ir.Assign(ir.Index(of, from_base, place), each, statement.line))
            case ir.Do(call=ir.CallExpression(name="store", args=(place, value))):
                self._store(place, value, statement.line)
            case ir.Do(call=ir.CallExpression(name="prefetch", args=(place,))):
                self._out.append(ir.Do(call("prefetch", (place,)), statement.line))
            case _:
                raise ValueError("the loop holds another loop, a condition, or memory of its own")

    def _new(self, name: str, value: _Turns | _Long, line: int) -> None:
        if isinstance(value, _Long):
            own = ir.Var(value.value.type, f"{name}{self._suffix}")
            self._out.append(ir.Declare(own.name, own.type, value.value, line))
            self._known[name] = _Long(own)
            return
        if value.is_same and isinstance(value.values[0], ir.Var | ir.Const):
            self._known[name] = value
            return
        copies: list[ir.Expr] = []
        for i, item in enumerate(value.values):
            if value.is_same and i:
                copies.append(copies[0])
                continue
            copy = ir.Var(item.type, f"{name}{self._suffix}_{i}")
            copies.append(copy)
            self._out.append(ir.Declare(copy.name, item.type, item, line))
        self._known[name] = _Turns(tuple(copies))

    def _set(self, name: str, value: _Turns | _Long, line: int) -> None:
        variable = self._known[name]
        if isinstance(variable, _Long):
            self._out.append(ir.Assign(variable.value, self._long(value), line))
            return
        for target, turn_value in zip(variable.values, self._turns(value).values, strict=True):
            if not isinstance(target, ir.Var) or (
                variable.is_same and self._n > 1 and len(set(variable.values)) == 1
            ):
                raise ValueError(f"`{name}` differs from turn to turn and did not before")
            self._out.append(ir.Assign(target, turn_value, line))

    def _store(self, place: ir.Expr, value: ir.Expr, line: int) -> None:
        new = self._value(value)
        places = self._turns(self._value(place)).values
        if self._stride(place) == ir.vec(value).lanes:
            self._out.append(ir.Do(call("store", (places[0], self._long(new))), line))
            return
        for address, turn_value in zip(places, self._turns(new).values, strict=True):
            self._out.append(ir.Do(call("store", (address, turn_value)), line))

    # ---- values ----

    def _stride(self, place: ir.Expr) -> int | None:
        """The number of elements between the places of two turns; None if it is unknown."""
        step = self._loop.step
        by = coefficient(place, self._loop.variable, self._changing)
        return by * int(step.value) if by is not None and isinstance(step, ir.Const) else None

    def _turns(self, value: _Turns | _Long) -> _Turns:
        if isinstance(value, _Turns):
            return value
        return _Turns(tuple(_part(value.value, i, self._n) for i in range(self._n)))

    def _long(self, value: _Turns | _Long) -> ir.Expr:
        return value.value if isinstance(value, _Long) else _joined(list(value.values))

    def _value(self, e: ir.Expr) -> _Turns | _Long:
        if isinstance(e, ir.Var):
            if e.name == self._loop.variable:
                return _Turns(tuple(later(self._loop, i) for i in range(self._n)))
            return self._known.get(e.name, _Turns((e,) * self._n))
        if isinstance(e, ir.Const):
            return _Turns((e,) * self._n)
        if not isinstance(e.type, Vec) or not ir.used(e):
            if isinstance(e.type, Vec) and ir.is_call(e, "splat", "vector"):
                return self._call(e)
            return self._each(e)
        if isinstance(e, ir.CallExpression):
            return self._call(e)
        if isinstance(e, ir.Binary) and e.op in ("<<", ">>"):
            return self._lanewise(e, (e.a,))
        if isinstance(e, ir.Binary):
            return self._lanewise(e, (e.a, e.b))
        if isinstance(e, ir.Unary):
            return self._lanewise(e, (e.a,))
        if isinstance(e, ir.Ternary):
            return self._each(e)
        raise ValueError("an array of vectors")

    def _each(self, e: ir.Expr) -> _Turns:
        """Compute an expression for every turn by itself."""
        values: list[ir.Expr] = []
        for i in range(self._n):
            by: dict[str, ir.Expr] = {}
            for name in ir.used(e):
                if name == self._loop.variable:
                    by[name] = later(self._loop, i)
                elif name in self._known:
                    by[name] = self._turns(self._known[name]).values[i]
            values.append(ir.Substitute(by).expr(e))
        return _Turns(tuple(values))

    def _lanewise(self, e: ir.Expr, operands: tuple[ir.Expr, ...]) -> _Turns | _Long:
        """Apply a lane-by-lane operation to longer vectors."""
        values = [self._value(arg) for arg in operands]
        is_short = all(isinstance(value, _Turns) for value in values) and all(
            isinstance(arg.type, Vec) and arg.type.size < SMALL_BYTES for arg in operands
        )
        if is_short:
            turns = [self._turns(value).values for value in values]
            return _Turns(tuple(_with_operands(e, operands, list(each)) for each in zip(*turns, strict=True)))
        return _Long(_with_operands(e, operands, [self._long(value) for value in values]))

    def _call(self, e: ir.CallExpression) -> _Turns | _Long:
        match e.name:
            case "load":
                return self._load(e)
            case "splat":
                inner = self._turns(self._value(e.args[0])).values
                (lanes,) = e.numbers
                assert isinstance(lanes, ir.Const)
                if all(item == inner[0] for item in inner):
                    return _Long(call("splat", (inner[0],), (int(lanes.value) * self._n,)))
                return _Turns(tuple(call("splat", (item,), e.numbers) for item in inner))
            case "vector":
                return _Long(call("vector", (), e.numbers * self._n, ir.vec(e).elem))
            case name if OPERATIONS[name].moves_lanes:
                return self._each(e)  # each turn's vector by itself
        return self._lanewise(e, e.args)

    def _load(self, e: ir.CallExpression) -> _Turns | _Long:
        places = self._turns(self._value(e.args[0])).values
        if self._stride(e.args[0]) == ir.vec(e).lanes:
            return _Long(call("load", (places[0],), (ir.vec(e).lanes * self._n,)))
        if all(place == places[0] for place in places):
            return _Turns((e,) * self._n)
        return _Turns(tuple(call("load", (place,), e.numbers) for place in places))


def _with_operands(e: ir.Expr, old: tuple[ir.Expr, ...], new: list[ir.Expr]) -> ir.Expr:
    """Apply the operation to other vectors; its result is as long as they are."""
    first_old, first_new = old[0].type, new[0].type
    assert isinstance(first_old, Vec)
    assert isinstance(first_new, Vec)
    of = Vec(ir.vec(e).elem, ir.vec(e).lanes * first_new.lanes // first_old.lanes)
    if isinstance(e, ir.CallExpression):
        return replace(e, type=of, args=tuple(new))
    if isinstance(e, ir.Unary):
        return replace(e, type=of, a=new[0])
    assert isinstance(e, ir.Binary)
    return replace(e, type=of, a=new[0], b=new[1]) if len(new) == 2 else replace(e, type=of, a=new[0])


def _joined(values: list[ir.Expr]) -> ir.Expr:
    if all(value == values[0] for value in values) and ir.is_call(values[0], "splat"):
        (lanes,) = values[0].numbers
        assert isinstance(lanes, ir.Const)
        return call("splat", values[0].args, (int(lanes.value) * len(values),))
    while len(values) > 1:
        values = [call("concat", (values[i], values[i + 1])) for i in range(0, len(values), 2)]
    return values[0]


def _part(e: ir.Expr, index: int, n: int) -> ir.Expr:
    """Take part `index` of a long vector that has n parts."""
    while n > 1:
        n //= 2
        which = "hi" if index >= n else "lo"
        is_joined = ir.is_call(e, "concat")
        e = e.args[which == "hi"] if isinstance(e, ir.CallExpression) and is_joined else call(which, (e,))
        index %= n
    return e
