"""Laws of every kernel, drawn at random: texts are fixed points, and all ways of running one agree."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.ir.build import built, chosen, innermost
from phasewise.ir.errors import SourceError
from phasewise.ir.lowering import includes, lower
from phasewise.ir.nodes import FunctionDefinition
from phasewise.ir.raising.parse import parse_all
from phasewise.ir.raising.preprocess import preprocess
from phasewise.ir.raising.raising import raised
from phasewise.ir.reading import read
from phasewise.ir.running import cases as drawing
from phasewise.ir.running.cases import Case
from phasewise.ir.running.checking import KernelOutputs, in_folder
from phasewise.ir.running.compiling import compile_c
from phasewise.ir.running.harness import check_program
from phasewise.ir.running.limited import ChildLimits, run
from phasewise.ir.targets import TARGETS
from phasewise.ir.text import printed
from tests.ir.programs import DESCRIBED, HELPERS, program
from tests.ir.samples import HOME, same_bits, why_not

pytestmark = pytest.mark.skipif(why_not(HOME) is not None, reason=str(why_not(HOME)))
BATCH = 100


@pytest.mark.slow
@settings(max_examples=1, deadline=None)
@given(st.integers(0, 2**32))
def test_a_hundred_drawn_programs_mean_what_their_c_computes(seed: int) -> None:
    _check_batch(seed)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_more_drawn_programs_mean_what_their_c_computes(seed: int) -> None:
    _check_batch(seed)


@pytest.mark.soak
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_ten_thousand_drawn_programs_mean_what_their_c_computes(seed: int) -> None:
    _check_batch(seed)


def _check_batch(seed: int) -> None:
    """Raise, print, read, print: a fixed point; lowered to portable C, it gives the bits that its C gives."""
    dice = Random(seed)
    texts = {f"f{number}": program(f"f{number}", dice) for number in range(BATCH)}
    with in_folder() as name:
        folder = Path(name)
        source = folder / "drawn.c"
        source.write_text("\n".join([HELPERS, *texts.values()]))
        low = parse_all(preprocess(source, "avx2"), str(source))
        kernels = {kernel_name: _described(printed(raised(low[kernel_name]))) for kernel_name in texts}
        functions = {}
        for kernel_name, text in kernels.items():
            assert printed(read(text)) == text, texts[kernel_name]
            functions[kernel_name] = chosen(text, {})
        case = drawing.draw(functions["f0"], np.random.default_rng(seed))
        expected = _compiled(folder, source, functions, case)
        got = _compiled(folder, _lowered(folder / "lowered.c", functions), functions, case)
    for kernel_name in functions:
        assert _same(got[kernel_name], expected[kernel_name]), texts[kernel_name]


def _lowered(path: Path, functions: dict[str, FunctionDefinition]) -> Path:
    """One file with all functions in portable C."""
    parts = [lower(function, TARGETS["portable"]) for function in functions.values()]
    definitions = {name: text for part in parts for name, text in part.definitions.items()}
    path.write_text(
        "\n".join([includes(TARGETS["portable"]), *definitions.values(), *(part.body for part in parts)])
    )
    return path


def _described(text: str) -> str:
    start = text.index("\n", text.index("\ndef ") + 1) + 1
    return printed(
        read(text[:start] + "".join(f"    {line}\n" for line in DESCRIBED.values()) + text[start:])
    )


def _compiled(
    folder: Path, source: Path, functions: dict[str, FunctionDefinition], case: Case
) -> dict[str, KernelOutputs]:
    """Outputs of each function of one file, called with the same arguments in one process."""
    first = functions["f0"]
    main = (
        check_program(first)
        .replace("#define KERNEL f0", "")
        .replace("call(KERNEL)", "call(all[case_number])")
    )
    declared = "".join(
        f"float {function}(const float *, const int32_t *, float *, int32_t);\n" for function in functions
    )
    table = f"static kernel *const all[] = {{{', '.join(functions)}}};\n"
    main = main.replace("\nint main(", f"\n{declared}{table}int main(", 1)
    (folder / "main.c").write_text(main)
    compile_c([folder / "main.c", source], folder / "program", HOME, ("-O1",))
    data = b"".join(case.encoded(first, is_at_end=True) for _ in functions)
    (folder / "in").write_bytes(data)
    done = run([str(folder / "program"), str(folder / "in"), str(folder / "out")], ChildLimits())
    assert done.code == 0, done.output + done.errors
    out, size = (folder / "out").read_bytes(), 8 + 4 * 64
    return {
        name: KernelOutputs(out[i * size : i * size + 8], (out[i * size + 8 : (i + 1) * size],))
        for i, name in enumerate(functions)
    }


def _same(a: KernelOutputs, b: KernelOutputs) -> bool:
    """Bit for bit, but for which NaN."""
    for first, other in ((a.result[:4], b.result[:4]), (a.buffers[0], b.buffers[0])):
        x, y = np.frombuffer(first, "<u4"), np.frombuffer(other, "<u4")
        nans = np.isnan(x.view("<f4")) & np.isnan(y.view("<f4"))
        if not ((x == y) | nans).all():
            return False
    return True


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from((2, 3, 4)), st.sampled_from(("unroll", "widen")))
def test_a_transformed_program_computes_the_same(seed: int, n: int, how: str) -> None:
    """Without `reassociate` every transformation that is not refused keeps every bit."""
    dice = Random(seed)
    with in_folder() as name:
        source = Path(name) / "drawn.c"
        source.write_text(HELPERS + program("f0", dice))
        text = _described(printed(raised(parse_all(preprocess(source, "avx2"), "drawn")["f0"])))
    plain = chosen(text, {})
    for loop in innermost(read(text).body):
        line = next(candidate for candidate in text.splitlines() if f'steps("{loop.name}"' in candidate)
        changed = text.replace(line, line.removesuffix("):") + f", {how}({n})):")
        try:
            other = chosen(changed, {})
        except SourceError:
            continue
        assert same_bits(plain, other), changed


def test_a_lowered_program_is_the_same_on_every_target() -> None:
    """Lowering of drawn programs refuses nothing, whatever the registers."""
    dice = Random(7)
    with in_folder() as name:
        source = Path(name) / "drawn.c"
        source.write_text("\n".join([HELPERS, *(program(f"f{i}", dice) for i in range(30))]))
        low = parse_all(preprocess(source, "avx2"), "drawn")
    for function in low.values():
        if function.name.startswith("f"):
            text = printed(raised(function))
            assert all(built(text, {}, target).body for target in TARGETS.values())
