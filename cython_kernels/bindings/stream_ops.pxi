# Ops of several streams beside each other. Textually included by _native.pyx.


cdef dict STREAM_MODES = {"predict": PW_PREDICT, "correct": PW_CORRECT, "spread": PW_SPREAD, "merge": PW_MERGE}


cdef class StreamBuilder(StateBuilder):
    """One more op: cython_kernels/state/streams.h says what it does."""

    def streams(self, mode, int64_t width, int32_t count, at, taken, given, to=(0, 0), rows="every", int32_t active=0,
                norm=None, router=None, coefficients=None, scale=None):
        """mode: "predict", "correct", "spread" or "merge". at, taken, given, to: (offset, stride) of rows of `count` streams
        one behind the other, of rows that are read and written, and of rows of streams that are written, or read by "merge".

        norm [width], router [count, width], coefficients [outputs, count]: of "predict" and "correct". scale [width]: of
        what "correct" gives, None for none.
        """
        cdef pw_op op = _op_of(PW_STREAMS, rows, taken[0], taken[1], given[0], given[1])
        cdef pw_streams *s = &op.streams
        cdef pw_capacity *room = &self.program.capacity
        s.mode, s.count, s.active, s.each = STREAM_MODES[mode], count, active, width
        (s.at, s.stride), (s.to, s.to_stride) = at, to
        op.k, op.eps = width, self.program.shape.norm_eps
        if not 2 <= count <= PW_MAX_STREAMS or not 0 <= active < count:
            raise ProgramError(f"stream {active} of {count}: 2 to {PW_MAX_STREAMS} streams can run")
        of_step = op.rows == PW_EVERY_ROW or mode == "correct"
        self._reserve(s.at, s.stride, room.max_tokens if of_step else room.max_logit_rows, count * width)
        if mode in ("correct", "merge"):
            n_rows = room.max_tokens if op.rows == PW_EVERY_ROW else room.max_logit_rows
            self._reserve(s.to, s.to_stride, n_rows, (count if mode == "correct" else count - 1) * width)
        if mode in ("predict", "correct"):
            op.norm = self._vector(norm, width, "norm weights")
            s.router = self._vector(router, count * width, "routers of streams")
            outputs = count * count if mode == "predict" else count
            s.coefficients = self._vector(coefficients, outputs * count, "coefficients of streams")
            s.scale = self._optional(scale, width, "factors")
        self._add(&op, [], width, width)
