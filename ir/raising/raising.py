"""Raising of the low level to the high: intrinsics become operations, C's loops become named steps, trees of
additions become reductions. Bits do not change: an intrinsic without an operation of the same meaning is
refused with its line.

`raise_file` gives a C file's function as text, with the descriptions in its comments.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from phasewise.ir import nodes as ir
from phasewise.ir.builders import Intrinsic, pointer_to, target
from phasewise.ir.errors import SourceError
from phasewise.ir.operations import LIBRARY, LIBRARY_F64, Mistyped, as_elem, binary, call, cast, unary
from phasewise.ir.raising.inline import inlined
from phasewise.ir.raising.intrinsics_masks import mask_of
from phasewise.ir.raising.intrinsics_x86 import x86
from phasewise.ir.raising.parse import parse_file
from phasewise.ir.raising.preprocess import read_source
from phasewise.ir.raising.reductions import recognised
from phasewise.ir.reading import read
from phasewise.ir.text import printed
from phasewise.ir.types import BITS, I32, U8, U32, VOID, Array, Pointer, Scalar, Type, Vec, pointee


def raised(function: ir.FunctionDefinition, path: str | Path = "") -> ir.FunctionDefinition:
    """Raise the function to the high level."""
    flat = inlined(function, str(path))
    return recognised(_Raiser(flat, str(path)).function())


class _Raiser:
    def __init__(self, function: ir.FunctionDefinition, path: str) -> None:
        self._low = function
        self._path = path
        self._table = x86()
        self._types: dict[str, Type] = {name: _memory_type(of) for name, of in function.args}
        for table in function.tables:
            self._types[table.name] = table.type
        self._line = function.line
        self._n_loops: dict[str, int] = {}
        self._known: dict[str, ir.Expr] = {}
        """Values of registers that are assigned once, from numbers alone."""
        self._once = _given_once(function.body)
        self._declared: set[str] = {name for name, _ in function.args}

    def function(self) -> ir.FunctionDefinition:
        low = self._low
        body = self._body(low.body)
        return replace(
            low, args=tuple((name, _memory_type(of)) for name, of in low.args), body=body, helpers=()
        )

    def _refuse(self, reason: str) -> SourceError:
        return SourceError(self._path, self._line, reason)

    # ---- statements ----

    def _body(self, body: ir.Body) -> ir.Body:
        return tuple(new for statement in body for new in self._statement(statement))

    def _statement(self, statement: ir.Stmt) -> ir.Body:
        self._line = statement.line
        match statement:
            case ir.Declare():
                return self._declare(statement)
            case ir.Assign(target, value, line):
                return self._assign(target, value, line)
            case ir.Do(what, line):
                return self._do(what, line)
            case ir.For():
                return self._for(statement)
            case ir.While(is_after=True):
                return self._asked_after(statement)
            case ir.While(condition, body, line):
                return (ir.While(self.expr(condition), self._body(body), line),)
            case ir.If(condition, then, otherwise, line):
                test = self.expr(condition)
                if isinstance(test, ir.Const):
                    return self._body(then if test.value else otherwise)
                return (ir.If(test, self._body(then), self._body(otherwise), line),)
            case ir.Return(value, line):
                return (
                    ir.Return(None if value is None else self._as(self.expr(value), self._low.result), line),
                )
            case ir.BlockStatement(body, _):
                return self._body(body)
            case ir.Leave():
                return (statement,)
            case _:
                raise AssertionError(statement)

    def _asked_after(self, loop: ir.While) -> ir.Body:
        """Raise `do .. while` to an endless loop with a `break`: the high level tests before a turn."""
        if _has_continue(loop.body):
            raise self._refuse("`continue` in a `do` loop is not in the subset")
        body, condition = self._body(loop.body), self.expr(loop.condition)
        if isinstance(condition, ir.Const) and not condition.value and not _has_leave(loop.body, "break"):
            return body
        leave = ir.If(unary("!", condition), (ir.Leave("break", loop.line),), (), loop.line)
        return (ir.While(ir.integer(1), (*body, leave), loop.line),)

    def _declare(self, declaration: ir.Declare) -> ir.Body:
        if isinstance(declaration.type, Array):
            array = declaration.type
            if isinstance(array.of, Vec) and array.of.elem == BITS:
                array = Array(Vec(U32, array.of.size // 4), array.count)
            self._types[declaration.name] = array
            return (replace(declaration, type=array),)
        of = _memory_type(declaration.type)
        if declaration.value is None:
            if not (isinstance(of, Vec) and of.elem == BITS):
                self._types[declaration.name] = of
                return (replace(declaration, type=of),)
            return ()  # its type is that of what is first assigned
        value = self.expr(declaration.value)
        value = self._as(value, of) if not (isinstance(of, Vec) and of.elem == BITS) else value
        if isinstance(of, Vec):
            self._remember(declaration.name, value, declaration.is_const)
        self._types[declaration.name] = value.type if isinstance(of, Vec) else of
        return (replace(declaration, type=self._types[declaration.name], value=value),)

    def _remember(self, name: str, value: ir.Expr, is_const: bool) -> None:
        """Remember the value of a register that is assigned once, if it is made of numbers alone."""
        if is_const or name in self._once:
            constant = ir.Substitute(self._known).expr(value)
            if not ir.used(constant):
                self._known[name] = constant

    def _assign(self, target: ir.Expr, value: ir.Expr, line: int) -> ir.Body:
        new = self.expr(value)
        if isinstance(target, ir.Var):
            if target.name not in self._types:
                self._types[target.name] = new.type
                self._remember(target.name, new, is_const=False)
                return (ir.Declare(target.name, new.type, new, line),)
            of = self._types[target.name]
            return (ir.Assign(ir.Var(of, target.name), self._as(new, of), line),)
        place = self.expr(target)
        if ir.is_call(place, "load"):
            return (ir.Do(call("store", (place.args[0], self._as(new, place.type))), line),)
        if not isinstance(place, ir.Index | ir.Member):
            raise self._refuse("assigns to what is no place in memory")
        return (ir.Assign(place, self._as(new, place.type), line),)

    def _do(self, what: ir.Expr, line: int) -> ir.Body:
        if ir.is_call(what, "__clear"):
            array = self.expr(what.args[0])
            assert isinstance(array, ir.Var)
            assert isinstance(array.type, Array)
            element = array.type.of
            if not isinstance(element, Scalar):
                raise self._refuse("memset of other than numbers")
            i = ir.Var(I32, self._fresh_loop_variable())
            zero = ir.zero(element)
            body = (ir.Assign(ir.Index(element, array, i), zero, line),)
            end = binary("<", i, ir.integer(array.type.count))
            return (ir.Steps(self._loop_name(), i.name, I32, ir.integer(0), end, ir.integer(1), body, line),)
        new = self.expr(what)
        if isinstance(new, ir.CallExpression) and new.type == VOID:
            return (ir.Do(new, line),)
        return ()

    def _fresh_loop_variable(self) -> str:
        names = set(self._types) | ir.assigned(self._low.body)
        n = next(n for n in range(1000) if f"at{n}" not in names)
        self._types[f"at{n}"] = I32
        return f"at{n}"

    def _loop_name(self) -> str:
        self._n_loops[""] = self._n_loops.get("", 0) + 1
        return f"loop{self._n_loops['']}"

    # ---- loops ----

    def _for(self, loop: ir.For) -> ir.Body:
        name = self._loop_name()
        before = list(self._body(loop.start))
        condition = loop.condition
        steps = [
            statement
            for statement in loop.update
            if isinstance(statement, ir.Assign) and isinstance(statement.target, ir.Var)
        ]
        counted = [
            assignment
            for assignment in steps
            if assignment.target.name in ir.used(condition)  # type: ignore[union-attr]
            and assignment.target.name not in ir.assigned(loop.body)  # type: ignore[union-attr]
            and _step_of(assignment) is not None
        ]
        if counted and _counts_down_unsigned(counted[0]):  # copies of a turn would ask behind zero
            counted = []
        has_continue = _has_continue(loop.body)
        if len(counted) != 1 or (has_continue and len(loop.update) > 1):
            if has_continue:
                raise self._refuse("`continue` in a loop that is no simple count is not in the subset")
            after = self._body(loop.body) + self._body(loop.update)
            return (*before, ir.While(self.expr(condition), after, loop.line))
        counter = counted[0]
        assert isinstance(counter.target, ir.Var)
        variable = counter.target.name
        step = _step_of(counter)
        assert step is not None
        of = self._types[variable]
        start: ir.Expr = ir.Var(of, variable)
        if before and isinstance(before[-1], ir.Declare | ir.Assign):
            last = before[-1]
            is_own = isinstance(last, ir.Declare) and last.name == variable
            if is_own or (isinstance(last, ir.Assign) and last.target == ir.Var(of, variable)):
                assert last.value is not None
                start = last.value
                before.pop()
                if isinstance(last, ir.Declare):
                    self._types[variable] = of
        others = tuple(statement for statement in loop.update if statement is not counter)
        raised_step = self.expr(step)
        if ir.used(raised_step) & (ir.assigned(loop.body) | {variable}):
            raise self._refuse("the step of a loop changes within it; not in the subset")
        return (
            *before,
            ir.Steps(
                name, variable, of, start, self.expr(condition), raised_step,
                self._body(loop.body) + self._body(others), loop.line,
            ),
        )  # fmt: skip

    # ---- expressions ----

    def _as(self, e: ir.Expr, of: Type) -> ir.Expr:
        """Convert the expression `e` to the type of the place that it is assigned to."""
        of = _memory_type(of)
        if isinstance(of, Vec) and isinstance(e.type, Vec):
            return as_elem(e, e.type.elem if of.elem == BITS else of.elem)
        if e.type == of or isinstance(e.type, Array):
            return e
        return cast(of, e)

    def expr(self, e: ir.Expr) -> ir.Expr:
        try:
            return self._expr(e)
        except Mistyped as error:
            name = f"`{e.name}` " if isinstance(e, ir.CallExpression) else ""
            raise self._refuse(f"{name}{error}") from None

    def _expr(self, e: ir.Expr) -> ir.Expr:
        match e:
            case ir.Const():
                return e
            case ir.Var(_, name):
                if name not in self._types:
                    raise self._refuse(f"`{name}` is used before it has a value")
                return ir.Var(self._types[name], name)
            case ir.Unary(_, op, a):
                return unary(op, self.expr(a))
            case ir.Binary(_, op, a, b):
                return self._binary(op, a, b)
            case ir.Ternary(_, condition, a, b):
                if_true, if_false = self.expr(a), self.expr(b)
                if isinstance(if_true.type, Vec) and isinstance(if_false.type, Vec):
                    if_false = as_elem(if_false, if_true.type.elem)
                return ir.Ternary(if_true.type, self.expr(condition), if_true, if_false)
            case ir.Cast(of, a):
                return self._cast(of, a)
            case ir.Index(of, base, index):
                return self._index(of, base, index)
            case ir.Member(of, base, field):
                return ir.Member(_memory_type(of), self.expr(base), field)
            case ir.AddressOf(_, a):
                inner = self.expr(a)
                if isinstance(inner.type, Array):
                    return inner
                if isinstance(inner, ir.Index):
                    return binary("+", inner.base, inner.index)
                raise self._refuse("the address of a variable is not in the subset, but for memcpy")
            case ir.CallExpression():
                return self._call(e)

    def _binary(self, op: str, a: ir.Expr, b: ir.Expr) -> ir.Expr:
        left, right = self.expr(a), self.expr(b)
        for pointer, other in ((a, 1), (b, 0)):
            scale = _register_scale(pointer.type)
            if scale and op in "+-" and not isinstance((b if other else a).type, Pointer):
                index = right if other else left
                scaled = binary("*", index, ir.integer(scale))
                if isinstance(index, ir.Const):
                    scaled_const = ir.integer(int(index.value) * scale)
                    return binary(op, left, scaled_const) if other else binary(op, scaled_const, right)
                return binary(op, left, scaled) if other else binary(op, scaled, right)
        return binary(op, left, right)

    def _cast(self, of: Type, a: ir.Expr) -> ir.Expr:
        inner = self.expr(a)
        if isinstance(of, Pointer) and isinstance(of.to, Vec):
            if isinstance(inner.type, Pointer) and not isinstance(inner.type.to, Scalar):
                return cast(Pointer(U8, of.is_const), inner)
            scale = _register_scale(of)
            assert scale
            return _bytes(inner, of)
        if isinstance(of, Pointer) and isinstance(inner.type, Pointer) and of.to == inner.type.to:
            return inner if not inner.type.is_const or of.is_const else cast(of, inner)
        return cast(_memory_type(of), inner)

    def _index(self, of: Type, base: ir.Expr, index: ir.Expr) -> ir.Expr:
        if isinstance(of, Vec) and isinstance(base.type, Pointer):
            place = self._binary("+", base, index)
            return self._intrinsic_load(place, of)
        new: ir.Expr = self.expr(base)
        raised_index = self.expr(index)
        if isinstance(new, ir.Binary) and isinstance(new.a.type, Pointer | Array):
            is_sum = new.op == "+" and raised_index == ir.integer(0)
            new, raised_index = (new.a, new.b) if is_sum else (new, raised_index)
        element = _memory_type(of)
        if isinstance(of, Vec) and isinstance(new.type, Array):
            element = new.type.of
        return ir.Index(element, new, raised_index)

    def _intrinsic_load(self, place: ir.Expr, of: Vec) -> ir.Expr:
        p = pointer_to(place, None if of.elem == BITS else of.elem)
        return call("load", (p,), (of.size // target(p).size,))

    def _call(self, e: ir.CallExpression) -> ir.Expr:
        if e.name == "__bits":
            to = _memory_type(e.type)
            assert isinstance(to, Scalar)
            given = self.expr(e.args[0])
            return given if given.type == to else call("bits", (given,), of=to)
        if e.name == "__mask":
            (value,) = e.args
            assert isinstance(value, ir.Const)
            return mask_of(int(value.value), ir.vec(e))
        if e.name.endswith(_BROADCASTS):
            inner = e.args[0]
            while isinstance(inner, ir.Cast):
                inner = inner.a
            if isinstance(inner, ir.AddressOf) and isinstance(e.type, Vec) and inner.a.type == e.type.elem:
                return call("splat", (self.expr(inner.a),), (e.type.lanes,))
        args = tuple(self.expr(arg) for arg in e.args)
        if e.name in LIBRARY or e.name in LIBRARY_F64:
            return call(e.name, args)
        intrinsic = self._table[e.name]
        try:
            operation = self._built(intrinsic, args)
        except (AssertionError, IndexError):
            raise self._refuse(f"`{e.name}` with these arguments is not in the subset") from None
        if (
            isinstance(intrinsic.result, Vec)
            and intrinsic.result.elem != BITS
            and operation.type != intrinsic.result
        ):
            operation = as_elem(operation, intrinsic.result.elem)
        return operation

    def _built(self, intrinsic: Intrinsic, args: tuple[ir.Expr, ...]) -> ir.Expr:
        """Build the operation of an intrinsic; a register made of numbers is replaced by the numbers where
        the intrinsic needs them."""
        try:
            return intrinsic.build(args)
        except Mistyped:
            numbers = tuple(ir.Substitute(self._known).expr(arg) for arg in args)
            if numbers == args:
                raise
            return intrinsic.build(numbers)


_BROADCASTS = ("broadcast_ss", "load1_ps", "load_ps1", "broadcast_sd", "load1_pd")
"""Intrinsics that read one number from an address."""


def _given_once(body: ir.Body) -> set[str]:
    """The names of the variables that are assigned in one place only."""
    counts: Counter[str] = Counter()
    for node in ir.walk_body(body):
        if isinstance(node, ir.Declare) and node.value is not None:
            counts[node.name] += 1
        elif isinstance(node, ir.Assign) and isinstance(node.target, ir.Var):
            counts[node.target.name] += 1
    return {name for name, count in counts.items() if count == 1}


def _memory_type(of: Type) -> Type:
    """The raised type of a pointer or array; pointers to registers, and to void, become pointers to bytes."""
    if isinstance(of, Pointer) and isinstance(of.to, Vec):
        return Pointer(U8 if of.to.elem == BITS else of.to.elem, of.is_const)
    if isinstance(of, Pointer) and of.to == VOID:
        return Pointer(U8, of.is_const)
    return of


def _register_scale(of: Type) -> int:
    """Elements of the raised pointer in a register that it points to; 0 for pointers to no registers."""
    if not (isinstance(of, Pointer) and isinstance(of.to, Vec)):
        return 0
    return of.to.size if of.to.elem == BITS else of.to.lanes


def _bytes(e: ir.Expr, of: Pointer) -> ir.Expr:
    """Make a pointer to registers a pointer to numbers: to bytes where arithmetic may follow."""
    assert isinstance(of.to, Vec)
    elem = U8 if of.to.elem == BITS else of.to.elem
    given = pointee(e.type)
    if isinstance(given, Scalar) and (given.size == 1 or given == elem):
        return e
    return cast(Pointer(elem, of.is_const or (isinstance(e.type, Pointer) and e.type.is_const)), e)


def _step_of(assignment: ir.Assign) -> ir.Expr | None:
    """The step of `i = i + step`; of `i = i - step`, its negative."""
    value = assignment.value
    while isinstance(value, ir.Cast):
        value = value.a
    if not isinstance(value, ir.Binary) or value.op not in "+-" or not isinstance(assignment.target, ir.Var):
        return None
    if value.a != assignment.target or not isinstance(value.type, Scalar | Pointer):
        return None
    if value.op == "+":
        return value.b
    return ir.Const(value.b.type, -value.b.value) if isinstance(value.b, ir.Const) else None


def _counts_down_unsigned(assignment: ir.Assign) -> bool:
    of, step = assignment.target.type, _step_of(assignment)
    is_less = isinstance(step, ir.Const) and step.value < 0
    return is_less and isinstance(of, Scalar) and not of.is_signed


def _has_continue(body: ir.Body) -> bool:
    """True if a `continue` belongs to this loop, not to one within it."""
    return _has_leave(body, "continue")


def _has_leave(body: ir.Body, word: str) -> bool:
    for statement in body:
        match statement:
            case ir.Leave(word=own) if own == word:
                return True
            case ir.If(then=then, otherwise=otherwise):
                if _has_leave(then, word) or _has_leave(otherwise, word):
                    return True
            case ir.BlockStatement(body=inner):
                if _has_leave(inner, word):
                    return True
    return False


_DESCRIBED = re.compile(
    r"^[ \t]*(?://|\*|/\*+)?[ \t]*@arg[ \t]+(\w+)[ \t]*(.*?)(?:\*/)?[ \t]*$", re.MULTILINE
)


def raise_file(
    path: Path,
    function: str,
    isa: str | None = None,
    include: Sequence[Path] = (),
    define: Sequence[str] = (),
    reassociate: bool = False,
) -> str:
    """Raise a C file's function to text of the high level, with `reassociate()` if asked for. A comment line
    `@arg x count=n low=-1 high=1` becomes a `describe` line of argument `x`. SourceError for a function
    outside the subset."""
    kernel = raised(parse_file(path, function, isa, include, define), path)
    read_back = read(_with_descriptions(printed(kernel), read_source(path)), str(path))
    return printed(replace(read_back, reassociate=reassociate))


def _with_descriptions(text: str, source: str) -> str:
    lines = text.splitlines()
    def_index = next(i for i, line in enumerate(lines) if line.startswith("def "))
    names = set(re.findall(r"(\w+): ", lines[def_index]))
    described = {
        name: f'    describe("{name}", {", ".join(words.split())})'
        for name, words in _DESCRIBED.findall(source)
        if name in names
    }
    return "\n".join([*lines[: def_index + 1], *described.values(), *lines[def_index + 1 :]]) + "\n"
