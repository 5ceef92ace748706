# Low-rank products beside the weights of linear ops. Textually included by _native.pyx.


cdef extern from "program/program.h" nogil:
    enum:
        PW_MAX_TARGETS, PW_MAX_ADAPTERS, PW_MAX_LOW_ROWS

    ctypedef struct pw_low_rank_target:
        int64_t column
        int64_t first "from"
        pw_thin_weight up

    ctypedef struct pw_low_rank:
        int32_t n_targets
        pw_thin_weight down
        const float *scales
        pw_low_rank_target targets[PW_MAX_TARGETS]

    bint pw_program_adapt(pw_program *program, int32_t op, int32_t adapter, const pw_low_rank *low_rank)


MAX_ADAPTERS = PW_MAX_ADAPTERS
"""The most adapters of one program."""


cdef class AdaptableBuilder(ProgramBuilder):
    """A builder whose linear ops rows may have adapters for: low-rank products on top of what the op gives."""

    def adapt(self, int32_t op, int32_t adapter, down, scales, ups):
        """Rows of slices that name adapter `adapter` (1 to MAX_ADAPTERS) have y += up (scales * (down x)) from now on.

        op: what `linear` returned. down: [sum of ranks, k]; scales: float32 of each of its outputs. ups: at most three
        (column, weight [n, rank]): the ranks one after the other, and each one's outputs from a column of the op's
        rows on, whole panels away from where a part begins. All weights are of `packing.pack_thin`.
        """
        cdef pw_low_rank own
        cdef int i
        cdef int64_t end = 0
        memset(&own, 0, sizeof(own))
        if self.sealed:
            raise ProgramError("a sealed program takes no adapters")
        if not (0 <= op < self.program.n_ops and self.program.ops[op].code == PW_LINEAR):
            raise ProgramError(f"there is no linear op {op}")
        if not 1 <= adapter <= PW_MAX_ADAPTERS or not 1 <= len(ups) <= PW_MAX_TARGETS:
            raise ProgramError(f"adapter {adapter} of 1 to {PW_MAX_ADAPTERS} with {len(ups)} targets of 1 to {PW_MAX_TARGETS}")
        if down.k != self.program.ops[op].k or down.n > PW_MAX_LOW_ROWS:
            raise ProgramError(f"[{down.n}, {down.k}] where at most {PW_MAX_LOW_ROWS} rows of {self.program.ops[op].k} belong")
        own.n_targets, own.down = len(ups), thin_view(down)
        own.scales = self._vector(scales, down.n, "scales")
        for i, (column, up) in enumerate(ups):
            own.targets[i].column, own.targets[i].first, own.targets[i].up = column, end, thin_view(up)
            end += up.k
            self._check_columns(op, column, up.n)
        if end != down.n:
            raise ProgramError(f"weights of {end} inputs in all read the {down.n} outputs of another")
        if not pw_program_adapt(self.program, op, adapter, &own):
            raise ProgramError("no memory for an adapter")
        self.kept.append((down, ups))

    cdef int _check_columns(self, int32_t op, int64_t column, int64_t n) except -1:
        """They lie in one part, from one of its panels on: pieces of the part's product then hold whole panels of them."""
        cdef pw_part *part
        cdef int i
        for i in range(self.program.ops[op].n_parts):
            part = &self.program.ops[op].parts[i]
            if part.column <= column and column + n <= part.column + part.weight.n and (column - part.column) % PW_PANEL == 0:
                return 0
        raise ProgramError(f"{n} outputs from column {column} on are no panels of one weight of the op")


cdef pw_thin_weight thin_view(packed) except *:
    """A weight of `packing.pack_thin` as add_low_rank reads it."""
    cdef pw_thin_weight w
    w.n, w.rank, w.is_bf16 = packed.n, packed.k, packed.kind == "bf16"
    if packed.kind not in ("f32", "bf16") or packed.n < 1 or packed.k < 1:
        raise WeightError(f"a thin weight of kind {packed.kind}, {packed.n} outputs and {packed.k} inputs")
    w.values = _bytes_of(packed.values, packing.values_dtype(packed.kind),
                         packing.thin_shape(packed.kind, packed.n, packed.k), "values")
    return w


def add_low_rank(x, packed, float[:, ::1] y, rows, panels=None):
    """y[rows[i]] += x[i] W^T for a range of panels (None: all). x: float32 [m, rank]; packed: of `packing.pack_thin`."""
    cdef pw_thin_weight w = thin_view(packed)
    cdef pw_thin_rows r
    cdef const float[:, ::1] inputs = np.ascontiguousarray(x, np.float32)
    cdef const int64_t[::1] row_at = np.ascontiguousarray(rows, np.int64)
    cdef int64_t first, end
    first, end = (0, packed.panels) if panels is None else panels
    if inputs.shape[1] != w.rank or inputs.shape[0] != row_at.shape[0] or y.shape[1] != w.n:
        raise ValueError("rows, weight and y do not fit together")
    if not 0 <= first <= end <= packed.panels or (len(rows) and not 0 <= min(rows) <= max(rows) < y.shape[0]):
        raise ValueError(f"rows {rows} or panels {panels} lie outside y")
    if inputs.shape[0] == 0:
        return
    r.x, r.ldx, r.count, r.row_at = &inputs[0, 0], w.rank, inputs.shape[0], &row_at[0]
    r.y, r.ldy = &y[0, 0], w.n
    with nogil:
        _ops().add_low_rank(&w, first, end, &r)
