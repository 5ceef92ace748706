# Low-rank products beside the weights of linear ops. Textually included by _native.pyx.


cdef extern from "program/low_rank.h" nogil:
    enum:
        PW_MAX_TARGETS
        PW_MAX_ADAPTERS
        PW_MAX_LOW_ROWS

    ctypedef struct pw_low_rank_target:
        int64_t column
        int64_t first "from"
        pw_weight up

    ctypedef struct pw_low_rank:
        int32_t n_targets
        pw_weight down
        const float *scales
        pw_low_rank_target targets[PW_MAX_TARGETS]

    bint pw_program_adapt(pw_program *program, int32_t op, int32_t adapter, const pw_low_rank *low_rank)


MAX_ADAPTERS = PW_MAX_ADAPTERS
"""The most adapters of one program."""


cdef class AdaptableBuilder(ProgramBuilder):
    """A builder whose linear ops rows may have adapters for: low-rank products on top of what the op gives."""

    def adapt(self, int32_t op, int32_t adapter, down, scales, ups):
        """Rows of slices that name adapter `adapter` (1 to MAX_ADAPTERS) have y += up (scales * (down x)) from now on.

        op: what `linear` returned. down: PackedWeight [sum of ranks, k], f32 or bf16; scales: float32 of each of its
        outputs. ups: at most three (column, PackedWeight [n, rank]): the ranks one after the other, and each one's
        outputs from a column of the op's rows on.
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
        own.n_targets, own.down = len(ups), self._dense(down)
        own.scales = self._vector(scales, down.n, "scales")
        for i, (column, up) in enumerate(ups):
            own.targets[i].column, own.targets[i].first, own.targets[i].up = column, end, self._dense(up)
            end += up.k
            if column < 0 or column + up.n > self.program.ops[op].out_stride:
                raise ProgramError(f"{up.n} outputs from column {column} on, in rows of {self.program.ops[op].out_stride}")
        if end != down.n:
            raise ProgramError(f"weights of {end} inputs in all read the {down.n} outputs of another")
        if not pw_program_adapt(self.program, op, adapter, &own):
            raise ProgramError("no memory for an adapter")

    cdef pw_weight _dense(self, packed) except *:
        """Float32 rows meet its numbers unrounded."""
        if packed.kind not in ("f32", "bf16") or packed.is_sparse:
            raise ProgramError(f"a low-rank weight of kind {packed.kind}: dense f32 or bf16 expected")
        self.kept.append(packed)
        return weight_view(packed, "fma")
