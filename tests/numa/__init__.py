"""Machines with NUMA nodes, emulated: what speed cannot show there."""
