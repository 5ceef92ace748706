# Ops of layers that keep a state of each sequence. Textually included by _native.pyx.


cdef extern from "state/run_state.h" nogil:
    int64_t pw_convolution_floats(const pw_op *op)
    int64_t pw_recurrence_floats(const pw_op *op)

cdef enum:
    STATE_TAPS = 16


cdef class StateBuilder(AdaptableBuilder):
    """Ops beside a builder's: short convolutions and linear recurrences. cython_kernels/state/run_state.h says what they do.

    Each has a part of every sequence's state, which lies in one of capacity's `state_places`.
    """

    def convolve(self, weights, int64_t from_at, int64_t from_stride, int64_t out, int64_t out_stride, bias=None,
                 bint gates_rows=False, bint silu=False):
        """Each channel over its rows before. weights: float32 [channels, taps], the oldest row's first.

        gates_rows: rows have a gate, a factor and the input side by side, channels each.
        """
        cdef pw_op op = _op_of(PW_CONVOLVE, "every", from_at, from_stride, out, out_stride)
        taps = np.asarray(weights, np.float32)
        if taps.ndim != 2 or not 2 <= taps.shape[1] <= STATE_TAPS:
            raise ProgramError(f"a convolution of shape {taps.shape}: channels, and 2 to {STATE_TAPS} taps")
        op.k, op.state.taps, op.state.gates_rows, op.state.silu = taps.shape[0], taps.shape[1], gates_rows, silu
        op.state.weights = self._vector(taps.T, taps.size, "taps")
        op.bias = self._optional(bias, op.k, "biases")
        self._add_state(&op, pw_convolution_floats(&op))
        self._add(&op, [], 3 * op.k if gates_rows else op.k, op.k)

    def state_gates(self, shape, int64_t from_at, int64_t from_stride, int64_t out, int64_t out_stride, rates, offsets,
                    steps=(0.0, float("inf")), normalised=None, double eps=1e-6, factor_at=None):
        """Of each row and head a decay and the factor of a change. shape: as `recur`'s; steps: limits of time steps.

        factor_at: the column of factors where decays are of all numbers of keys, which come first; shape has `by_key`.

        normalised: (offset, stride, query column, key column) of rows whose queries and keys are; None: none are.
        """
        cdef pw_op op = _op_of(PW_STATE_GATES, "every", from_at, from_stride, out, out_stride)
        self._recurrent(&op, shape)
        op.eps, op.state.least, op.state.most = eps, steps[0], steps[1]
        op.state.rates = self._vector(rates, shape.heads, "decay rates")
        op.state.factor_at = 0 if factor_at is None else factor_at
        decays = shape.heads * (shape.key_dim if op.state.by_key else 1)
        op.state.offsets = self._vector(offsets, decays, "offsets of time steps")
        if normalised is not None:
            op.state.second, op.state.second_stride, op.state.query_at, op.state.key_at = normalised
            op.state.query_scale = self._filled(1 / shape.key_dim, shape.key_dim)
            op.state.key_scale = self._filled(1 / sqrt(shape.key_dim), shape.key_dim)
            self._reserve_second(&op, shape.groups * shape.key_dim + max(op.state.query_at, op.state.key_at))
        width = op.state.factor_at + shape.heads if op.state.by_key else (2 if shape.erases else 1) * shape.heads
        if op.state.factor_at < (decays if op.state.by_key else 0):
            raise ProgramError(f"factors from column {factor_at} on, where {decays} numbers come first")
        self._add(&op, [], width, (decays if op.state.by_key else 0) + 2 * shape.heads)

    def recur(self, shape, int64_t from_at, int64_t from_stride, int64_t out, int64_t out_stride, gates, columns,
              skips=None):
        """The recurrence of every head over the rows of each sequence.

        shape: an object with heads, groups (of queries and keys, which heads share), key_dim, value_dim and erases;
        where it has `tiled`, head h is of group h % groups, not h // (heads / groups); `by_key`: decays are of each number
        of a head's key.
        gates: (offset, stride) of what `state_gates` gave. columns: of queries, keys and values in a row.
        """
        cdef pw_op op = _op_of(PW_RECUR, "every", from_at, from_stride, out, out_stride)
        self._recurrent(&op, shape)
        op.state.second, op.state.second_stride = gates
        op.state.query_at, op.state.key_at, op.state.value_at = columns
        op.state.skips = self._optional(skips, shape.heads, "skips")
        keys, values = shape.groups * shape.key_dim, shape.heads * shape.value_dim
        width = max(op.state.query_at + keys, op.state.key_at + keys, op.state.value_at + values)
        self._reserve_second(&op, ((shape.key_dim if op.state.by_key else 0) + 2) * shape.heads)
        self._add_state(&op, pw_recurrence_floats(&op))
        self._add(&op, [], width, values)

    def gate_rows(self, int64_t width, int64_t from_at, int64_t from_stride, int64_t out, int64_t out_stride, by,
                  gate="silu", norm=None, shape=None, bint norm_first=False, eps=None, rows="every", bint one_gate=False,
                  double scale=1.0):
        """Rows times an activation of other rows; normalised before by heads, or after by groups, with `norm` weights.

        by: (offset, stride) of the other rows. gate: of GATES. shape: as `recur`'s. one_gate: rows are multiplied by the
        logistic of one number each. rows: "every", or those that want "logits". scale: of rows without a norm.
        """
        cdef pw_op op = _op_of(PW_GATE_ROWS, rows, from_at, from_stride, out, out_stride)
        op.k, op.gate, op.eps = width, GATES[gate], self.program.shape.norm_eps if eps is None else eps
        op.state.second, op.state.second_stride = by
        op.state.one_gate, op.scale = one_gate, scale
        if norm is not None:
            self._recurrent(&op, shape)
            op.state.norm_first = norm_first
            if width != shape.heads * shape.value_dim or width % shape.groups:
                raise ProgramError(f"rows of {width} numbers for {shape}")
            op.state.weights = self._vector(norm, shape.value_dim if norm_first else width, "norm weights")
        self._reserve_second(&op, 1 if one_gate else width)
        self._add(&op, [], width, width)

    def state_bytes(self):
        """Bytes of one sequence's state."""
        return self.program.state_floats * sizeof(float)

    cdef int _recurrent(self, pw_op *op, shape) except -1:
        op.state.heads, op.state.groups, op.state.erases = shape.heads, shape.groups, shape.erases
        op.state.tiled, op.state.by_key = getattr(shape, "tiled", False), getattr(shape, "by_key", False)
        op.state.key_dim, op.state.value_dim = shape.key_dim, shape.value_dim
        if op.state.by_key and not shape.erases:
            raise ProgramError(f"a decay for each number of a key where nothing is erased: {shape}")
        if min(shape.heads, shape.groups, shape.key_dim, shape.value_dim) < 1 or shape.heads % shape.groups:
            raise ProgramError(f"a recurrence of {shape}")
        return 0

    cdef const float *_filled(self, double number, int64_t length) except NULL:
        return self._vector(np.full(length, number, np.float32), length, "factors")

    cdef int _reserve_second(self, const pw_op *op, int64_t width) except -1:
        cdef pw_capacity *room = &self.program.capacity
        n_rows = room.max_tokens if op.rows == PW_EVERY_ROW else room.max_logit_rows
        self._reserve(op.state.second, op.state.second_stride, n_rows, width)
        return 0

    cdef int _add_state(self, pw_op *op, int64_t floats) except -1:
        """The op's part of a state, which begins on a line of its own."""
        if self.program.capacity.state_places < 1:
            raise ProgramError("a program of layers with states needs places for them")
        op.state.at = self.program.state_floats
        self.program.state_floats += (floats + 15) // 16 * 16
        return 0
