"""Emission of one C file, and its header, that builds anywhere without phasewise: the tuned variants and the
choice among them for each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod, sqrt

from phasewise.ir.build import built
from phasewise.ir.c_text import signature
from phasewise.ir.errors import UserKernelError
from phasewise.ir.lowering import Lowered, own_header
from phasewise.ir.printing import Original, is_original
from phasewise.ir.reading import read
from phasewise.ir.targets import TARGETS, IsaTarget
from phasewise.ir.types import Void

Shape = tuple[tuple[str, int], ...]
_PLAIN = """/* The order of roundings is part of the kernel: compilers must not fuse what it does not fuse. */
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif
"""


@dataclass(frozen=True)
class TunedTarget:
    """The parameters in use for a target, by shape."""

    target: IsaTarget
    by_shape: Mapping[Shape, Mapping[str, int]]
    core_sig: str
    original: Original | None = None
    """The original function, for shapes at which it is in use; None if there are none."""


def emitted(text: str, tuned: Sequence[TunedTarget], header: str | None, about: str) -> str:
    """Write the C file of a kernel: its variants for each tuned target that the compiler enables, else the
    default parameters in portable C."""
    function = read(text)
    plain = built(text, {}, TARGETS["portable"])
    sections = [
        _section(text, function.name, tuned_target) for tuned_target in tuned if tuned_target.by_shape
    ]
    lines = [about_comment(about, [tuned_target for tuned_target in tuned if tuned_target.by_shape])]
    lines += ["#include <math.h>", "#include <stdint.h>", "#include <string.h>"]
    lines += [f'#include "{header}"'] if header else [plain.structs]
    for number, (condition, body) in enumerate(sections):
        lines += [f"{'#if' if number == 0 else '#elif'} {condition}", body]
    if sections:
        lines.append("#else")
    lines += [_PLAIN, *plain.definitions.values(), plain.body]
    if sections:
        lines.append("#endif")
    return "\n".join(lines) + "\n"


def about_comment(about: str, tuned: Sequence[TunedTarget]) -> str:
    """The comment at the top of a file: its source, and the compiler flags with which it is fast."""
    lines = [f"/* {about}"]
    lines += [
        f" * Tuned on {tuned_target.core_sig}: build with -O3 {' '.join(tuned_target.target.flags)}"
        for tuned_target in tuned
    ]
    return "\n".join(
        [*lines, " * Builds with gcc 12, clang 15 and later for any machine of little-endian bytes. */"]
    )


def emitted_header(text: str, about: str) -> str:
    """Write the header of a kernel: its structs and its declaration."""
    function = read(text)
    plain = built(text, {}, TARGETS["portable"])
    guard = f"{function.name.upper()}_H"
    body = f"/* {about} */\n#include <stdint.h>\n{plain.structs}\n{plain.signature};"
    return f"#ifndef {guard}\n#define {guard}\n{body}\n#endif\n"


def _section(text: str, name: str, tuned: TunedTarget) -> tuple[str, str]:
    """C of the variants for a target, and of the function that chooses among them."""
    choices = list(dict.fromkeys(tuple(sorted(parameters.items())) for parameters in tuned.by_shape.values()))
    variants = [_variant(text, dict(choice), tuned, f"{name}_variant{i}") for i, choice in enumerate(choices)]
    numbers = {
        shape: choices.index(tuple(sorted(parameters.items())))
        for shape, parameters in tuned.by_shape.items()
    }
    definitions: dict[str, str] = {}
    for variant in variants:
        definitions |= variant.definitions
    about = [
        f"/* {_described(dict(choice))} */\n{variant.body}"
        for choice, variant in zip(choices, variants, strict=True)
    ]
    condition = " && ".join(f"defined({macro})" for macro in tuned.target.macros) or "1"
    include = own_header(tuned.target).rstrip()
    return condition, "\n".join(
        [include, _PLAIN, *definitions.values(), *about, _dispatch(text, variants, numbers)]
    )


def _described(choice: Mapping[str, int]) -> str:
    if is_original(choice):
        return "the original"
    return ", ".join(f"{key} = {value}" for key, value in choice.items()) or "no parameters"


def _variant(text: str, choice: Mapping[str, int], tuned: TunedTarget, name: str) -> Lowered:
    if not is_original(choice):
        return built(text, choice, tuned.target, name=name, is_static=True)
    if tuned.original is None or dict(tuned.original.choice) != choice:
        raise UserKernelError(
            f"{read(text).name}: its original C is in use for a shape, and this is another text or none; "
            "give the file that was tuned against"
        )
    return tuned.original.lowered(name)


def _dispatch(text: str, variants: Sequence[Lowered], numbers: Mapping[Shape, int]) -> str:
    """C of the function under its own name, which calls the variant of the nearest shape: nearest in ratio,
    by the product of the numbers that differ between shapes."""
    function = read(text)
    names = ", ".join(name for name, _ in function.args)
    word = "" if isinstance(function.result, Void) else "return "
    differing = [name for name, _ in next(iter(numbers)) if len({dict(shape)[name] for shape in numbers}) > 1]
    by_size = sorted(
        (prod(dict(shape)[name] for name in differing), number) for shape, number in numbers.items()
    )
    lines = [f"{signature(function.name, function.args, function.result)} {{"]
    steps = [
        (sqrt(size * following), number)
        for (size, number), (following, after) in pairwise(by_size)
        if number != after
    ]
    if steps:
        lines.append(f"    const double size = {' * '.join(f'(double){name}' for name in differing)};")
    for limit, number in steps:
        call = f"{word}{variants[number].name}({names});"
        if word:
            lines.append(f"    if (size < {limit:.1f}) {call}")
        else:
            lines.append(f"    if (size < {limit:.1f}) {{ {call} return; }}")
    last = variants[by_size[-1][1]].name
    return "\n".join([*lines, f"    {word}{last}({names});", "}"])
