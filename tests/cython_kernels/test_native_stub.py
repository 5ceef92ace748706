"""`_native.pyi` says what the compiled module has: the same names, parameters and defaults."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from phasewise.cython_kernels import _native
from tests.support import ROOT

KERNELS = ROOT / "cython_kernels"
STUB = ast.parse((KERNELS / "_native.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def of_module() -> Iterator[tuple[str, Any]]:
    """The module's own public names: not modules, nor exceptions that it takes from errors.py."""
    for name, value in vars(_native).items():
        imported = isinstance(value, type) and value.__module__ != _native.__name__
        if not name.startswith("_") and not isinstance(value, ModuleType) and not imported:
            yield name, value


def parameters(function: Callable[..., Any]) -> list[str]:
    """`name`, or `name=` where there is a default; without self."""
    declared = inspect.signature(function).parameters.values()
    return [f"{p.name}=" if p.default is not p.empty else p.name for p in declared if p.name != "self"]


def stub_parameters(function: ast.FunctionDef) -> list[str]:
    arguments = [*function.args.posonlyargs, *function.args.args]
    required = len(arguments) - len(function.args.defaults)
    named = [f"{a.arg}=" if i >= required else a.arg for i, a in enumerate(arguments)]
    return [name for name in named if name != "self"]


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {child.name: child for child in node.body if isinstance(child, ast.FunctionDef)}


def test_the_names_are_those_of_the_module() -> None:
    variables = {
        node.target.id
        for node in STUB.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    told = public([*CLASSES, *FUNCTIONS, *variables])
    there = {name for name, _ in of_module()}

    assert there - told == set(), f"_native.pyi lacks {sorted(there - told)}"
    assert told - there == set(), f"_native.pyi has what the module has not: {sorted(told - there)}"


def test_functions_take_what_the_stub_says() -> None:
    for name, value in of_module():
        if not isinstance(value, type) and callable(value):
            assert parameters(value) == stub_parameters(FUNCTIONS[name]), f"_native.{name}"


def test_classes_have_what_the_stub_says() -> None:
    for name, value in of_module():
        if isinstance(value, type):
            told, there = methods(CLASSES[name]), public(vars(value))
            assert public(told) == there, f"_native.{name}: {sorted(public(told) ^ there)}"
            for method in there:
                if callable(getattr(value, method)):
                    assert parameters(getattr(value, method)) == stub_parameters(told[method]), (
                        f"{name}.{method}"
                    )
