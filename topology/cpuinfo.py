"""The kind of CPU that `/proc/cpuinfo` describes: x86, Arm and POWER write it differently."""

from __future__ import annotations

from collections.abc import Mapping

from phasewise.topology.tree import Cpu

KERNEL_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
)
"""The instruction sets that kernels use or will, in the kernel's names and in the order they are printed."""

ARM_IMPLEMENTERS = {
    "0x41": "ARM",
    "0x42": "Broadcom",
    "0x43": "Cavium",
    "0x46": "Fujitsu",
    "0x48": "HiSilicon",
    "0x4e": "NVIDIA",
    "0x50": "APM",
    "0x51": "Qualcomm",
    "0x61": "Apple",
    "0x6d": "Microsoft",
    "0xc0": "Ampere",
}


MAX_WORD_CHARS = 120


def parse_cpuinfo(text: str, architecture: str | None) -> Cpu:
    """The CPU of the first processor described. Fields that the text lacks are None."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value)
    return cpu_from_fields(fields, architecture)


def cpu_from_fields(fields: Mapping[str, str], architecture: str | None) -> Cpu:
    """The CPU from fields named as in `/proc/cpuinfo`; the text in them need not be trusted."""
    words = frozenset(f"{fields.get('flags', '')} {fields.get('Features', '')}".split())
    vendor, family, model, name = (_clean(text) for text in _identity(fields))
    return Cpu(
        architecture=_clean(architecture),
        vendor=vendor,
        family=family,
        model=model,
        name=name,
        features=words & frozenset(KERNEL_FEATURES),
    )


def _identity(fields: Mapping[str, str]) -> tuple[str | None, str | None, str | None, str | None]:
    """Vendor, family and model of a CPU, and a name for people."""
    name = fields.get("model name")
    if "CPU implementer" in fields:
        code = fields["CPU implementer"].strip()
        vendor = ARM_IMPLEMENTERS.get(code, f"arm-{code}")
        return vendor, fields.get("CPU architecture"), fields.get("CPU part"), name
    power = (fields.get("cpu") or name or "").strip()
    if power.startswith("POWER"):  # e.g. "POWER9, altivec supported"; the revision is a stepping
        return "IBM", power.split(",")[0].split()[0], None, power
    return fields.get("vendor_id"), fields.get("cpu family"), fields.get("model"), name


def _clean(text: str | None) -> str | None:
    """The text made printable and put on one line: names reach terminals and pictures, and XML comes from
    strangers."""
    kept = "".join(char for char in " ".join((text or "").split()) if char.isprintable())
    return kept[:MAX_WORD_CHARS] or None
