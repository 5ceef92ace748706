"""Printer of the high level as text that a person edits, in Python's syntax, one construct a line."""

from __future__ import annotations

import math

import numpy as np

from phasewise.ir import nodes as ir
from phasewise.ir.operations import OPERATIONS, ORDERS, REDUCTIONS
from phasewise.ir.types import F32, I32, Array, Pointer, Scalar, Vec, numbers_of, spelled

FIRST_LINE = "# phasewise kernel 1"


def printed(function: ir.FunctionDefinition) -> str:
    """Print a kernel at the high level; `reading.read` reads the text back."""
    lines = [FIRST_LINE]
    if function.source_isa:
        lines.append(f"# raised from C for {function.source_isa}")
    for struct in function.structs:
        lines += ["", f"class {struct.name}:"]
        lines += [f"    {name}: {spelled(of)}" for name, of in struct.fields] or ["    pass"]
    for table in function.tables:
        lines += ["", f"{table.name}: {spelled(table.type)} = [", *_values(table), "]"]
    args = ", ".join(f"{name}: {spelled(of)}" for name, of in function.args)
    lines += ["", f"def {function.name}({args}) -> {spelled(function.result)}:"]
    if function.reassociate:
        lines.append("    reassociate()")
    lines += [f"    {_parameter(parameter)}" for parameter in function.parameters]
    lines += [f"    {_argument(argument)}" for argument in function.described]
    lines += _body(function.body, 1)
    return "\n".join(lines) + "\n"


def _parameter(parameter: ir.Parameter) -> str:
    values = ", ".join(map(str, parameter.values))
    return (
        f"{parameter.name} = tune({values})" if len(parameter.values) > 1 else f"{parameter.name} = {values}"
    )


def _values(table: ir.Declare) -> list[str]:
    words = [_number(value, numbers_of(table.type)) for value in table.values]
    return [f"    {', '.join(words[i : i + 16])}," for i in range(0, len(words), 16)]


def _argument(argument: ir.Argument) -> str:
    parts = [f'"{argument.name}"']
    if argument.count is not None:
        parts.append(f"count={expression(argument.count)}")
    parts += [f"{name}={_plain(value)}" for name, value in argument.numbers]
    if argument.halves:
        parts.append(f'halves="{" ".join(argument.halves)}"')
    if argument.is_out:
        parts.append("out=True")
    if argument.alias:
        parts.append(f"alias={argument.alias}")
    return f"describe({', '.join(parts)})"


def _plain(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _body(body: ir.Body, depth: int) -> list[str]:
    lines = [line for statement in body for line in _statement(statement, depth)]
    return lines or ["    " * depth + "pass"]


def _statement(statement: ir.Stmt, depth: int) -> list[str]:
    pad = "    " * depth
    match statement:
        case ir.Declare(name, of, value, _, values):
            return [pad + _declaration(name, of, value, values)]
        case ir.Assign(target, value, _):
            return [f"{pad}{expression(target)} = {expression(value)}"]
        case ir.Do(what, _):
            return [pad + expression(what)]
        case ir.Steps():
            return [
                f"{pad}for {statement.variable} in {_steps(statement)}:",
                *_body(statement.body, depth + 1),
            ]
        case ir.While(condition, body, _):
            return [f"{pad}while {expression(condition)}:", *_body(body, depth + 1)]
        case ir.If(condition, then, otherwise, _):
            lines = [f"{pad}if {expression(condition)}:", *_body(then, depth + 1)]
            return [*lines, f"{pad}else:", *_body(otherwise, depth + 1)] if otherwise else lines
        case ir.Return(value, _):
            return [pad + ("return" if value is None else f"return {expression(value)}")]
        case ir.Leave(word, _):
            return [pad + word]
        case ir.BlockStatement(body, _):
            return [line for inner in body for line in _statement(inner, depth)]
        case ir.For():
            raise AssertionError("a loop of the low level")


def _declaration(name: str, of: object, value: ir.Expr | None, values: tuple[int | float, ...]) -> str:
    if isinstance(of, Array):
        text = f"{name}: {spelled(of)}"
        if not values:
            return text
        if not any(values):
            return f"{text} = zeros"
        return f"{text} = [{', '.join(_number(item, numbers_of(of)) for item in values)}]"
    assert isinstance(of, Scalar | Vec | Pointer)
    if value is None:
        return f"{name}: {spelled(of)}"
    if isinstance(of, Vec):
        return f"{name} = {expression(value)}"
    return f"{name}: {spelled(of)} = {expression(value)}"


def _steps(loop: ir.Steps) -> str:
    parts = [f'"{loop.name}"', expression(loop.start), expression(loop.condition), expression(loop.step)]
    return f"steps({', '.join([*parts, *map(_how, loop.how)])})"


def _how(transformation: ir.How) -> str:
    return f"{transformation.name}({expression(transformation.number)})"


WORDS = {"&&": "and", "||": "or"}


def expression(e: ir.Expr) -> str:
    """Print one expression; every operation within another one is in parentheses."""
    match e:
        case ir.Const(of, value):
            assert isinstance(of, Scalar)
            word = _number(value, of)
            return word if of in (I32, F32) else f"{of.name}({word})"
        case ir.Var(_, name):
            return name
        case ir.Unary(_, op, a):
            return f"{'not ' if op == '!' else op}{_inner(a)}"
        case ir.Binary(_, op, a, b):
            return f"{_inner(a)} {_operator(e)} {_inner(b)}"
        case ir.Ternary(_, condition, a, b):
            return f"{_inner(a)} if {_inner(condition)} else {_inner(b)}"
        case ir.Cast(of, a):
            return f"{spelled(of)}({expression(a)})"
        case ir.CallExpression():
            return _call(e)
        case ir.Index(_, base, index):
            return f"{_inner(base)}[{expression(index)}]"
        case ir.Member(_, base, field):
            return f"{_inner(base)}.{field}"
        case ir.AddressOf():
            raise AssertionError("an address at the high level")


def _operator(e: ir.Binary) -> str:
    if e.op == "/" and isinstance(e.type, Scalar) and not e.type.is_float:
        return "//"
    return WORDS.get(e.op, e.op)


def _inner(e: ir.Expr) -> str:
    text = expression(e)
    is_negative = isinstance(e, ir.Const) and text.startswith("-")
    return f"({text})" if isinstance(e, ir.Unary | ir.Binary | ir.Ternary) or is_negative else text


def _call(e: ir.CallExpression) -> str:
    parts = [expression(arg) for arg in e.args]
    if e.name in OPERATIONS and OPERATIONS[e.name].names_type:
        of = e.type.elem if isinstance(e.type, Vec) else e.type
        parts.append(spelled(of))
    elif e.name == "vector":
        elem = ir.vec(e).elem
        numbers = (_number(constant.value, elem) for constant in e.numbers if isinstance(constant, ir.Const))
        return f"vector({elem.name}, {', '.join(numbers)})"
    elif e.name in REDUCTIONS:
        parts += [ORDERS[place] for place in e.places]
    else:
        parts += [expression(constant) for constant in e.numbers]
    return f"{e.name}({', '.join(parts)})"


def _number(value: int | float, of: Scalar) -> str:
    if not of.is_float:
        return str(int(value))
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    text = str(np.float32(value)) if of == F32 else repr(float(value))
    return text if any(mark in text for mark in ".einf") else f"{text}.0"
