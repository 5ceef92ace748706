"""Rows of `bench kernels` with a few numbers chosen."""

from __future__ import annotations

from phasewise.workflows.bench.kernel_rows import KernelRow

SCHEDULE = {
    "mr": 1, "panels": 2, "block_m": 1, "block_n": 32, "block_k": 64, "threads_m": 1, "threads_n": 2,
    "threads_k": 1, "compute_path": "fma", "k_parts": 1, "prefetch_bytes": 0, "loop_order": "nm",
}  # fmt: skip


def kernel_row(
    m: int = 1,
    median_ns: int = 1000,
    peers: dict[str, int] | None = None,
    peak_fraction: float = 0.5,
    bandwidth_fraction: float = 0.5,
    weight_bytes: int = 1 << 20,
    weight_format: str = "bf16",
    n_rounds: int = 3,
) -> KernelRow:
    """As measured, with a few numbers chosen. n_rounds: samples of each system; 6 prove a ratio."""
    peers = peers or {}
    return KernelRow(
        weight_format, 512, 1024, m, 2, median_ns, 2.0 * m * 512 * 1024 / median_ns, weight_bytes / median_ns,
        peak_fraction, bandwidth_fraction, SCHEDULE, peers, "default", weight_bytes, 1e12, 1e11, "portable",
        "core", "place", 0.0, [median_ns] * n_rounds, {peer: [ns] * n_rounds for peer, ns in peers.items()},
        dict.fromkeys(peers, "packed"),
    )  # fmt: skip
