"""Instruction sets that kernels are lowered to: register sizes, compiler flags, and macros."""

from __future__ import annotations

from dataclasses import dataclass

COMMON_FLAGS = (
    "-O3",
    "-std=gnu11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fwrapv",
)


@dataclass(frozen=True, slots=True)
class IsaTarget:
    """An instruction set as a target. register_bytes: widest vector of one variable of the lowered C."""

    name: str
    family: str
    """The family of the instruction set: x86, arm or any."""
    register_bytes: int
    flags: tuple[str, ...]
    macros: tuple[str, ...]
    """Macros by which an emitted file tests whether the compiler enables this set."""

    @property
    def has_vnni(self) -> bool:
        return self.name == "avx512_vnni"

    @property
    def has_dotprod(self) -> bool:
        return self.name == "neon_dotprod"


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_AVX2_MACROS = ("__AVX2__", "__FMA__", "__F16C__")
_AVX512_MACROS = ("__AVX512F__", "__AVX512BW__", "__AVX512VL__", "__AVX512DQ__")

TARGETS = {
    target.name: target
    for target in (
        IsaTarget("portable", "any", 16, (), ()),
        IsaTarget("avx2", "x86", 32, _AVX2, _AVX2_MACROS),
        IsaTarget("avx512", "x86", 64, _AVX512, _AVX512_MACROS),
        IsaTarget("avx512_vnni", "x86", 64, (*_AVX512, "-mavx512vnni"), (*_AVX512_MACROS, "__AVX512VNNI__")),
        IsaTarget("neon", "arm", 16, (), ("__aarch64__", "__ARM_NEON")),
        IsaTarget(
            "neon_dotprod", "arm", 16, ("-march=armv8.2-a+dotprod",), ("__aarch64__", "__ARM_FEATURE_DOTPROD")
        ),
    )
}

CPU_WORDS = {
    "portable": (),
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "avx512_vnni": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"),
}
"""Flags of /proc/cpuinfo that an instruction set needs, by instruction set."""


def runs_here(name: str, cpu_flags: frozenset[str]) -> bool:
    """True if an x86 machine with these flags executes the set `name`."""
    return name in CPU_WORDS and set(CPU_WORDS[name]) <= cpu_flags


def cpu_flags() -> frozenset[str]:
    """Features of this machine's processor, as the kernel lists them."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()
