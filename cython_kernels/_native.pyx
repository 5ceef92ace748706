# cython: language_level=3
"""Thin doors over the C kernels: check shapes, drop the GIL, call, return."""

include "gemm.pxi"
include "group.pxi"
include "limits.pxi"
include "mapped_fault.pxi"
include "memory_policy.pxi"
include "ops.pxi"
include "probe.pxi"
include "product.pxi"
include "program.pxi"
include "kv_memory.pxi"
