"""Printer of C of the low level: the parsed function with every conversion written out.

An `Original` is the function that a kernel was raised from: a contestant in its tuning, and a variant of the
emitted file. Its print compiles to the same results. A database holds a hash of this text and no code, so
that an original is in use only beside the very file it was measured from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from phasewise.ir import nodes as ir
from phasewise.ir.builders import X86_NAMES
from phasewise.ir.c_text import c_type, compared, number, struct_text, wrapped
from phasewise.ir.errors import UserKernelError
from phasewise.ir.lowering import Lowered
from phasewise.ir.operations import LIBRARY_F64
from phasewise.ir.raising.parse import parse_file
from phasewise.ir.targets import IsaTarget
from phasewise.ir.types import Array, Scalar, Type, Vec, innermost

_BITS = """static inline {to} {name}({of} a) {{ {to} x; memcpy(&x, &a, sizeof x); return x; }}"""


def printed_c(function: ir.FunctionDefinition) -> str:
    """Print a C file with the function, its helpers, structs and tables."""
    own = "" if function.source_isa == "portable" else "#include <immintrin.h>\n"
    head = f"#include <math.h>\n#include <stdint.h>\n#include <string.h>\n{own}"
    printer = _Printer()
    structs = [struct_text(struct, printer.type) for struct in function.structs]
    definitions, body = printed_parts(function)
    return "\n".join([head, *structs, *definitions.values(), body, ""])


def printed_parts(function: ir.FunctionDefinition, is_static: bool = False) -> tuple[dict[str, str], str]:
    """Print the function's declarations, except structs and headers, by name, and the function itself."""
    printer = _Printer()
    tables = {table.name: table for part in (*function.helpers, function) for table in part.tables}
    helpers = {helper.name: printer.function(helper, is_static=True) for helper in function.helpers}
    body = printer.function(function, is_static)
    arrays = {name: f"static const {printer.array(table)}" for name, table in tables.items()}
    return {**printer.extra, **arrays, **helpers}, body


class _Printer:
    def __init__(self) -> None:
        self.extra: dict[str, str] = {}

    def type(self, of: Type, name: str = "") -> str:
        return c_type(of, name, lambda own: X86_NAMES.get(own, "?") if isinstance(own, Vec) else None)

    def array(self, declaration: ir.Declare) -> str:
        of = innermost(declaration.type)
        values = ""
        if declaration.values and isinstance(of, Scalar):
            words = [number(value, of) for value in declaration.values]
            rows = [", ".join(words[i : i + 16]) for i in range(0, len(words), 16)]
            values = " = {" + ",\n    ".join(rows) + "}" if any(declaration.values) else " = {0}"
            if isinstance(declaration.type, Array) and isinstance(declaration.type.of, Array):
                inner = declaration.type.of.size // of.size
                groups = [", ".join(words[i : i + inner]) for i in range(0, len(words), inner)]
                values = " = {" + ", ".join(f"{{{group}}}" for group in groups) + "}"
        return f"{self.type(declaration.type, declaration.name)}{values};"

    def function(self, function: ir.FunctionDefinition, is_static: bool = False) -> str:
        args = ", ".join(self.type(of, name) for name, of in function.args) or "void"
        head = f"{self.type(function.result)} {function.name}({args})".replace("* ", "*")
        return "\n".join(
            [f"{'static inline ' if is_static else ''}{head} {{", *self._body(function.body, 1), "}"]
        )

    def _body(self, body: ir.Body, depth: int) -> list[str]:
        return [line for statement in body for line in self._statement(statement, depth)]

    def _statement(self, statement: ir.Stmt, depth: int) -> list[str]:
        pad = "    " * depth
        match statement:
            case ir.Declare(type=Array()):
                return [pad + ("static const " if statement.is_const else "") + self.array(statement)]
            case ir.Declare() | ir.Assign() | ir.Do():
                return [f"{pad}{self._simple(statement)};"]
            case ir.For(start, condition, update, body, _):
                before = [f"{pad}{self._simple(part)};" for part in start]
                after = ", ".join(self._simple(part) for part in update)
                head = f"{pad}for (; {self.expr(condition)}; {after}) {{"
                return [f"{pad}{{", *before, head, *self._body(body, depth + 1), f"{pad}}}", f"{pad}}}"]
            case ir.While(condition, body, _, is_after):
                inner = self._body(body, depth + 1)
                if is_after:
                    return [f"{pad}do {{", *inner, f"{pad}}} while ({self.expr(condition)});"]
                return [f"{pad}while ({self.expr(condition)}) {{", *inner, f"{pad}}}"]
            case ir.If(condition, then, otherwise, _):
                lines = [f"{pad}if ({self.expr(condition)}) {{", *self._body(then, depth + 1)]
                if otherwise:
                    lines += [f"{pad}}} else {{", *self._body(otherwise, depth + 1)]
                return [*lines, f"{pad}}}"]
            case ir.Return(value, _):
                return [f"{pad}return;" if value is None else f"{pad}return {self.expr(value)};"]
            case ir.Leave(word, _):
                return [f"{pad}{word};"]
            case ir.BlockStatement(body, _):
                return [f"{pad}{{", *self._body(body, depth + 1), f"{pad}}}"]
        raise AssertionError(statement)

    def _simple(self, statement: ir.Stmt) -> str:
        match statement:
            case ir.Declare(name, of, value, _):
                init = "" if value is None else f" = {self.expr(value)}"
                return f"{self.type(of, name)}{init}"
            case ir.Assign(target, value, _):
                return f"{self.expr(target)} = {self.expr(value)}"
            case ir.Do(what, _):
                return self.expr(what)
        raise AssertionError(statement)

    def expr(self, e: ir.Expr) -> str:
        match e:
            case ir.Const(of, value):
                assert isinstance(of, Scalar)
                return number(value, of)
            case ir.Var(_, name):
                return name
            case ir.Unary(_, op, a):
                return f"{op}{wrapped(self.expr(a))}"
            case ir.Binary(_, _, a, b):
                return compared(e, self.expr(a), self.expr(b), self.type)
            case ir.Ternary(_, condition, a, b):
                return f"{wrapped(self.expr(condition))} ? {wrapped(self.expr(a))} : {wrapped(self.expr(b))}"
            case ir.Cast(of, a):
                return f"({self.type(of)}){wrapped(self.expr(a))}"
            case ir.Index(_, base, index):
                return f"{wrapped(self.expr(base))}[{self.expr(index)}]"
            case ir.Member(_, base, field):
                return f"{wrapped(self.expr(base))}.{field}"
            case ir.AddressOf(_, a):
                return f"&{wrapped(self.expr(a))}"
            case ir.CallExpression():
                return self._call(e)

    def _call(self, e: ir.CallExpression) -> str:
        args = [self.expr(arg) for arg in e.args]
        if e.name == "__clear":
            return f"memset({args[0]}, 0, sizeof {args[0]})"
        if e.name == "__mask":
            return args[0]
        if e.name == "__bits":
            to, of = self.type(e.type), self.type(e.args[0].type)
            name = f"{to}_of_{of}".replace(" ", "_")
            self.extra[name] = _BITS.format(to=to, of=of, name=name)
            return f"{name}({args[0]})"
        if e.name == "_mm_prefetch":
            return f"_mm_prefetch((const char *)({args[0]}), _MM_HINT_T0)"
        return f"{LIBRARY_F64.get(e.name, e.name)}({', '.join(args)})"


NAME = "original"
"""Stands in place of a parameter's name in the choice of an original; parameters are upper-case."""


@dataclass(frozen=True)
class Original:
    """A function of the low level, and the hash by which a database knows it."""

    function: ir.FunctionDefinition
    digest: int

    @property
    def choice(self) -> tuple[tuple[str, int], ...]:
        """The entry that stands for the original in place of a choice of parameters."""
        return ((NAME, self.digest),)

    def file(self) -> str:
        """The C of one translation unit with the original."""
        return printed_c(self.function)

    def lowered(self, name: str) -> Lowered:
        """Print the original as pieces of a file; the function is static and called `name`."""
        definitions, body = printed_parts(replace(self.function, name=name), is_static=True)
        return Lowered(name, "", "", definitions, body)


def original_of(
    path: Path, kernel: ir.FunctionDefinition, target: IsaTarget,
    include: Sequence[Path] = (), define: Sequence[str] = (),
) -> Original:  # fmt: skip
    """Read the original of a kernel: the function of its name in a C file. include, define: folders of
    headers and macros that the file needs. SourceError for a function outside the subset; UserKernelError for
    other arguments than the kernel's, or a file that cannot be compiled for `target`."""
    function = parse_file(path, kernel.name, None, include, define)
    if (function.args, function.result) != (kernel.args, kernel.result):
        raise UserKernelError(f"{path}: {kernel.name} has other arguments than the kernel")
    if function.source_isa != "portable" and target.family != "x86":
        raise UserKernelError(f"{path} is of {function.source_isa}, which {target.name} does not run")
    digest = hashlib.sha256(printed_c(function).encode()).digest()
    return Original(function, int.from_bytes(digest[:4], "big") >> 2)


def is_original(choice: Mapping[str, int]) -> bool:
    """True if a choice names an original instead of parameters."""
    return NAME in choice
