# The tables of kernels, packed matrix products and the choice of instruction set. Textually included by _native.pyx.

import os

import numpy as np

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free

from phasewise.cython_kernels import blocks, packing
from phasewise.cython_kernels.errors import IsaError, WeightError


cdef extern from "gemm.h" nogil:
    enum:
        PW_FMA, PW_PANEL, PW_PATHS, PW_MOST_TILE

    ctypedef enum pw_epilogue:
        PW_STORE, PW_ADD

    ctypedef struct pw_weight:
        int32_t kind, group, zero_point, scale_bytes, path, top_exponent, k_parts
        int64_t n, k
        const void *values
        const uint32_t *offsets
        const void *scales
        const void *mins

    ctypedef struct pw_form:
        int32_t kind, group, zero_point, path

    ctypedef struct pw_activations:
        const void *rows
        int64_t row_bytes

    ctypedef struct pw_range:
        int64_t begin, end

    ctypedef struct pw_schedule:
        int32_t mr, panels, block_m, block_n, block_k, prefetch_bytes, threads_m, threads_n, threads_k, loop_order

    int64_t pw_panels(int64_t n)
    int64_t pw_padded_k(int64_t k)
    pw_form pw_form_of(const pw_weight *w)
    const char *pw_weight_problem(const pw_weight *w)
    pw_schedule pw_default_schedule(const pw_weight *w, int64_t m, int32_t threads)
    int64_t pw_now_ns()
    const char *pw_path_name(int path)
    void pw_share(const pw_schedule *s, const pw_weight *w, int64_t m, int32_t thread, pw_range *rows, pw_range *panels)


cdef extern from "cpu.h" nogil:
    ctypedef struct pw_core_traits:
        const char *name

    const pw_core_traits *pw_core()
    int pw_core_select(const char *name)
    int pw_cpu_expands()
    void pw_cpu_let_expand(int allowed)
    const char *pw_core_name(int index)


cdef extern from "sparse.h" nogil:
    enum:
        PW_SPARSE_TAIL

    ctypedef struct pw_sparse_shape:
        int32_t kind, zero_point
        int64_t panels, k

    int64_t pw_sparse_slots(int64_t k)
    int64_t pw_sparse_pack(const pw_sparse_shape *shape, const void *dense, int64_t at, uint8_t *stream,
                           uint32_t *offsets, int64_t *kept)
    void pw_sparse_unpack(const pw_sparse_shape *shape, const uint8_t *stream, const uint32_t *offsets, void *dense)
    const char *pw_sparse_problem(const pw_sparse_shape *shape, const uint8_t *stream, int64_t bytes,
                                  const uint32_t *offsets, int64_t *kept)


cdef extern from "ops.h" nogil:
    enum:
        PW_CHUNK, PW_MAX_HEAD_DIM, PW_MAX_LATENT_DIM, PW_MAX_INDEX_DIM, PW_ROW_STRIDE
        PW_GATES, PW_ACTIVATIONS, PW_ACT_xielu, PW_XIELU_NUMBERS

    const char *pw_gate_name(int number)
    const char *pw_activation_name(int number)

    ctypedef struct pw_kv_head:
        void *keys
        void *values
        int32_t format, head_dim, value_dim

    ctypedef struct pw_queries:
        const float *q
        const int64_t *first
        const int64_t *last
        int32_t rows, tile_rows
        float cap
        const float *slopes
        const int64_t *positions
        const void *next_keys

    ctypedef struct pw_partial:
        float *top
        float *sum
        float *values

    ctypedef struct pw_thin_weight:
        const void *values
        int64_t n, rank
        bint is_bf16

    ctypedef struct pw_thin_rows:
        const float *x
        int64_t ldx
        float *y
        int64_t ldy
        const int64_t *row_at
        int64_t count

    ctypedef struct pw_turn:
        const float *cosine
        const float *sine
        float factor

    ctypedef struct pw_norm:
        const float *weight
        const float *bias
        float eps

    ctypedef struct pw_op_kernels:
        int32_t lanes
        void (*layernorm)(int64_t n, const float *x, const float *bias, const pw_norm *norm, float *y) noexcept nogil
        void (*activations[PW_ACTIVATIONS])(int64_t n, const float *x, const float *own, float *y) noexcept nogil
        void (*rmsnorm)(int64_t n, const float *x, const float *w, float eps, float *y) noexcept nogil
        void (*rope)(int64_t half, const pw_turn *turn, const float *x, float *y) noexcept nogil
        void (*gates[PW_GATES])(int64_t n, const float *gate, const float *up, float *y) noexcept nogil
        void (*cap)(int64_t n, float c, const float *x, float *y) noexcept nogil
        void (*add_low_rank)(const pw_thin_weight *w, int64_t first, int64_t end, const pw_thin_rows *rows) noexcept nogil
        void (*softmax)(int64_t n, const float *x, float *y) noexcept nogil
        void (*exponential)(int64_t n, const float *x, float *y) noexcept nogil
        void (*store_key)(const pw_kv_head *head, int64_t slot, const float *key) noexcept nogil
        void (*store_value)(const pw_kv_head *head, int64_t slot, const float *value) noexcept nogil
        void (*prepare_queries)(int32_t kv_format, int32_t head_dim, int32_t rows, float *q) noexcept nogil
        void (*attend_chunk)(const pw_kv_head *head, const pw_queries *queries, int64_t chunk, int64_t slot,
                             float *scratch, pw_partial out) noexcept nogil
        void (*begin)(int32_t rows, int32_t value_dim, pw_partial out) noexcept nogil
        void (*merge)(int32_t rows, int32_t value_dim, pw_partial part, pw_partial into) noexcept nogil
        void (*finish)(int32_t head_dim, float sum, const float *values, float *out) noexcept nogil
        int64_t (*argmax)(int64_t n, const float *x) noexcept nogil
        double (*logsumexp)(int64_t n, const float *x) noexcept nogil
        int64_t (*top_k)(int64_t n, const float *x, int64_t k, float *heap, int64_t *index) noexcept nogil

    int64_t pw_attention_scratch(int32_t head_dim)
    int64_t pw_kv_slot_bytes(int32_t format, int64_t head_dim)
    int64_t pw_kv_elements(int32_t format, int64_t n)
    int64_t pw_kv_element_bytes(int32_t format)
    bint pw_latent_can_be(int32_t format)
    pw_kv_head pw_kv_head_at(char *memory, int64_t slots, int32_t format, int32_t head_dim)


cdef extern from "dispatch.h" nogil:
    ctypedef struct pw_gemm_kernels:
        int64_t (*row_bytes)(const pw_form *form, int64_t k) noexcept nogil
        void (*prepare_rows)(const pw_form *form, int64_t k, const float *x, int64_t ldx, pw_range rows,
                             void *prepared) noexcept nogil
        void (*gemm)(const pw_weight *w, const pw_activations *x, pw_range rows, pw_range panels, int32_t part,
                     float *y, int64_t ldy, pw_epilogue epilogue, const pw_schedule *schedule) noexcept nogil
        int32_t (*path_of)(int32_t kind, int32_t group, int32_t path) noexcept nogil
        int32_t (*has_tile)(const pw_weight *w, int32_t mr, int32_t panels) noexcept nogil
        void (*unpack_row)(const pw_weight *w, int64_t row, float *out) noexcept nogil

    ctypedef struct pw_limit_kernels:
        uint64_t (*f32)(uint64_t rounds) noexcept nogil
        uint64_t (*f16)(uint64_t rounds) noexcept nogil
        uint64_t (*bf16)(uint64_t rounds) noexcept nogil
        uint64_t (*int8)(uint64_t rounds) noexcept nogil
        uint64_t (*read)(const void *buffer, size_t bytes) noexcept nogil

    ctypedef struct pw_kernels:
        const char *isa
        const char *gemm_abi
        const char *attention_abi
        pw_gemm_kernels gemm
        pw_limit_kernels limits
        pw_op_kernels ops

    int pw_usable_count()
    const pw_kernels *pw_usable(int index)
    const pw_kernels *pw_active()
    const char *pw_select(const char *isa)
    const char *pw_isa_name(int index)


def isa_ladder():
    names, index = [], 0
    while pw_isa_name(index) != NULL:
        names.append(pw_isa_name(index).decode())
        index += 1
    return names


def isa_usable():
    return [pw_usable(index).isa.decode() for index in range(pw_usable_count())]


def isa_active():
    return pw_active().isa.decode()


cdef dict _abis_of(const pw_kernels *kernels):
    return {"gemm": kernels.gemm_abi.decode(), "attention": kernels.attention_abi.decode()}


def kernel_abi(family):
    """Under which name timings of a kernel family are kept, on the instruction set in use: see abi.py."""
    return _abis_of(pw_active())[family]


def kernel_abis():
    """The names of every family on every instruction set that is usable here."""
    return tuple(abi for index in range(pw_usable_count()) for abi in _abis_of(pw_usable(index)).values())


def isa_select(name):
    cdef bytes encoded = name.encode()
    cdef const char *problem = pw_select(encoded)
    if problem != NULL:
        raise IsaError(f"instruction set {name!r}: {problem.decode()}; usable here: {', '.join(isa_usable())}")


def core_names():
    """Every kind of core that defaults are known for."""
    names, index = [], 0
    while pw_core_name(index) != NULL:
        names.append(pw_core_name(index).decode())
        index += 1
    return names


def core_active():
    return pw_core().name.decode()


def core_select(name):
    """Treat the cores as those called `name`; None: as what they are."""
    cdef bytes encoded
    cdef const char *wanted = NULL
    if name is not None:
        encoded = name.encode()
        wanted = encoded
    if not pw_core_select(wanted):
        raise IsaError(f"there is no kind of core {name!r}: {', '.join(core_names())} are known")


def _select_at_import():
    try:
        core_select(os.environ.get("PHASEWISE_CORE") or None)
    except IsaError as error:
        raise IsaError(f"PHASEWISE_CORE: {error}") from None
    wanted = os.environ.get("PHASEWISE_ISA", "")
    try:
        isa_select(wanted or isa_usable()[-1])
    except IsaError as error:
        raise IsaError(f"PHASEWISE_ISA, {error}") from None


_select_at_import()


cdef const void *_bytes_of(array, dtype, tuple shape, str name) except? NULL:
    """Where an array's elements lie, after a check that they are what a kernel reads."""
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise WeightError(
            f"{name} is {array.dtype}{list(array.shape)}, contiguous {np.dtype(dtype)}{list(shape)} expected")
    return <const void *><size_t>array.__array_interface__["data"][0]


def path_names():
    """Every compute path, in the order of their numbers."""
    return tuple(pw_path_name(path).decode() for path in range(PW_PATHS))


def compute_paths(kind, int32_t group=packing.DEFAULT_GROUP):
    """The paths that the active ISA computes weights of this kind (and group, if q8) by, the default one first."""
    cdef int32_t number = packing.KINDS.index(kind)
    if kind in blocks.BLOCKS:
        group = blocks.BLOCKS[kind].group
    default = pw_active().gemm.path_of(number, group, -1)
    own = [path for path in range(PW_PATHS)
           if path != default and pw_active().gemm.path_of(number, group, path) == path]
    return tuple(pw_path_name(path).decode() for path in (default, *own))


def micro_kernels(kind, path=None, int32_t group=packing.DEFAULT_GROUP):
    """[(rows, panels)] of every micro-kernel that the active ISA has for weights of this kind (and group, if q8)."""
    cdef pw_weight w
    cdef int32_t mr, panels
    if kind in blocks.BLOCKS:
        group = blocks.BLOCKS[kind].group
    w.kind, w.group, w.path = packing.KINDS.index(kind), group, path_number(path)
    sizes = range(1, PW_MOST_TILE + 1)
    return [(mr, panels) for panels in sizes for mr in sizes if pw_active().gemm.has_tile(&w, mr, panels)]


cdef int32_t path_number(path) except? -2:
    """-1, the ISA's default, for None. WeightError for a name that no kernel knows."""
    if path is None:
        return -1
    if path not in path_names():
        raise WeightError(f"there is no compute path {path!r}: {', '.join(path_names())} are known")
    return path_names().index(path)


cdef pw_weight weight_view(packed, path=None, int32_t k_parts=1) except *:
    """A PackedWeight as the kernels see it, and the arithmetic that it wants.

    The caller keeps `packed` alive while the view is in use.
    """
    cdef pw_weight w
    cdef const char *problem
    n, k = packed.n, packed.k
    if packed.kind not in packing.KINDS or n < 1 or k < 1:
        raise WeightError(f"a weight of kind {packed.kind!r}, {n} outputs and {k} inputs: no kernel reads it")
    w.kind = packing.KINDS.index(packed.kind)
    w.n, w.k, w.group, w.zero_point = n, k, packed.group, packed.zero_point
    w.path, w.k_parts, w.top_exponent = path_number(path), k_parts, packed.top_exponent
    if w.path < 0 and w.top_exponent == packing.NOT_FINITE:
        w.path = PW_FMA
    w.scale_bytes = 0
    w.scales = w.mins = NULL
    if packed.kind in blocks.BLOCKS and k % blocks.BLOCKS[packed.kind].inputs:
        raise WeightError(f"a {packed.kind} weight of {k} inputs, which are not whole blocks")
    w.offsets = NULL
    if packed.offsets is None:
        w.values = _bytes_of(packed.values, packing.values_dtype(packed.kind),
                             packing.values_shape(packed.kind, n, k), "values")
    else:
        w.values = _bytes_of(packed.values, np.uint8, (packed.values.size,), "the stream")
        w.offsets = <const uint32_t *>_bytes_of(packed.offsets, np.uint32, packing.offsets_shape(n, k), "offsets")
        if int(packed.offsets.max()) * packing.SLOT_UNIT + packing.SPARSE_TAIL > packed.values.size:
            raise WeightError(f"a sparse {packed.kind} weight with a slot beyond its {packed.values.size} bytes")
    if packed.scales is not None:
        if packed.group not in (0, 16, 32) or packed.scales.dtype not in (np.float16, np.float32):
            raise WeightError(f"no kernel reads {packed.scales.dtype} scales in groups of {packed.group}")
        shape, dtype = packing.scales_shape(packed.kind, n, k, packed.group), packed.scales.dtype
        w.scale_bytes = dtype.itemsize
        w.scales = _bytes_of(packed.scales, dtype, shape, "scales")
        if packed.mins is not None:
            w.mins = _bytes_of(packed.mins, dtype, shape, "mins")
    problem = pw_weight_problem(&w)
    if problem != NULL:
        raise WeightError(f"a {packed.kind} weight: {problem.decode()}")
    return w


def expands():
    """Whether one instruction expands sparse weights on this CPU."""
    return bool(pw_cpu_expands())


def let_expand(bint allowed):
    """For tests: False, as if this CPU had no such instruction."""
    pw_cpu_let_expand(allowed)


cdef pw_sparse_shape _sparse_shape(str kind, int32_t zero_point, int64_t panels, int64_t k) except *:
    cdef pw_sparse_shape shape
    if kind not in ("bf16", "q8") or panels < 1 or k < 1:
        raise WeightError(f"a sparse {kind} weight of {panels} panels and {k} inputs: there is no such storage")
    shape.kind, shape.zero_point, shape.panels, shape.k = packing.KINDS.index(kind), zero_point, panels, k
    return shape


def sparse_pack(values, str kind, int32_t zero_point, int64_t k, int64_t at=0):
    """(stream uint8 without its tail, offsets uint32 [panels, slots], weights kept) of dense panels (packing.py).

    at: bytes of the panels before these, from which offsets count. The stream is a list of one array.
    """
    cdef pw_sparse_shape shape = _sparse_shape(kind, zero_point, values.shape[0], k)
    cdef const uint8_t[::1] dense = values.reshape(-1).view(np.uint8)
    cdef uint8_t[::1] to
    cdef uint32_t[::1] slots
    cdef int64_t size, kept
    offsets = np.empty((values.shape[0], pw_sparse_slots(k)), dtype=np.uint32)
    slots = offsets.reshape(-1)
    if dense.shape[0] != values.shape[0] * pw_padded_k(k) * PW_PANEL * (2 if kind == "bf16" else 1):
        raise WeightError(f"{dense.shape[0]} bytes are not {values.shape[0]} panels of {k} inputs")
    with nogil:
        size = pw_sparse_pack(&shape, &dense[0], at, NULL, &slots[0], &kept)
    if size < 0:
        raise WeightError("a sparse weight is larger than offsets reach")
    stream = np.empty(size, dtype=np.uint8)
    to = stream
    with nogil:
        pw_sparse_pack(&shape, &dense[0], at, &to[0], &slots[0], &kept)
    return stream, offsets, kept


def sparse_unpack(stream, offsets, str kind, int32_t zero_point, int64_t k):
    """The dense panels of a checked stream, uint8."""
    cdef pw_sparse_shape shape = _sparse_shape(kind, zero_point, offsets.shape[0], k)
    cdef const uint8_t[::1] of = stream
    cdef const uint32_t[::1] slots = np.ascontiguousarray(offsets).reshape(-1)
    cdef uint8_t[::1] to
    dense = np.empty(offsets.shape[0] * pw_padded_k(k) * PW_PANEL * (2 if kind == "bf16" else 1), dtype=np.uint8)
    to = dense
    with nogil:
        pw_sparse_unpack(&shape, &of[0], &slots[0], &to[0])
    return dense


def sparse_kept(stream, offsets, str kind, int64_t k):
    """How many weights a stream keeps. WeightError unless its offsets, masks and length agree: it may say anything."""
    cdef pw_sparse_shape shape = _sparse_shape(kind, 0, offsets.shape[0], k)
    cdef const uint8_t[::1] of = stream
    cdef const uint32_t[::1] slots = np.ascontiguousarray(offsets).reshape(-1)
    cdef int64_t kept, size = of.shape[0]
    cdef const char *problem
    if offsets.shape[1] != pw_sparse_slots(k) or size < PW_SPARSE_TAIL:
        raise WeightError(f"a sparse {kind} weight of {size} bytes with offsets {offsets.shape}")
    with nogil:
        problem = pw_sparse_problem(&shape, &of[0], size, &slots[0], &kept)
    if problem != NULL:
        raise WeightError(f"a sparse {kind} weight: {problem.decode()}")
    return kept


cdef tuple LOOP_ORDERS = ("nm", "mn")  # pw_loop_order


cdef pw_schedule schedule_of(fields):
    cdef pw_schedule s
    s.mr, s.panels, s.block_m, s.block_n, s.block_k = (
        fields["mr"], fields["panels"], fields["block_m"], fields["block_n"], fields["block_k"])
    s.threads_m, s.threads_n, s.threads_k = fields["threads_m"], fields["threads_n"], fields["threads_k"]
    s.prefetch_bytes, s.loop_order = fields["prefetch_bytes"], LOOP_ORDERS.index(fields["loop_order"])
    return s


cdef dict fields_of(pw_schedule s):
    cdef dict fields = s
    return {**fields, "loop_order": LOOP_ORDERS[s.loop_order]}


def default_schedule(packed, int64_t m, int32_t threads=1, path=None, int32_t k_parts=1):
    """The schedule that the kernels use for m rows where no tuned one is known: a dict by the names of pw_schedule."""
    cdef pw_weight w = weight_view(packed, path, k_parts)
    return fields_of(pw_default_schedule(&w, m, threads))


def prepared_row_bytes(packed, path=None):
    """Bytes of one row of activations in the form that this weight's kernel reads, on the active ISA."""
    cdef pw_weight w = weight_view(packed, path)
    cdef pw_form form = pw_form_of(&w)
    return pw_active().gemm.row_bytes(&form, w.k)


def prepare_rows(const float[:, ::1] x, packed, path=None):
    """float32 [m, k] to uint8 [m, row bytes], the form that this weight's kernel reads on the active ISA."""
    cdef pw_weight w = weight_view(packed, path)
    cdef pw_form form = pw_form_of(&w)
    cdef int64_t row_bytes = pw_active().gemm.row_bytes(&form, w.k)
    cdef pw_range rows
    cdef uint8_t[:, ::1] out
    if x.shape[1] != w.k:
        raise ValueError(f"x has {x.shape[1]} columns, the weight {w.k} inputs")
    prepared = np.empty((x.shape[0], row_bytes), dtype=np.uint8)
    if x.shape[0]:
        out = prepared
        rows.begin, rows.end = 0, x.shape[0]
        with nogil:
            pw_active().gemm.prepare_rows(&form, w.k, &x[0, 0], w.k, rows, &out[0, 0])
    return prepared


def gemm_share(const uint8_t[:, ::1] prepared, packed, float[:, ::1] y, rows=None, panels=None, schedule=None,
               add=False, path=None, int32_t k_parts=1, part=None):
    """y[m, n] (+)= x W^T for a range of rows and a range of panels; the rest of y is left alone.

    `prepared` comes from prepare_rows on the same ISA; rows and panels are (begin, end), whole by default.
    `part` is one of k_parts, whose sum alone is wanted.
    """
    cdef pw_weight w = weight_view(packed, path, k_parts)
    cdef pw_form form = pw_form_of(&w)
    cdef int64_t m = y.shape[0]
    cdef pw_activations x
    cdef pw_range row_range, panel_range
    cdef pw_schedule s = pw_default_schedule(&w, m, 1) if schedule is None else schedule_of(schedule)
    cdef pw_epilogue epilogue = PW_ADD if add else PW_STORE
    cdef int32_t part_number = -1 if part is None else part
    if part is not None and not 0 <= part < k_parts:
        raise ValueError(f"part {part} of {k_parts}")
    row_range.begin, row_range.end = (0, m) if rows is None else rows
    panel_range.begin, panel_range.end = (0, pw_panels(w.n)) if panels is None else panels
    if prepared.shape[0] != m or prepared.shape[1] != pw_active().gemm.row_bytes(&form, w.k) or y.shape[1] != w.n:
        raise ValueError("prepared rows, weight and y do not fit together")
    if not (0 <= row_range.begin <= row_range.end <= m and 0 <= panel_range.begin <= panel_range.end <= pw_panels(w.n)):
        raise ValueError(f"rows {rows} or panels {panels} lie outside y")
    if m == 0:
        return
    x.rows, x.row_bytes = &prepared[0, 0], prepared.shape[1]
    with nogil:
        pw_active().gemm.gemm(&w, &x, row_range, panel_range, part_number, &y[0, 0], w.n, epilogue, &s)


def gemm(x, packed, schedule=None, path=None, int32_t k_parts=1):
    """float32 [m, k] times a packed weight: float32 [m, n], on one thread."""
    rows = np.ascontiguousarray(x, dtype=np.float32)
    y = np.empty((rows.shape[0], packed.n), dtype=np.float32)
    gemm_share(prepare_rows(rows, packed, path), packed, y, schedule=schedule, path=path, k_parts=k_parts)
    return y


def unpack_row(packed, int64_t row):
    """W[row] as float32 [k]."""
    cdef pw_weight w = weight_view(packed)
    cdef float[::1] out
    if not 0 <= row < w.n:
        raise ValueError(f"row {row} of a weight with {w.n}")
    values = np.empty(w.k, dtype=np.float32)
    out = values
    pw_active().gemm.unpack_row(&w, row, &out[0])
    return values


def share(packed, int64_t m, int32_t thread, schedule):
    """((first row, last row + 1), (first panel, last panel + 1)) of one thread under a schedule's grid."""
    cdef pw_weight w = weight_view(packed)
    cdef pw_schedule s = schedule_of(schedule)
    cdef pw_range rows, panels
    pw_share(&s, &w, m, thread, &rows, &panels)
    return (rows.begin, rows.end), (panels.begin, panels.end)
