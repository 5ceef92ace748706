"""Lowering of the high level's expressions to C: one text for a number, or for each register of a vector."""

from __future__ import annotations

from typing import TypeAlias

from phasewise.ir import nodes as ir
from phasewise.ir.c_text import c_type, compared, is_simple, number, wrapped
from phasewise.ir.operations import COMPARISONS, LIBRARY, LIBRARY_F64, LOGICAL, ORDERS, REDUCTIONS
from phasewise.ir.targets import IsaTarget
from phasewise.ir.types import Pointer, Scalar, Type, Vec
from phasewise.ir.words import C_NAMES, Words

Parts: TypeAlias = list[str]
"""The C expressions of a vector's registers, the lowest lanes first."""


class LoweredExpressions:
    """Writes expressions as C, and the lines and words that they need before them."""

    def __init__(self, target: IsaTarget, names: set[str]) -> None:
        self._target = target
        self._words = Words(target)
        self._lines: list[str] = []
        self._depth = 1
        self._n_temporaries = 0
        self._names = names
        self._extra: dict[str, str] = {}
        self._is_half_used = False

    # ---- registers ----

    @staticmethod
    def _part_names(name: str, n: int) -> list[str]:
        return [name] if n == 1 else [f"{name}_p{i}" for i in range(n)]

    def _n_parts(self, of: Vec) -> int:
        return max(1, of.size // self._target.register_bytes)

    def _part(self, of: Vec) -> Vec:
        return Vec(of.elem, of.lanes // self._n_parts(of))

    def _places(self, target: ir.Expr) -> Parts:
        n = self._n_parts(ir.vec(target))
        if isinstance(target, ir.Var):
            return self._part_names(target.name, n)
        assert isinstance(target, ir.Index)
        base = f"{self._scalar(target.base)}[{self._scalar(target.index)}]"
        return [base] if n == 1 else [f"{base}[{i}]" for i in range(n)]

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

    def _captured(self, e: ir.Expr) -> tuple[list[str], str]:
        """The C of an expression, and the lines that must come before it."""
        mine, self._lines = self._lines, []
        text = self._scalar(e)
        lines, self._lines = self._lines, mine
        return lines, text

    # ---- numbers ----

    def _scalar(self, e: ir.Expr) -> str:
        match e:
            case ir.Const(of, value):
                assert isinstance(of, Scalar)
                return number(value, of)
            case ir.Var(_, name):
                return name
            case ir.Unary(of, op, a):
                return f"{op}{wrapped(self._scalar(a))}"
            case ir.Binary():
                return self._binary(e)
            case ir.Ternary(of, condition, a, b):
                return self._ternary(of, condition, a, b)
            case ir.Cast(of, a):
                through = ""
                if isinstance(of, Pointer):
                    through = "(const void *)" if of.is_const else "(void *)"
                return f"({c_type(of)}){through}{wrapped(self._scalar(a))}"
            case ir.Index(_, base, index):
                if self._is_punned(e):
                    assert isinstance(e.type, Scalar)
                    return f"{self._load_word(e.type)}({self._address(e)})"
                return f"{wrapped(self._scalar(base))}[{self._scalar(index)}]"
            case ir.Member(_, base, field):
                return f"{wrapped(self._scalar(base))}.{field}"
            case ir.CallExpression():
                return self._call(e)
            case ir.AddressOf():
                raise AssertionError("an address at the high level")

    def _binary(self, e: ir.Binary) -> str:
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
        return compared(e, a, b, c_type)

    def _ternary(self, of: Type, condition: ir.Expr, a: ir.Expr, b: ir.Expr) -> str:
        test = self._scalar(condition)
        (before_a, text_a), (before_b, text_b) = self._captured(a), self._captured(b)
        if not before_a and not before_b:
            return f"{wrapped(test)} ? {wrapped(text_a)} : {wrapped(text_b)}"
        self._n_temporaries += 1
        name = f"t{self._n_temporaries}"
        self._line(f"{c_type(of, name)};")
        self._line(f"if ({test}) {{")
        self._lines += ["    " + line for line in (*before_a, f"{'    ' * self._depth}{name} = {text_a};")]
        self._line("} else {")
        self._lines += ["    " + line for line in (*before_b, f"{'    ' * self._depth}{name} = {text_b};")]
        self._line("}")
        return name

    def _is_punned(self, e: ir.Index | ir.Member) -> bool:
        """True for memory of one type that is read as another, or unaligned: it is copied by memcpy."""
        base = e.base
        while isinstance(base, ir.Binary):
            base = base.a
        return isinstance(base, ir.Cast) and isinstance(e.type, Scalar) and isinstance(e, ir.Index)

    def _address(self, e: ir.Index | ir.Member) -> str:
        assert isinstance(e, ir.Index)
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

    def _call(self, e: ir.CallExpression) -> str:
        assert isinstance(e.type, Scalar)
        if e.name in LIBRARY or e.name in LIBRARY_F64:
            return f"{LIBRARY_F64.get(e.name, e.name)}({', '.join(self._scalar(arg) for arg in e.args)})"
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
        if e.name == "lane":
            (lane,) = e.numbers
            assert isinstance(lane, ir.Const)
            part = self._part(ir.vec(source))
            register = self._bound(part, self._vector(source)[int(lane.value) // part.lanes])
            return f"{register}[{int(lane.value) % part.lanes}]"
        assert e.name in REDUCTIONS
        order = ORDERS[e.places[0] if e.numbers else 0]
        return self._reduced(e.name.removeprefix("reduce_"), source, order)

    def _bits(self, to: Scalar, a: ir.Expr) -> str:
        assert isinstance(a.type, Scalar)
        name = f"{to.name}_of_{a.type.name}"
        c, given = C_NAMES[to.name], C_NAMES[a.type.name]
        self._extra[name] = (
            f"static inline {c} {name}({given} a) {{ {c} x; memcpy(&x, &a, sizeof x); return x; }}"
        )
        return f"{name}({self._scalar(a)})"

    def _reduced(self, op: str, source: ir.Expr, order: str) -> str:
        """C of a reduction to a number: `halves` join whole registers first, `pairs` a register's lanes."""
        part, parts = self._part(ir.vec(source)), self._vector(source)
        if order == "pairs":
            values = [f"{self._words.reduction(op, part, order)}({register})" for register in parts]
            while len(values) > 1:
                values = [
                    self._combined(op, values[i], values[i + 1], part.elem) for i in range(0, len(values), 2)
                ]
            return values[0]
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [self._words.paired(op, part, parts[i], parts[i + half]) for i in range(half)]
        return f"{self._words.reduction(op, part, order)}({parts[0]})"

    def _combined(self, op: str, a: str, b: str, elem: Scalar) -> str:
        c = C_NAMES[elem.name]
        first, second = self._temporary(c, a), self._temporary(c, b)
        if op == "add":
            return f"({first} + {second})"
        return f"({first} {'>' if op == 'max' else '<'} {second} ? {first} : {second})"

    # ---- vectors ----

    def _vector(self, e: ir.Expr) -> Parts:
        of = e.type
        assert isinstance(of, Vec)
        match e:
            case ir.Var(_, name):
                return self._part_names(name, self._n_parts(of))
            case ir.Index():
                return self._places(e)
            case ir.Ternary(_, condition, a, b):
                return self._chosen(of, condition, a, b)
            case ir.Unary(_, op, a):
                return self._unary(op, a, of)
            case ir.Binary():
                return self._vector_binary(e, of)
            case ir.CallExpression():
                return self._vector_call(e, of)
        raise AssertionError(e)

    def _chosen(self, of: Vec, condition: ir.Expr, a: ir.Expr, b: ir.Expr) -> Parts:
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

    def _unary(self, op: str, a: ir.Expr, of: Vec) -> Parts:
        part = self._part(of)
        if op == "-" and not of.elem.is_float:
            return [f"{self._words.make('neg', part, (part,))}({register})" for register in self._vector(a)]
        return [f"({op}{wrapped(register)})" for register in self._vector(a)]

    def _vector_binary(self, e: ir.Binary, of: Vec) -> Parts:
        left = e.a.type
        assert isinstance(left, Vec)
        part = self._part(of)
        if e.op in ("<<", ">>"):
            by = self._scalar(e.b)
            word = self._words.type(part)
            if e.op == "<<" and of.elem.is_signed:
                wide = self._words.type(Vec(Scalar("u" + of.elem.name[1:]), part.lanes))
                return [
                    f"({word})(({wide}){wrapped(register)} << {wrapped(by)})"
                    for register in self._vector(e.a)
                ]
            return [f"({wrapped(register)} {e.op} {wrapped(by)})" for register in self._vector(e.a)]
        sides = list(zip(self._vector(e.a), self._vector(e.b), strict=True))
        if e.op in COMPARISONS:
            word = self._words.type(part)
            return [f"(({word})({a} {e.op} {b}))" for a, b in sides]
        if not of.elem.is_float and e.op in ("+", "-", "*"):
            name = self._words.make({"+": "add", "-": "sub", "*": "mul"}[e.op], part, (part, part))
            return [f"{name}({a}, {b})" for a, b in sides]
        return [f"({a} {e.op} {b})" for a, b in sides]

    def _vector_call(self, e: ir.CallExpression, of: Vec) -> Parts:
        part, n = self._part(of), self._n_parts(of)
        match e.name:
            case "load":
                place = self._scalar(e.args[0])
                word = self._memory_word("load", part)
                return [f"{word}({f'{wrapped(place)} + {i * part.lanes}' if i else place})" for i in range(n)]
            case "splat":
                value = self._scalar(e.args[0])
                return [self._splat(part, value, isinstance(e.args[0], ir.Const | ir.Var))] * n
            case "vector":
                values = [
                    number(constant.value, of.elem)
                    for constant in e.numbers
                    if isinstance(constant, ir.Const)
                ]
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

    def _reinterpreted(self, a: ir.Expr, of: Vec) -> Parts:
        word = self._words.type(self._part(of))
        parts = self._vector(a)
        return [f"(({word}){wrapped(register)})" for register in parts]

    def _bound(self, of: Vec, text: str) -> str:
        """Bind a register that is used more than once to a name; returns the name."""
        return text if is_simple(text) else self._temporary(self._words.type(of), text)

    def _take(self, parts: Parts, of: Vec, start: int, count: int) -> str:
        """C of `count` lanes of a vector from `start` on, whatever registers they are in."""
        part = self._part(of)
        own = self._words.type(Vec(of.elem, count))
        first = start // part.lanes
        if count == part.lanes and start % part.lanes == 0:
            return parts[first]
        if count < part.lanes:
            register = self._bound(part, parts[first])
            parts[first] = register
            if count == 1:
                return f"(({own}){{{register}[{start % part.lanes}]}})"
            places = ", ".join(str(start % part.lanes + i) for i in range(count))
            return f"__builtin_shufflevector({register}, {register}, {places})"
        if count == 2 * part.lanes:
            places = ", ".join(map(str, range(count)))
            return f"__builtin_shufflevector({parts[first]}, {parts[first + 1]}, {places})"
        half = count // 2
        low, high = (self._take(parts, of, start + offset, half) for offset in (0, half))
        return f"__builtin_shufflevector({low}, {high}, {', '.join(map(str, range(count)))})"

    def _moved(self, e: ir.CallExpression, of: Vec) -> Parts:
        part, n = self._part(of), self._n_parts(of)
        source = e.args[0].type
        assert isinstance(source, Vec)
        match e.name:
            case "lo" | "hi":
                lane = 0 if e.name == "lo" else of.lanes
                parts = self._vector(e.args[0])
                return [self._take(parts, source, lane + i * part.lanes, part.lanes) for i in range(n)]
            case "concat":
                parts = self._vector(e.args[0]) + self._vector(e.args[1])
                if len(parts) == n:
                    return parts
                places = ", ".join(map(str, range(part.lanes)))
                if source.lanes == 1:
                    values = ", ".join(f"{self._bound(source, register)}[0]" for register in parts)
                    return [f"(({self._words.type(part)}){{{values}}})"]
                return [f"__builtin_shufflevector({parts[0]}, {parts[1]}, {places})"]
            case "with_lane":
                lane = e.places[0]
                parts = list(self._vector(e.args[0]))
                value = self._scalar(e.args[1])
                name = self._temporary(self._words.type(part), parts[lane // part.lanes])
                self._line(f"{name}[{lane % part.lanes}] = {value};")
                parts[lane // part.lanes] = name
                return parts
        places_of = e.places
        if e.name == "permute":
            return self._permuted(e.args[0], places_of, of)
        group = len(places_of)
        sides = zip(self._vector(e.args[0]), self._vector(e.args[1]), strict=True)
        shuffles = []
        for a, b in sides:
            if e.args[0] == e.args[1]:
                a = b = self._bound(part, a)
            all_places = [
                start + place % group + (part.lanes if place >= group else 0)
                for start in range(0, part.lanes, group)
                for place in places_of
            ]
            shuffles.append(f"__builtin_shufflevector({a}, {b}, {', '.join(map(str, all_places))})")
        return shuffles

    def _permuted(self, a: ir.Expr, places: list[int], of: Vec) -> Parts:
        part, n = self._part(of), self._n_parts(of)
        source = self._part(ir.vec(a))
        parts = [self._bound(source, register) for register in self._vector(a)]
        registers = []
        for i in range(n):
            mine = places[i * part.lanes : (i + 1) * part.lanes]
            of_parts = sorted({place // source.lanes for place in mine})
            if len(of_parts) <= 2 and part.lanes > 1 and source.lanes > 1:
                first, last = of_parts[0], of_parts[-1]
                own = [
                    place % source.lanes + (source.lanes if place // source.lanes != first else 0)
                    for place in mine
                ]
                registers.append(
                    f"__builtin_shufflevector({parts[first]}, {parts[last]}, {', '.join(map(str, own))})"
                )
            else:
                values = ", ".join(
                    f"{parts[place // source.lanes]}[{place % source.lanes}]" for place in mine
                )
                registers.append(f"(({self._words.type(part)}){{{values}}})")
        return registers

    def _computed(self, e: ir.CallExpression, of: Vec) -> Parts:
        """C of an operation whose result has parts that depend only on the same part of each argument."""
        n, part = self._n_parts(of), self._part(of)
        sources = [arg.type for arg in e.args]
        vectors = [self._vector(arg) for arg in e.args]
        if e.name == "pack":
            return self._packed(e, of, vectors)
        operation = e.name
        if (
            operation == "dot_u8i8"
            and not self._target.has_vnni
            and part.size >= 16
            and self._target.family == "x86"
        ):
            return [
                f"{self._words.quads(part)}({', '.join(values)})" for values in zip(*vectors, strict=True)
            ]
        registers = []
        for i in range(n):
            values, types = [], []
            for source, parts in zip(sources, vectors, strict=True):
                assert isinstance(source, Vec)
                lanes = source.lanes // n
                values.append(self._take(parts, source, i * lanes, lanes))
                types.append(Vec(source.elem, lanes))
            word = self._words.make(operation, part, tuple(types))
            registers.append(f"{word}({', '.join(values)})")
        return registers

    def _packed(self, e: ir.CallExpression, of: Vec, vectors: list[Parts]) -> Parts:
        """C of a packing operation: each register of the result has halves of both arguments' groups, and
        groups stay in their sixteen bytes."""
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
            f"{word}({', '.join(self._take(register, source, i * lanes, lanes) for register in vectors)})"
            for i in range(n)
        ]
