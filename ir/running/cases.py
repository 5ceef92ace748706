"""Arguments for calls of a kernel, drawn from its own description: edges first, then at random."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phasewise.ir import nodes as ir
from phasewise.ir.errors import SourceError
from phasewise.ir.operations import fitting, integer_result
from phasewise.ir.running.harness import IS_ALIAS, IS_SHARED
from phasewise.ir.types import Pointer, Scalar, Struct, Type, innermost

DEFAULT_MOST = 512
MAX_BUFFER_BYTES = 64 << 20
SPECIAL_SHARE = 0.15
ALIASED_SHARE = 1 / 3
"""Share of calls in which two buffers that may be the same one are the same."""


DTYPES = {
    "i8": "<i1", "u8": "<u1", "i16": "<i2", "u16": "<u2", "i32": "<i4", "u32": "<u4", "i64": "<i8",
    "u64": "<u8", "f32": "<f4", "f64": "<f8",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """The arguments of one call: a number, or the bytes of a buffer, for each. aliases: pairs of arguments
    that are one buffer, in the order of the arguments; their bytes are equal."""

    values: tuple[int | float | bytes, ...]
    aliases: tuple[tuple[int, int], ...] = ()

    def encoded(self, function: ir.FunctionDefinition, is_at_end: bool) -> bytes:
        """The case as the bytes that harness.py reads."""
        parts = [struct.pack("<Q", is_at_end)]
        earlier = {later: first for first, later in self.aliases}
        shared = {first for first, _ in self.aliases}
        for i, (value, (_, of)) in enumerate(zip(self.values, function.args, strict=True)):
            if isinstance(value, bytes) and i in earlier:
                parts.append(struct.pack("<QQ", IS_ALIAS, earlier[i]))
            elif isinstance(value, bytes):
                parts += [struct.pack("<Q", len(value) | (IS_SHARED if i in shared else 0)), value]
            else:
                assert isinstance(of, Scalar)
                parts.append(np.array(value, DTYPES[of.name]).tobytes().ljust(8, b"\0"))
        return b"".join(parts)


def described(function: ir.FunctionDefinition, where: str = "kernel") -> dict[str, ir.Argument]:
    """The description of every argument, by name. SourceError for a buffer without: no size is guessed."""
    by_name = {argument.name: argument for argument in function.described}
    for name, of in function.args:
        if name not in by_name and isinstance(of, Pointer):
            raise SourceError(
                where, function.line, f'argument `{name}` is not described; add describe("{name}", count=..)'
            )
        if isinstance(of, Pointer) and by_name[name].count is None:
            raise SourceError(where, by_name[name].line, f"argument `{name}` has no count")
    return by_name


def sizes(function: ir.FunctionDefinition) -> list[str]:
    """The names of the arguments that are whole numbers, which make up a shape."""
    return [name for name, of in function.args if isinstance(of, Scalar) and not of.is_float]


def draw(
    function: ir.FunctionDefinition,
    rng: np.random.Generator,
    shape: Mapping[str, int] | None = None,
    edge: int | None = None,
    where: str = "kernel",
    is_plain: bool = False,
) -> Case:
    """Draw the arguments of a call. shape: values of whole numbers. edge: index of the call in its run, whose
    first calls meet the bounds. is_plain: True for no zeros and no subnormal numbers, which slow a processor
    down."""
    descriptions = described(function, where)
    numbers: dict[str, int | float] = {}
    for name, of in function.args:
        if isinstance(of, Scalar):
            description = descriptions.get(name) or ir.Argument(name, 0)
            if shape is not None and name in shape:
                numbers[name] = _on_grid(shape[name], dict(description.numbers))
            else:
                numbers[name] = _number(description, of, rng, edge)
    values: list[int | float | bytes] = []
    for name, of in function.args:
        if isinstance(of, Scalar):
            values.append(numbers[name])
        else:
            assert isinstance(of, Pointer)
            description = descriptions[name]
            assert description.count is not None
            count = evaluate(description.count, numbers)
            if not 0 <= count * of.to.size <= MAX_BUFFER_BYTES:
                raise SourceError(where, description.line, f"`{name}` would have {count} elements")
            values.append(_content(of.to, count, description, rng, is_plain))
    names = [name for name, _ in function.args]
    aliases = []
    for argument in function.described:
        if argument.alias and not is_plain and rng.random() < ALIASED_SHARE:
            i, j = names.index(argument.name), names.index(argument.alias)
            here, there = values[i], values[j]
            if isinstance(here, bytes) and isinstance(there, bytes) and len(here) == len(there):
                values[i] = there
                aliases.append((min(i, j), max(i, j)))
    return Case(tuple(values), tuple(aliases))


def _on_grid(value: int, bounds: Mapping[str, float]) -> int:
    return value // int(bounds.get("multiple", 1)) * int(bounds.get("multiple", 1))


def _number(argument: ir.Argument, of: Scalar, rng: np.random.Generator, edge: int | None) -> int | float:
    bounds = dict(argument.numbers)
    if of.is_float:
        return float(np.float32(rng.uniform(bounds.get("low", -1.0), bounds.get("high", 1.0))))
    least, most = int(bounds.get("least", 0)), int(bounds.get("most", DEFAULT_MOST))
    multiple = int(bounds.get("multiple", 1))
    low, high = -(-least // multiple), most // multiple
    if edge is not None and edge < 40:
        return min(high, low + edge) * multiple
    if edge is not None and edge == 40:
        return high * multiple
    if rng.random() < 0.9:
        high = min(high, low + max(2, 300 // multiple))
    return int(rng.integers(low, high + 1)) * multiple


def _content(of: Type, count: int, argument: ir.Argument, rng: np.random.Generator, is_plain: bool) -> bytes:
    if isinstance(of, Struct):
        whole = np.zeros((count, of.size), np.uint8)
        for name, field in of.fields:
            inner, n = _flat(field)
            values = _numbers(inner, (count, n), argument, rng, name in argument.halves, is_plain)
            offset = of.offset(name)
            whole[:, offset : offset + field.size] = (
                np.ascontiguousarray(values).view(np.uint8).reshape(count, field.size)
            )
        return whole.tobytes()
    inner, n = _flat(of)
    return _numbers(inner, (count, n), argument, rng, "*" in argument.halves, is_plain).tobytes()


def _flat(of: Type) -> tuple[Scalar, int]:
    inner = innermost(of)
    if not isinstance(inner, Scalar):
        raise SourceError("kernel", 0, "a buffer of structs within structs cannot be drawn")
    return inner, of.size // inner.size


def _numbers(
    of: Scalar,
    shape: tuple[int, int],
    argument: ir.Argument,
    rng: np.random.Generator,
    is_half: bool,
    is_plain: bool,
) -> npt.NDArray[np.generic]:
    bounds = dict(argument.numbers)
    low, high = bounds.get("low", -1.0), bounds.get("high", 1.0)
    if of.is_float or is_half:
        drawn = rng.uniform(low, high, shape)
        if not is_plain and rng.random() < SPECIAL_SHARE:
            special = [value for value in (0.0, -0.0, low, high, 1e-30, -1e-42, 1.0) if low <= value <= high]
            mask = rng.random(shape) < 0.3
            drawn = np.where(mask, rng.choice(special, shape), drawn)
        if is_half:
            return drawn.astype("<f2").view("<u2")
        with np.errstate(over="ignore"):
            return drawn.astype(DTYPES[of.name])
    info = np.iinfo(DTYPES[of.name])
    is_bounded = (
        "low" in bounds and info.min <= bounds["low"] and bounds["high"] <= info.max and not argument.halves
    )
    least, most = (
        (int(bounds["low"]), int(bounds["high"])) if is_bounded and "high" in bounds else (info.min, info.max)
    )
    return rng.integers(least, most, shape, DTYPES[of.name], endpoint=True)


def magnitudes(case: Case, function: ir.FunctionDefinition) -> Case:
    """Copy a case with absolute values; its result is the scale of a result without cancellation."""
    values: list[int | float | bytes] = []
    described_by = {argument.name: argument for argument in function.described}
    for value, (name, of) in zip(case.values, function.args, strict=True):
        if isinstance(value, bytes) and isinstance(of, Pointer):
            inner = of.to
            if isinstance(inner, Scalar):
                with np.errstate(over="ignore"):
                    array = np.frombuffer(value, DTYPES[inner.name])
                    value = np.abs(array).astype(array.dtype).tobytes()
            elif isinstance(inner, Struct):
                value = _absolute_fields(value, inner, described_by[name].halves)
        values.append(value)
    return Case(tuple(values), case.aliases)


def _absolute_fields(value: bytes, of: Struct, halves: Sequence[str]) -> bytes:
    whole = np.frombuffer(value, np.uint8).reshape(-1, of.size).copy()
    for name, field in of.fields:
        inner, _ = _flat(field)
        offset = of.offset(name)
        part = np.ascontiguousarray(whole[:, offset : offset + field.size]).view(DTYPES[inner.name])
        if name in halves:
            part = part & 0x7FFF
        elif inner.is_signed:
            part = np.abs(np.maximum(part, -127)) if inner.size == 1 else np.abs(part)
        whole[:, offset : offset + field.size] = np.ascontiguousarray(part.astype(DTYPES[inner.name])).view(
            np.uint8
        )
    return whole.tobytes()


def evaluate(e: ir.Expr, numbers: Mapping[str, int | float]) -> int:
    """Compute a count, given the numbers among the arguments."""
    match e:
        case ir.Const(value=value):
            return int(value)
        case ir.Var(name=name) if name in numbers:
            return int(numbers[name])
        case ir.Cast(type=Scalar() as of, a=a):
            return int(fitting(evaluate(a, numbers), of))
        case ir.Unary(op="-", a=a):
            return -evaluate(a, numbers)
        case ir.Ternary(condition=condition, a=a, b=b):
            return evaluate(a if evaluate(condition, numbers) else b, numbers)
        case ir.Binary(type=Scalar() as of, op=op, a=a, b=b):
            result = integer_result(op, evaluate(a, numbers), evaluate(b, numbers), of)
            if result is not None:
                return result
    raise SourceError("kernel", 0, "a count is made of the kernel's whole numbers alone")
