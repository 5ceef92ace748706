"""Preprocessor runs: C text with macros and includes expanded for one instruction set, each line with the
place that it came from.

The preprocessor runs in a limited process and sees our own short system headers: they declare nothing,
because the parser knows the standard types and the intrinsics, and define the few macros that kernels use.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phasewise._files import read_input
from phasewise.ir.errors import SourceError
from phasewise.ir.running.limited import ChildLimits, run

MAX_SOURCE_BYTES = 4 << 20
MAX_EXPANDED_BYTES = 16 << 20
LIMITS = ChildLimits(seconds=5, memory_bytes=1 << 30, file_bytes=MAX_EXPANDED_BYTES)

_SSE = ("__SSE__", "__SSE2__", "__SSE3__", "__SSSE3__", "__SSE4_1__", "__SSE4_2__", "__x86_64__", "__AVX__")
_AVX2 = (*_SSE, "__AVX2__", "__FMA__", "__F16C__")
_AVX512 = (*_AVX2, "__AVX512F__", "__AVX512BW__", "__AVX512VL__", "__AVX512DQ__")
MACROS: dict[str, tuple[str, ...]] = {
    "portable": (),
    "sse": _SSE[:-1],
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_vnni": (*_AVX512, "__AVX512VNNI__"),
}
"""Macros that a compiler for an instruction set defines, by instruction set."""

ALWAYS = (
    "__STDC__=1", "__STDC_VERSION__=201112L", "__GNUC__=12", "__linux__=1", "__LP64__=1", "__CHAR_BIT__=8",
    "__restrict=", "__restrict__=", "restrict=", "__inline=inline", "__inline__=inline", "__extension__=",
    "__attribute__(x)=", "__attribute(x)=", "_Noreturn=", "__asm=__asm__", "asm=__asm__", "__const=const",
    "__volatile__=volatile", "_Static_assert(...)=", "static_assert(...)=", "__builtin_expect(x,y)=(x)",
    "__builtin_assume_aligned(p,...)=(p)", "_Alignas(x)=", "alignas(x)=", "__declspec(x)=",
    "__has_include(x)=0",
    "__has_attribute(x)=0", "__has_builtin(x)=0", "__ORDER_LITTLE_ENDIAN__=1234", "__BYTE_ORDER__=1234",
)  # fmt: skip

_COMMON = """#pragma once
#define NULL ((void*)0)
#define INT8_MIN (-128)
#define INT8_MAX 127
#define UINT8_MAX 255
#define INT16_MAX 32767
#define INT16_MIN (-32768)
#define UINT16_MAX 65535
#define INT32_MAX 2147483647
#define INT_MAX 2147483647
#define UINT32_MAX 4294967295u
#define SIZE_MAX 18446744073709551615ul
#define INT64_MAX 9223372036854775807l
#define CHAR_BIT 8
#define FLT_MAX 3.40282347e+38f
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.19209290e-07f
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf()
#define HUGE_VALF __builtin_inff()
#define FLT_MANT_DIG 24
#define SHRT_MIN (-32768)
#define SHRT_MAX 32767
#define USHRT_MAX 65535
#define SCHAR_MIN (-128)
#define SCHAR_MAX 127
#define UCHAR_MAX 255
#define CHAR_MIN (-128)
#define CHAR_MAX 127
#define INT_MIN (-2147483647-1)
#define INT32_MIN (-2147483647-1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807l
#define INT64_MIN (-9223372036854775807l-1)
#define UINT64_MAX 18446744073709551615ul
#define M_E 2.7182818284590452354
#define M_LOG2E 1.4426950408889634074
#define M_LOG10E 0.43429448190325182765
#define M_LN2 0.69314718055994530942
#define M_LN10 2.30258509299404568402
#define M_PI 3.14159265358979323846
#define M_PI_2 1.57079632679489661923
#define M_PI_4 0.78539816339744830962
#define M_1_PI 0.31830988618379067154
#define M_2_PI 0.63661977236758134308
#define M_2_SQRTPI 1.12837916709551257390
#define M_SQRT2 1.41421356237309504880
#define M_SQRT1_2 0.70710678118654752440
#define assert(x) ((void)0)
#define true 1
#define false 0
#define bool _Bool
#define INT64_C(x) x##l
#define UINT64_C(x) x##ul
#define UINT32_C(x) x##u
#define INT32_C(x) x
#define UINT8_C(x) x
#define UINT16_C(x) x
"""
_INTRINSICS = """#pragma once
#define _MM_SHUFFLE(z, y, x, w) (((z) << 6) | ((y) << 4) | ((x) << 2) | (w))
#define _MM_HINT_T0 3
#define _MM_HINT_T1 2
#define _MM_HINT_T2 1
#define _MM_HINT_NTA 0
#define _MM_FROUND_TO_NEAREST_INT 0
#define _MM_FROUND_TO_NEG_INF 1
#define _MM_FROUND_TO_POS_INF 2
#define _MM_FROUND_TO_ZERO 3
#define _MM_FROUND_CUR_DIRECTION 4
#define _MM_FROUND_NO_EXC 8
#define _CMP_EQ_OQ 0
#define _CMP_LT_OS 1
#define _CMP_LE_OS 2
#define _CMP_UNORD_Q 3
#define _CMP_NEQ_UQ 4
#define _CMP_NLT_US 5
#define _CMP_NLE_US 6
#define _CMP_ORD_Q 7
#define _CMP_NGE_US 9
#define _CMP_NGT_US 10
#define _CMP_GE_OS 13
#define _CMP_GT_OS 14
#define _CMP_EQ_OS 16
#define _CMP_LT_OQ 17
#define _CMP_LE_OQ 18
#define _CMP_NEQ_US 20
#define _CMP_GE_OQ 29
#define _CMP_GT_OQ 30
"""
_SYSTEM = """assert ctype errno fenv float inttypes limits locale malloc math memory pthread setjmp
signal stdalign stdarg stdatomic stdbool stddef stdint stdio stdlib string strings time uchar wchar
unistd fcntl sched sys/mman sys/types sys/stat sys/time"""
_X86_HEADERS = """immintrin x86intrin xmmintrin emmintrin pmmintrin tmmintrin smmintrin nmmintrin
avxintrin avx2intrin"""


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """The file and line from which a line of the expanded text came."""

    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Expanded:
    """Preprocessed text; `places[i]` is the origin of its line i, counted from 0."""

    text: str
    places: tuple[SourcePlace, ...]
    isa: str


def guess_isa(text: str) -> str:
    """The widest instruction set whose intrinsics a source names."""
    if re.search(r"\b_mm512_", text):
        return "avx512"
    return "avx2" if re.search(r"\b_mm", text) else "portable"


def read_source(path: Path) -> str:
    """Read a source file. SourceError for a file that cannot be read, is no text, or is too large."""
    try:
        return read_input(path, MAX_SOURCE_BYTES).decode()
    except UnicodeDecodeError:
        raise SourceError(str(path), 0, "is not UTF-8 text") from None
    except OSError as error:
        raise SourceError(str(path), 0, f"cannot be read: {error.strerror}") from None


def preprocess(
    path: Path, isa: str, include: Sequence[Path] = (), define: Sequence[str] = (), compiler: str = "cc"
) -> Expanded:
    """Expand macros and includes. SourceError with the preprocessor's first error."""
    tool = shutil.which(compiler) or compiler
    with tempfile.TemporaryDirectory(prefix="phasewise-") as folder:
        _write_headers(Path(folder))
        command = [
            tool, "-E", "-undef", "-nostdinc", "-w", "-x", "c", "-ftabstop=1",
            "-iquote", str(path.parent.absolute()),
            *(flag for macro in (*ALWAYS, *MACROS[isa]) for flag in ("-D", macro)),
            *(flag for macro in define for flag in ("-D", macro)),
            *(flag for directory in include for flag in ("-I", str(directory))),
            "-isystem", folder, str(path),
        ]  # fmt: skip
        done = run(command, LIMITS)
    if done.code != 0:
        raise _complaint(path, done.errors, done.signal_name)
    return _with_places(done.output, str(path), isa)


def _write_headers(folder: Path) -> None:
    for name in _SYSTEM.split():
        file = folder / f"{name}.h"
        file.parent.mkdir(exist_ok=True)
        file.write_text(_COMMON)
    for name in _X86_HEADERS.split():
        (folder / f"{name}.h").write_text(_INTRINSICS)


def _complaint(path: Path, errors: str, signal_name: str | None) -> SourceError:
    is_stopped = any(
        words in errors for words in ("size limit exceeded", "CPU time limit", "Killed", "out of memory")
    )
    if signal_name or is_stopped:
        return SourceError(
            str(path), 0, f"expands beyond {LIMITS.seconds} s or {MAX_EXPANDED_BYTES >> 20} MiB; stopped"
        )
    match = re.search(r"^(.*?):(\d+):(?:\d+:)? (?:fatal )?error: (.*)$", errors, re.MULTILINE)
    if match:
        hint = "; add --include FOLDER" if "No such file" in match[3] else ""
        return SourceError(match[1], int(match[2]), match[3] + hint)
    return SourceError(str(path), 0, f"the preprocessor failed: {errors.strip().splitlines()[:1]}")


_MARKER = re.compile(r'^#(?:line)? (\d+) "((?:[^"\\]|\\.)*)"')


def _with_places(text: str, path: str, isa: str) -> Expanded:
    lines, places = [], []
    file, number = path, 1
    for line in text.split("\n"):
        marker = _MARKER.match(line)
        if marker:
            number, file = int(marker[1]), marker[2]
            continue
        if line.startswith("#"):  # a pragma
            number += 1
            continue
        lines.append(line)
        places.append(SourcePlace(file, number))
        number += 1
    return Expanded(_unambiguous("\n".join(lines)), tuple(places), isa)


_TYPE_WORDS = frozenset(
    ("void", "char", "short", "int", "long", "float", "double", "signed", "unsigned", "bool", "size_t")
)
_TYPEDEF = re.compile(r"\btypedef\b[^;]*?\b(\w+)\s*;")
_PERHAPS_A_CAST = re.compile(
    r"(?<![\w)\]])\((\s*([A-Za-z_]\w*)\s*(?:(?:\[[^][]*\])*|\([^()]*\))\s*)\)(?=\s*[-+*&])"
)


def _unambiguous(text: str) -> str:
    """Move the sign of `(x) + y` into the parentheses: the untyped grammar would take `(x)` for a cast."""
    types = _TYPE_WORDS | set(_TYPEDEF.findall(text))

    def signed(match: re.Match[str]) -> str:
        name = match[2]
        is_type = name in types or name.endswith("_t") or name.startswith("__m")
        return match[0] if is_type else f"(+{match[1]})"

    return _PERHAPS_A_CAST.sub(signed, text)
