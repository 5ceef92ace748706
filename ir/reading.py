"""Reader of the high level's text: typed statements. Every error names the line of the text.

Python's own parser reads the syntax; the branches below accept the subset that has a meaning here. Parameters
get values first, because the lanes of a vector may depend on them: a kernel is read anew for each choice.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import replace

from phasewise.ir import nodes as ir
from phasewise.ir.operations import OPERATIONS, Mistyped, decayed, fitting
from phasewise.ir.reading_expressions import Folder, TextExpressions
from phasewise.ir.text import FIRST_LINE
from phasewise.ir.types import (
    I32,
    SCALARS,
    VOID,
    Array,
    Pointer,
    Scalar,
    Struct,
    Type,
    Vec,
    innermost,
    spelled,
)

MAX_CHARS = 1 << 20
MAX_DEPTH = 100
MAX_SPACE = 100_000
"""Most choices, as the product of the numbers of values of all parameters."""
TRANSFORMATIONS = ("unroll", "widen")
"""Names of a loop's transformations, each with a number; see transforms.py."""


def read(text: str, where: str = "kernel", choice: Mapping[str, int] | None = None) -> ir.FunctionDefinition:
    """Read a kernel from its text. choice: values in place of the parameters; without it the parameters'
    names stay, and types are those of the defaults. Raises SourceError."""
    return _Reader(text, where, choice).function()


class _Reader(TextExpressions):
    def __init__(self, text: str, where: str, choice: Mapping[str, int] | None) -> None:
        super().__init__(where, choice)
        self._tables: dict[str, ir.Declare] = {}
        self._described: list[ir.Argument] = []
        """The descriptions of arguments that were read so far."""
        self._loops: set[str] = set()
        self._reassociate = False
        self._result: Type = VOID
        self._tree = self._parsed(text)
        raised = re.search(r"^# raised from C for (\w+)$", text, re.MULTILINE)
        self._source_isa = raised[1] if raised else ""

    def _parsed(self, text: str) -> ast.Module:
        if len(text) > MAX_CHARS:
            raise self._refuse(0, f"longer than {MAX_CHARS} characters")
        first = next((line for line in text.splitlines() if line.strip()), "")
        version = re.fullmatch(r"# phasewise kernel (\d+)", first.strip())
        if version is None:
            raise self._refuse(1, f"does not begin with `{FIRST_LINE}`")
        if version[1] != "1":
            raise self._refuse(1, f"is of version {version[1]}; this phasewise reads version 1")
        depth = 0
        for number, line in enumerate(text.splitlines(), 1):
            for mark in line:
                depth += (mark in "([{") - (mark in ")]}")
                if depth > MAX_DEPTH:
                    raise self._refuse(number, f"nested more than {MAX_DEPTH} deep")
            words = re.split(r"\S", line, maxsplit=1)[0]
            if len(words) > 4 * MAX_DEPTH:
                raise self._refuse(number, f"nested more than {MAX_DEPTH} deep")
            if len(line) > 20_000 or line.count("-") + line.count("~") + line.count("not ") > 2_000:
                raise self._refuse(number, "a line of this length means no kernel")
        try:
            return ast.parse(text)
        except SyntaxError as error:
            raise self._refuse(error.lineno or 0, f"does not parse: {error.msg}") from None
        except (ValueError, RecursionError, MemoryError):
            raise self._refuse(0, "does not parse: too deep, or not text") from None

    # ---- the file ----

    def function(self) -> ir.FunctionDefinition:
        definition: ast.FunctionDef | None = None
        for node in self._tree.body:
            match node:
                case ast.ClassDef():
                    self._struct(node)
                case ast.AnnAssign():
                    self._table(node)
                case ast.FunctionDef():
                    if definition is not None:
                        raise self._refuse(node, f"a second kernel, `{node.name}`; one text holds one")
                    definition = node
                case _:
                    raise self._refuse(
                        node, "only structs, tables and one `def` stand at the outermost level"
                    )
        if definition is None:
            raise self._refuse(0, "has no `def`: there is no kernel in it")
        try:
            return self._kernel(definition)
        except RecursionError:
            raise self._refuse(definition, "nested too deep") from None

    def _struct(self, node: ast.ClassDef) -> None:
        fields = []
        for line in node.body:
            if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
                raise self._refuse(line, f"a field of `{node.name}` is written `name: type`")
            fields.append((line.target.id, self._type(line.annotation)))
        self._structs[node.name] = Struct(node.name, tuple(fields))

    def _table(self, node: ast.AnnAssign) -> None:
        if not isinstance(node.target, ast.Name):
            raise self._refuse(node, "a table is written `name: array[u8, 4] = [...]`")
        name, of = node.target.id, self._type(node.annotation)
        if not isinstance(of, Array):
            raise self._refuse(node, f"table `{name}` is an array")
        values = self._list(node.value, of, node)
        self._tables[name] = ir.Declare(name, of, None, node.lineno, values, True)
        self._types[name] = of

    def _list(self, node: ast.expr | None, of: Array, statement: ast.AST) -> tuple[int | float, ...]:
        inner = innermost(of)
        if not isinstance(inner, Scalar):
            raise self._refuse(statement, f"values of {spelled(of)}")
        if isinstance(node, ast.Name) and node.id == "zeros":
            return (0,) * (of.size // inner.size)
        if not isinstance(node, ast.List):
            raise self._refuse(statement, "values stand in a list")
        values = tuple(self._plain_number(value, inner) for value in node.elts)
        if len(values) != of.size // inner.size:
            raise self._refuse(statement, f"{of.size // inner.size} values are needed, not {len(values)}")
        return values

    # ---- the kernel ----

    def _kernel(self, node: ast.FunctionDef) -> ir.FunctionDefinition:
        spec = node.args
        if spec.vararg or spec.kwarg or spec.kwonlyargs or spec.defaults or spec.posonlyargs:
            raise self._refuse(node, "arguments are written `name: type`")
        args = []
        for arg in spec.args:
            if arg.annotation is None:
                raise self._refuse(arg, f"argument `{arg.arg}` has no type")
            of = self._type(arg.annotation)
            if not isinstance(of, Scalar | Pointer):
                raise self._refuse(
                    arg, f"argument `{arg.arg}` is {spelled(of)}; numbers and pointers are passed"
                )
            args.append((arg.arg, of))
            self._types[arg.arg] = of
        self._result = self._type(node.returns)
        rest = [line for line in node.body if not self._is_header(line)]
        body = self._body(rest)
        space = 1
        for parameter in self._parameters.values():
            space *= len(parameter.values)
        if space > MAX_SPACE:
            raise self._refuse(
                node, f"the parameters have {space} choices together; at most {MAX_SPACE} are searched"
            )
        for name in self._choice or ():
            if name not in self._parameters:
                names = ", ".join(self._parameters) or "none"
                raise self._refuse(node, f"{node.name} has no parameter {name!r:.40}; it has {names}")
        function = ir.FunctionDefinition(
            name=node.name,
            args=tuple(args),
            result=self._result,
            body=body,
            line=node.lineno,
            structs=tuple(self._structs.values()),
            tables=tuple(self._tables.values()),
            parameters=tuple(self._parameters.values()),
            described=tuple(self._described),
            reassociate=self._reassociate,
            source_isa=self._source_isa,
        )
        return (
            function
            if self._choice is None
            else replace(function, body=Folder().body(function.body), parameters=())
        )

    def _is_header(self, node: ast.stmt) -> bool:
        """True if the line describes the kernel and computes nothing; its content is noted."""
        match node:
            case ast.Expr(value=ast.Constant(value=str())) | ast.Pass():
                return True
            case ast.Expr(value=ast.Call(func=ast.Name(id="reassociate"))):
                self._reassociate = True
                return True
            case ast.Expr(value=ast.Call(func=ast.Name(id="describe")) as description):
                self._describe(description)
                return True
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if re.fullmatch(
                r"[A-Z][A-Z0-9_]*", name
            ):
                self._parameter(name, value)
                return True
        return False

    def _parameter(self, name: str, node: ast.expr) -> None:
        if name in self._parameters or len(name) > 32:
            raise self._refuse(node, f"parameter `{name}` is given twice, or its name is longer than 32")
        match node:
            case ast.Call(func=ast.Name(id="tune"), args=args) if args:
                values = [int(self._plain_number(arg, I32)) for arg in args]
            case ast.Constant(value=int()) | ast.UnaryOp():
                values = [int(self._plain_number(node, I32))]
            case _:
                raise self._refuse(node, f"parameter `{name}` is a whole number, or tune(1, 2, ..)")
        if len(set(values)) != len(values):
            raise self._refuse(node, f"parameter `{name}` has a value twice")
        if self._choice is not None:
            chosen = self._choice.get(name, values[0])
            if chosen not in values:
                raise self._refuse(node, f"parameter `{name}` may be one of {tuple(values)}, not {chosen}")
            values = [chosen]
        self._parameters[name] = ir.Parameter(name, tuple(values), node.lineno)

    def _describe(self, node: ast.Call) -> None:
        match node.args:
            case [ast.Constant(value=str(name))] if isinstance(self._types.get(name), Scalar | Pointer):
                pass
            case _:
                raise self._refuse(node, "describe begins with the name of an argument")
        argument = ir.Argument(name, node.lineno)
        for keyword in node.keywords:
            match keyword.arg, keyword.value:
                case "count", value:
                    argument = replace(argument, count=self._expr(value))
                case ("low" | "high" | "least" | "most" | "multiple") as word, value:
                    argument = replace(
                        argument,
                        numbers=(*argument.numbers, (word, float(self._plain_number(value, SCALARS["f64"])))),
                    )
                case "halves", ast.Constant(value=str(text)):
                    argument = replace(argument, halves=tuple(text.split()))
                case "out", ast.Constant(value=True):
                    argument = replace(argument, is_out=True)
                case "alias", ast.Name(id=other) if self._may_alias(name, other):
                    argument = replace(argument, alias=other)
                case "alias", _:
                    raise self._refuse(node, f"`{name}` may be another buffer of the same type alone")
                case word, _:
                    raise self._refuse(node, f"describe does not know `{word}`")
        self._described.append(argument)

    def _may_alias(self, name: str, other: str) -> bool:
        type_of_name, type_of_other = self._types.get(name), self._types.get(other)
        return (
            name != other
            and isinstance(type_of_name, Pointer)
            and isinstance(type_of_other, Pointer)
            and type_of_name.to == type_of_other.to
        )

    # ---- statements ----

    def _body(self, nodes: list[ast.stmt]) -> ir.Body:
        return tuple(new for line in nodes for new in self._statement(line))

    def _statement(self, node: ast.stmt) -> list[ir.Stmt]:
        try:
            return self._typed_statement(node)
        except Mistyped as error:
            raise self._refuse(node, str(error)) from None

    def _typed_statement(self, node: ast.stmt) -> list[ir.Stmt]:
        line = node.lineno
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                return [self._declaration(name, self._type(annotation), value, node)]
            case ast.Assign(targets=[target], value=value):
                return [self._assignment(target, self._expr(value), node)]
            case ast.Expr(value=ast.Call() as expression):
                call = self._expr(expression)
                if not isinstance(call, ir.CallExpression) or not OPERATIONS[call.name].is_effect:
                    raise self._refuse(node, "has no effect")
                return [ir.Do(call, line)]
            case ast.For(
                target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="steps")) as steps, body=body
            ):
                if node.orelse:
                    raise self._refuse(node, "`else` of a loop")
                return [self._loop(name, steps, body, node)]
            case ast.While(test=test, body=body, orelse=[]):
                return [ir.While(self._number(test), self._body(body), line)]
            case ast.If(test=test, body=body, orelse=orelse):
                condition = self._number(test)
                return [ir.If(condition, self._body(body), self._body(orelse), line)]
            case ast.Return(value=value):
                if (value is None) != (self._result == VOID):
                    raise self._refuse(node, f"the kernel gives {spelled(self._result)}")
                return [
                    ir.Return(
                        None if value is None else self._fit(self._expr(value), self._result, node), line
                    )
                ]
            case ast.Break():
                return [ir.Leave("break", line)]
            case ast.Continue():
                return [ir.Leave("continue", line)]
            case ast.Pass():
                return []
        raise self._refuse(node, f"`{ast.unparse(node).splitlines()[0][:50]}` is nothing that a kernel does")

    def _declaration(self, name: str, of: Type, value: ast.expr | None, node: ast.stmt) -> ir.Declare:
        self._new_name(name, of, node)
        if isinstance(of, Array):
            values = () if value is None else self._list(value, of, node)
            return ir.Declare(name, of, None, node.lineno, values)
        if isinstance(of, Struct):
            raise self._refuse(node, "a variable that is a struct")
        init = None if value is None else self._fit(self._expr(value), of, node)
        return ir.Declare(name, of, init, node.lineno)

    def _new_name(self, name: str, of: Type, node: ast.AST) -> None:
        declared = self._types.get(name)
        if declared is not None:
            raise self._refuse(node, f"`{name}` exists already, as {spelled(declared)}")
        if (
            name in OPERATIONS
            or name in SCALARS
            or name in self._parameters
            or not re.fullmatch(r"[A-Za-z_]\w{0,99}", name, re.ASCII)
        ):
            raise self._refuse(node, f"`{name}` cannot be the name of a variable")
        self._types[name] = of

    def _fit(self, value: ir.Expr, of: Type, node: ast.AST) -> ir.Expr:
        """Give a value the needed type. Numbers of the text take the type, other values are not converted."""
        if value.type == of:
            return value
        if (
            isinstance(value, ir.Const)
            and isinstance(of, Scalar)
            and (of.is_float or isinstance(value.value, int))
        ):
            fitted = fitting(value.value, of)
            if fitted == value.value or of.is_float:
                return ir.Const(of, fitted)
        if isinstance(value.type, Array) and decayed(value.type) == of:
            return value
        if isinstance(of, Pointer) and isinstance(decayed(value.type), Pointer):
            given = decayed(value.type)
            assert isinstance(given, Pointer)
            if given.to == of.to and (of.is_const or not given.is_const):
                return value
        raise self._refuse(
            node, f"{spelled(value.type)} where {spelled(of)} is needed; write {spelled(of)}(..)"
        )

    def _assignment(self, target: ast.expr, value: ir.Expr, node: ast.stmt) -> ir.Stmt:
        if isinstance(target, ast.Name):
            declared = self._types.get(target.id)
            if declared is None:
                if not isinstance(value.type, Vec):
                    raise self._refuse(
                        node, f"`{target.id}` is new: write `{target.id}: {spelled(value.type)} = ..`"
                    )
                self._new_name(target.id, value.type, node)
                return ir.Declare(target.id, value.type, value, node.lineno)
            if isinstance(declared, Array) or target.id in self._tables:
                raise self._refuse(node, f"`{target.id}` is an array; assign to its elements")
            return ir.Assign(ir.Var(declared, target.id), self._fit(value, declared, node), node.lineno)
        place = self._expr(target)
        if not isinstance(place, ir.Index | ir.Member) or isinstance(place.type, Array | Struct):
            raise self._refuse(node, "only variables, elements and fields are assigned to")
        self._check_writable(place, node)
        return ir.Assign(place, self._fit(value, place.type, node), node.lineno)

    def _check_writable(self, place: ir.Expr, node: ast.AST) -> None:
        while isinstance(place, ir.Index | ir.Member):
            base = place.base
            if isinstance(base.type, Pointer) and base.type.is_const:
                raise self._refuse(node, "assigns to memory that is const")
            if isinstance(base, ir.Var) and base.name in self._tables:
                raise self._refuse(node, f"assigns to the table `{base.name}`")
            place = base

    def _loop(self, variable: str, steps: ast.Call, body: list[ast.stmt], node: ast.For) -> ir.Steps:
        if len(steps.args) < 4 or steps.keywords:
            raise self._refuse(node, 'a loop is written `for i in steps("name", start, condition, step):`')
        name, start, condition, step, *how = steps.args
        if not isinstance(name, ast.Constant) or not isinstance(name.value, str) or name.value in self._loops:
            raise self._refuse(node, "a loop begins with a name of its own, in quotes")
        self._loops.add(name.value)
        first = self._expr(start)
        of = decayed(first.type)
        declared = self._types.get(variable)
        if not isinstance(of, Scalar | Pointer) or (isinstance(of, Scalar) and of.is_float):
            raise self._refuse(node, f"a loop over {spelled(of)}")
        if declared is None:
            self._new_name(variable, of, node)
        elif declared != of:
            first = self._fit(first, declared, node)
            of = declared
        until, by = self._number(condition), self._expr(step)
        if not isinstance(by.type, Scalar) or by.type.is_float:
            raise self._refuse(node, "a step is a whole number")
        transformed = tuple(self._how(transformation) for transformation in how)
        return ir.Steps(
            name.value, variable, of, first, until, by, self._body(body), node.lineno, transformed
        )

    def _how(self, node: ast.expr) -> ir.How:
        match node:
            case ast.Call(func=ast.Name(id=name), args=[number]) if name in TRANSFORMATIONS:
                return ir.How(name, self._expr(number))
        raise self._refuse(
            node, f"`{ast.unparse(node)[:40]}` is no transformation; there are {', '.join(TRANSFORMATIONS)}"
        )
