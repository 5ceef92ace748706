"""Rates of a machine from limits that were measured on it, for modelled evaluators."""

from __future__ import annotations

from phasewise.topology import Kind, Machine
from phasewise.tuner.config.rates import MachineRates


def measured_rates(
    machine: Machine, peak_flops: float, read_bytes_per_s: float, core_read_bytes_per_s: float
) -> MachineRates:
    """From limits measured on all allowed cores together, and one core's reading on its own."""
    cores = len(machine.allowed_cores()) or len(machine.allowed_pus)
    memories = sum(1 for node in machine.nodes(Kind.NUMA) if node.cpus) or 1
    return MachineRates(
        flops_per_core=peak_flops / cores,
        core_read_bytes_per_s=core_read_bytes_per_s,
        l3_read_bytes_per_s=None,
        numa_read_bytes_per_s=read_bytes_per_s / memories,
    )
