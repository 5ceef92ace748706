"""Kernels of public projects, raised as they stand, lowered, and compared with their originals.

    python benchmarks/public_kernels.py --llama-cpp DIR [--llama2-c DIR] [--xnnpack DIR] [--cases 200]
    python benchmarks/public_kernels.py --volk DIR --draw 40 --seed 1 [--cases 200]

The folders are checkouts; nothing of them is kept. For each function: how many statements it is, or the line
that was refused. What was raised is lowered to AVX2 (from NEON too) and to portable C, and held against the
original on drawn bytes, bit for bit: VOLK's own source as it is compiled, of the others the C that the low
level prints. NEON originals run under qemu-aarch64 where this machine is no Arm. Prints a Markdown table.
The seed draws the functions of VOLK.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from benchmarks.harness import Yielded, commands
from phasewise.ir.build import built, chosen
from phasewise.ir.c_text import c_type
from phasewise.ir.errors import UserKernelError
from phasewise.ir.nodes import FunctionDefinition
from phasewise.ir.printing import printed_c
from phasewise.ir.raising.parse import parse_file
from phasewise.ir.raising.raise_file import raise_file
from phasewise.ir.reading import read
from phasewise.ir.running.checking import Program, check, in_folder
from phasewise.ir.targets import TARGETS
from phasewise.ir.types import Pointer, Void

DOTS = """q4_0_q8_0 q4_1_q8_1 q5_0_q8_0 q5_1_q8_1 q8_0_q8_0 q2_K_q8_K q3_K_q8_K q4_K_q8_K q5_K_q8_K q6_K_q8_K
iq4_nl_q8_0 iq4_xs_q8_K q1_0_q8_0 mxfp4_q8_0 nvfp4_q8_0 tq1_0_q8_K tq2_0_q8_K iq2_xxs_q8_K iq2_xs_q8_K
iq2_s_q8_K iq3_xxs_q8_K iq3_s_q8_K iq1_s_q8_K iq1_m_q8_K"""
DOT_ARGUMENTS = """    describe("n", least=256, most=1024, multiple=256)
    describe("s", count=1)
    describe("vx", count=n * 4)
    describe("vy", count=n * 4)
"""
LLAMA2 = {
    "rmsnorm": """    describe("size", least=1, most=300)
    describe("o", count=size)
    describe("x", count=size)
    describe("weight", count=size)
""",
    "softmax": """    describe("size", least=1, most=300)
    describe("x", count=size)
""",
    "matmul": """    describe("n", least=1, most=40)
    describe("d", least=1, most=40)
    describe("xout", count=d)
    describe("x", count=n)
    describe("w", count=n * d)
""",
}
XNNPACK_VECTORS = """    describe("batch", least=4, most=400, multiple=4)
    describe("input_a", count=(batch // 4) + 8)
    describe("input_b", count=(batch // 4) + 8)
    describe("output", count=batch // 4, out=True)
    describe("params", count=1)
"""
XNNPACK = {
    ("f32-vbinary", "f32-vadd", "scalar-u8"): "portable",
    ("f32-vbinary", "f32-vmul", "scalar-u4"): "portable",
    ("f32-vbinary", "f32-vadd", "sse-u8"): "avx2",
    ("f32-vbinary", "f32-vmax", "sse-u8"): "avx2",
    ("f32-vbinary", "f32-vsqrdiff", "sse-u4"): "avx2",
    ("f32-vbinary", "f32-vadd", "avx-u8"): "avx2",
    ("f32-vbinary", "f32-vadd", "avx512f-u16"): "avx512",
    ("f32-vbinary", "f32-vadd", "neon-u8"): "neon",
    ("f32-vbinary", "f32-vmul", "neon-u4"): "neon",
    ("f32-vbinary", "f32-vdiv", "aarch64-neon-u8"): "neon",
}
"""Folder, operation and variant of element-wise kernels, with their instruction set. Those of SSE read behind
their inputs, which XNNPACK's callers allow."""


VOLK_FUNCTION = re.compile(
    r"static inline \w+\s+(volk_\w+?_(?:generic|[au]_(?:sse|avx)\w*|neon(?:v8)?))\s*\(", re.ASCII
)
_AVX2 = ("MMX", "SSE", "SSE2", "SSE3", "SSSE3", "SSE4_1", "SSE4_2", "64", "AVX", "AVX2", "FMA")
VOLK_DEFINES = {
    "portable": (),
    "neon": ("NEON", "NEONV8"),
    "avx2": _AVX2,
    "avx512": (*_AVX2, "AVX512F", "AVX512DQ", "AVX512BW"),
}


MANY_POINTS = "num_points"
"""In place of descriptions: they follow from the arguments."""


@dataclass(frozen=True)
class Public:
    project: str
    isa: str
    file: Path
    function: str
    described: str
    include: tuple[Path, ...] = ()
    define: tuple[str, ...] = ()
    is_alone: bool = False
    """Its source can be compiled by itself."""


def kernels(
    llama_cpp: Path | None, llama2_c: Path | None, xnnpack: Path | None, empty: Path
) -> Iterator[Public]:
    if llama_cpp:
        ggml = llama_cpp / "ggml"
        include = (ggml / "src", ggml / "src/ggml-cpu", ggml / "include")
        for isa, folder, define in (
            ("avx2", "x86", ("GGML_CPU_FP16_TO_FP32(x)=_cvtsh_ss(x)",)),
            ("neon_dotprod", "arm", ()),
        ):
            file = ggml / "src/ggml-cpu/arch" / folder / "quants.c"
            for name in DOTS.split():
                yield Public("ggml", isa, file, f"ggml_vec_dot_{name}", DOT_ARGUMENTS, include, define)
    if llama2_c:
        for name, described in LLAMA2.items():
            yield Public("llama2.c", "portable", llama2_c / "run.c", name, described)
    if xnnpack:
        (empty / "pthreadpool.h").touch()  # of another project; nothing of it is used here
        for (folder, operation, variant), isa in XNNPACK.items():
            file = xnnpack / "src" / folder / "gen" / f"{operation}-{variant}.c"
            name = f"xnn_{operation}_ukernel__{variant}".replace("-", "_")
            yield Public("XNNPACK", isa, file, name, XNNPACK_VECTORS, (xnnpack, empty))


def drawn_of_volk(volk: Path, count: int, seed: int, folder: Path) -> Iterator[Public]:
    """Functions of VOLK, each in a source that includes what VOLK's own build includes before it."""
    headers = sorted((volk / "kernels/volk").glob("*.h"))
    every = [(file, name) for file in headers for name in VOLK_FUNCTION.findall(file.read_text())]
    (folder / "volk").mkdir()
    (folder / "volk/volk.h").touch()  # which VOLK's build writes: declarations of all functions
    include = (volk / "include", volk / "kernels", volk / "kernels/volk/asm", folder)
    for file, name in random.Random(seed).sample(every, min(count, len(every))):
        isa = next((isa for isa in ("neon", "avx512") if isa in name), "avx2")
        isa = "portable" if name.endswith("generic") else isa
        source = folder / f"{name}.c"
        first = ("math.h", "volk/volk_common.h", "volk/volk_complex.h", f"volk/{file.name}")
        source.write_text("".join(f"#include <{header}>\n" for header in first))
        define = tuple(f"LV_HAVE_{part}" for part in ("GENERIC", *VOLK_DEFINES[isa]))
        yield Public("VOLK", isa, source, name, MANY_POINTS, include, define, is_alone=True)


def raised(kernel: Public) -> str:
    """The text with descriptions of the arguments."""
    text = raise_file(kernel.file, kernel.function, kernel.isa, kernel.include, kernel.define)
    start = text.index("\n", text.index("\ndef ") + 1) + 1
    described = points_of(text) if kernel.described == MANY_POINTS else kernel.described
    return text[:start] + described + text[start:] if described else text


def points_of(text: str) -> str:
    """Descriptions of a function of VOLK's: room for two numbers a point and more behind each pointer, in
    whole cache lines, since half of the functions ask for buffers that are aligned.
    """
    lines = []
    for name, of in read(text).args:
        if isinstance(of, Pointer):
            lines.append(f'    describe("{name}", count=(2 * num_points + 127) // 64 * 64)\n')
        elif name == "num_points":
            lines.insert(0, f'    describe("{name}", least=1, most=99)\n')
    return "".join(lines) if 'describe("num_points"' in "".join(lines[:1]) else ""


def compared(kernel: Public, text: str, cases: int) -> str:
    """The verdict of a comparison with the original; a difference is an error."""
    low = parse_file(kernel.file, kernel.function, kernel.isa, kernel.include, kernel.define)
    function = chosen(text, {})
    with in_folder() as name:
        folder = Path(name)
        source = folder / "original.c"
        source.write_text(called_as_it_stands(kernel, low) if kernel.is_alone else printed_c(low))
        home = TARGETS.get(kernel.isa, TARGETS["avx2"])
        folders = [flag for folder in kernel.include for flag in ("-I", str(folder))]
        flags = [*folders, *(f"-D{macro}" for macro in kernel.define)] if kernel.is_alone else []
        original = Program(function, [source], folder, home, flags)
        for target in ("avx2", "portable"):
            lowered = folder / f"lowered-{target}.c"
            lowered.write_text(built(text, {}, TARGETS[target]).file(TARGETS[target]))
            check(original, Program(function, [lowered], folder, TARGETS[target]), function, cases)
    return "bits equal on avx2 and portable"


def called_as_it_stands(kernel: Public, low: FunctionDefinition) -> str:
    """A source that includes the author's and calls his function; complex arguments come as two numbers."""
    author = f"{kernel.function}_of_the_author"
    given, passed = [], []
    for name, of in low.args:
        if isinstance(of, Pointer):
            given.append(f"void *{name}")
            passed.append(name)
            continue
        given.append(c_type(of, name))
        is_second = name.endswith("_im") and passed and passed[-1] == f"{name[:-3]}_re"
        if is_second:
            passed[-1] = f"__builtin_complex({passed[-1]}, {name})"
        else:
            passed.append(name)
    is_void = isinstance(low.result, Void)
    head = f"{c_type(low.result, kernel.function)}({', '.join(given)})"
    return (
        f'#define {kernel.function} {author}\n#include "{kernel.file}"\n#undef {kernel.function}\n'
        f"{head} {{ {'' if is_void else 'return '}{author}({', '.join(passed)}); }}\n"
    )


def public_kernels(
    llama_cpp: Annotated[Path | None, Option()] = None,
    llama2_c: Annotated[Path | None, Option()] = None,
    xnnpack: Annotated[Path | None, Option()] = None,
    volk: Annotated[Path | None, Option()] = None,
    draw: Annotated[int, Option(help="functions of VOLK")] = 40,
    seed: int = 1,
    cases: Annotated[int, Option(help="calls to compare; 0: raise only")] = 0,
) -> Yielded:
    n_all = n_raised = 0
    with in_folder() as empty:
        drawn = drawn_of_volk(volk, draw, seed, Path(empty)) if volk else ()
        for kernel in (*kernels(llama_cpp, llama2_c, xnnpack, Path(empty)), *drawn):
            n_all += 1
            state = verdict = ""
            try:
                text = raised(kernel)
                n_raised += 1
                state = f"{len(read(text).body)} statements"
                if cases and "describe(" in text:
                    verdict = compared(kernel, text, cases)
            except UserKernelError as error:
                line = " ".join(str(error).replace(str(kernel.file.parent) + "/", "").split())
                state, verdict = (state, line) if _is_after(error) else (line, "")
            row = {"project": kernel.project, "from": kernel.isa, "function": kernel.function}
            yield row | {"raised": state, "lowered": verdict}
    yield f"{n_raised} of {n_all} raised"


def _is_after(error: UserKernelError) -> bool:
    """True if a kernel was raised and only its comparison failed."""
    return type(error).__name__ in ("CheckError", "ToolError")


app = commands(__doc__, public_kernels)

if __name__ == "__main__":
    app()
