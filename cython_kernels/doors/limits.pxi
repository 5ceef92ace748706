# The loops that measure the machine's limits. Textually included by _native.pyx.

from libc.stdint cimport uint64_t


cdef extern from "dispatch.h" nogil:
    ctypedef struct pw_limit_kernels:
        uint64_t (*f32)(uint64_t rounds) noexcept nogil
        uint64_t (*f16)(uint64_t rounds) noexcept nogil
        uint64_t (*bf16)(uint64_t rounds) noexcept nogil
        uint64_t (*int8)(uint64_t rounds) noexcept nogil
        uint64_t (*read)(const void *buffer, size_t bytes) noexcept nogil

    ctypedef struct pw_kernels_with_limits "pw_kernels":
        pw_limit_kernels limits


def limit_peak(str kind, uint64_t rounds):
    cdef const pw_kernels_with_limits *kernels = <const pw_kernels_with_limits *>pw_active()
    cdef uint64_t (*loop)(uint64_t) noexcept nogil
    if kind == "f32":
        loop = kernels.limits.f32
    elif kind == "f16":
        loop = kernels.limits.f16
    elif kind == "bf16":
        loop = kernels.limits.bf16
    elif kind == "int8":
        loop = kernels.limits.int8
    else:
        raise ValueError(f"no peak is measured for {kind!r}")
    cdef uint64_t done
    with nogil:
        done = loop(rounds)
    return done


def limit_read(const uint8_t[::1] buffer):
    cdef const pw_kernels_with_limits *kernels = <const pw_kernels_with_limits *>pw_active()
    cdef uint64_t done = 0
    cdef size_t size = buffer.shape[0]
    if size:
        with nogil:
            done = kernels.limits.read(&buffer[0], size)
    return done
