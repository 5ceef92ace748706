"""Facts about a loop that transformations need: values carried to the next turn, movement of addresses."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phasewise.ir import nodes as ir
from phasewise.ir.operations import binary, call, cast
from phasewise.ir.types import Array, Scalar, Type, Vec


@dataclass(frozen=True, slots=True)
class Accumulator:
    """A variable that each turn of a loop only adds to, or takes the minimum or maximum with: turns may be
    computed apart and combined."""

    name: str
    type: Type
    op: str
    """The operator by which the accumulator grows: +, min or max."""

    @property
    def is_exact(self) -> bool:
        """True if the order of turns changes no bit of the result. It changes bits for floats, with min and
        max too, because of NaN and zeros."""
        return not _elem(self.type).is_float

    def identity(self, value: ir.Expr) -> ir.Expr:
        """The first value of a second accumulator. value: the first value of this accumulator."""
        if self.op != "+":
            return value
        elem = _elem(self.type)
        zero = ir.zero(elem)
        return (
            call("splat", (zero,), (ir.Const(_I32, self.type.lanes),)) if isinstance(self.type, Vec) else zero
        )

    def combined(self, a: ir.Expr, b: ir.Expr) -> ir.Expr:
        if self.op == "+":
            return binary("+", a, b)
        return call(self.op, (a, b))

    def total(self, parts: list[ir.Expr]) -> ir.Expr:
        """Combine all partial results to one: neighbours, then neighbours of the results."""
        while len(parts) > 1:
            half = len(parts) // 2
            pairs = [self.combined(parts[2 * i], parts[2 * i + 1]) for i in range(half)]
            parts = pairs + parts[2 * half :]
        return parts[0]


_I32 = Scalar("i32")


def _elem(of: Type) -> Scalar:
    assert isinstance(of, Scalar | Vec)
    return of.elem if isinstance(of, Vec) else of


def accumulators(loop: ir.Steps) -> tuple[list[Accumulator], list[str]]:
    """Find the accumulators of a loop, and the names of all else that it carries from turn to turn."""
    own = {node.name for node in ir.walk_body(loop.body) if isinstance(node, ir.Declare)}
    counted = {node.variable for node in ir.walk_body(loop.body) if isinstance(node, ir.Steps)}
    carried = ir.assigned(loop.body) - own - counted - {loop.variable}
    carried |= {name for name in own if _is_read_first(loop.body, name)}
    sums, others = [], []
    for name in sorted(carried):
        accumulator = _accumulator(loop.body, name)
        if accumulator is None:
            others.append(name)
        else:
            sums.append(accumulator)
    return sums, others


def _is_read_first(body: ir.Body, name: str) -> bool:
    """True if a variable declared without a value may be read before it is set: the last turn's value."""
    for statement in body:
        if isinstance(statement, ir.Declare) and statement.name == name:
            return (
                statement.value is None
                and not isinstance(statement.type, Array)
                and _is_read_before_written(body, name)
            )
    return False


def _is_read_before_written(body: ir.Body, name: str) -> bool:
    for statement in body:
        if (
            isinstance(statement, ir.Assign)
            and isinstance(statement.target, ir.Var)
            and statement.target.name == name
        ):
            return name in ir.used(statement.value)
        if name in {node.name for node in ir.walk(statement) if isinstance(node, ir.Var)}:
            return True
    return False


def _accumulator(body: ir.Body, name: str) -> Accumulator | None:
    """The accumulator of this name in a body, if every assignment does the same one operation on the variable
    and nothing else uses it; else None."""
    ops: set[str] = set()
    of: Type | None = None
    n_uses = 0
    for node in ir.walk_body(body):
        if isinstance(node, ir.Assign) and isinstance(node.target, ir.Var) and node.target.name == name:
            op = _combining(node.value, name)
            if op is None:
                return None
            ops.add(op)
            of = node.target.type
            n_uses += 2
        elif isinstance(node, ir.Steps) and node.variable == name:
            return None
    all_uses = sum(isinstance(node, ir.Var) and node.name == name for node in ir.walk_body(body))
    if of is None or len(ops) != 1 or all_uses != n_uses:
        return None
    op = ops.pop()
    return None if op != "+" and isinstance(of, Scalar) else Accumulator(name, of, op)


def _combining(value: ir.Expr, name: str) -> str | None:
    is_own = ir.Var(value.type, name)
    match value:
        case ir.Binary(op="+", a=a, b=b) if (a == is_own) != (b == is_own):
            return "+"
        case ir.CallExpression(name="fma", args=(_, _, c)) if c == is_own:
            return "+"
        case ir.CallExpression(name="min" | "max" as op, args=(a, b)) if (a == is_own) != (b == is_own):
            return op
        case ir.CallExpression(name="dot_u8i8" | "dot_i8i8", args=(a, _, _)) if a == is_own:
            return "+"
    return None


def coefficient(e: ir.Expr, variable: str, changing: set[str]) -> int | None:
    """The number of elements by which `e` grows when the variable grows by one; None if unknown."""
    match e:
        case ir.Const():
            return 0
        case ir.Var(name=name):
            return 1 if name == variable else None if name in changing else 0
        case ir.Cast(a=a) if isinstance(e.type, Scalar) and isinstance(a.type, Scalar):
            return None if e.type.is_float or a.type.is_float else coefficient(a, variable, changing)
        case ir.Unary(op="-", a=a):
            inner = coefficient(a, variable, changing)
            return None if inner is None else -inner
        case ir.Binary(op="+" | "-" as op, a=a, b=b):
            of_a, of_b = coefficient(a, variable, changing), coefficient(b, variable, changing)
            return None if of_a is None or of_b is None else of_a + of_b if op == "+" else of_a - of_b
        case ir.Binary(op="*", a=a, b=b):
            of_a, of_b = coefficient(a, variable, changing), coefficient(b, variable, changing)
            if of_a == 0 and of_b == 0:
                return 0
            if isinstance(b, ir.Const) and of_a is not None:
                return of_a * int(b.value)
            if isinstance(a, ir.Const) and of_b is not None:
                return of_b * int(a.value)
            return None
    return 0 if not (ir.used(e) & (changing | {variable})) else None


def moved(e: ir.Expr, loop: ir.Steps, turns: int) -> ir.Expr:
    """The expression `e` with the loop's variable some turns later."""
    if not turns:
        return e
    return ir.Substitute({loop.variable: later(loop, turns)}).expr(e)


def later(loop: ir.Steps, turns: int) -> ir.Expr:
    """The loop's variable some turns later, as an expression."""
    variable = ir.Var(loop.type, loop.variable)
    if not turns:
        return variable
    return binary("+", variable, times(loop.step, turns))


def times(step: ir.Expr, n: int) -> ir.Expr:
    """The step taken n times; a constant if the step is constant."""
    if isinstance(step, ir.Const):
        return ir.Const(step.type, int(step.value) * n)
    assert isinstance(step.type, Scalar)
    return step if n == 1 else binary("*", step, cast(step.type, ir.Const(_I32, n)))


def trip_count(loop: ir.Steps) -> int | None:
    """The number of turns of a loop between known numbers; None for any other loop."""
    match loop.condition:
        case ir.Binary(op="<" | "<=" as op, a=ir.Var(name=name), b=ir.Const(value=end)) if (
            name == loop.variable
        ):
            if (
                isinstance(loop.start, ir.Const)
                and isinstance(loop.step, ir.Const)
                and int(loop.step.value) > 0
            ):
                span = int(end) + (op == "<=") - int(loop.start.value)
                return max(0, -(-span // int(loop.step.value)))
    return None


def leaves_early(body: ir.Body) -> bool:
    """True if a turn may end the loop, or skip its rest."""
    for statement in body:
        if isinstance(statement, ir.Leave | ir.Return):
            return True
        if isinstance(statement, ir.Steps | ir.While):
            if any(isinstance(node, ir.Return) for node in ir.walk_body(statement.body)):
                return True
            continue
        parts = [
            getattr(statement, name) for name in ("then", "otherwise", "body") if hasattr(statement, name)
        ]
        if any(leaves_early(part) for part in parts):
            return True
    return False


def renamed(body: ir.Body, suffix: str) -> ir.Body:
    """Copy a body with this suffix on the names of its own variables."""
    by: dict[str, ir.Expr] = {}
    for node in ir.walk_body(body):
        if isinstance(node, ir.Declare):
            by[node.name] = ir.Var(node.type, f"{node.name}{suffix}")
        if isinstance(node, ir.Steps):
            by.setdefault(node.variable, ir.Var(node.type, f"{node.variable}{suffix}"))
    copied = ir.Substitute(by).body(body)
    return _loops_renamed(copied, suffix)


def _loops_renamed(body: ir.Body, suffix: str) -> ir.Body:
    return tuple(
        replace(statement, name=f"{statement.name}{suffix}", body=_loops_renamed(statement.body, suffix))
        if isinstance(statement, ir.Steps)
        else statement
        for statement in body
    )
