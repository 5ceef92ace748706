# cython: language_level=3
"""Thin doors over the C kernels: check shapes, drop the GIL, call, return."""

include "doors/gemm.pxi"
include "doors/group.pxi"
include "doors/limits.pxi"
include "doors/mapped_fault.pxi"
include "doors/memory_policy.pxi"
include "doors/ops.pxi"
include "doors/probe.pxi"
include "doors/product.pxi"
include "doors/program_builder.pxi"
include "doors/program.pxi"
include "doors/kv_memory.pxi"
