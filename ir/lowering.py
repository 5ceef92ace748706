"""The high level, its parameters chosen and its loops transformed, as C for one target.

A vector wider than a register becomes several variables of a register each, a narrower one a smaller
variable. Lanes keep their places, so every target computes the same sums in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from phasewise.ir.joining import joined
from phasewise.ir.nodes import (
    AddressOf,
    Assign,
    Binary,
    BlockStatement,
    Body,
    CallExpression,
    Cast,
    Const,
    Declare,
    Do,
    Expr,
    FunctionDefinition,
    If,
    Index,
    Leave,
    Member,
    Return,
    Steps,
    Stmt,
    Ternary,
    Unary,
    Var,
    While,
    walk_body,
)
from phasewise.ir.operations import COMPARISONS, LIBRARY, LOGICAL, ORDERS, REDUCTIONS, decayed
from phasewise.ir.targets import IsaTarget
from phasewise.ir.types import F32, Array, Pointer, Scalar, Struct, Type, Vec, Void, common, promoted
from phasewise.ir.words import C_NAMES, Word, Words, halves, typedef, vec_name

Parts: TypeAlias = list[str]
"""The C expressions of a vector's registers, the lowest lanes first."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """C in pieces, so that several functions may share a file. `definitions` are types, words and tables by
    name.
    """

    name: str
    signature: str
    structs: str
    definitions: Mapping[str, str]
    body: str

    def file(self, target: IsaTarget, header: str = "") -> str:
        """One translation unit."""
        return "\n".join([header + includes(target), self.structs, *self.definitions.values(), self.body, ""])


def includes(target: IsaTarget) -> str:
    own = {"x86": "#include <immintrin.h>\n", "arm": "#include <arm_neon.h>\n"}.get(target.family, "")
    return f"#include <math.h>\n#include <stdint.h>\n#include <string.h>\n{own}"


def lower(
    function: FunctionDefinition, target: IsaTarget, name: str | None = None, is_static: bool = False
) -> Lowered:
    """C of a kernel whose numbers are all known (reading.read with a choice, transforms.transformed)."""
    lowerer = _Lowerer(joined(function) if target.has_vnni else function, target)
    return lowerer.lowered(name or function.name, is_static)


def c_type(of: Type, name: str = "") -> str:
    """A declaration of `name`, without register types."""
    match of:
        case Scalar(word):
            return f"{C_NAMES[word]} {name}".rstrip()
        case Pointer(to, is_const):
            const = "const " if is_const else ""
            return f"{const}{c_type(to)} *{name}"
        case Array(element, count):
            return c_type(element, f"{name}[{count}]")
        case Struct(word):
            return f"{word} {name}".rstrip()
        case Void():
            return f"void {name}".rstrip()
        case Vec():
            raise AssertionError("a register in a declaration of memory")


def struct_text(of: Struct) -> str:
    fields = " ".join(f"{c_type(field, name)};" for name, field in of.fields)
    return f"typedef struct {{ {fields} }} {of.name};"


def number(value: int | float, of: Scalar) -> str:
    """A constant in C."""
    if of.is_float:
        suffix = "f" if of == F32 else ""
        if math.isnan(value):
            return f'__builtin_nan{suffix}("")'
        if math.isinf(value):
            return f"{'-' if value < 0 else ''}__builtin_inf{suffix}()"
        value = float(value)
        text = value.hex() if value != int(value) or abs(value) > 1e9 else f"{value:.1f}"
        return f"({text}{suffix})" if value < 0 or text.startswith("-") else f"{text}{suffix}"
    value = int(value)
    if of.name == "i32":
        return f"({value})" if value < 0 and value != -(2**31) else "INT32_MIN" if value < 0 else str(value)
    if of.name == "u32":
        return f"{value}u"
    if of.size == 8:
        return (
            f"UINT64_C({value})"
            if not of.is_signed
            else "INT64_MIN"
            if value == -(2**63)
            else f"INT64_C({value})"
        )
    return f"({C_NAMES[of.name]}){value}"


class _Lowerer:
    def __init__(self, function: FunctionDefinition, target: IsaTarget) -> None:
        self._function = function
        self._target = target
        self._words = Words(target)
        self._lines: list[str] = []
        self._depth = 1
        self._n_temporaries = 0
        self._names = {name for name, _ in function.args}
        self._extra: dict[str, str] = {}
        self._is_half_used = False

    # ---- the function ----

    def lowered(self, name: str, is_static: bool) -> Lowered:
        function = self._function
        self._declare_locals()
        self._body(function.body)
        args = ", ".join(c_type(of, arg) for arg, of in function.args) or "void"
        signature = f"{c_type(function.result)} {name}({args})".replace("* ", "*")
        structs = "\n".join(struct_text(one) for one in function.structs)
        body = "\n".join([f"{'static ' if is_static else ''}{signature} {{", *self._lines, "}"])
        return Lowered(name, signature, structs, self._definitions(), body)

    def _definitions(self) -> dict[str, str]:
        words = self._words
        made = {word.name: word.text for word in words.made.values()}
        calls_halves = any("from_f16(a[i])" in one or "to_f16(a[i])" in one for one in made.values())
        types = sorted(words.types.values(), key=lambda of: (of.size, of.elem.name))
        return {
            **{vec_name(of): typedef(of) for of in types},
            **({"halves": halves(self._target)} if self._is_half_used or calls_halves else {}),
            **{one.name: self._table(one) for one in self._function.tables},
            **self._extra,
            **made,
        }

    def _table(self, one: Declare) -> str:
        of: Type = one.type
        while isinstance(of, Array):
            of = of.of
        assert isinstance(of, Scalar)
        words = [number(value, of) for value in one.values]
        lines = [f"    {', '.join(words[i : i + 16])}," for i in range(0, len(words), 16)]
        flat = Array(of, len(words))
        if isinstance(one.type, Array) and isinstance(one.type.of, Array):
            raise AssertionError("tables have one dimension")
        return "\n".join([f"static const {c_type(flat, one.name)} = {{", *lines, "};"])

    def _declare_locals(self) -> None:
        """All variables at the beginning: those of a loop keep their value after it."""
        seen: set[str] = set(self._names)
        for node in walk_body(self._function.body):
            match node:
                case Declare(name=name, type=of, values=values) if name not in seen:
                    seen.add(name)
                    self._declare(name, of, values)
                case Steps(variable=name, type=of) if name not in seen:
                    seen.add(name)
                    self._line(f"{c_type(of, name)};")

    def _declare(self, name: str, of: Type, values: tuple[int | float, ...]) -> None:
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

    @staticmethod
    def _part_names(name: str, n: int) -> list[str]:
        return [name] if n == 1 else [f"{name}_p{i}" for i in range(n)]

    def _n_parts(self, of: Vec) -> int:
        return max(1, of.size // self._target.register_bytes)

    def _part(self, of: Vec) -> Vec:
        return Vec(of.elem, of.lanes // self._n_parts(of))

    # ---- lines ----

    def _line(self, text: str) -> None:
        self._lines.append("    " * self._depth + text)

    def _temporary(self, of: str, text: str) -> str:
        self._n_temporaries += 1
        name = f"t{self._n_temporaries}"
        while name in self._names:
            self._n_temporaries += 1
            name = f"t{self._n_temporaries}"
        self._line(f"{of} {name} = {text};")
        return name

    def _captured(self, e: Expr) -> tuple[list[str], str]:
        """An expression and the lines that it needs before it."""
        mine, self._lines = self._lines, []
        text = self._scalar(e)
        lines, self._lines = self._lines, mine
        return lines, text

    # ---- statements ----

    def _body(self, body: Body) -> None:
        for one in body:
            self._statement(one)

    def _block(self, head: str, body: Body, tail: str = "}") -> None:
        self._line(f"{head} {{")
        self._depth += 1
        self._body(body)
        self._depth -= 1
        self._line(tail)

    def _statement(self, statement: Stmt) -> None:
        match statement:
            case Declare():
                self._initial(statement)
            case Assign(target, value, _):
                self._assign(target, value)
            case Do(what, _):
                assert isinstance(what, CallExpression)
                self._do(what)
            case Steps():
                self._steps(statement)
            case While(condition, body, _):
                lines, text = self._captured(condition)
                if lines:
                    self._line("for (;;) {")
                    self._lines += ["    " + line for line in lines]
                    self._depth += 1
                    self._line(f"if (!({text})) break;")
                    self._body(body)
                    self._depth -= 1
                    self._line("}")
                else:
                    self._block(f"while ({text})", body)
            case If(condition, then, otherwise, _):
                self._block(f"if ({self._scalar(condition)})", then)
                if otherwise:
                    self._lines.pop()
                    self._block("} else", otherwise)
            case Return(value, _):
                self._line("return;" if value is None else f"return {self._scalar(value)};")
            case Leave(word, _):
                self._line(f"{word};")
            case BlockStatement(body, _):
                self._body(body)
            case _:
                raise AssertionError(statement)

    def _initial(self, one: Declare) -> None:
        if isinstance(one.type, Array):
            if one.values and not any(one.values):
                self._line(f"memset({one.name}, 0, sizeof {one.name});")
            elif one.values:
                table = f"{one.name}_values"
                self._lines.insert(0, "    static const " + self._values(table, one))
                self._line(f"memcpy({one.name}, {table}, sizeof {one.name});")
        elif one.value is not None:
            self._assign(Var(one.type, one.name), one.value)

    def _values(self, name: str, one: Declare) -> str:
        of: Type = one.type
        while isinstance(of, Array):
            of = of.of
        assert isinstance(of, Scalar)
        values = ", ".join(number(value, of) for value in one.values)
        return f"{c_type(Array(of, len(one.values)), name)} = {{{values}}};"

    def _assign(self, target: Expr, value: Expr) -> None:
        if isinstance(target.type, Vec):
            parts = self._vector(value)
            places = self._places(target)
            if len(parts) > 1 and isinstance(target, Var):
                of = self._words.type(self._part(target.type))
                parts = [part if _is_simple(part) else self._temporary(of, part) for part in parts]
            for place, part in zip(places, parts, strict=True):
                if place != part:
                    self._line(f"{place} = {part};")
            return
        text = self._scalar(value)
        if isinstance(target, Index | Member) and self._is_punned(target):
            assert isinstance(target.type, Scalar)
            self._line(f"{self._store_word(target.type)}({self._address(target)}, {text});")
        else:
            self._line(f"{self._scalar(target)} = {text};")

    def _places(self, target: Expr) -> Parts:
        assert isinstance(target.type, Vec)
        n = self._n_parts(target.type)
        if isinstance(target, Var):
            return self._part_names(target.name, n)
        assert isinstance(target, Index)
        base = f"{self._scalar(target.base)}[{self._scalar(target.index)}]"
        return [base] if n == 1 else [f"{base}[{i}]" for i in range(n)]

    def _do(self, what: CallExpression) -> None:
        if what.name == "prefetch":
            self._line(f"__builtin_prefetch({self._scalar(what.args[0])});")
            return
        assert what.name == "store"
        value = what.args[1]
        assert isinstance(value.type, Vec)
        part = self._part(value.type)
        parts = self._vector(value)
        place = self._scalar(what.args[0])
        for i, one in enumerate(parts):
            at = f"{wrapped(place)} + {i * part.lanes}" if i else place
            self._line(f"{self._memory_word('store', part)}({at}, {one});")

    def _memory_word(self, operation: str, of: Vec) -> str:
        word = self._words.type(of)
        element = C_NAMES[of.elem.name]
        name = f"{word}_{operation}"
        if operation == "store":
            text = f"static inline void {name}({element} *p, {word} v) {{ memcpy(p, &v, sizeof v); }}"
        else:
            body = f"{word} v; memcpy(&v, p, sizeof v); return v;"
            text = f"static inline {word} {name}(const {element} *p) {{ {body} }}"
        self._extra[name] = text
        return name

    def _steps(self, loop: Steps) -> None:
        variable = loop.variable
        start, step = self._scalar(loop.start), self._scalar(loop.step)
        before = "" if start == variable else f"{variable} = {start}"
        after = f"++{variable}" if step == "1" else f"{variable} += {step}"
        lines, condition = self._captured(loop.condition)
        if lines:
            self._line(f"for ({before};; {after}) {{")
            self._lines += ["    " + line for line in lines]
            self._depth += 1
            self._line(f"if (!({condition})) break;")
            self._body(loop.body)
            self._depth -= 1
            self._line("}")
        else:
            self._block(f"for ({before}; {condition}; {after})", loop.body)

    # ---- numbers ----

    def _scalar(self, e: Expr) -> str:
        match e:
            case Const(of, value):
                assert isinstance(of, Scalar)
                return number(value, of)
            case Var(_, name):
                return name
            case Unary(of, op, a):
                return f"{op}{wrapped(self._scalar(a))}"
            case Binary():
                return self._binary(e)
            case Ternary(of, condition, a, b):
                return self._ternary(of, condition, a, b)
            case Cast(of, a):
                if isinstance(of, Pointer):
                    return (
                        f"({c_type(of)})(const void *){wrapped(self._scalar(a))}"
                        if of.is_const
                        else (f"({c_type(of)})(void *){wrapped(self._scalar(a))}")
                    )
                return f"({c_type(of)}){wrapped(self._scalar(a))}"
            case Index(_, base, index):
                if self._is_punned(e):
                    assert isinstance(e.type, Scalar)
                    return f"{self._load_word(e.type)}({self._address(e)})"
                return f"{wrapped(self._scalar(base))}[{self._scalar(index)}]"
            case Member(_, base, field):
                return f"{wrapped(self._scalar(base))}.{field}"
            case CallExpression():
                return self._call(e)
            case AddressOf():
                raise AssertionError("an address at the high level")

    def _binary(self, e: Binary) -> str:
        a, b = self._scalar(e.a), None
        if e.op in LOGICAL:
            lines, b = self._captured(e.b)
            if lines:
                name = self._temporary("int32_t", f"({a}) != 0")
                self._line(f"if ({'' if e.op == '&&' else '!'}{name}) {{")
                self._lines += ["    " + line for line in lines]
                self._line(f"    {name} = ({b}) != 0;")
                self._line("}")
                return name
        else:
            b = self._scalar(e.b)
        left, right = decayed(e.a.type), decayed(e.b.type)
        if e.op in COMPARISONS and isinstance(left, Scalar) and isinstance(right, Scalar) and left != right:
            shared = common(left, right)
            a = a if promoted(left) == shared else f"({c_type(shared)}){wrapped(a)}"
            b = b if promoted(right) == shared else f"({c_type(shared)}){wrapped(b)}"
        return f"{wrapped(a)} {e.op} {wrapped(b)}"

    def _ternary(self, of: Type, condition: Expr, a: Expr, b: Expr) -> str:
        test = self._scalar(condition)
        (before_a, one), (before_b, other) = self._captured(a), self._captured(b)
        if not before_a and not before_b:
            return f"{wrapped(test)} ? {wrapped(one)} : {wrapped(other)}"
        self._n_temporaries += 1
        name = f"t{self._n_temporaries}"
        self._line(f"{c_type(of, name)};")
        self._line(f"if ({test}) {{")
        self._lines += ["    " + line for line in (*before_a, f"{'    ' * self._depth}{name} = {one};")]
        self._line("} else {")
        self._lines += ["    " + line for line in (*before_b, f"{'    ' * self._depth}{name} = {other};")]
        self._line("}")
        return name

    def _is_punned(self, e: Index | Member) -> bool:
        """Memory of one type that is read as another, or off its alignment: by memcpy."""
        base = e.base
        while isinstance(base, Binary):
            base = base.a
        return isinstance(base, Cast) and isinstance(e.type, Scalar) and isinstance(e, Index)

    def _address(self, e: Index | Member) -> str:
        assert isinstance(e, Index)
        return f"{wrapped(self._scalar(e.base))} + {wrapped(self._scalar(e.index))}"

    def _load_word(self, of: Scalar) -> str:
        c, name = C_NAMES[of.name], f"{of.name}_at"
        self._extra[name] = (
            f"static inline {c} {name}(const void *p) {{ {c} x; memcpy(&x, p, sizeof x); return x; }}"
        )
        return name

    def _store_word(self, of: Scalar) -> str:
        c, name = C_NAMES[of.name], f"{of.name}_to"
        self._extra[name] = f"static inline void {name}(void *p, {c} x) {{ memcpy(p, &x, sizeof x); }}"
        return name

    def _call(self, e: CallExpression) -> str:
        assert isinstance(e.type, Scalar)
        if e.name in LIBRARY:
            return f"{e.name}({', '.join(self._scalar(one) for one in e.args)})"
        if e.name in ("from_f16", "to_f16"):
            self._is_half_used = True
            return f"{e.name}({self._scalar(e.args[0])})"
        if e.name == "bits":
            return self._bits(e.type, e.args[0])
        if e.name == "convert":
            return f"({c_type(e.type)}){wrapped(self._scalar(e.args[0]))}"
        if e.name in ("min", "max"):
            raise AssertionError("min and max of numbers are ternaries")
        source = e.args[0]
        assert isinstance(source.type, Vec)
        if e.name == "lane":
            (at,) = e.numbers
            assert isinstance(at, Const)
            part = self._part(source.type)
            one = self._bound(part, self._vector(source)[int(at.value) // part.lanes])
            return f"{one}[{int(at.value) % part.lanes}]"
        assert e.name in REDUCTIONS
        order = ORDERS[int(e.numbers[0].value)] if e.numbers and isinstance(e.numbers[0], Const) else "halves"
        return self._reduced(e.name.removeprefix("reduce_"), source, order)

    def _bits(self, to: Scalar, a: Expr) -> str:
        assert isinstance(a.type, Scalar)
        name = f"{to.name}_of_{a.type.name}"
        c, given = C_NAMES[to.name], C_NAMES[a.type.name]
        self._extra[name] = (
            f"static inline {c} {name}({given} a) {{ {c} x; memcpy(&x, &a, sizeof x); return x; }}"
        )
        return f"{name}({self._scalar(a)})"

    def _reduced(self, op: str, source: Expr, order: str) -> str:
        """Halves are whole registers first; pairs meet within a register first."""
        assert isinstance(source.type, Vec)
        part, parts = self._part(source.type), self._vector(source)
        if order == "pairs":
            values = [f"{self._reduction_word(op, part, order)}({one})" for one in parts]
            while len(values) > 1:
                values = [
                    self._combined(op, values[i], values[i + 1], part.elem) for i in range(0, len(values), 2)
                ]
            return values[0]
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [self._paired(op, part, parts[i], parts[i + half]) for i in range(half)]
        return f"{self._reduction_word(op, part, order)}({parts[0]})"

    def _combined(self, op: str, a: str, b: str, elem: Scalar) -> str:
        c = C_NAMES[elem.name]
        one, other = self._temporary(c, a), self._temporary(c, b)
        if op == "add":
            return f"({one} + {other})"
        return f"({one} {'>' if op == 'max' else '<'} {other} ? {one} : {other})"

    def _paired(self, op: str, of: Vec, a: str, b: str) -> str:
        if op == "add" and of.elem.is_float:
            return f"({a} + {b})"
        return f"{self._words.make(op, of, (of, of))}({a}, {b})"

    def _reduction_word(self, op: str, of: Vec, order: str) -> str:
        word, c = self._words.type(of), C_NAMES[of.elem.name]
        name = f"{word}_reduce_{op}_{order}"
        if name in self._extra or name in self._words.made:
            return name
        lines, at, lanes = [], "v", of.lanes
        while lanes > 1:
            half = Vec(of.elem, lanes // 2)
            is_pairs = order == "pairs" or (order == "halves_pairs" and lanes * of.elem.size <= 16)
            first = list(range(0, lanes, 2)) if is_pairs else list(range(lanes // 2))
            second = list(range(1, lanes, 2)) if is_pairs else list(range(lanes // 2, lanes))
            smaller = self._words.type(half)
            if half.size < 8 or lanes == 2:
                break
            sides = [
                f"__builtin_shufflevector({at}, {at}, {', '.join(map(str, one))})" for one in (first, second)
            ]
            text = self._paired(op, half, *sides)
            lines.append(f"    {smaller} v{lanes // 2} = {text};")
            at, lanes = f"v{lanes // 2}", lanes // 2
        lines.append(f"    return {self._last_lanes(op, at, lanes, of.elem, order)};")
        text = "\n".join([f"static inline {c} {name}({word} v) {{", *lines, "}"])
        self._words.made[name] = Word(name, text, (of,))
        return name

    @staticmethod
    def _last_lanes(op: str, v: str, lanes: int, elem: Scalar, order: str) -> str:
        values = [f"{v}[{i}]" for i in range(lanes)]
        c = C_NAMES[elem.name]
        while len(values) > 1:
            half = len(values) // 2
            pairs = (
                [(values[i], values[i + 1]) for i in range(0, len(values), 2)]
                if order != "halves"
                else [(values[i], values[i + half]) for i in range(half)]
            )
            if op == "add":
                values = [f"({c})({a} + {b})" for a, b in pairs]
            else:
                values = [f"({a} {'>' if op == 'max' else '<'} {b} ? {a} : {b})" for a, b in pairs]
        return values[0]

    # ---- vectors ----

    def _vector(self, e: Expr) -> Parts:
        of = e.type
        assert isinstance(of, Vec)
        match e:
            case Var(_, name):
                return self._part_names(name, self._n_parts(of))
            case Index():
                return self._places(e)
            case Ternary(_, condition, a, b):
                return self._chosen(of, condition, a, b)
            case Unary(_, op, a):
                return self._unary(op, a, of)
            case Binary():
                return self._vector_binary(e, of)
            case CallExpression():
                return self._vector_call(e, of)
        raise AssertionError(e)

    def _chosen(self, of: Vec, condition: Expr, a: Expr, b: Expr) -> Parts:
        test = self._scalar(condition)
        word, n = self._words.type(self._part(of)), self._n_parts(of)
        names = []
        for _ in range(n):
            self._n_temporaries += 1
            names.append(f"t{self._n_temporaries}")
        self._line(f"{word} {', '.join(names)};")
        for head, value in ((f"if ({test}) {{", a), ("} else {", b)):
            self._line(head)
            self._depth += 1
            for name, part in zip(names, self._vector(value), strict=True):
                self._line(f"{name} = {part};")
            self._depth -= 1
        self._line("}")
        return names

    def _unary(self, op: str, a: Expr, of: Vec) -> Parts:
        part = self._part(of)
        if op == "-" and not of.elem.is_float:
            return [f"{self._words.make('neg', part, (part,))}({one})" for one in self._vector(a)]
        return [f"({op}{wrapped(one)})" for one in self._vector(a)]

    def _vector_binary(self, e: Binary, of: Vec) -> Parts:
        left = e.a.type
        assert isinstance(left, Vec)
        part = self._part(of)
        if e.op in ("<<", ">>"):
            by = self._scalar(e.b)
            word = self._words.type(part)
            if e.op == "<<" and of.elem.is_signed:
                wide = self._words.type(Vec(Scalar("u" + of.elem.name[1:]), part.lanes))
                return [f"({word})(({wide}){wrapped(one)} << {wrapped(by)})" for one in self._vector(e.a)]
            return [f"({wrapped(one)} {e.op} {wrapped(by)})" for one in self._vector(e.a)]
        sides = list(zip(self._vector(e.a), self._vector(e.b), strict=True))
        if e.op in COMPARISONS:
            word = self._words.type(part)
            return [f"(({word})({a} {e.op} {b}))" for a, b in sides]
        if not of.elem.is_float and e.op in ("+", "-", "*"):
            name = self._words.make({"+": "add", "-": "sub", "*": "mul"}[e.op], part, (part, part))
            return [f"{name}({a}, {b})" for a, b in sides]
        return [f"({a} {e.op} {b})" for a, b in sides]

    def _vector_call(self, e: CallExpression, of: Vec) -> Parts:
        part, n = self._part(of), self._n_parts(of)
        match e.name:
            case "load":
                place = self._scalar(e.args[0])
                word = self._memory_word("load", part)
                return [f"{word}({f'{wrapped(place)} + {i * part.lanes}' if i else place})" for i in range(n)]
            case "splat":
                value = self._scalar(e.args[0])
                return [self._splat(part, value, isinstance(e.args[0], Const | Var))] * n
            case "vector":
                values = [number(one.value, of.elem) for one in e.numbers if isinstance(one, Const)]
                word = self._words.type(part)
                return [
                    f"(({word}){{{', '.join(values[i * part.lanes : (i + 1) * part.lanes])}}})"
                    for i in range(n)
                ]
            case "bits":
                return self._reinterpreted(e.args[0], of)
            case "lo" | "hi" | "concat" | "permute" | "shuffle" | "with_lane":
                return self._moved(e, of)
        return self._computed(e, of)

    def _splat(self, of: Vec, value: str, is_simple: bool) -> str:
        word = self._words.type(of)
        c = C_NAMES[of.elem.name]
        if is_simple and value.strip("()").replace(".0f", "") in ("0", f"{c})0"):
            return f"(({word}){{}})"
        name = f"{word}_splat"
        if name not in self._extra:
            lanes = ", ".join(["x"] * of.lanes)
            self._extra[name] = f"static inline {word} {name}({c} x) {{ return ({word}){{{lanes}}}; }}"
        return f"{name}({value})"

    def _reinterpreted(self, a: Expr, of: Vec) -> Parts:
        assert isinstance(a.type, Vec)
        word = self._words.type(self._part(of))
        parts = self._vector(a)
        return [f"(({word}){wrapped(one)})" for one in parts]

    def _bound(self, of: Vec, text: str) -> str:
        """A name for a register that is used more than once."""
        return text if _is_simple(text) else self._temporary(self._words.type(of), text)

    def _take(self, parts: Parts, of: Vec, start: int, count: int) -> str:
        """Lanes of a vector, whatever registers they are in."""
        part = self._part(of)
        own = self._words.type(Vec(of.elem, count))
        first = start // part.lanes
        if count == part.lanes and start % part.lanes == 0:
            return parts[first]
        if count < part.lanes:
            one = self._bound(part, parts[first])
            parts[first] = one
            if count == 1:
                return f"(({own}){{{one}[{start % part.lanes}]}})"
            places = ", ".join(str(start % part.lanes + i) for i in range(count))
            return f"__builtin_shufflevector({one}, {one}, {places})"
        if count == 2 * part.lanes:
            places = ", ".join(map(str, range(count)))
            return f"__builtin_shufflevector({parts[first]}, {parts[first + 1]}, {places})"
        half = count // 2
        one, other = (self._take(parts, of, start + at, half) for at in (0, half))
        return f"__builtin_shufflevector({one}, {other}, {', '.join(map(str, range(count)))})"

    def _moved(self, e: CallExpression, of: Vec) -> Parts:
        part, n = self._part(of), self._n_parts(of)
        source = e.args[0].type
        assert isinstance(source, Vec)
        match e.name:
            case "lo" | "hi":
                at = 0 if e.name == "lo" else of.lanes
                parts = self._vector(e.args[0])
                return [self._take(parts, source, at + i * part.lanes, part.lanes) for i in range(n)]
            case "concat":
                parts = self._vector(e.args[0]) + self._vector(e.args[1])
                if len(parts) == n:
                    return parts
                places = ", ".join(map(str, range(part.lanes)))
                if source.lanes == 1:
                    values = ", ".join(f"{self._bound(source, one)}[0]" for one in parts)
                    return [f"(({self._words.type(part)}){{{values}}})"]
                return [f"__builtin_shufflevector({parts[0]}, {parts[1]}, {places})"]
            case "with_lane":
                at = int(e.numbers[0].value) if isinstance(e.numbers[0], Const) else 0
                parts = list(self._vector(e.args[0]))
                value = self._scalar(e.args[1])
                name = self._temporary(self._words.type(part), parts[at // part.lanes])
                self._line(f"{name}[{at % part.lanes}] = {value};")
                parts[at // part.lanes] = name
                return parts
        places_of = [int(one.value) for one in e.numbers if isinstance(one, Const)]
        if e.name == "permute":
            return self._permuted(e.args[0], places_of, of)
        group = len(places_of)
        sides = zip(self._vector(e.args[0]), self._vector(e.args[1]), strict=True)
        found = []
        for a, b in sides:
            if e.args[0] == e.args[1]:
                a = b = self._bound(part, a)
            all_places = [
                start + place % group + (part.lanes if place >= group else 0)
                for start in range(0, part.lanes, group)
                for place in places_of
            ]
            found.append(f"__builtin_shufflevector({a}, {b}, {', '.join(map(str, all_places))})")
        return found

    def _permuted(self, a: Expr, places: list[int], of: Vec) -> Parts:
        assert isinstance(a.type, Vec)
        part, n = self._part(of), self._n_parts(of)
        source = self._part(a.type)
        parts = [self._bound(source, one) for one in self._vector(a)]
        found = []
        for i in range(n):
            mine = places[i * part.lanes : (i + 1) * part.lanes]
            of_parts = sorted({place // source.lanes for place in mine})
            if len(of_parts) <= 2 and part.lanes > 1 and source.lanes > 1:
                first, last = of_parts[0], of_parts[-1]
                own = [
                    place % source.lanes + (source.lanes if place // source.lanes != first else 0)
                    for place in mine
                ]
                found.append(
                    f"__builtin_shufflevector({parts[first]}, {parts[last]}, {', '.join(map(str, own))})"
                )
            else:
                values = ", ".join(
                    f"{parts[place // source.lanes]}[{place % source.lanes}]" for place in mine
                )
                found.append(f"(({self._words.type(part)}){{{values}}})")
        return found

    def _computed(self, e: CallExpression, of: Vec) -> Parts:
        """An operation whose results depend on lanes at the same share of each argument."""
        n, part = self._n_parts(of), self._part(of)
        sources = [one.type for one in e.args]
        vectors = [self._vector(one) for one in e.args]
        if e.name == "pack":
            return self._packed(e, of, vectors)
        operation = e.name
        if (
            operation == "dot_u8i8"
            and not self._target.has_vnni
            and part.size >= 16
            and self._target.family == "x86"
        ):
            return self._quads(e, of)
        found = []
        for i in range(n):
            values, types = [], []
            for source, parts in zip(sources, vectors, strict=True):
                assert isinstance(source, Vec)
                lanes = source.lanes // n
                values.append(self._take(parts, source, i * lanes, lanes))
                types.append(Vec(source.elem, lanes))
            word = self._words.make(operation, part, tuple(types))
            found.append(f"{word}({', '.join(values)})")
        return found

    def _packed(self, e: CallExpression, of: Vec, vectors: list[Parts]) -> Parts:
        """Each register of the result has halves of both arguments' groups: groups never leave their sixteen
        bytes.
        """
        n, part = self._n_parts(of), self._part(of)
        source = e.args[0].type
        assert isinstance(source, Vec)
        lanes = source.lanes // n
        types = (Vec(source.elem, lanes), Vec(source.elem, lanes))
        if types[0].size < 16:
            part, n, lanes = of, 1, source.lanes
            types = (source, source)
        word = self._words.make("pack", part, types)
        return [
            f"{word}({', '.join(self._take(one, source, i * lanes, lanes) for one in vectors)})"
            for i in range(n)
        ]

    def _quads(self, e: CallExpression, of: Vec) -> Parts:
        """dot_u8i8 without its instruction: even and odd bytes as sixteen bits, so that nothing saturates."""
        part = self._part(of)
        lanes = 4 * part.lanes
        name = f"{self._words.type(part)}_dot_u8i8"
        words16, u16 = (
            self._words.type(Vec(Scalar("i16"), 2 * part.lanes)),
            self._words.type(Vec(Scalar("u16"), 2 * part.lanes)),
        )
        a8, b8 = self._words.type(Vec(Scalar("u8"), lanes)), self._words.type(Vec(Scalar("i8"), lanes))
        dot = self._words.make("dot_i16", part, (Vec(Scalar("i16"), 2 * part.lanes),) * 2)
        add = self._words.make("add", part, (part, part))
        word = self._words.type(part)
        self._words.made.setdefault(
            name,
            Word(
                name,
                f"static inline {word} {name}({word} a, {a8} b, {b8} c) {{\n"
                f"    {words16} even = ({words16})((({u16})b) & 255), odd = ({words16})((({u16})b) >> 8);\n"
                f"    {words16} c_even = ({words16})((({u16})c) << 8) >> 8, c_odd = (({words16})c) >> 8;\n"
                f"    return {add}({add}(a, {dot}(even, c_even)), {dot}(odd, c_odd));\n}}",
                (part,),
            ),
        )
        vectors = [self._vector(one) for one in e.args]
        return [f"{name}({', '.join(values)})" for values in zip(*vectors, strict=True)]


def _is_simple(text: str) -> bool:
    return text.isidentifier()


def wrapped(text: str) -> str:
    """An operand: in parentheses unless it is a name, a number or closed already."""
    if text.isidentifier() or text.replace(".", "").isalnum():
        return text
    if text[0] == "(" and text[-1] == ")":
        depth = 0
        for i, mark in enumerate(text):
            depth += (mark == "(") - (mark == ")")
            if depth == 0:
                return text if i == len(text) - 1 else f"({text})"
    head = text.partition("(")[0].partition("[")[0]
    if head.isidentifier() and _closes_at_end(text, len(head)):
        return text
    return f"({text})"


def _closes_at_end(text: str, at: int) -> bool:
    depth = 0
    for i, mark in enumerate(text[at:], at):
        depth += (mark in "([") - (mark in ")]")
        if depth == 0:
            return i == len(text) - 1
    return False
