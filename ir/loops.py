"""Questions of transformations about a loop: what it carries from one turn to the next, how addresses move,
what it touches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phasewise.ir.nodes import (
    Assign,
    Binary,
    Body,
    CallExpression,
    Cast,
    Const,
    Declare,
    Do,
    Expr,
    Index,
    Leave,
    Member,
    Return,
    Steps,
    Substitute,
    Unary,
    Var,
    While,
    assigned,
    used,
    walk,
    walk_body,
)
from phasewise.ir.operations import binary, call, cast
from phasewise.ir.types import Array, Pointer, Scalar, Type, Vec

WHOLE = "whole"
"""Word of `unroll` and `apart`: turns that fill no group of n are not the loop's."""
SUM_ORDERS = ("pairs", "halves", "in_turn")
"""The order in which sums of turns are added: neighbours; the upper half upon the lower; one after
another.
"""


@dataclass(frozen=True, slots=True)
class Accumulator:
    """A variable that a loop only adds to, or raises: its turns may be computed apart and combined."""

    name: str
    type: Type
    op: str
    """+, min or max."""

    @property
    def is_exact(self) -> bool:
        """True if the order of turns changes no bit. Of floats min and max are not, for NaN and zeros."""
        return not _elem(self.type).is_float

    def identity(self, value: Expr) -> Expr:
        """The first value of a second accumulator; `value`: the first one's."""
        if self.op != "+":
            return value
        elem = _elem(self.type)
        zero = Const(elem, 0.0 if elem.is_float else 0)
        return call("splat", (zero,), (Const(_I32, self.type.lanes),)) if isinstance(self.type, Vec) else zero

    def combined(self, a: Expr, b: Expr) -> Expr:
        if self.op == "+":
            return binary("+", a, b)
        return call(self.op, (a, b))

    def total(self, parts: list[Expr], order: str) -> Expr:
        """All of them as one, in an order of SUM_ORDERS."""
        while len(parts) > 1:
            half = len(parts) // 2
            if order == "in_turn":
                parts = [self.combined(parts[0], parts[1]), *parts[2:]]
            elif order == "halves" and len(parts) % 2 == 0:
                parts = [self.combined(parts[i], parts[i + half]) for i in range(half)]
            else:
                pairs = [self.combined(parts[2 * i], parts[2 * i + 1]) for i in range(half)]
                parts = pairs + parts[2 * half :]
        return parts[0]


_I32 = Scalar("i32")


def _elem(of: Type) -> Scalar:
    assert isinstance(of, Scalar | Vec)
    return of.elem if isinstance(of, Vec) else of


def accumulators(loop: Steps) -> tuple[list[Accumulator], list[str]]:
    """Those of a loop, and the names of what else it carries from turn to turn."""
    own = {node.name for node in walk_body(loop.body) if isinstance(node, Declare)}
    counted = {node.variable for node in walk_body(loop.body) if isinstance(node, Steps)}
    carried = assigned(loop.body) - own - counted - {loop.variable}
    carried |= {name for name in own if _is_read_first(loop.body, name)}
    found, others = [], []
    for name in sorted(carried):
        one = _accumulator(loop.body, name)
        if one is None:
            others.append(name)
        else:
            found.append(one)
    return found, others


def _is_read_first(body: Body, name: str) -> bool:
    """True if a variable that a body declares without a value may still have one of the turn before."""
    for one in body:
        if isinstance(one, Declare) and one.name == name:
            return (
                one.value is None and not isinstance(one.type, Array) and _is_read_before_written(body, name)
            )
    return False


def _is_read_before_written(body: Body, name: str) -> bool:
    for one in body:
        if isinstance(one, Assign) and isinstance(one.target, Var) and one.target.name == name:
            return name in used(one.value)
        if name in {node.name for node in walk(one) if isinstance(node, Var)}:
            return True
    return False


def _accumulator(body: Body, name: str) -> Accumulator | None:
    """One operation on it for each assignment, all the same, and no other use."""
    ops: set[str] = set()
    of: Type | None = None
    n_uses = 0
    for node in walk_body(body):
        if isinstance(node, Assign) and isinstance(node.target, Var) and node.target.name == name:
            op = _combining(node.value, name)
            if op is None:
                return None
            ops.add(op)
            of = node.target.type
            n_uses += 2
        elif isinstance(node, Steps) and node.variable == name:
            return None
    all_uses = sum(isinstance(node, Var) and node.name == name for node in walk_body(body))
    if of is None or len(ops) != 1 or all_uses != n_uses:
        return None
    op = ops.pop()
    return None if op != "+" and isinstance(of, Scalar) else Accumulator(name, of, op)


def _combining(value: Expr, name: str) -> str | None:
    is_own = Var(value.type, name)
    match value:
        case Binary(op="+", a=a, b=b) if (a == is_own) != (b == is_own):
            return "+"
        case CallExpression(name="fma", args=(_, _, c)) if c == is_own:
            return "+"
        case CallExpression(name="min" | "max" as op, args=(a, b)) if (a == is_own) != (b == is_own):
            return op
        case CallExpression(name="dot_u8i8" | "dot_i8i8", args=(a, _, _)) if a == is_own:
            return "+"
    return None


def coefficient(e: Expr, variable: str, changing: set[str]) -> int | None:
    """By how many (elements, for a pointer) `e` grows when the variable grows by one. None: not by a known
    number.
    """
    match e:
        case Const():
            return 0
        case Var(name=name):
            return 1 if name == variable else None if name in changing else 0
        case Cast(a=a) if isinstance(e.type, Scalar) and isinstance(a.type, Scalar):
            return None if e.type.is_float or a.type.is_float else coefficient(a, variable, changing)
        case Unary(op="-", a=a):
            inner = coefficient(a, variable, changing)
            return None if inner is None else -inner
        case Binary(op="+" | "-" as op, a=a, b=b):
            one, other = coefficient(a, variable, changing), coefficient(b, variable, changing)
            return None if one is None or other is None else one + other if op == "+" else one - other
        case Binary(op="*", a=a, b=b):
            one, other = coefficient(a, variable, changing), coefficient(b, variable, changing)
            if one == 0 and other == 0:
                return 0
            if isinstance(b, Const) and one is not None:
                return one * int(b.value)
            if isinstance(a, Const) and other is not None:
                return other * int(a.value)
            return None
    return 0 if not (used(e) & (changing | {variable})) else None


def moved(e: Expr, loop: Steps, turns: int) -> Expr:
    """`e` some turns later."""
    if not turns:
        return e
    return Substitute({loop.variable: later(loop, turns)}).expr(e)


def later(loop: Steps, turns: int) -> Expr:
    """The loop's variable some turns later."""
    variable = Var(loop.type, loop.variable)
    if not turns:
        return variable
    return binary("+", variable, times(loop.step, turns))


def times(step: Expr, n: int) -> Expr:
    """A step, several times; a number if it is one."""
    if isinstance(step, Const):
        return Const(step.type, int(step.value) * n)
    assert isinstance(step.type, Scalar)
    return step if n == 1 else binary("*", step, cast(step.type, Const(_I32, n)))


def trip_count(loop: Steps) -> int | None:
    """The number of turns of a loop between known numbers."""
    match loop.condition:
        case Binary(op="<" | "<=" as op, a=Var(name=name), b=Const(value=end)) if name == loop.variable:
            if isinstance(loop.start, Const) and isinstance(loop.step, Const) and int(loop.step.value) > 0:
                span = int(end) + (op == "<=") - int(loop.start.value)
                return max(0, -(-span // int(loop.step.value)))
    return None


def continued(body: Body, at: int) -> Steps | None:
    """The remainder loop: single turns from where a loop stops to the same end; None: there is none."""
    loop = body[at]
    assert isinstance(loop, Steps)
    for one in body[at + 1 :]:
        if isinstance(one, Steps) and one.start == Var(loop.type, loop.variable):
            match loop.condition, one.condition:
                case Binary(op="<" | "<=", b=end), Binary(op="<", a=Var(name=name), b=other):
                    is_next = end == other and name == one.variable and not used(end) & assigned(body[at:])
                    return one if is_next and one.step == Const(one.step.type, 1) else None
            return None
        if loop.variable in assigned((one,)):
            return None
    return None


def leaves_early(body: Body) -> bool:
    """True if a turn may end the loop, or skip its rest."""
    for one in body:
        if isinstance(one, Leave | Return):
            return True
        if isinstance(one, Steps | While):
            if any(isinstance(node, Return) for node in walk_body(one.body)):
                return True
            continue
        parts = [getattr(one, name) for name in ("then", "otherwise", "body") if hasattr(one, name)]
        if any(leaves_early(part) for part in parts):
            return True
    return False


def base_of(p: Expr) -> str | None:
    """The pointer or array that an address begins with."""
    while True:
        match p:
            case Var(name=name):
                return name
            case Binary(a=a, b=b):
                p = a if isinstance(a.type, Pointer | Array) else b
            case Cast(a=a) | Index(base=a) | Member(base=a):
                p = a
            case _:
                return None


def loaded(body: Body) -> list[tuple[str | None, Expr]]:
    """Addresses that are read, with what they begin with."""
    found: list[tuple[str | None, Expr]] = []
    for node in walk_body(body):
        if isinstance(node, CallExpression) and node.name == "load":
            found.append((base_of(node.args[0]), node.args[0]))
        elif (
            isinstance(node, Index)
            and isinstance(node.base.type, Pointer | Array)
            and isinstance(node.type, Scalar)
        ):
            found.append((base_of(node.base), binary("+", node.base, node.index)))
    return found


def stored(body: Body) -> list[tuple[str | None, Expr]]:
    """Addresses that are written."""
    found: list[tuple[str | None, Expr]] = []
    for node in walk_body(body):
        if isinstance(node, Do) and isinstance(node.call, CallExpression) and node.call.name == "store":
            found.append((base_of(node.call.args[0]), node.call.args[0]))
        elif isinstance(node, Assign) and isinstance(node.target, Index | Member):
            found.append((base_of(node.target), node.target))
    return found


def renamed(body: Body, suffix: str, keep: set[str] = frozenset()) -> Body:  # type: ignore[assignment]
    """A copy whose own variables have names of their own."""
    by: dict[str, Expr] = {}
    for node in walk_body(body):
        if isinstance(node, Declare) and node.name not in keep:
            by[node.name] = Var(node.type, f"{node.name}{suffix}")
        if isinstance(node, Steps) and node.variable not in keep:
            by.setdefault(node.variable, Var(node.type, f"{node.variable}{suffix}"))
    copied = Substitute(by).body(body)
    return _loops_renamed(copied, suffix)


def _loops_renamed(body: Body, suffix: str) -> Body:
    return tuple(
        replace(one, name=f"{one.name}{suffix}", body=_loops_renamed(one.body, suffix))
        if isinstance(one, Steps)
        else one
        for one in body
    )
