"""Lowering of the high level to C for one target, once parameters are chosen and loops transformed.

A vector wider than a register becomes several variables of a register each, a narrower one a smaller
variable. Lanes keep their places, so every target computes the same sums in the same order.

Byte dot products whose pairs cannot overflow become one instruction of VNNI. `dot_i16(dot_u8i8_sat(a, b),
ones)` adds pairs in 16 bits, which saturates, and the results in 32. Where every lane of `a` is known to be
at most 128, no pair leaves 16 bits (2 * 128 * -128 is the least), and `dot_u8i8` gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from phasewise.ir import nodes as ir
from phasewise.ir.c_text import c_type, is_simple, number, signature, struct_text, wrapped
from phasewise.ir.lowering_expressions import LoweredExpressions
from phasewise.ir.operations import call
from phasewise.ir.raising.reductions import without_unused
from phasewise.ir.targets import IsaTarget
from phasewise.ir.types import I32, Array, Scalar, Type, Vec, numbers_of
from phasewise.ir.words import halves, typedef, vec_name

MOST = 128
"""Largest value of a lane for which the sum of two products with bytes fits 16 bits."""


def joined(function: ir.FunctionDefinition) -> ir.FunctionDefinition:
    """Replace dot products by one operation of four products, wherever that changes no bit."""
    body = _Joiner(function).body(function.body)
    return function if body == function.body else without_unused(replace(function, body=body))


class _Joiner(ir.Rewriter):
    def __init__(self, function: ir.FunctionDefinition) -> None:
        nodes = ir.walk_body(function.body)
        targets = [node.target for node in nodes if isinstance(node, ir.Assign)]
        self._changing = {target.name for target in targets if isinstance(target, ir.Var)}
        self._values: dict[str, ir.Expr] = {}
        for node in nodes:
            if isinstance(node, ir.Declare):
                if node.name in self._values or node.value is None:
                    self._changing.add(node.name)
                else:
                    self._values[node.name] = node.value

    def leave(self, e: ir.Expr) -> ir.Expr:
        if not (ir.is_call(e, "dot_i16") and _is_one(self._known(e.args[1]))):
            return e
        pairs = self._known(e.args[0])
        if not isinstance(pairs, ir.CallExpression) or pairs.name != "dot_u8i8_sat":
            return e
        a, b = pairs.args
        is_later = isinstance(e.args[0], ir.Var) and (ir.used(pairs) & self._changing or _reads_memory(pairs))
        if is_later or self._most(a) > MOST:
            return e
        zero = call("splat", (ir.Const(I32, 0),), (ir.vec(e).lanes,))
        return call("dot_u8i8", (zero, a, b))

    def _known(self, e: ir.Expr) -> ir.Expr:
        """The expression that a name stands for, if it has only one value; else the name."""
        while isinstance(e, ir.Var) and e.name in self._values and e.name not in self._changing:
            e = self._values[e.name]
        return e

    def _most(self, e: ir.Expr) -> int:
        """An upper bound for the lanes of a vector of bytes, read without a sign."""
        e = self._known(e)
        match e:
            case ir.CallExpression(name="bits", args=(inner,)) if isinstance(inner.type, Vec):
                return self._most(inner) if inner.type.elem.size == 1 else 255
            case ir.CallExpression(name="splat", args=(ir.Const(value=int(value)),)):
                return value & 255
            case ir.CallExpression(name="abs"):
                return 128
            case ir.CallExpression(name="sign", args=(a, b)) if a == b:
                return 128
            case ir.CallExpression(name="concat", args=(a, b)):
                return max(self._most(a), self._most(b))
            case ir.CallExpression(name="lo" | "hi", args=(a,)):
                return self._most(a)
            case ir.Binary(op="&", a=a, b=b):
                return min(self._most(a), self._most(b))
        return 255


def _reads_memory(e: ir.Expr) -> bool:
    return any(isinstance(node, ir.Index | ir.Member) or (ir.is_call(node, "load")) for node in ir.walk(e))


def _is_one(e: ir.Expr) -> bool:
    match e:
        case ir.CallExpression(name="splat", args=(ir.Const(value=1),)):
            return True
        case ir.CallExpression(name="bits", args=(inner,)) if isinstance(inner.type, Vec):
            return isinstance(e.type, Vec) and inner.type.elem.size == e.type.elem.size and _is_one(inner)
        case ir.CallExpression(name="concat", args=(a, b)):
            return _is_one(a) and _is_one(b)
    return False


@dataclass(frozen=True, slots=True)
class Lowered:
    """C of a function in pieces that can share a file. definitions: types, words and tables by name."""

    name: str
    signature: str
    structs: str
    definitions: Mapping[str, str]
    body: str

    def file(self, target: IsaTarget, header: str = "") -> str:
        """The C of one translation unit."""
        return "\n".join([header + includes(target), self.structs, *self.definitions.values(), self.body, ""])


def includes(target: IsaTarget) -> str:
    return f"#include <math.h>\n#include <stdint.h>\n#include <string.h>\n{own_header(target)}"


def own_header(target: IsaTarget) -> str:
    """The header file in which the target's intrinsics are declared."""
    return {"x86": "#include <immintrin.h>\n", "arm": "#include <arm_neon.h>\n"}.get(target.family, "")


def lower(
    function: ir.FunctionDefinition, target: IsaTarget, name: str | None = None, is_static: bool = False
) -> Lowered:
    """Lower a kernel to C. All its numbers must be known (`reading.read` with a choice,
    `transforms.transformed`)."""
    lowerer = _Lowerer(joined(function) if target.has_vnni else function, target)
    return lowerer.lowered(name or function.name, is_static)


class _Lowerer(LoweredExpressions):
    def __init__(self, function: ir.FunctionDefinition, target: IsaTarget) -> None:
        super().__init__(target, {name for name, _ in function.args})
        self._function = function

    # ---- the function ----

    def lowered(self, name: str, is_static: bool) -> Lowered:
        function = self._function
        self._declare_locals()
        self._body(function.body)
        head = signature(name, function.args, function.result)
        structs = "\n".join(struct_text(struct) for struct in function.structs)
        body = "\n".join([f"{'static ' if is_static else ''}{head} {{", *self._lines, "}"])
        return Lowered(name, head, structs, self._definitions(), body)

    def _definitions(self) -> dict[str, str]:
        words = self._words
        texts = words.by_name
        calls_halves = any("from_f16(a[i])" in text or "to_f16(a[i])" in text for text in texts.values())
        types = sorted(words.types.values(), key=lambda of: (of.size, of.elem.name))
        return {
            **{vec_name(of): typedef(of) for of in types},
            **({"halves": halves(self._target)} if self._is_half_used or calls_halves else {}),
            **{table.name: self._table(table) for table in self._function.tables},
            **self._extra,
            **texts,
        }

    def _table(self, declaration: ir.Declare) -> str:
        of = numbers_of(declaration.type)
        words = [number(value, of) for value in declaration.values]
        lines = [f"    {', '.join(words[i : i + 16])}," for i in range(0, len(words), 16)]
        flat = Array(of, len(words))
        if isinstance(declaration.type, Array) and isinstance(declaration.type.of, Array):
            raise AssertionError("tables have one dimension")
        return "\n".join([f"static const {c_type(flat, declaration.name)} = {{", *lines, "};"])

    def _declare_locals(self) -> None:
        """Declare all variables at the beginning: a loop's variables keep their values after it."""
        seen: set[str] = set(self._names)
        for node in ir.walk_body(self._function.body):
            match node:
                case ir.Declare(name=name, type=of) if name not in seen:
                    seen.add(name)
                    self._declare(name, of)
                case ir.Steps(variable=name, type=of) if name not in seen:
                    seen.add(name)
                    self._line(f"{c_type(of, name)};")

    def _declare(self, name: str, of: Type) -> None:
        if isinstance(of, Vec):
            n = self._n_parts(of)
            word = self._words.type(self._part(of))
            self._line(f"{word} {', '.join(self._part_names(name, n))};")
        elif isinstance(of, Array) and isinstance(of.of, Vec):
            n = self._n_parts(of.of)
            inner = f"[{n}]" if n > 1 else ""
            self._line(f"{self._words.type(self._part(of.of))} {name}[{of.count}]{inner};")
        else:
            self._line(f"{c_type(of, name)};")
        self._names.add(name)

    # ---- statements ----

    def _body(self, body: ir.Body) -> None:
        for statement in body:
            self._statement(statement)

    def _block(self, head: str, body: ir.Body, tail: str = "}") -> None:
        self._line(f"{head} {{")
        self._depth += 1
        self._body(body)
        self._depth -= 1
        self._line(tail)

    def _statement(self, statement: ir.Stmt) -> None:
        match statement:
            case ir.Declare():
                self._initial(statement)
            case ir.Assign(target, value, _):
                self._assign(target, value)
            case ir.Do(what, _):
                assert isinstance(what, ir.CallExpression)
                self._do(what)
            case ir.Steps():
                self._steps(statement)
            case ir.While(condition, body, _):
                self._loop("while ({condition})", "for (;;)", condition, body)
            case ir.If(condition, then, otherwise, _):
                self._block(f"if ({self._scalar(condition)})", then)
                if otherwise:
                    self._lines.pop()
                    self._block("} else", otherwise)
            case ir.Return(value, _):
                self._line("return;" if value is None else f"return {self._scalar(value)};")
            case ir.Leave(word, _):
                self._line(f"{word};")
            case ir.BlockStatement(body, _):
                self._body(body)
            case _:
                raise AssertionError(statement)

    def _initial(self, declaration: ir.Declare) -> None:
        if isinstance(declaration.type, Array):
            if declaration.values and not any(declaration.values):
                self._line(f"memset({declaration.name}, 0, sizeof {declaration.name});")
            elif declaration.values:
                table = f"{declaration.name}_values"
                self._lines.insert(0, "    static const " + self._values(table, declaration))
                self._line(f"memcpy({declaration.name}, {table}, sizeof {declaration.name});")
        elif declaration.value is not None:
            self._assign(ir.Var(declaration.type, declaration.name), declaration.value)

    def _values(self, name: str, declaration: ir.Declare) -> str:
        of = numbers_of(declaration.type)
        values = ", ".join(number(value, of) for value in declaration.values)
        return f"{c_type(Array(of, len(declaration.values)), name)} = {{{values}}};"

    def _assign(self, target: ir.Expr, value: ir.Expr) -> None:
        if isinstance(target.type, Vec):
            parts = self._vector(value)
            places = self._places(target)
            if len(parts) > 1 and isinstance(target, ir.Var):
                of = self._words.type(self._part(target.type))
                parts = [
                    part
                    if is_simple(part) and (part == place or part not in places)
                    else self._temporary(of, part)
                    for part, place in zip(parts, places, strict=True)
                ]
            for place, part in zip(places, parts, strict=True):
                if place != part:
                    self._line(f"{place} = {part};")
            return
        text = self._scalar(value)
        if isinstance(target, ir.Index | ir.Member) and self._is_punned(target):
            assert isinstance(target.type, Scalar)
            self._line(f"{self._store_word(target.type)}({self._address(target)}, {text});")
        else:
            self._line(f"{self._scalar(target)} = {text};")

    def _do(self, what: ir.CallExpression) -> None:
        if what.name == "prefetch":
            self._line(f"__builtin_prefetch({self._scalar(what.args[0])});")
            return
        assert what.name == "store"
        value = what.args[1]
        part = self._part(ir.vec(value))
        parts = self._vector(value)
        place = self._scalar(what.args[0])
        for i, register in enumerate(parts):
            address = f"{wrapped(place)} + {i * part.lanes}" if i else place
            self._line(f"{self._memory_word('store', part)}({address}, {register});")

    def _steps(self, loop: ir.Steps) -> None:
        variable = loop.variable
        start, step = self._scalar(loop.start), self._scalar(loop.step)
        before = "" if start == variable else f"{variable} = {start}"
        after = f"++{variable}" if step == "1" else f"{variable} += {step}"
        plain = f"for ({before}; {{condition}}; {after})"
        self._loop(plain, f"for ({before};; {after})", loop.condition, loop.body)

    def _loop(self, plain: str, endless: str, condition: ir.Expr, body: ir.Body) -> None:
        """Write a loop, as `endless` with the test inside where its condition needs lines of its own."""
        lines, text = self._captured(condition)
        if not lines:
            self._block(plain.format(condition=text), body)
            return
        self._line(f"{endless} {{")
        self._lines += ["    " + line for line in lines]
        self._depth += 1
        self._line(f"if (!({text})) break;")
        self._body(body)
        self._depth -= 1
        self._line("}")
