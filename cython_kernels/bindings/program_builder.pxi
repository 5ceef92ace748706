# Flat programs: ops are added once, then a step runs in one call. Textually included by _native.pyx.

from libc.math cimport sqrt

from phasewise.cython_kernels.division import columns as _columns


cdef dict SOURCES = {
    "rows": PW_FROM_ROWS, "norm": PW_FROM_NORM, "gate": PW_FROM_GATE, "activation": PW_FROM_ACTIVATION,
}
GATES = {pw_gate_name(gate).decode(): gate for gate in range(PW_GATES)}
cdef dict SCORES = {"softmax": PW_SOFTMAX, "logistic": PW_LOGISTIC, "sparse_mixer": PW_SPARSE_MIXER}
ACTIVATIONS = {pw_activation_name(number).decode(): number for number in range(PW_ACTIVATIONS)}
cdef dict _NO_LATENT = {"latent": 0, "index": 0, "chosen": 0}
cdef dict ROWS = {"every": PW_EVERY_ROW, "gathered": PW_GATHERED_ROWS, "logits": PW_LOGIT_ROWS}


cdef pw_op _op_of(int32_t code, rows, int64_t from_at, int64_t from_stride, int64_t out, int64_t out_stride) except *:
    """An op of nothing else."""
    cdef pw_op op
    memset(&op, 0, sizeof(op))
    op.code, op.rows = code, ROWS[rows]
    op.in_at, op.in_stride, op.out_at, op.out_stride = from_at, from_stride, out, out_stride
    return op


cdef int32_t read_row_ranges(ranges, pw_row_range *found) except -1:
    """Pairs of a last number of rows and a schedule; `found` has room for PW_MAX_ROW_RANGES."""
    cdef int32_t count = 0
    if len(ranges) > PW_MAX_ROW_RANGES or [last for last, _ in ranges] != sorted({last for last, _ in ranges}):
        raise ProgramError(f"a table takes at most {PW_MAX_ROW_RANGES} schedules, in the order of their rows")
    for last_rows, schedule in ranges:
        found[count].last_rows, found[count].tuned = last_rows, schedule is not None
        if schedule is not None:
            found[count].schedule = schedule_of(schedule)
        count += 1
    return count


def default_attention(shape, int64_t tokens, int64_t positions, int threads):
    """The schedule, as default_schedule gives it, of a step with one slice: `tokens` rows, or one that sees `positions`.

    shape: as for a Program. What its numbers mean: Program.set_attention_schedules.
    """
    cdef pw_shape s = {**_NO_LATENT, **shape}
    return fields_of(pw_default_attention(&s, tokens, (positions + PW_CHUNK - 1) // PW_CHUNK, threads))


cdef class ProgramBuilder:
    """A model's forward step as ops over an arena of floats: embed, linear, attend and so on, in the order of the step.

    shape and capacity are mappings with the fields of pw_shape and pw_capacity (program.h), kv_format by its name;
    inv_freq is float64 [head_dim / 2]; with shape's `window` (0: none) and `first_heads` it is attention's kind 0, and `kind`
    adds others.
    Offsets count floats from the arena's start; rows of an op are `stride` floats apart.

    shape may also have `latent`, the numbers of a value of latent attention (attend_latent), `index`, those of an indexer's key
    behind each vector, which are numbers of head_dim too, and `chosen`, positions that it leaves to a token (choose), `outputs`, numbers of an output row (else `vocab`), and `bidirectional`: whether tokens see
    those after them; then every slice is a whole sequence.

    division: how the steps of each table are divided over ranks, and which rank this process is (None: one rank
    for all). patience_s: how long a rank waits for another within an op.
    """

    cdef pw_program *program
    cdef object division
    cdef list kept
    cdef bint sealed
    cdef bint has_segments

    def __cinit__(self, shape, capacity, inv_freq, division=None, double patience_s=60.0, double magnitude=1.0):
        cdef pw_shape s = {**_NO_LATENT, **shape}
        cdef pw_capacity c = {"ring_slots": 0, "state_places": 0, **capacity, "kv_format": kv_format_code(capacity["kv_format"])}
        if s.latent:
            check_latent(s.latent, s.n_kv_heads, s.head_dim - s.index, c.kv_format)
            if s.index and not (2 <= s.index <= PW_MAX_INDEX_DIM and s.index % 2 == 0 and 1 <= s.chosen <= 1 << 20):
                raise ProgramError(f"an indexer's keys of {s.index} numbers, of which {s.chosen} positions are chosen")
        elif not 2 <= s.head_dim <= PW_MAX_HEAD_DIM or s.head_dim % 2:
            raise ProgramError(
                f"attention heads of {s.head_dim} dimensions: even numbers up to {PW_MAX_HEAD_DIM} are supported")
        if min(s.n_layers, s.n_heads, s.n_kv_heads, s.hidden, s.ffn, s.vocab) < 1 or s.n_heads % s.n_kv_heads:
            raise ProgramError(f"a model of this shape cannot be: {shape}")
        if min(c.kv_slots, c.max_tokens, c.max_slices, c.max_logit_rows, c.max_threads) < 1:
            raise ProgramError(f"a program needs room for something: {capacity}")
        if max(c.kv_slots, c.ring_slots, c.max_tokens, c.max_slices, c.max_logit_rows) > 1 << 30:
            raise ProgramError(f"more than 2^30 slots, tokens or rows: {capacity}")
        if not 0 <= c.state_places <= 1 << 20:
            raise ProgramError(f"{c.state_places} places for states")
        if c.ring_slots < 0 or c.ring_slots % 16:
            raise ProgramError(f"{c.ring_slots} slots of rings: a multiple of 16 expected")
        c.kv_slots = (c.kv_slots + 15) // 16 * 16
        self.kept = []
        self.program = pw_program_open(s, c)
        if self.program == NULL:
            raise ProgramError(f"no memory for the bookkeeping of {capacity}")
        self.program.outputs = shape.get("outputs", s.vocab)
        self.program.bidirectional = shape.get("bidirectional", False)
        if not 1 <= self.program.outputs <= 1 << 30:
            raise ProgramError(f"a step that gives {self.program.outputs} numbers for a row")
        self.kind(inv_freq, shape.get("window", 0), magnitude, shape.get("first_heads"), shape.get("in_chunks", False))
        if division is not None:
            self._divide(division, patience_s)

    cdef int _divide(self, division, double patience_s) except -1:
        cdef int32_t threads[256]
        cdef int32_t weights[256]
        cdef int32_t ranks = max((len(teams) for teams in division.teams), default=0)
        if len(division.teams) > PW_SCHEDULE_TABLES or not 1 <= ranks <= 256 or not 0 <= division.rank < ranks:
            raise ProgramError(f"rank {division.rank} of teams {division.teams}: 1 to 256 ranks for each of at most "
                               f"{PW_SCHEDULE_TABLES} tables expected")
        if not 0 < patience_s <= 1e6:
            raise ProgramError(f"a patience of {patience_s} s")
        for table, teams in enumerate(division.teams):
            for rank, (size, weight) in enumerate(zip(teams, division.shares(table), strict=True)):
                if not 1 <= size <= PW_OBSERVED_THREADS:
                    raise ProgramError(f"a rank with {size} threads: 1 to {PW_OBSERVED_THREADS} expected")
                if not 1 <= weight <= 1 << 22:
                    raise ProgramError(f"a rank that weighs {weight}: 1 to {1 << 22} expected")
                threads[rank], weights[rank] = size, weight
            self.program.divisions[table] = pw_division_of(len(teams), threads, weights, division.rank)
        if max(team.own_threads for team in self.program.divisions) > self.program.capacity.max_threads:
            raise ProgramError(f"room for {self.program.capacity.max_threads} threads, where {division} has more")
        self.division = division
        self.program.rank, self.program.n_ranks = division.rank, ranks
        self.program.patience_ns = <long>(patience_s * 1e9)
        return 0

    def __dealloc__(self):
        pw_program_close(self.program)

    def kind(self, inv_freq, int64_t window=0, double magnitude=1.0, heads=None, bint in_chunks=False):
        """Adds a kind of attention and returns its number, which `attend` takes.

        inv_freq: float64 [pairs], of which a head may have head_dim / 2; empty where positions turn nothing. window:
        positions that a token sees, 0 for all; bidirectional, half of them on each side. magnitude: what cosines and sines are multiplied by. heads (KV heads,
        numbers of a head): None for the shape's, which are the most. in_chunks: positions lie in chunks of `window`, and a
        token sees those of its own alone.
        """
        cdef const double[::1] angles = np.ascontiguousarray(inv_freq, np.float64)
        cdef pw_attention_kind kind
        cdef double none = 0
        cdef pw_shape *shape = &self.program.shape
        memset(&kind, 0, sizeof(kind))
        kind.n_kv_heads, kind.head_dim = (shape.n_kv_heads, shape.head_dim) if heads is None else heads
        if not 1 <= kind.n_kv_heads <= shape.n_kv_heads or shape.n_heads % kind.n_kv_heads or (
                not 2 <= kind.head_dim <= shape.head_dim or kind.head_dim % 2):
            raise ProgramError(f"{kind.n_kv_heads} KV heads of {kind.head_dim} dimensions in a model of "
                               f"{shape.n_kv_heads} of {shape.head_dim}")
        if self.sealed or angles.shape[0] > kind.head_dim // 2:
            raise ProgramError(f"{angles.shape[0]} rotation frequencies for heads of {kind.head_dim} dimensions")
        if window < in_chunks:
            raise ProgramError(f"a window of {window} positions")
        kind.window, kind.half, kind.magnitude = window, <int32_t>angles.shape[0], magnitude
        kind.in_chunks = in_chunks
        kind.inv_freq = <double *>(&angles[0] if angles.shape[0] else &none)
        index = pw_program_kind(self.program, kind)
        if index < 0:
            raise ProgramError(f"no room for another kind of attention beside {self.program.n_kinds}")
        return index

    def embed(self, packed, int64_t out, int64_t out_stride, double scale=1.0, positions=None, segments=None):
        """Rows of a packed matrix times `scale`, one for each token of the step.

        positions [n, width]: added by the token's position, and no sequence may be longer than n; segments [2, width]:
        added by the text of a pair that the token belongs to (a slice's `second` is where the second begins).
        """
        cdef pw_op op = _op_of(PW_EMBED, "every", 0, 0, out, out_stride)
        op.n_parts, op.k, op.scale = 1, packed.k, scale
        op.parts[0].weight = weight_view(packed)
        if packed.n < self.program.shape.vocab:
            raise ProgramError(f"an embedding of {packed.n} rows for a vocabulary of {self.program.shape.vocab}")
        if positions is not None:
            op.positions = self._vector(positions, positions.size, "positions")
            self.program.n_positions = positions.size // packed.k
            if positions.size != self.program.n_positions * packed.k:
                raise ProgramError(f"{positions.size} numbers for positions of {packed.k}")
        if segments is not None:
            op.segments = self._vector(segments, 2 * packed.k, "segments")
            self.has_segments = True
        self._add(&op, [packed], 0, packed.k)

    def layer_inputs(self, packed, int64_t width, int64_t group, int64_t at, int64_t stride, norm, double scale, double eps):
        """Rows of `width` numbers in place: every `group` numbers normalised, then those of the token in a matrix times
        `scale` added. They are one of its rows, or several; a token that it has none of has its first ones.
        """
        cdef pw_op op = _op_of(PW_LAYER_INPUTS, "every", at, stride, at, stride)
        op.n_parts, op.k, op.group, op.scale, op.eps = 1, width, group, scale, eps
        if group < 1 or width % group or width % packed.k or packed.n < width // packed.k:
            raise ProgramError(f"{width} numbers in groups of {group}, from rows of {packed.k}")
        op.parts[0].weight = weight_view(packed)
        op.norm = self._vector(norm, group, "norm weights")
        self._add(&op, [packed], width, width)

    def linear(self, parts, source, int64_t from_at, int64_t from_stride, int64_t out, int64_t out_stride,
               norm=None, bint add=False, rows="every", residual=None, arithmetics=None, gate="silu", eps=None,
               bias=None, seconds=None, double sparsity=0):
        """Rows times weights, each weight's outputs from its own column on. Returns the op's number.

        parts: [(PackedWeight, column)], all of the same k. arithmetics: [(compute path, k parts)], one for each of
        them (None: the default path of the ISA in use, k whole). source: "rows", "norm" (with the norm's weights),
        "gate": gate(first k) * (next k), of GATES, or times the step's row of k numbers at `seconds` (offset, stride); of the first k what lies `sparsity` deviations above their mean (0: all); or "activation": `gate`, of ACTIVATIONS, of rows plus `bias`, which are xielu's numbers. eps: of the norm (None: the shape's). rows: "every" row of the step; those that want logits "gathered" from
        among them into rows of their own, added to `residual` (offset, stride) if `add`; or such "logits" rows.
        """
        cdef pw_op op = _op_of(PW_LINEAR, rows, from_at, from_stride, out, out_stride)
        if not 1 <= len(parts) <= PW_MAX_PARTS or len({packed.k for packed, _ in parts}) != 1:
            raise ProgramError(f"a linear op takes 1 to {PW_MAX_PARTS} weights of the same number of inputs")
        op.source, op.n_parts, op.k = SOURCES[source], len(parts), parts[0][0].k
        op.gate = ACTIVATIONS[gate] if source == "activation" else GATES[gate]
        op.eps = self.program.shape.norm_eps if eps is None else eps
        op.sparsity = sparsity
        if sparsity and source != "gate":
            raise ProgramError("a sparse activation is of gates")
        if seconds is not None:
            op.second_at, op.second_stride = seconds
            self._reserve(op.second_at, op.second_stride, self.program.capacity.max_tokens, op.k)
        if (seconds is not None and source != "gate") or (seconds is not None and op.second_stride < 1):
            raise ProgramError("rows of second halves are for gates")
        if bias is not None and source != "activation":
            raise ProgramError("biases are added before an activation")
        self._add_to(&op, add, residual)
        out_width = 0
        for i, (packed, column) in enumerate(parts):
            path, k_parts = (None, 1) if arithmetics is None else arithmetics[i]
            op.parts[i].weight, op.parts[i].column = weight_view(packed, path, k_parts), column
            out_width = max(out_width, column + packed.n)
            if column < 0:
                raise ProgramError(f"outputs cannot begin at column {column}")
            self._share(&op, i, packed, path, k_parts)
        op.norm = self._vector(norm, op.k if source == "norm" else 0, "norm weights")
        if source == "activation" and op.gate == PW_ACT_xielu:
            op.bias = self._vector(bias, PW_XIELU_NUMBERS, "numbers of xielu")
        else:
            op.bias = self._optional(bias, op.k, "biases")
        read = 2 * op.k if source == "gate" and seconds is None else op.k
        self._add(&op, [packed for packed, _ in parts], read, out_width)
        return self.program.n_ops - 1

    cdef int _add_to(self, pw_op *op, bint add, residual) except -1:
        """The op's rows are added to what is there, or gathered ones to `residual` (offset, stride)."""
        op.epilogue = PW_ADD if add else PW_STORE
        if (residual is not None) != (add and op.rows == PW_GATHERED_ROWS):
            raise ProgramError("gathered rows are added to a residual, other rows to what is there")
        if residual is not None:
            op.residual, op.residual_stride = residual
        return 0

    cdef int _share(self, pw_op *op, int part, packed, path, int32_t k_parts) except -1:
        """What this rank computes of a weight, by each table; the rest is left zero."""
        cdef pw_column_share *own
        cdef int table
        for table in range(PW_SCHEDULE_TABLES):
            own, first, view = &op.shares[table][part], 0, packed
            if self.division is not None and table >= len(self.division.teams):
                continue
            if self.division is not None:
                first, _ = self.division.panels(packed, table)
                view = self.division.weight(packed, table)
            if view is not None:
                own.weight, own.column = weight_view(view, path, k_parts), op.parts[part].column + first * PW_PANEL
        return 0

    def set_schedules(self, int32_t op, int32_t part, ranges, int32_t table=0):
        """How part `part` of a linear op runs, by the number of rows; no schedule changes a result.

        ranges: at most PW_MAX_ROW_RANGES pairs, ascending: the last number of rows that a schedule serves, and the schedule, a
        mapping such as default_schedule gives (None: the default). `table`: below PW_SCHEDULE_TABLES, which `run` names. Of divided
        weights, a rank's schedules are those of its own columns.
        """
        cdef pw_row_range[PW_MAX_ROW_RANGES] found
        cdef int32_t count
        self._check_part(op, part, table)
        count = read_row_ranges(ranges, found)
        if not pw_schedules_replace(&self.program.ops[op].shares[table][part].schedules, count, found):
            raise ProgramError("no memory for another schedule")

    def tap(self, packed, float[:, ::1] rows):
        """Every run copies what the weight is multiplied with: float32 rows as they enter its product.

        packed: a weight of a linear op. rows: float32 [as many as a run has, k], which the program then writes to.
        """
        cdef const void *values = <const void *><size_t>packed.values.__array_interface__["data"][0]
        cdef int64_t least = max(self.program.capacity.max_tokens, self.program.capacity.max_logit_rows)
        cdef int32_t i, part
        found = False
        if rows.shape[0] < least or rows.shape[1] != packed.k:
            raise ProgramError(f"[{rows.shape[0]}, {rows.shape[1]}] rows for [{least}, {packed.k}] inputs")
        for i in range(self.program.n_ops):
            for part in range(self.program.ops[i].n_parts):
                if self.program.ops[i].code == PW_LINEAR and self.program.ops[i].parts[part].weight.values == values:
                    self.program.ops[i].tap, found = &rows[0, 0], True
        if not found:
            raise ProgramError("no linear op reads this weight")
        self.kept.append(rows)

    cdef int _check_part(self, int32_t op, int32_t part, int32_t table) except -1:
        if not (0 <= op < self.program.n_ops and self.program.ops[op].code in (PW_LINEAR, PW_EXPERTS, PW_HEADS)
                and 0 <= part < self.program.ops[op].n_parts and 0 <= table < PW_SCHEDULE_TABLES):
            raise ProgramError(f"there is no weight {part} in a linear op {op}, or no table {table} of schedules")
        return 0

    def set_attention_schedules(self, ranges, int32_t table=0):
        """The same for attention, by the rows of a step's longest slice.

        Of a schedule count mr, the query rows of a tile; block_m, the query rows of a piece; and for slices of one
        token block_k, the positions of a piece.
        """
        cdef pw_row_range[PW_MAX_ROW_RANGES] found
        cdef int32_t count
        if not 0 <= table < PW_SCHEDULE_TABLES:
            raise ProgramError(f"there is no table {table} of schedules")
        count = read_row_ranges(ranges, found)
        if not pw_schedules_replace(&self.program.attention[table], count, found):
            raise ProgramError("no memory for another schedule")

    def attend(self, int32_t layer, int64_t from_at, int64_t from_stride, int64_t out, int64_t out_stride,
               bias=None, q_norm=None, k_norm=None, rows="every", int32_t kind=0, scale=None, double cap=0,
               sinks=None, slopes=None, growth=None, int64_t growth_span=1, int64_t growth_shift=0, v_norm=None,
               keys_are_values=False, only_reads=False, norm_last=False):
        """Attention of a layer: q, k and v heads side by side in a row, to the weighted values of all heads.

        rows: "every", or "gathered" if only those that want logits are read afterwards; keys and values of every
        row are kept. scale: of scores (None: 1 / sqrt(head_dim)); cap: c tanh(score / c), 0 for none; sinks: a score
        for each head beside those of positions, without a value; slopes: what a score of each head loses for each position
        between (ALiBi). growth: queries at position p are multiplied by its number (p + growth_shift) // growth_span,
        or by its last. v_norm: weights of a norm of every value. keys_are_values: rows have no values, which are keys before their
        norm and rotation. only_reads: rows have queries alone, and `layer` is another's, which keeps keys and values.
        norm_last: queries and keys are normalised behind their rotation.
        """
        cdef pw_op op = _op_of(PW_ATTEND, rows, from_at, from_stride, out, out_stride)
        cdef pw_shape *shape = &self.program.shape
        cdef pw_attention_kind *own
        if not 0 <= layer < shape.n_layers or not 0 <= kind < self.program.n_kinds:
            raise ProgramError(f"layer {layer} of {shape.n_layers}, kind {kind} of {self.program.n_kinds}")
        own = &self.program.kinds[kind]
        op.keys_are_values, op.only_reads, op.norm_last = keys_are_values, only_reads, norm_last
        columns = (shape.n_heads + (0 if only_reads else 2 - keys_are_values) * own.n_kv_heads) * own.head_dim
        op.layer, op.kind, op.cap, op.scale = layer, kind, cap, 1 / sqrt(own.head_dim) if scale is None else scale
        op.v_norm = self._optional(v_norm, own.head_dim, "value norm weights")
        op.sinks = self._optional(sinks, shape.n_heads, "sinks")
        op.slopes = self._optional(slopes, shape.n_heads, "slopes")
        op.n_growth, op.growth_span = 0 if growth is None else len(growth), growth_span
        op.growth_shift = growth_shift
        op.growth = self._optional(growth, op.n_growth, "factors of queries")
        if growth_span < 1 or growth_shift < 0 or (growth is not None and op.n_growth < 1):
            raise ProgramError(f"{op.n_growth} factors of queries, for {growth_span} positions each")
        op.bias = self._optional(bias, columns, "attention biases")
        op.q_norm = self._optional(q_norm, own.head_dim, "query norm weights")
        op.k_norm = self._optional(k_norm, own.head_dim, "key norm weights")
        self._add(&op, [], columns, shape.n_heads * own.head_dim)

    def attend_latent(self, int32_t layer, int64_t from_at, int64_t from_stride, int64_t out, int64_t out_stride,
                      queries, vectors, norm, double eps, double scale, rows="every", int32_t kind=0, double cap=0):
        """Attention over latent vectors, whose first `latent` numbers are what is read of them.

        from_at: of each head `latent` numbers, what meets those; the outputs are as many. queries (offset, stride, step,
        at): of each head, `step` numbers after the one before, the pairs from number `at` on, which meet the others.
        vectors (offset, stride): of a row its vector, before the norm of its first numbers (weights, eps) and the turn
        of its pairs. rows, kind, scale and cap: as for `attend`.
        """
        cdef pw_op op = _op_of(PW_ATTEND, rows, from_at, from_stride, out, out_stride)
        cdef pw_shape *shape = &self.program.shape
        op.layer, op.kind, op.cap, op.scale, op.eps = layer, kind, cap, scale, eps
        if not 0 <= layer < shape.n_layers or not 0 <= kind < self.program.n_kinds or not shape.latent:
            raise ProgramError(f"layer {layer} of {shape.n_layers}, kind {kind} of {self.program.n_kinds}")
        pairs = 2 * self.program.kinds[kind].half
        if pairs != shape.head_dim - shape.index - shape.latent:
            raise ProgramError(f"{pairs} turned numbers of {shape.head_dim - shape.index - shape.latent} behind the latent ones")
        op.latent.query, op.latent.query_stride, op.latent.step, op.latent.at = queries
        op.latent.vector, op.latent.vector_stride = vectors
        op.latent.norm = self._vector(norm, shape.latent, "norm weights")
        tokens = self.program.capacity.max_tokens
        if op.latent.at < 0 or op.latent.step < op.latent.at + pairs:
            raise ProgramError(f"{pairs} turned numbers from number {op.latent.at} of {op.latent.step}")
        self._reserve(op.latent.query, op.latent.query_stride, tokens, op.latent.step * shape.n_heads)
        self._reserve(op.latent.vector, op.latent.vector_stride, tokens, shape.head_dim - shape.index)
        self._add(&op, [], shape.n_heads * shape.latent, shape.n_heads * shape.latent)

    def choose(self, int32_t layer, queries, keys, weights, int64_t heads, norm, norm_bias, double eps, rows="every", int32_t kind=0):
        """The positions that rows see in attend_latent behind this op, of this layer and of those after it (DeepSeek-V3.2,
        2025, eq. 1): those of the `chosen` largest sums over heads of weight * max(0, query . key), the earlier of equals.

        queries, keys, weights (offset, stride): of a row `heads` queries of `index` numbers, a key before its LayerNorm (norm,
        norm_bias, eps), and a weight of each head. The first numbers of queries and keys are turned as `kind` says.
        """
        cdef pw_op op = _op_of(PW_INDEX, rows, queries[0], queries[1], queries[0], queries[1])
        cdef pw_shape *shape = &self.program.shape
        tokens = self.program.capacity.max_tokens
        if not 0 <= layer < shape.n_layers or not 0 <= kind < self.program.n_kinds or self.program.kinds[kind].window:
            raise ProgramError(f"layer {layer} of {shape.n_layers}, kind {kind} of {self.program.n_kinds}, which sees all")
        if not 0 < heads <= 1 << 10 or not 2 * self.program.kinds[kind].half <= shape.index:
            raise ProgramError(f"an indexer of {heads} heads of {shape.index} numbers")
        op.layer, op.kind, op.eps, op.latent.step = layer, kind, eps, heads
        op.norm = self._vector(norm, shape.index, "norm weights")
        op.norm_bias = self._vector(norm_bias, shape.index, "norm biases")
        op.latent.vector, op.latent.vector_stride = keys
        op.latent.query, op.latent.query_stride = weights
        self._reserve(op.latent.vector, op.latent.vector_stride, tokens, shape.index)
        self._reserve(op.latent.query, op.latent.query_stride, tokens, heads)
        self._add(&op, [], heads * shape.index, 0)

    def heads(self, packed, int32_t count, int64_t from_at, int64_t from_stride, int64_t out, int64_t out_stride,
              int64_t step, arithmetic=(None, 1)):
        """Products by head: numbers [step h, step h + k) of a row times the weight of head h. Returns the op's number.

        packed: the heads' weights one below the other, each of whole panels.
        """
        cdef pw_op op = _op_of(PW_HEADS, "every", from_at, from_stride, out, out_stride)
        cdef int table
        n = packed.n // count if count > 0 else 0
        if n < 1 or packed.n % count or n % PW_PANEL or step < packed.k:
            raise ProgramError(f"{count} heads of {n} outputs, {step} inputs apart: outputs a multiple of {PW_PANEL} can run")
        path, k_parts = arithmetic
        op.n_parts, op.k = 1, packed.k
        op.heads.count, op.heads.step, op.heads.n = count, step, n
        op.parts[0].weight = weight_view(packed, path, k_parts)
        one = _columns(packed, 0, n // PW_PANEL)
        for table in range(PW_SCHEDULE_TABLES):
            op.shares[table][0].weight = weight_view(one, path, k_parts)
        self._add(&op, [packed], step * (count - 1) + packed.k, packed.n)
        return self.program.n_ops - 1

    def adjust(self, int64_t width, int64_t from_at, int64_t from_stride, int64_t out, int64_t out_stride, norm=None,
               bias=None, double cap=0, bint add=False, rows="every", residual=None, eps=None, double scale=1.0):
        """Rows of `width` numbers: normalised, a bias added, capped, added to what is there, all of it times `scale`; as
        far as asked for.

        rows: as for `linear`; of "gathered" rows the input is one row for each that wants logits, and the sum begins
        with the step's row of `residual` (offset, stride).
        """
        cdef pw_op op = _op_of(PW_ADJUST, rows, from_at, from_stride, out, out_stride)
        op.k, op.cap, op.eps = width, cap, self.program.shape.norm_eps if eps is None else eps
        op.scale = scale
        self._add_to(&op, add, residual)
        op.norm = self._optional(norm, width, "norm weights")
        op.bias = self._optional(bias, width, "biases")
        self._add(&op, [], width, width)

    def layernorm(self, int64_t width, int64_t from_at, int64_t from_stride, int64_t out, int64_t out_stride, weight,
                  norm_bias, bias=None, rows="every", eps=None):
        """Rows of `width` numbers: a bias added, then normalised by a LayerNorm. eps: None for the shape's."""
        cdef pw_op op = _op_of(PW_ADJUST, rows, from_at, from_stride, out, out_stride)
        op.k, op.eps = width, self.program.shape.norm_eps if eps is None else eps
        op.norm = self._vector(weight, width, "norm weights")
        op.norm_bias = self._vector(norm_bias, width, "norm biases")
        op.bias = self._optional(bias, width, "biases")
        self._add(&op, [], width, width)

    cdef pw_experts _experts(self, experts, int64_t n) except *:
        cdef pw_experts found
        found.count, found.chosen, found.normalised, found.n = experts.count, experts.chosen, experts.normalised, n
        found.weighs_inputs = experts.weighs_inputs
        if not 1 <= found.chosen <= found.count <= PW_MAX_EXPERTS:
            raise ProgramError(f"{found.chosen} of {found.count} experts; at most {PW_MAX_EXPERTS} can run")
        return found

    def route(self, experts, int64_t from_at, int64_t from_stride, rows="every", choice_bias=None, factors=None):
        """The experts of each row, by its logits. experts: serving.models.experts.Experts. choice_bias: numbers of
        experts that are added to their scores where they are chosen; factors: that multiply their weights.
        """
        cdef pw_op op = _op_of(PW_ROUTE, rows, from_at, from_stride, from_at, from_stride)
        cdef pw_choice *choice = &op.choice
        op.experts = self._experts(experts, 0)
        choice.scores, choice.scale = SCORES[experts.scores], experts.scale
        choice.groups, choice.chosen_groups = experts.groups, experts.chosen_groups
        choice.group_best = experts.group_best
        choice.bias = self._optional(choice_bias, experts.count, "biases of choices")
        choice.factors = self._optional(factors, experts.count, "factors of experts")
        of_one = experts.count // choice.groups if choice.groups > 0 else 0
        if not 1 <= choice.group_best <= of_one or of_one * choice.groups != experts.count:
            raise ProgramError(f"{choice.groups} groups of {experts.count} experts by {choice.group_best} of each")
        if not 1 <= choice.chosen_groups <= choice.groups or experts.chosen > of_one * choice.chosen_groups:
            raise ProgramError(f"{experts.chosen} experts of {choice.chosen_groups} of {choice.groups} groups")
        self._add(&op, [], experts.count, experts.count)

    def experts(self, experts, packed, source, int64_t from_at, int64_t from_stride, int64_t out, int64_t out_stride,
                norm=None, bias=None, rows="every", arithmetic=(None, 1), gate="silu", eps=None):
        """Products with a stack of experts' weights, after `route`. Returns the op's number.

        packed: the experts' weights one below the other, each of whole panels. source: "norm" or "rows" of the step,
        the "gate" of pairs, whose bias [experts, 2 k] is added before, or their "activation". The outputs are pairs: of each row, one for
        each of its experts. arithmetic: (compute path, k parts).
        """
        cdef pw_op op = _op_of(PW_EXPERTS, rows, from_at, from_stride, out, out_stride)
        cdef int table
        n = packed.n // experts.count
        if packed.n % experts.count or n % PW_PANEL:
            raise ProgramError(f"{experts.count} experts of {n} outputs: a multiple of {PW_PANEL} can run")
        if source != "gate" and bias is not None:
            raise ProgramError("biases are added where pairs are read")
        if source == "activation" and gate == "xielu":
            raise ProgramError("experts have no numbers of their own")
        path, k_parts = arithmetic
        op.source, op.n_parts, op.k = SOURCES[source], 1, packed.k
        op.gate = ACTIVATIONS[gate] if source == "activation" else GATES[gate]
        op.experts = self._experts(experts, n)
        op.eps = self.program.shape.norm_eps if eps is None else eps
        op.parts[0].weight = weight_view(packed, path, k_parts)
        one = _columns(packed, 0, n // PW_PANEL)
        for table in range(PW_SCHEDULE_TABLES):
            op.shares[table][0].weight = weight_view(one, path, k_parts)
        op.norm = self._vector(norm, op.k if source == "norm" else 0, "norm weights")
        op.bias = self._optional(bias, 2 * op.k * experts.count, "experts' biases")
        self._add(&op, [packed], 2 * op.k if source == "gate" else op.k, n)
        return self.program.n_ops - 1

    def combine(self, experts, int64_t width, int64_t from_at, int64_t from_stride, int64_t out, int64_t out_stride,
                bias=None, rows="every", bint add=True):
        """The `width` numbers that each row's experts gave, and biases [experts, width], times their weights: added to
        what is there, or in its place.
        """
        cdef pw_op op = _op_of(PW_COMBINE, rows, from_at, from_stride, out, out_stride)
        op.k, op.experts = width, self._experts(experts, 0)
        self._add_to(&op, add, None)
        op.bias = self._optional(bias, width * experts.count, "experts' biases")
        self._add(&op, [], width, width)

    cdef const float *_optional(self, numbers, int64_t length, str name) except? NULL:
        if numbers is None:
            return NULL
        return self._vector(numbers, length, name)

    cdef const float *_vector(self, numbers, int64_t length, str name) except? NULL:
        """All numbers of an array, in memory that the program keeps. None has no numbers."""
        cdef const float[::1] view
        size = 0 if numbers is None else np.size(numbers)
        if size != length:
            raise ProgramError(f"{name}: {size} values where {length} belong")
        if numbers is None:
            return NULL
        owned = np.ascontiguousarray(numbers, np.float32).reshape(-1)
        self.kept.append(owned)
        view = owned
        return &view[0]

    cdef int _add(self, const pw_op *op, list weights, int64_t in_width, int64_t out_width) except -1:
        if self.sealed:
            raise ProgramError("a sealed program takes no more ops")
        cdef pw_capacity *room = &self.program.capacity
        tokens, logit_rows = room.max_tokens, room.max_logit_rows
        whole = op.rows == PW_EVERY_ROW or op.code in (PW_ATTEND, PW_INDEX)
        own_rows = op.rows == PW_LOGIT_ROWS or (op.rows == PW_GATHERED_ROWS and op.code == PW_ADJUST)
        pairs = op.experts.chosen if op.code == PW_EXPERTS else 1
        self._reserve(op.out_at, op.out_stride, (tokens if whole else logit_rows) * pairs, out_width)
        if op.code != PW_EMBED:
            of_pairs = op.code == PW_COMBINE or op.code == PW_EXPERTS and op.source in (PW_FROM_GATE, PW_FROM_ACTIVATION)
            read = op.experts.chosen if of_pairs else 1
            self._reserve(op.in_at, op.in_stride, (logit_rows if own_rows else tokens) * read, in_width)
        if op.residual_stride:
            self._reserve(op.residual, op.residual_stride, tokens, out_width)
        self.kept.append(weights)
        if not pw_program_add(self.program, op):
            raise ProgramError("no memory for another op")
        return 0

    cdef int _reserve(self, int64_t offset, int64_t stride, int64_t rows, int64_t width) except -1:
        """The arena grows to hold `rows` rows."""
        if offset < 0 or stride < width:
            raise ProgramError("an op's rows overlap, or lie before the arena")
        self.program.arena_floats = max(self.program.arena_floats, offset + (rows - 1) * stride + width)
        return 0

    def bytes(self):
        """What the program runs in once it is sealed, shared memory included."""
        return pw_program_bytes(self.program)

    def shared_bytes(self):
        """How much memory the ranks share: whole pages."""
        return pw_program_shared_bytes(self.program)

    def whole_kv_bytes(self):
        """Bytes of all keys, values and states, also before the program is sealed."""
        return pw_program_kv_bytes(self.program)
