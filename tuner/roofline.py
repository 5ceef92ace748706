"""The roofline of a product: bound by arithmetic, or by reading its operands once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from phasewise.tuner.machine_limits import peak_flops, read_bandwidth

FLOAT_BYTES = 4
"""Bytes of an activation, before and after a product."""

READ_PASSES = 12


def peak_kinds(weight_format: str) -> tuple[str, ...]:
    """The multiply rates (`limits.KINDS`) that weights of this format may be computed at.

    bf16 weights can be widened or become float16, and not every CPU multiplies pairs of bf16 faster than
    float32.
    """
    match weight_format:
        case "f32" | "f16":
            return ("f32",)
        case "bf16":
            return ("f32", "f16", "bf16")
        case _:
            return ("f32", "bf16", "int8")


@dataclass(frozen=True)
class Roofline:
    """The rates that some cores reach, operations and bytes a second; operations by kind (`limits.KINDS`)."""

    peak_flops: Mapping[str, float]
    read_bytes_per_s: float

    def bound_ns(self, weight_format: str, n: int, k: int, m: int, weight_bytes: int) -> float:
        """Least time of y[m, n] = x[m, k] W[n, k]^T with W read from memory once."""
        peak = max(self.peak_flops[kind] for kind in peak_kinds(weight_format))
        moved_bytes = weight_bytes + FLOAT_BYTES * m * (n + k)
        return max(2 * m * n * k / peak, moved_bytes / self.read_bytes_per_s) * 1e9


def measure_roofline(cores: Sequence[int], formats: Iterable[str], read_buffer_bytes: int) -> Roofline:
    """Measure the limits of the instruction set in use, for weights of these formats; about 1 s.

    `read_buffer_bytes` is what the timed weights take together.
    """
    kinds = dict.fromkeys(kind for weight_format in formats for kind in peak_kinds(weight_format))
    peaks = {kind: peak_flops(kind, cores) for kind in kinds}
    return Roofline(peaks, read_bandwidth(cores, read_buffer_bytes, READ_PASSES))
