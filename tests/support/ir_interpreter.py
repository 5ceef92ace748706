"""The high level run step by step, in Python: what the text means, whatever the compilers make of it.

Numbers are Python's, brought to their type after every operation; vectors are NumPy arrays. Memory is bytes:
a pointer outside its buffer is an error. Floats round as IEEE 754 says, `fma` once.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from phasewise.ir import nodes as ir
from phasewise.ir.errors import UserKernelError
from phasewise.ir.operations import (
    COMPARISONS,
    DOTS,
    LIBRARY,
    OPERATIONS,
    ORDERS,
    REDUCTIONS,
    decayed,
    fitting,
    integer_result,
)
from phasewise.ir.running.cases import DTYPES, Case
from phasewise.ir.running.checking import KernelOutputs
from phasewise.ir.types import F32, Array, Pointer, Scalar, Struct, Type, Vec, common

Value: TypeAlias = Any
"""A number, an array of lanes, or a `Place`."""
MAX_STEPS = 5_000_000


@dataclass(frozen=True)
class MemoryAddress:
    """An address: bytes of a buffer from an offset on."""

    memory: npt.NDArray[np.uint8]
    offset: int

    def read(self, size: int) -> bytes:
        if not 0 <= self.offset <= len(self.memory) - size:
            raise UserKernelError(f"reads byte {self.offset} of {len(self.memory)}")
        return self.memory[self.offset : self.offset + size].tobytes()

    def write(self, data: bytes) -> None:
        if not 0 <= self.offset <= len(self.memory) - len(data):
            raise UserKernelError(f"writes byte {self.offset} of {len(self.memory)}")
        self.memory[self.offset : self.offset + len(data)] = np.frombuffer(data, np.uint8)

    def moved(self, by: int) -> MemoryAddress:
        return MemoryAddress(self.memory, self.offset + by)


class _Returned(Exception):
    def __init__(self, value: Value) -> None:
        self.value = value


class _Left(Exception):
    def __init__(self, word: str) -> None:
        self.word = word


def interpreted(function: ir.FunctionDefinition, case: Case) -> KernelOutputs:
    """The state after a call, as a compiled kernel leaves it. KernelError for a touch outside a buffer."""
    names: dict[str, Value] = {}
    out = []
    for value, (name, of) in zip(case.values, function.args, strict=True):
        if isinstance(value, bytes):
            place = MemoryAddress(np.frombuffer(value, np.uint8).copy(), 0)
            names[name] = place
            if isinstance(of, Pointer) and not of.is_const:
                out.append(place)
        else:
            assert isinstance(of, Scalar)
            names[name] = fitting(value, of)
    machine = _Machine(names)
    for table in function.tables:
        machine.declare(table)
    result = b"\0" * 8
    with np.errstate(all="ignore"):
        try:
            machine.body(function.body)
        except _Returned as done:
            if isinstance(function.result, Scalar):
                result = _packed(done.value, function.result).ljust(8, b"\0")
    return KernelOutputs(result, tuple(place.memory.tobytes() for place in out))


def _packed(value: Value, of: Scalar) -> bytes:
    return np.array(value, DTYPES[of.name]).tobytes()


def _number(value: Any, of: Scalar) -> int | float:
    return float(value) if of.is_float else int(value)


class _Machine:
    def __init__(self, names: dict[str, Value]) -> None:
        self._names = names
        self._left = MAX_STEPS

    # ---- statements ----

    def body(self, body: ir.Body) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, statement: ir.Stmt) -> None:
        match statement:
            case ir.Declare():
                self.declare(statement)
            case ir.Assign(target, value, _):
                self._assign(target, self._value(value))
            case ir.Do(ir.CallExpression(name="store", args=(place, value)), _):
                self._value(place).write(self._value(value).tobytes())
            case ir.Do():
                pass
            case ir.Steps():
                self._steps(statement)
            case ir.While(condition, body, _):
                while self._value(condition) and self._turn(body):
                    pass
            case ir.If(condition, then, otherwise, _):
                self.body(then if self._value(condition) else otherwise)
            case ir.Return(value, _):
                raise _Returned(None if value is None else self._value(value))
            case ir.Leave(word, _):
                raise _Left(word)
            case ir.BlockStatement(body, _):
                self.body(body)
            case _:
                raise AssertionError(statement)

    def declare(self, declared: ir.Declare) -> None:
        if isinstance(declared.type, Array):
            memory = np.zeros(declared.type.size, np.uint8)
            if declared.values:
                of: Type = declared.type
                while isinstance(of, Array):
                    of = of.of
                assert isinstance(of, Scalar)
                memory[:] = np.array(declared.values, DTYPES[of.name]).view(np.uint8)
            self._names[declared.name] = MemoryAddress(memory, 0)
        elif declared.value is not None:
            self._names[declared.name] = self._value(declared.value)

    def _assign(self, target: ir.Expr, value: Value) -> None:
        if isinstance(target, ir.Var):
            self._names[target.name] = value
            return
        data = value.tobytes() if isinstance(target.type, Vec) else _packed(value, target.type)  # type: ignore[arg-type]
        self._place(target).write(data)

    def _steps(self, loop: ir.Steps) -> None:
        self._names[loop.variable] = self._value(loop.start)
        variable = ir.Var(loop.type, loop.variable)
        while self._value(loop.condition) and self._turn(loop.body):
            moved = ir.Binary(loop.type, "+", variable, loop.step)
            self._names[loop.variable] = self._value(moved)

    def _turn(self, body: ir.Body) -> bool:
        """False: the loop was left."""
        self._left -= 1
        if self._left < 0:
            raise UserKernelError(f"more than {MAX_STEPS} turns of loops")
        try:
            self.body(body)
        except _Left as left:
            return left.word == "continue"
        return True

    # ---- places ----

    def _place(self, e: ir.Expr) -> MemoryAddress:
        match e:
            case ir.Index(of, base, index):
                start: MemoryAddress = self._value(base)
                return start.moved(int(self._value(index)) * of.size)
            case ir.Member(_, base, field):
                assert isinstance(base.type, Struct)
                return self._place(base).moved(base.type.offset(field))
        raise AssertionError(e)

    def _loaded(self, place: MemoryAddress, of: Type) -> Value:
        if isinstance(of, Array | Struct):
            return place
        if isinstance(of, Vec):
            return np.frombuffer(place.read(of.size), DTYPES[of.elem.name])
        assert isinstance(of, Scalar)
        return _number(np.frombuffer(place.read(of.size), DTYPES[of.name])[0], of)

    # ---- values ----

    def _value(self, e: ir.Expr) -> Value:
        match e:
            case ir.Const(of, value):
                return value
            case ir.Var(_, name):
                return self._names[name]
            case ir.Unary(of, op, a):
                return self._unary(of, op, self._value(a))
            case ir.Binary():
                return self._binary(e)
            case ir.Ternary(_, condition, a, b):
                return self._value(a if self._value(condition) else b)
            case ir.Cast(of, a):
                value = self._value(a)
                return fitting(value, of) if isinstance(of, Scalar) else value
            case ir.Index() | ir.Member():
                return self._loaded(self._place(e), e.type)
            case ir.CallExpression():
                return self._call(e)
        raise AssertionError(e)

    def _unary(self, of: Type, op: str, a: Value) -> Value:
        if isinstance(of, Vec):
            return -a if op == "-" else ~a
        assert isinstance(of, Scalar)
        if op == "!":
            return int(not a)
        return fitting(-a if op == "-" else ~a, of)

    def _binary(self, e: ir.Binary) -> Value:
        if e.op == "&&":
            return int(bool(self._value(e.a)) and bool(self._value(e.b)))
        if e.op == "||":
            return int(bool(self._value(e.a)) or bool(self._value(e.b)))
        a, b = self._value(e.a), self._value(e.b)
        if isinstance(e.a.type, Vec):
            return _lanewise(e.op, a, b, e.type)
        left, right = decayed(e.a.type), decayed(e.b.type)
        if isinstance(left, Pointer) or isinstance(right, Pointer):
            return _of_pointers(e.op, a, b, left, right)
        assert isinstance(left, Scalar)
        assert isinstance(right, Scalar)
        assert isinstance(e.type, Scalar)
        return _of_numbers(e.op, a, b, left, right, e.type)

    def _call(self, e: ir.CallExpression) -> Value:
        name = e.name
        if name == "load":
            assert isinstance(e.type, Vec)
            return self._loaded(self._value(e.args[0]), e.type)
        args = [self._value(arg) for arg in e.args]
        if name in LIBRARY:
            return _library(name)(*args)
        if isinstance(e.type, Scalar):
            return self._to_number(e, args)
        assert isinstance(e.type, Vec)
        numbers = [int(number.value) for number in e.numbers if isinstance(number, ir.Const)]
        return _vector(e, args, numbers, e.type)

    def _to_number(self, e: ir.CallExpression, args: list[Value]) -> Value:
        of = e.type
        assert isinstance(of, Scalar)
        if e.name in REDUCTIONS:
            order = (
                ORDERS[int(e.numbers[0].value)]
                if e.numbers and isinstance(e.numbers[0], ir.Const)
                else "halves"
            )
            return _number(_reduced(e.name, args[0], order), of)
        if e.name == "lane":
            assert isinstance(e.numbers[0], ir.Const)
            return _number(args[0][int(e.numbers[0].value)], of)
        if e.name == "from_f16":
            return float(np.uint16(args[0]).view(np.float16).astype(np.float32))
        if e.name == "to_f16":
            return int(np.float32(args[0]).astype(np.float16).view(np.uint16))
        if e.name == "bits":
            given = e.args[0].type
            assert isinstance(given, Scalar)
            return _number(np.frombuffer(_packed(args[0], given), DTYPES[of.name])[0], of)
        assert e.name == "convert"
        return fitting(args[0], of)


def _of_pointers(op: str, a: Value, b: Value, left: Type, right: Type) -> Value:
    if op in COMPARISONS:
        return integer_result(op, a.offset, b.offset, Scalar("i64"))
    if isinstance(left, Pointer) and isinstance(right, Pointer):
        return (a.offset - b.offset) // left.to.size
    if isinstance(left, Pointer):
        return a.moved(int(b) * left.to.size * (1 if op == "+" else -1))
    assert isinstance(right, Pointer)
    return b.moved(int(a) * right.to.size)


def _of_numbers(op: str, a: Value, b: Value, left: Scalar, right: Scalar, of: Scalar) -> Value:
    if op in ("<<", ">>"):
        result = integer_result(op, int(fitting(a, of)), int(b), of)
    else:
        shared = common(left, right)
        a, b = fitting(a, shared), fitting(b, shared)
        if shared.is_float:
            return _of_floats(op, float(a), float(b), shared)
        result = integer_result(op, int(a), int(b), Scalar("i32") if op in COMPARISONS else of)
    if result is None:
        raise UserKernelError(f"{a} {op} {b} has no value")
    return result


def _of_floats(op: str, a: float, b: float, of: Scalar) -> Value:
    kind = np.float32 if of == F32 else np.float64
    x, y = kind(a), kind(b)
    if op in COMPARISONS:
        return int(_COMPARE[op](x, y))
    result = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}[op](x, y)
    return float(result)


_COMPARE = {
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
}


def _lanewise(op: str, a: Value, b: Value, of: Type) -> Value:
    assert isinstance(of, Vec)
    if op in COMPARISONS:
        return -_COMPARE[op](a, b).astype(DTYPES[of.elem.name])
    if op in ("<<", ">>"):
        count = a.dtype.type(int(b))
        return (a << count if op == "<<" else a >> count).astype(a.dtype)
    functions = {
        "+": np.add,
        "-": np.subtract,
        "*": np.multiply,
        "/": np.divide,
        "&": np.bitwise_and,
        "|": np.bitwise_or,
        "^": np.bitwise_xor,
    }
    return functions[op](a, b)


# ---- operations ------------------------------------------------------------------------------------------


def fma(a: npt.NDArray[Any], b: npt.NDArray[Any], c: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """a b + c of float32, rounded once: the sum in float64 is rounded to odd before it becomes float32.

    Boldo, Melquiond: Emulation of a FMA and correctly rounded sums (2008): a float64 that was rounded to odd
    has enough digits for the second rounding to be right.
    """
    product = a.astype(np.float64) * b.astype(np.float64)  # exact: twice 24 bits
    third = c.astype(np.float64)
    total = product + third
    back = total - product
    error = (product - (total - back)) + (third - back)
    bits = np.atleast_1d(total).view(np.int64)
    is_even = (bits & 1 == 0) & np.isfinite(total) & (error != 0)
    away = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where(is_even, bits + away, bits).view(np.float64)
    return odd.reshape(total.shape).astype(np.float32)


def _vector(e: ir.CallExpression, args: list[Value], numbers: list[int], of: Vec) -> Value:
    dtype = DTYPES[of.elem.name]
    name = e.name
    match name:
        case "splat":
            return np.full(of.lanes, fitting(args[0], of.elem), dtype)
        case "vector":
            return np.array([number.value for number in e.numbers if isinstance(number, ir.Const)], dtype)
        case "fma":
            return fma(*args)
        case "bits":
            return np.frombuffer(args[0].tobytes(), dtype)
        case "convert" | "widen" | "narrow":
            return args[0].astype(dtype)
        case "from_f16":
            return args[0].view(np.float16).astype(np.float32)
        case "to_f16":
            return args[0].astype(np.float16).view(np.uint16)
        case "lo":
            return args[0][: of.lanes]
        case "hi":
            return args[0][of.lanes :]
        case "concat":
            return np.concatenate(args)
        case "permute":
            return args[0][numbers]
        case "shuffle":
            return _shuffled(args[0], args[1], numbers)
        case "with_lane":
            changed = args[0].copy()
            changed[numbers[0]] = args[1]
            return changed
        case "select":
            return np.where(
                args[0] < 0 if args[0].dtype.kind == "i" else args[0] >> (8 * of.elem.size - 1), *args[1:]
            )
        case "pack":
            return _saturated(_packed_groups(args[0], args[1]), of.elem)
        case "lookup":
            return _looked_up(args[0], args[1])
    return _dot(name, args, of) if name in DOTS else _simple(name, args, of)


def _shuffled(a: Value, b: Value, places: list[int]) -> Value:
    group = len(places)
    both = np.concatenate([a.reshape(-1, group), b.reshape(-1, group)], axis=1)
    return both[:, places].reshape(-1)


def _packed_groups(a: Value, b: Value) -> Value:
    """Sixteen bytes of the result: the group of a, then that of b."""
    lanes = min(len(a), 16 // a.dtype.itemsize)
    return np.concatenate([a.reshape(-1, lanes), b.reshape(-1, lanes)], axis=1).reshape(-1)


def _saturated(wide: Value, of: Scalar) -> Value:
    info = np.iinfo(DTYPES[of.name])
    return np.clip(wide.astype(np.int64), info.min, info.max).astype(DTYPES[of.name])


def _looked_up(table: Value, places: Value) -> Value:
    indices = places.view(np.uint8).reshape(-1, 16)
    looked_up = np.take_along_axis(table.reshape(-1, 16), (indices & 15).astype(np.int64), axis=1)
    return np.where(indices & 128, 0, looked_up).astype(table.dtype).reshape(-1)


def _dot(name: str, args: list[Value], of: Vec) -> Value:
    products, is_added = DOTS[name][3], DOTS[name][4]
    a, b = (arg.astype(np.int64) for arg in args[-2:])
    sums = (a * b).reshape(-1, products).sum(axis=1)
    if name.endswith("_sat"):
        return _saturated(sums, of.elem)
    return (sums + (args[0].astype(np.int64) if is_added else 0)).astype(DTYPES[of.elem.name])


def _simple(name: str, args: list[Value], of: Vec) -> Value:
    a = args[0]
    match name:
        case "min":
            return np.where(a < args[1], a, args[1])
        case "max":
            return np.where(a > args[1], a, args[1])
        case "avg":
            return ((a.astype(np.int64) + args[1] + 1) >> 1).astype(a.dtype)
        case "sign":
            return (a * np.sign(args[1])).astype(a.dtype)
        case "mulhi":
            return ((a.astype(np.int64) * args[1]) >> 16).astype(a.dtype)
        case "add_sat":
            return _saturated(a.astype(np.int64) + args[1], of.elem)
        case "sub_sat":
            return _saturated(a.astype(np.int64) - args[1], of.elem)
        case "andnot":
            return ~a & args[1]
        case "abs":
            return np.abs(a)
        case "sqrt":
            return np.sqrt(a)
        case "nearest":
            return np.rint(a)
        case "floor" | "ceil" | "trunc":
            return getattr(np, name)(a)
        case "nearest_i32" | "trunc_i32":
            whole = (np.rint(a) if name == "nearest_i32" else np.trunc(a)).astype(np.float64)
            inside = (whole >= -(2.0**31)) & (whole < 2.0**31)
            return np.where(inside, whole, -(2.0**31)).astype(np.int32)
    raise AssertionError(name)


def _reduced(name: str, values: Value, order: str = "halves") -> Value:
    def combined(a: Value, b: Value) -> Value:
        return a + b if name == "reduce_add" else _simple(name.removeprefix("reduce_"), [a, b], _ANY)

    while len(values) > 1:
        half = len(values) // 2
        is_pairs = order == "pairs" or (order == "halves_pairs" and values.nbytes <= 16)
        a, b = (values[::2], values[1::2]) if is_pairs else (values[:half], values[half:])
        values = {"reduce_add": lambda x, y: x + y}.get(name, lambda x, y: _simple(name[7:], [x, y], _ANY))(
            a, b
        )
    return values[0]


_ANY = Vec(F32, 1)


@cache
def _library(name: str) -> Any:
    """The function that compiled kernels call."""
    function = getattr(ctypes.CDLL(ctypes.util.find_library("m")), name)
    function.restype = ctypes.c_float
    function.argtypes = [ctypes.c_float] * OPERATIONS[name].values
    return function
